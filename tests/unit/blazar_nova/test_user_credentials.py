# SPDX-License-Identifier: Apache-2.0

import datetime
import functools
import math
import os
import types

import fixtures
from keystoneauth1 import exceptions
from keystoneauth1 import fixture as tokens
from oslo_config import cfg
import requests
from requests_mock.contrib import fixture as requests_fixture

from blazar_core.common import errors
from blazar_nova.services import service_user
from blazar_nova.services import user_credentials
from tests.unit import base

URL = 'http://keystone.test/v3'
TRUSTS = f'{URL}/OS-TRUST/trusts'
END = 1_900_000_000
CONFIGURED = f'''
[keystone_authtoken]
auth_type = password
auth_url = {URL}
username = nova
password = secret
user_domain_id = default
project_name = service
project_domain_id = default
'''


class CredentialsTestCase(base.TestCase):
    """A keystone with answers as seen in tests/integration."""

    def setUp(self):
        super().setUp()
        self.web = self.useFixture(requests_fixture.Fixture())
        self.web.get(URL, json={'version': tokens.V3Discovery(URL)})
        self.web.post(f'{URL}/auth/tokens', json=self.token)
        self.refused = {}
        self.trusts = user_credentials.Credentials(self.conf(CONFIGURED))
        self.user = types.SimpleNamespace(
            user_id='user', project_id='project', roles=['member', 'reader'],
            auth_token='users-token')

    def conf(self, text):
        """Return a configuration from a file with this text."""
        path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'nova.conf')
        with open(path, 'w') as file:
            file.write(text)
        conf = cfg.ConfigOpts()
        conf([], default_config_files=[path], default_config_dirs=[])
        return conf

    def token(self, request, context):
        """Return the answer to POST /v3/auth/tokens."""
        scope = request.json()['auth'].get('scope', {})
        who = 'trust' if 'OS-TRUST:trust' in scope else 'service'
        if who in self.refused:
            context.status_code = self.refused[who]
            context.headers['Content-Type'] = 'application/json'
            return {'error': {'message': f'{who} refused'}}
        context.headers['X-Subject-Token'] = f'{who}-token'
        token = tokens.V3Token(user_id='user' if who == 'trust' else 'nova',
                               project_id='project')
        token.add_service('identity').add_standard_endpoints(internal=URL)
        return token


class TestPlace(CredentialsTestCase):

    def test_place_has_auth_url_and_region(self):
        self.assertEqual({'auth_url': URL, 'region_name': None},
                         self.trusts.place())
        conf = self.conf(f'{CONFIGURED}[blazar_keystone]\nregion_name = one')
        self.assertEqual({'auth_url': URL, 'region_name': 'one'},
                         user_credentials.Credentials(conf).place())

    def test_place_is_empty_without_keystone(self):
        self.assertEqual({'auth_url': None, 'region_name': None},
                         user_credentials.Credentials(self.conf('')).place())


class TestDelegate(CredentialsTestCase):

    def made(self):
        """Return the requested trusts."""
        return [request.json()['trust'] for request in
                self.web.request_history if request.url == TRUSTS]

    def expiry(self, trust):
        return datetime.datetime.strptime(
            trust['expires_at'], '%Y-%m-%dT%H:%M:%S.%f%z').timestamp() - END

    def test_trust_has_roles_of_user_and_expires_after_lease(self):
        self.web.post(TRUSTS, json={'trust': {'id': 'the-trust'}})
        self.assertEqual('the-trust', self.trusts.delegate(
            self.user, END, as_owner=False))
        trust, = self.made()
        self.assertTrue(3600 <= self.expiry(trust) < 7200)
        del trust['expires_at']
        self.assertEqual({
            'trustor_user_id': 'user', 'trustee_user_id': 'nova',
            'project_id': 'project', 'impersonation': True,
            'roles': [{'name': 'member'}, {'name': 'reader'}]}, trust)
        self.assertEqual('users-token', self.web.request_history[-1].headers[
            'X-Auth-Token'])

    def test_conflicting_trust_is_retried_with_another_expiry(self):
        self.web.post(TRUSTS, [{'status_code': 409}] * 3 + [
            {'json': {'trust': {'id': 'the-trust'}}}])
        self.assertEqual('the-trust', self.trusts.delegate(
            self.user, END, as_owner=False))
        times = [self.expiry(trust) for trust in self.made()]
        self.assertEqual(4, len(times))
        self.assertLess(1, len(set(times)))

    def test_repeated_conflict_means_cloud_unavailable(self):
        self.web.post(TRUSTS, status_code=409)
        self.assertRaises(errors.CloudUnavailable, self.trusts.delegate,
                          self.user, END, as_owner=False)

    def test_forbidden_trust_is_refused_with_alternatives(self):
        self.web.post(TRUSTS, status_code=403)
        said = str(self.assertRaises(
            errors.TrustUnavailable, self.trusts.delegate, self.user, END,
            as_owner=False))
        for what_to_do in 'by your password', 'let the lease start now':
            self.assertIn(what_to_do, said)
        # With keystone no application credential can create trusts.
        self.assertNotIn('--unrestricted', said)

    def test_failing_keystone_means_cloud_unavailable(self):
        for answer in ({'status_code': 500}, {'text': '<html>'},
                       {'json': {}}, {'json': {'trust': None}},
                       {'json': []}):
            self.web.post(TRUSTS, **answer)
            self.assertRaises(errors.CloudUnavailable, self.trusts.delegate,
                              self.user, END, as_owner=False)

    def test_no_trust_is_created_without_keystone(self):
        trusts = user_credentials.Credentials(self.conf(''))
        self.assertFalse(trusts.is_configured())
        self.assertIsNone(trusts.delegate(self.user, END, as_owner=False))
        self.assertEqual(set(), trusts.held())
        trusts.revoke('whatever')
        self.assertEqual([], self.web.request_history)


