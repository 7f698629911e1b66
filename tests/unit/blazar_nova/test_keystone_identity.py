# SPDX-License-Identifier: Apache-2.0


"""Projects and users that keystone no longer has, verified with care."""

import requests

from blazar_core.common import errors
from blazar_nova.services import keystone_identity
from blazar_nova.services import user_credentials
from tests.unit.blazar_nova import test_user_credentials

URL = test_user_credentials.URL
NOT_FOUND = {'status_code': 404, 'json': {'error': {
    'code': 404, 'title': 'Not Found', 'message': 'Could not find it.'}}}


class TestIdentity(test_user_credentials.CredentialsTestCase):

    def setUp(self):
        super().setUp()
        self.identity = keystone_identity.KeystoneIdentity(self.trusts)
        self.there('users/nova', 'projects/project', 'users/one')

    def there(self, *paths, **answer):
        for path in paths:
            self.web.get(f'{URL}/{path}', **(answer or {'json': {}}))

    def test_owners_that_keystone_does_not_find_are_absent(self):
        self.there('projects/gone', 'users/gone', **NOT_FOUND)
        self.assertEqual(
            (frozenset({'gone'}), frozenset({'gone'}), frozenset()),
            self.identity.absent(['project', 'gone'], ['one', 'gone']))

    def test_project_id_with_dots_or_slashes_does_not_exist(self):
        self.there('projects/', '', 'users')
        wrong = ['..', '.', '../users', '']
        self.assertEqual(frozenset(wrong),
                         self.identity.absent(wrong, []).projects)

    def test_disabled_project_is_not_absent(self):
        self.there('projects/one', json={'project': {'enabled': False}})
        self.assertEqual(frozenset(),
                         self.identity.absent(['one'], []).projects)

    def test_each_owner_is_requested_once(self):
        self.identity.absent(['project'], ['one'])
        self.assertEqual(
            ['users/nova', 'projects/project', 'projects/project',
             'users/one'],
            [request.path.removeprefix('/v3/')
             for request in self.web.request_history
             if '/users/' in request.path or '/projects/' in request.path])

    def test_project_that_may_not_be_read_is_unknown(self):
        self.there('projects/other', status_code=403)
        self.assertEqual(
            (frozenset(), frozenset(), frozenset({'other'})),
            self.identity.absent(['project', 'other'], []))

    def test_404_from_another_server_leaves_owner_unknown(self):
        for answer in ({'status_code': 404, 'text': '<html>'},
                       {'status_code': 404, 'json': ['no']},
                       {'status_code': 404}):
            self.there('projects/other', **answer)
            self.assertEqual(
                (frozenset(), frozenset(), frozenset({'other'})),
                self.identity.absent(['other'], []))

    def test_service_user_must_be_able_to_read_itself(self):
        for path in 'users/nova', 'projects/project':
            for answer in NOT_FOUND, {'status_code': 403}:
                self.there(path, **answer)
                said = str(self.assertRaises(
                    errors.CloudUnavailable, self.identity.absent, ['x'], []))
                self.assertIn('Give the user a role', said)
            self.there(path)

    def test_failing_keystone_means_cloud_unavailable(self):
        names = ['one', 'two', 'three', 'four']
        for answer in ({'status_code': 500},
                       {'exc': requests.ConnectionError}):
            self.there(*(f'projects/{name}' for name in names), **answer)
            self.there('users/gone', **NOT_FOUND)
            self.web.reset_mock()
            self.assertRaises(errors.CloudUnavailable, self.identity.absent,
                              names, ['gone'])
            # One that does not answer is asked twice by keystoneauth.
            self.assertEqual({*names[:3]}, {
                request.path.rpartition('/')[2]
                for request in self.web.request_history} & {*names, 'gone'})

    def test_owner_whose_lookup_fails_is_unknown(self):
        for name in 'one', 'two', 'three':
            self.there(f'projects/{name}', status_code=500)
        self.there('projects/gone', 'users/gone', **NOT_FOUND)
        self.assertEqual(
            (frozenset({'gone'}), frozenset({'gone'}),
             frozenset({'one', 'two', 'three'})),
            self.identity.absent(['one', 'two', 'gone', 'three'], ['gone']))

    def test_each_lookup_is_announced(self):
        calls = []
        self.identity.absent(['project'], ['one'], lambda: calls.append(
            self.web.request_history[-1].path.rpartition('/')[2]))
        self.assertEqual(['project', 'project'], calls)

    def test_failed_authentication_means_cloud_unavailable(self):
        self.refused['service'] = 401
        self.assertRaises(errors.CloudUnavailable, self.identity.absent,
                          ['one'], [])

    def test_missing_configuration_means_cloud_unavailable(self):
        nobody = keystone_identity.KeystoneIdentity(
            user_credentials.Credentials(self.conf('')))
        self.assertRaises(errors.CloudUnavailable, nobody.absent, ['x'], [])

    def test_ids_are_quoted_in_url(self):
        self.there('projects/..%2Fusers%2Fone', **NOT_FOUND)
        self.assertEqual(
            frozenset({'../users/one'}),
            self.identity.absent(['../users/one'], []).projects)
