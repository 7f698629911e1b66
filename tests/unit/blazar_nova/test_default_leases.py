# SPDX-License-Identifier: Apache-2.0

"""Boots that get a lease by default, as far as Nova is not needed."""

import types
from unittest import mock

from oslo_config import cfg

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_nova.compat import nova_conf
from blazar_nova.services import default_leases
from tests import driven
from tests.unit import base

DAY = 86400


class DefaultLeasesTestCase(base.TestCase):

    def setUp(self):
        super().setUp()
        self.conf = cfg.ConfigOpts()
        nova_conf.register_opts(self.conf)
        self.conf([], project='blazar-test', default_config_files=[],
                  default_config_dirs=[])
        self.set('default_reservation', 'on')
        self.noted = mock.Mock()
        self.by_default = default_leases.DefaultLeases(
            self.conf, driven.ManualClock(base.NOW), self.noted)

    def set(self, name, value, group='blazar'):
        self.conf.set_override(name, value, group)


class TestRequest(DefaultLeasesTestCase):

    def request(self, hints=None, roles=('member',)):
        return self.by_default.request(types.SimpleNamespace(
            context=types.SimpleNamespace(
                project_id='mine', user_id='me', roles=roles),
            flavor_names={'1', 'tiny'}, image_names={'cirros'},
            server_ids=('a', 'b'), hint=(hints or {}).get))

    def test_default_lease_uses_default_options_and_starts_now(self):
        self.set('reservation_start_date', '2031-02-03 04:05')
        self.set('reservation_length_days', 2)
        self.set('reservation_length_hours', 1)
        self.set('grace_period', 60)
        self.set('on_end', ['delete', 'stop'])
        asked = self.request()
        end = base.NOW + 2 * DAY + 3600
        self.assertEqual(
            (model.Window(base.NOW, end), end - 3600, 'delete', True, 60),
            (asked.window, asked.before_end, asked.on_end, asked.starts_now,
             asked.grace_period))

    def test_no_default_lease_when_option_is_off(self):
        self.set('default_reservation', 'off')
        for hints in ({}, {'reserved': 'False'}):
            self.assertIsNone(self.request(hints))
        self.noted.note.assert_not_called()
        self.assertFalse(self.by_default.is_on())

    def test_opting_out_is_refused_with_alternatives(self):
        refused = str(self.assertRaises(
            errors.Forbidden, self.request, {'reserved': 'False'}))
        self.assertIn('Leave it out for a lease until 2027-02-14 08:00 UTC',
                      refused)
        self.assertIn('--hint reserved=True --hint lease_params=', refused)

    def test_exemptions_by_project_role_flavor_and_image(self):
        for what, values, hit in (
                ('project_ids', ['other', 'mine'], True),
                ('project_ids', ['MINE', 'me', 'min'], False),
                ('roles', ['MEMBER'], True), ('roles', ['reader'], False),
                ('flavors', ['1'], True), ('flavors', ['tiny'], True),
                ('flavors', ['Tiny', 'cirros'], False),
                ('images', ['cirros'], True), ('images', ['1'], False)):
            self.set(f'default_reservation_exempt_{what}', values)
            for mode, hints in (('on', {}), ('on', {'reserved': 'False'}),
                                ('announce', {})):
                self.set('default_reservation', mode)
                if hit:
                    self.assertIsNone(self.request(hints))
                    self.noted.note.assert_not_called()
            self.set('default_reservation', 'on')
            self.assertIs(hit, self.request() is None, (what, values))
            self.set(f'default_reservation_exempt_{what}', [])
        self.assertIsNotNone(self.request(roles=None))

    def test_announce_mode_only_notes_servers(self):
        self.set('default_reservation', 'announce')
        self.assertIsNone(self.request({'reserved': 'False'}))
        self.noted.note.assert_called_once_with(
            'mine', 'me', ('a', 'b'),
            model.Window(base.NOW, base.NOW + 30 * DAY))
        self.assertFalse(self.by_default.is_on())

    def test_refusal_explains_that_lease_is_by_default(self):
        asked = self.request()
        for exc in (errors.LimitExceeded('Too much.'), errors.Refused(
                refusals.Refusal(refusals.Reason.NO_HOST, 1, 0, None))):
            said = default_leases.explained(exc, asked)
            self.assertTrue(said.startswith(f'{exc} No lease was asked for'))
        down = errors.CloudUnavailable('No answer.')
        self.assertEqual('No answer.', default_leases.explained(down, asked))


class TestConfiguration(DefaultLeasesTestCase):

    def test_default_lease_beyond_limits_is_a_configuration_error(self):
        default_leases.check(self.conf)
        self.set('max_lease_duration', 30 * DAY, 'blazar_enforcement')
        default_leases.check(self.conf)
        self.set('grace_period', 1)
        self.assertIn('every boot would be refused', str(self.assertRaises(
            errors.ConfigurationError, default_leases.check, self.conf)))
        for mode, told in ('off', []), ('announce', ['cannot be on']):
            self.set('default_reservation', mode)
            default_leases.check(self.conf)
            self.assertEqual(told, [
                'cannot be on' for one in default_leases.doubts(self.conf)
                if 'cannot be on: a lease by default would last' in one])
        self.set('default_reservation', 'on')
        self.set('max_lease_duration', -1, 'blazar_enforcement')
        default_leases.check(self.conf)

    def test_implausible_exemptions_are_reported(self):
        self.set('default_reservation_exempt_project_ids', [
            'service', 'a' * 32, '12345678-1234-1234-1234-123456789abc'])
        self.set('default_reservation_exempt_roles', ['admin', 'b' * 32])
        project, role = default_leases.doubts(self.conf)
        self.assertIn('exempt_project_ids has "service", which is no id',
                      project)
        self.assertIn(f'exempt_roles has "{"b" * 32}", which is an id', role)