class TestWithoutTrust(CredentialsTestCase):
    """If a user may not create a trust, the service user is used."""

    def setUp(self):
        super().setUp()
        self.trusts = user_credentials.Credentials(self.conf(
            f'{CONFIGURED}[blazar_keystone]\nwithout_trust = service\n'))
        self.web.post(TRUSTS, status_code=403)
        self.known = {'users/user': 'home', 'projects/project': 'home',
                      'domains/home': None}
        for path in self.known:
            self.is_there(path)
        self.roles('member', 'Reader', 'other')

    def is_there(self, path, enabled=True, **how):
        kind = path.partition('s/')[0]
        self.web.get(f'{URL}/{path}', json={kind: {
            'domain_id': self.known[path], 'enabled': enabled}}, **how)

    def roles(self, *names):
        self.web.get(f'{URL}/role_assignments', json={'role_assignments': [
            {'role': {'id': name, 'name': name}} for name in names]})

    def delegate(self):
        return self.trusts.delegate(self.user, END, as_owner=False)

    def test_access_has_service_token_and_roles_of_user(self):
        credential = self.delegate()
        access = self.trusts.access(credential)
        self.assertEqual(
            ('service-token', 'user', 'project', ['member', 'reader']),
            (access.auth_token, access.user_id, access.project_id,
             access.role_names))
        self.assertEqual('identity', access.service_catalog.catalog[0]['type'])
        asked = [request for request in self.web.request_history
                 if 'role_assignments' in request.url]
        self.assertEqual(
            {'user.id': ['user'], 'scope.project.id': ['project'],
             'effective': ['true'], 'include_names': ['true']}, asked[0].qs)
        self.assertEqual('service-token', asked[0].headers['X-Auth-Token'])

    def test_trust_is_preferred_if_it_can_be_created(self):
        self.web.post(TRUSTS, json={'trust': {'id': 'the-trust'}})
        self.assertEqual('the-trust', self.delegate())

    def test_access_as_owner_requires_a_trust(self):
        self.assertRaises(errors.TrustUnavailable, self.trusts.delegate,
                          self.user, END, as_owner=True)
        self.assertRaises(errors.TrustUnavailable, self.trusts.access,
                          self.delegate(), as_owner=True)

    def test_disabled_deleted_and_unprivileged_users_are_refused(self):
        credential = self.delegate()
        for path in self.known:
            for how, words in (
                    ({'enabled': False}, 'is disabled'),
                    ({'status_code': 404}, 'no longer exists')):
                self.is_there(path, **how)
                for ask in (self.delegate,
                            lambda: self.trusts.access(credential)):
                    self.assertIn(words, str(self.assertRaises(
                        errors.TrustUnavailable, ask)))
            self.is_there(path)
        self.roles('member', 'other')
        self.assertIn('by your password', str(self.assertRaises(
            errors.TrustUnavailable, self.delegate)))
        for ask in self.delegate, lambda: self.trusts.access(credential):
            self.assertIn('the role reader on project project', str(
                self.assertRaises(errors.TrustUnavailable, ask)))
        self.roles('reader', 'member')
        self.trusts.access(credential)

    def test_unreadable_user_means_cloud_unavailable(self):
        credential = self.delegate()
        for status, words in ((403, 'the role admin'), (503, 'not answer')):
            self.is_there('users/user', status_code=status)
            self.assertIn(words, str(self.assertRaises(
                errors.CloudUnavailable, self.trusts.access, credential)))
        self.is_there('users/user')

    def test_invalid_token_means_trust_unavailable(self):
        self.web.post(TRUSTS, status_code=401)
        self.assertRaises(errors.TrustUnavailable, self.delegate)

    def test_access_is_refused_after_option_is_removed(self):
        credential = self.delegate()
        self.trusts = user_credentials.Credentials(self.conf(CONFIGURED))
        self.assertIn('without_trust', str(self.assertRaises(
            errors.TrustUnavailable, self.trusts.access, credential)))

    def test_malformed_responses_mean_cloud_unavailable(self):
        credential = self.delegate()
        for answer in ({'text': '<html>Maintenance'}, {'json': {}},
                       {'json': []}, {'json': {'user': {}}}):
            self.web.get(f'{URL}/users/user', **answer)
            self.assertRaises(errors.CloudUnavailable, self.trusts.access,
                              credential)
        self.is_there('users/user')
        self.web.get(f'{URL}/role_assignments',
                     json={'role_assignments': [{'role': {'id': 'x'}}]})
        self.assertRaises(errors.CloudUnavailable, self.delegate)

    def test_revoke_sends_no_request(self):
        credential = self.delegate()
        asked = len(self.web.request_history)
        self.trusts.revoke(credential)
        self.assertEqual(asked, len(self.web.request_history))

    def test_check_reports_missing_role_admin(self):
        self.known |= {'users/nova': 'home'}
        self.is_there('users/nova')
        self.assertTrue(self.trusts.check_without_trust())
        self.assertFalse(user_credentials.Credentials(
            self.conf(CONFIGURED)).check_without_trust())
        self.is_there('users/nova', status_code=403)
        self.assertIn('the role admin', str(self.assertRaises(
            errors.CloudUnavailable, self.trusts.check_without_trust)))


