# SPDX-License-Identifier: Apache-2.0

"""Whose credentials build the servers of a lease, and when they fail."""

import time
import typing as ty

from tests.integration import base
from tests.stack import configuration


class CredentialsTest(base.IntegrationTestCase):

    configured = False

    def setUp(self) -> None:
        super().setUp()
        self.trusts_before = self.trusts()

    # -- users who change before the lease starts -----------------------------

    def test_deferred_build_of_disabled_user_fails(self) -> None:
        user = self.new_user()
        held = self.hold(starts_in=6, client=user)
        self.keystone('PATCH', f'/users/{user.user_id}',
                      {'user': {'enabled': False}})
        self.assert_not_built(*held)

    def test_deferred_build_of_user_without_role_fails(self) -> None:
        user = self.new_user()
        held = self.hold(starts_in=6, client=user)
        self.keystone('DELETE', self.grant(user.user_id, 'member'))
        self.assert_not_built(*held)

    def test_deferred_build_of_unchanged_user_succeeds(self) -> None:
        """The same as above, without any change."""
        user = self.new_user()
        server_id, lease_id = self.hold(starts_in=6, client=user)
        trust = self.only_new_trust()
        self.assertEqual(user.user_id, trust['trustor_user_id'])
        self.assertEqual(['member', 'reader'], sorted(
            role['name'] for role in trust['roles']))
        self.wait_for_lease(lease_id, 'ACTIVE')
        guest = self.assert_built_once(server_id)
        self.assertEqual({'user_id': user.user_id,
                          'project_id': user.project_id}, guest['request'])
        user('DELETE', f'/servers/{server_id}')
        self.assert_over(lease_id)

    def test_lease_of_deleted_project_is_reported_and_continues(self) -> None:
        """It is noticed, and its lease continues."""
        project_id = self.keystone('POST', '/projects', {'project': {
            'name': self.getUniqueString('project'), 'domain_id': 'default',
        }})['project']['id']
        path = f'/projects/{project_id}'
        self.addCleanup(self.admin.request, 'DELETE', path,
                        service='keystone')
        role = self.grant(self.demo.user_id, 'member').rpartition('/')[2]
        self.keystone('PUT', f'{path}/users/{self.demo.user_id}/roles/{role}')
        auth = base.password(self.cloud, 'demo')
        auth['scope']['project'] = {'id': project_id}
        server_id = self.boot(self.lease_hints(), client=self.client(
            auth=auth))['server']['id']
        lease_id = self.lease_of(server_id)['id']
        self.wait_for_lease(lease_id, 'ACTIVE')
        self.assertNotIn(lease_id, self.orphans())
        self.keystone('DELETE', path)
        self.assertIn(lease_id, self.orphans())
        lease = self.lease(lease_id)
        self.assertEqual(
            ('ACTIVE', 'The project of the lease no longer exists.'),
            (lease['status'], lease['status_reason']))
        self.admin('DELETE', f'/leases/{lease_id}', service='reservation')
        self.wait_until_gone(server_id)
        self.wait_for_lease(lease_id, 'TERMINATED')
        self.assertNotIn(lease_id, self.orphans())

    def orphans(self) -> str:
        done = self.run_client(
            'blazar-nova-manage', '--config-file',
            f'{self.cloud.folder}/etc/nova/nova.conf', 'lease', 'orphans')
        self.assertEqual(0, done.returncode, done.stderr)
        return done.stdout

    def assert_not_built(
            self, server_id: str, lease_id: str,
            why: str = 'in the name of the user is no longer possible',
    ) -> None:
        """Assert that the lease has the reason, and its capacity is freed."""
        self.assertIsNotNone(self.booked_hosts()[server_id])
        lease = self.wait_for_lease(lease_id, 'ERROR')
        self.assertIn(why, lease['status_reason'])
        self.wait_for(lambda: self.booked_hosts()[server_id] is None,
                      'the room is free')
        self.assertEqual([], self.spawns(server_id))
        self.assertEqual({}, self.allocations(server_id))
        self.delete(server_id)
        self.assert_over(lease_id)

    def assert_over(self, lease_id: str) -> None:
        self.wait_for_lease(lease_id, 'TERMINATED')
        self.wait_for(lambda: self.trusts() == self.trusts_before,
                      'the trust is gone')

    def only_new_trust(self) -> base.Json:
        trust_id, = self.trusts() - self.trusts_before
        return ty.cast(base.Json, self.keystone(
            'GET', f'/OS-TRUST/trusts/{trust_id}')['trust'])

    # -- tokens that may not create trusts -----------------------------------

    def test_restricted_app_credential_can_only_lease_now(self) -> None:
        client = self.with_application_credential(unrestricted=False)
        self.assert_refused(client)
        self.assert_starts_now(client)

    def test_unrestricted_app_credential_can_only_lease_now(self) -> None:
        """With keystone it may not create trusts either, despite its name."""
        client = self.with_application_credential(unrestricted=True)
        self.assert_refused(client)
        self.assert_starts_now(client)

    def test_image_of_shelved_server_without_trust_is_deleted(self) -> None:
        """Its image is deleted with it."""
        client = self.with_application_credential(unrestricted=False)
        server_id = self.boot(
            self.lease_hints(), client=client)['server']['id']
        self.wait_for_server(server_id)
        client('POST', f'/servers/{server_id}/action', {'shelve': None})
        self.wait_for_server(server_id, 'SHELVED_OFFLOADED')

        def images() -> int:
            return len(self.demo(
                'GET', f'/images?instance_uuid={server_id}',
                service='glance')['images'])

        self.assertEqual(1, images())
        lease_id = self.lease_of(server_id)['id']
        client('DELETE', f'/leases/{lease_id}', service='reservation')
        self.wait_for_lease(lease_id, 'TERMINATED')
        self.wait_until_gone(server_id)
        self.wait_for(lambda: images() == 0, 'no image')

    def test_app_credential_can_create_trust_if_allowed(self) -> None:
        self.configure(
            'keystone/keystone.conf', '[security_compliance]\n'
            'allow_insecure_application_credential_trust_escalation = true\n',
            'keystone')
        client = self.with_application_credential(unrestricted=True)
        server_id, lease_id = self.hold(starts_in=6, client=client)
        self.wait_for_lease(lease_id, 'ACTIVE')
        self.assert_built_once(server_id)
        self.delete(server_id)
        self.assert_over(lease_id)

    # -- builds without a trust ----------------------------------------------

    def test_build_without_trust_by_service_user(self) -> None:
        """Of an image that only the user can see."""
        client = self.without_trust()
        image_id = self.private_image()
        server_id, lease_id = self.hold(
            starts_in=6, client=client, imageRef=image_id)
        self.assertEqual(self.trusts_before, self.trusts())
        self.wait_for_lease(lease_id, 'ACTIVE')
        guest = self.assert_built_once(server_id)
        self.assertEqual(
            ({'user_id': self.demo.user_id,
              'project_id': self.demo.project_id}, 2048),
            (guest['request'], guest['image_bytes']))
        # The server is the user's, who can delete it.
        self.demo('DELETE', f'/servers/{server_id}')
        self.assert_over(lease_id)

    def test_lease_without_trust_ends_on_time(self) -> None:
        server_id, lease_id = self.hold(
            starts_in=6, lasts=10, client=self.without_trust())
        self.wait_for_lease(lease_id, 'TERMINATED')
        self.wait_until_gone(server_id)
        self.assertEqual(1, len(self.spawns(server_id)))

    def test_build_without_trust_checks_user_and_role(self) -> None:
        user = self.new_user()
        held = self.hold(starts_in=6, client=self.without_trust(user))
        self.keystone('DELETE', self.grant(user.user_id, 'member'))
        self.assert_not_built(*held, why='does not have the role member')
        disabled = self.new_user()
        held = self.hold(starts_in=6, client=self.without_trust(disabled))
        self.keystone('PATCH', f'/users/{disabled.user_id}',
                      {'user': {'enabled': False}})
        self.assert_not_built(
            *held, why=f'The user {disabled.user_id} is disabled')

    def test_snapshots_are_refused_without_trust(self) -> None:
        client, before = self.without_trust(), self.records()
        for end in ({'on_end': 'snapshot'}, {
                'before_end': base.date(time.time() + 86400 + 300),
                'before_end_action': 'snapshot'}):
            fault = self.refusal(
                403, client, 'POST', '/servers', self.boot_body(
                    self.lease_hints(time.time() + 86400, **end)))
            self.assertIn('by your password', fault['message'])
        self.assertEqual(before, self.records())

    def without_trust(self, user: base.Client | None = None) -> base.Client:
        """Return a client whose application credential is sufficient."""
        if not self.configured:
            self.configured = True
            self.configure(
                'nova/nova.conf',
                '[blazar_keystone]\nwithout_trust = service\n',
                *(name for name in self.cloud.names() if name.startswith(
                    ('nova-api-', 'blazar-listener-'))))
        return self.with_application_credential(False, user)

    def private_image(self) -> str:
        image = self.demo('POST', '/images', {
            'name': self.getUniqueString('image'), 'disk_format': 'raw',
            'container_format': 'bare', 'visibility': 'private'},
            service='glance')
        self.addCleanup(self.demo, 'DELETE', f'/images/{image["id"]}',
                        service='glance')
        self.demo.upload(f'/images/{image["id"]}/file', bytes(2048))
        return ty.cast(str, image['id'])

    def configure(self, name: str, lines: str, *services: str) -> None:
        """Add lines to a configuration until the test ends."""
        path = f'{self.cloud.folder}/etc/{name}'
        with open(path) as file:
            before = file.read()
        for service in services:
            self.addCleanup(self.cloud.restart, service)
        self.addCleanup(self.write, path, before)
        self.write(path, before + lines)
        for service in services:
            self.cloud.restart(service)

    @staticmethod
    def write(path: str, text: str) -> None:
        with open(path, 'w') as file:
            file.write(text)

    def test_trust_scoped_token_can_only_lease_now(self) -> None:
        other = self.client('other')
        trust = self.demo('POST', '/OS-TRUST/trusts', {'trust': {
            'trustor_user_id': self.demo.user_id,
            'trustee_user_id': other.user_id,
            'project_id': self.demo.project_id, 'impersonation': True,
            'roles': [{'name': 'member'}, {'name': 'reader'}],
        }}, service='keystone')['trust']
        self.addCleanup(self.demo, 'DELETE',
                        f'/OS-TRUST/trusts/{trust["id"]}', service='keystone')
        self.trusts_before = self.trusts()
        client = self.client(auth=base.password(self.cloud, 'other') | {
            'scope': {'OS-TRUST:trust': {'id': trust['id']}}})
        self.assertEqual(self.demo.user_id, client.user_id)
        self.assert_refused(client)
        self.assert_starts_now(client)

    def test_lease_of_running_server_uses_trust_for_snapshot(self) -> None:
        server_id = self.boot()['server']['id']
        self.wait_for_server(server_id)
        body = {'name': 'adopted', 'on_end': 'snapshot',
                'end_date': base.date(time.time() + 40),
                'servers': [server_id]}
        before = self.records()
        answer = self.with_application_credential(unrestricted=False).request(
            'POST', '/leases', body, service='reservation')
        self.assertEqual(403, answer.status_code, answer.text)
        self.assertIn('by your password', answer.json()['error_message'])
        self.assertEqual(before, self.records())
        lease_id = self.demo('POST', '/leases', body,
                             service='reservation')['lease']['id']
        trust = self.only_new_trust()
        self.assertEqual(self.demo.user_id, trust['trustor_user_id'])
        self.assertGreater(base.seconds(trust['expires_at']),
                           self.lease(lease_id)['end_date'])
        # A change by another user does not change the trustor.
        self.admin('PUT', f'/leases/{lease_id}', {'name': 'changed'},
                   service='reservation')
        self.assertEqual(trust['id'], self.only_new_trust()['id'])
        self.wait_until_gone(server_id, 120)
        self.assert_over(lease_id)
        image, = self.demo(
            'GET', f'/images?instance_uuid={server_id}',
            service='glance')['images']
        self.assertEqual((self.demo.project_id, 'active'),
                         (image['owner'], image['status']))
        self.assertEqual(self.demo.user_id, image['user_id'])

    def assert_refused(self, client: base.Client) -> None:
        """Assert that a later start is refused, and leaves nothing behind."""
        before = self.records()
        fault = self.refusal(
            403, client, 'POST', '/servers',
            self.boot_body(self.lease_hints(time.time() + 86400)))
        for what_to_do in 'by your password', 'let the lease start now':
            self.assertIn(what_to_do, fault['message'])
        self.assertEqual(before, self.records())

    def records(self) -> list[object]:
        """Return all records that a boot with a lease writes."""
        return [self.server_ids(), self.leases(), self.booked_hosts(),
                self.trusts(), *(
                    self.sql(f'SELECT count(*) FROM {table}', database)
                    for database, table in (
                        ('nova_api', 'build_requests'),
                        ('nova_api', 'request_specs'),
                        ('nova_api', 'instance_mappings'),
                        ('blazar_nova', 'credentials'),
                        ('blazar_nova', 'deferred_builds')))]

    def assert_starts_now(self, client: base.Client) -> None:
        answer = self.boot(self.lease_hints(), client=client)
        server_id = answer['server']['id']
        self.wait_for_server(server_id)
        self.wait_for_lease(self.lease_of(server_id)['id'], 'ACTIVE')
        self.assertEqual(self.trusts_before, self.trusts())

    # -- accounts ------------------------------------------------------------

    def keystone(self, method: str, path: str, body: ty.Any = None) -> ty.Any:
        """Send a request to keystone as its administrator."""
        return self.admin(method, path, body, service='keystone')

    def grant(self, user_id: str, role: str) -> str:
        """Return the path of a user's role on the project demo."""
        role_id = self.keystone('GET', f'/roles?name={role}')['roles'][0]['id']
        return (f'/projects/{self.demo.project_id}/users/{user_id}'
                f'/roles/{role_id}')

    def new_user(self) -> base.Client:
        """Create a member of the project demo, until the test ends."""
        name = self.getUniqueString('user')
        user_id = self.keystone('POST', '/users', {'user': {
            'name': name, 'password': configuration.PASSWORD,
            'domain_id': 'default'}})['user']['id']
        self.addCleanup(self.keystone, 'DELETE', f'/users/{user_id}')
        for role in ('member', 'reader'):
            self.keystone('PUT', self.grant(user_id, role))
        auth = base.password(self.cloud, 'demo')
        auth['identity']['password']['user']['name'] = name
        return self.client(auth=auth)

    def with_application_credential(
            self, unrestricted: bool, user: base.Client | None = None,
    ) -> base.Client:
        user = user or self.demo
        path = f'/users/{user.user_id}/application_credentials'
        made = user('POST', path, {'application_credential': {
            'name': self.getUniqueString('credential'),
            'unrestricted': unrestricted,
        }}, service='keystone')['application_credential']
        # Delete it before its user.
        self.addCleanup(user.request, 'DELETE', f'{path}/{made["id"]}',
                        service='keystone')
        return self.client(auth={'identity': {
            'methods': ['application_credential'],
            'application_credential': {
                'id': made['id'], 'secret': made['secret']}}})