class TestAccess(CredentialsTestCase):

    def test_access_has_token_and_id_of_user(self):
        access = self.trusts.access('the-trust')
        self.assertEqual(('trust-token', 'user'),
                         (access.auth_token, access.user_id))

    def test_refused_trust_means_trust_unavailable(self):
        self.refused['trust'] = 403
        self.assertIn('trust refused', str(self.assertRaises(
            errors.TrustUnavailable, self.trusts.access, 'the-trust')))

    def test_refused_service_user_means_cloud_unavailable(self):
        """An operator has to correct it, and then the lease can start."""
        self.refused.update(trust=401, service=401)
        self.assertIn('service refused', str(self.assertRaises(
            errors.CloudUnavailable, self.trusts.access, 'the-trust')))

    def test_failing_keystone_means_cloud_unavailable(self):
        self.refused['trust'] = 503
        self.assertRaises(errors.CloudUnavailable, self.trusts.access,
                          'the-trust')

    def test_unreachable_keystone_means_cloud_unavailable(self):
        self.web.post(f'{URL}/auth/tokens', exc=requests.ConnectionError)
        self.assertRaises(errors.CloudUnavailable, self.trusts.access,
                          'the-trust')

    def test_only_one_thread_waits_for_silent_keystone(self):
        """Thousands of leases may end in a second."""
        asked = []

        def answer(_request, _context):
            asked.append(None)
            for work in (functools.partial(self.trusts.access, 'another'),
                         self.trusts.service, self.delegate):
                self.assertIn('does not answer', str(self.assertRaises(
                    errors.CloudUnavailable, work)))
            raise requests.Timeout

        self.web.post(f'{URL}/auth/tokens', exc=requests.Timeout)
        self.assertRaises(errors.CloudUnavailable, self.trusts.access,
                          'the-trust')
        self.web.post(f'{URL}/auth/tokens', json=answer)
        for _attempt in range(2):
            self.assertRaises(errors.CloudUnavailable, self.trusts.access,
                              'the-trust')
        self.assertEqual(2, len(asked))
        self.web.post(f'{URL}/auth/tokens', json=self.token)
        for _attempt in range(2):
            self.trusts.access('the-trust')
        self.trusts.service()

    def test_keystone_that_refuses_is_available_to_all_threads(self):
        for code, error in ((503, errors.CloudUnavailable),
                            (403, errors.TrustUnavailable)):
            self.web.post(f'{URL}/auth/tokens', exc=requests.Timeout)
            self.assertRaises(errors.CloudUnavailable, self.trusts.access,
                              'the-trust')
            self.refused['trust'] = code
            self.web.post(f'{URL}/auth/tokens', json=self.token)
            self.assertRaises(error, self.trusts.access, 'the-trust')
            self.assert_several_wait()

    def assert_several_wait(self):
        seen = []
        self.web.post(f'{URL}/auth/tokens', json=lambda request, context: (
            seen.append(None), len(seen) < 2 and self.trusts.access('another'),
            self.token(request, context))[-1])
        self.refused.clear()
        self.trusts.access('the-trust')
        self.assertEqual(2, len(seen))

    def delegate(self):
        return self.trusts.delegate(self.user, END, False)


class TestRevoke(CredentialsTestCase):

    def deleted_by(self):
        return [request.headers['X-Auth-Token'] for request in
                self.web.request_history if request.method == 'DELETE']

    def test_trust_is_deleted_in_name_of_its_user(self):
        self.web.delete(f'{TRUSTS}/the-trust', status_code=204)
        self.trusts.revoke('the-trust')
        self.assertEqual(['trust-token'], self.deleted_by())

    def test_trust_of_disabled_user_is_deleted_by_service_user(self):
        self.refused['trust'] = 403
        self.web.delete(f'{TRUSTS}/the-trust', status_code=204)
        self.trusts.revoke('the-trust')
        self.assertEqual(['service-token'], self.deleted_by())

    def test_missing_trust_counts_as_revoked(self):
        self.refused['trust'] = 401
        self.web.delete(f'{TRUSTS}/the-trust', status_code=404)
        self.trusts.revoke('the-trust')
        self.assertEqual(['service-token'], self.deleted_by())

    def test_keystone_behind_proxy_may_not_answer(self):
        for code in 502, 503, 504:
            self.web.delete(f'{TRUSTS}/the-trust', status_code=code)
            self.assertRaises(errors.CloudUnavailable, self.trusts.revoke,
                              'the-trust')

    def test_forbidden_deletion_of_trust_raises(self):
        self.refused['trust'] = 403
        self.web.delete(f'{TRUSTS}/the-trust', status_code=403)
        self.assertRaises(exceptions.Forbidden, self.trusts.revoke,
                          'the-trust')


class TestHeld(CredentialsTestCase):

    def test_expired_trusts_are_not_held(self):
        self.web.get(f'{TRUSTS}?trustee_user_id=nova', json={'trusts': [
            {'id': 'one', 'expires_at': '2999-01-01T00:00:00.000000Z'},
            {'id': 'old', 'expires_at': '2001-01-01T00:00:00.000000Z'},
            {'id': 'two', 'expires_at': None}]})
        self.assertEqual({'one', 'two'}, self.trusts.held())


class TestValidUntil(CredentialsTestCase):

    def test_credential_is_valid_until_its_trust_expires(self):
        for answer, expected in (
                ({'expires_at': '1970-01-01T01:00:00.000000Z'}, 3600),
                ({'expires_at': None}, math.inf)):
            self.web.get(f'{TRUSTS}/the-trust', json={'trust': answer})
            self.assertEqual(expected, self.trusts.valid_until('the-trust'))
        self.web.get(f'{TRUSTS}/the-trust', status_code=404)
        self.assertEqual(0, self.trusts.valid_until('the-trust'))

    def test_credential_without_a_trust_has_no_end(self):
        self.assertEqual(math.inf, self.trusts.valid_until(
            service_user.ServiceUser('user', 'project', ()).written()))
        self.assertEqual([], self.web.request_history)

    def test_failed_and_malformed_answers_mean_cloud_unavailable(self):
        for answer in ({'status_code': 500}, {'text': 'a page'},
                       {'json': []}, {'json': {'trust': {}}},
                       {'json': {'trust': {'expires_at': 'tomorrow'}}},
                       {'exc': requests.ConnectionError}):
            self.web.get(f'{TRUSTS}/the-trust', **answer)
            self.assertRaises(errors.CloudUnavailable,
                              self.trusts.valid_until, 'the-trust')
