# SPDX-License-Identifier: Apache-2.0

from oslo_config import cfg
from oslotest import base

from blazar_core.common import opts
from blazar_nova.compat import nova_conf


class TestOpts(base.BaseTestCase):

    def conf(self):
        conf = cfg.ConfigOpts()
        conf([], project='blazar-test', default_config_files=[],
             default_config_dirs=[])
        nova_conf.register_opts(conf)
        return conf

    def test_every_option_has_help_in_a_sentence(self):
        for group, options in nova_conf.list_opts():
            self.assertTrue(group.help)
            for option in options:
                self.assertTrue(option.help, option.name)
        for options in (opts.OPTS, opts.LIMIT_OPTS, nova_conf.OPTS,
                        nova_conf.LIMIT_OPTS, nova_conf.POWER_OPTS):
            for option in options:
                self.assertRegex(
                    option.help, r'^[A-Z](?s:.*)\.$', option.name)

    def test_defaults_of_blazar_options(self):
        self.assertEqual(
            {'reservation_start_date': 'now', 'reservation_length_days': 30,
             'reservation_length_hours': 0, 'reservation_length_minutes': 0,
             'default_reservation': 'off',
             'default_reservation_exempt_project_ids': [],
             'default_reservation_exempt_roles': [],
             'default_reservation_exempt_flavors': [],
             'default_reservation_exempt_images': [],
             'minutes_before_end_lease': 60, 'preflight': [1440, 60],
             'on_end': [
                 'delete', 'snapshot', 'shelve', 'stop', 'suspend',
                 'release'], 'end_timeout': 3600,
             'no_show_time': 0, 'no_show_notice': 3600,
             'low_use_share': 0, 'low_use_period': 86400,
             'orphan_grace': 72,
             'orphan_interval': 24,
             'orphaned_leases': 'report',
             'retries': 12, 'retry_interval': 300,
             'best_effort_timeout': 1800, 'best_effort_moves': 20,
             'best_effort_move_interval': 600,
             'best_effort_moves_per_hour': None,
             'interruptible_notice': 300,
             'interruptible_safe_for': 3600, 'eviction_timeout': 300,
             'evict_now': False, 'lend_enrolled_hosts': False,
             'eviction_actions': ['migrate', 'shelve', 'delete'],
             'grace_period': 0, 'cleaning_time': 0, 'cleaning_command': '',
             'cleaning_timeout': 10, 'encryption_keys': [],
             'public_properties': ['hypervisor_type', 'vcpus'],
             'list_ended': 86400,
             'allow_untested_nova': False,
             'notification_format': 'unversioned',
             'notification_topic': 'blazar_notifications',
             'allowed_hints': [], 'server_status': 'RESERVED',
             'enable_polling_monitor': True, 'polling_interval': 60,
             'enable_notification_monitor': True, 'failure_delay': 60,
             'recovery_delay': 300, 'healing_interval': 60,
             'evacuate': False,
             'sync_interval': 300, 'max_sleep': 10, 'workers': 8,
             'max_clock_skew': 5,
             'worker_timeout': 60, 'start_timeout': 300,
             'on_database_failure': 'allow',
             'metrics_by_project': False, 'metrics_port': 0,
             'metrics_host': '127.0.0.1',
             'lost_build_timeout': None, 'event_max_retries': 10,
             'max_occurrences': 100, 'uncounted': 'warn',
             'max_amount': 1000,
             'randomize_host_selection': False, 'rates_file': '',
             'admission_retries': 20},
            dict(self.conf().blazar.items()))

    def test_defaults_of_enforcement_options(self):
        self.assertEqual(
            {'max_lease_duration': 31536000,
             'max_lease_ahead': -1,
             'max_lease_duration_exempt_project_ids': [],
             'max_leases_per_project': 100,
             'max_held_servers_per_project': 50,
             'max_reserved_vcpus_per_project': -1,
             'max_reserved_ram_mb_per_project': -1,
             'max_reserved_disk_gb_per_project': -1,
             'max_reserved_hosts_per_project': -1,
             'max_reserved_floating_ips_per_project': -1,
             'max_reserved_networks_per_project': -1,
             'max_reserved_volume_gb_per_project': -1,
             'max_reserved_stacks_per_project': -1,
             'max_host_spread': 2,
             'exempt_project_ids': [],
             'max_future_leases_per_project': -1,
             'max_consecutive_leases_per_project': -1,
             'consecutive_lease_gap': 3600, 'extension_window': -1,
             'max_extension': -1, 'max_class_hours_per_month': {},
             'warning_shares': [80, 90],
             'external_service_base_endpoint': None,
             'external_service_check_create_endpoint': None,
             'external_service_check_update_endpoint': None,
             'external_service_commits': False,
             'external_service_commit_create_endpoint': None,
             'external_service_commit_update_endpoint': None,
             'external_service_on_end_endpoint': None,
             'external_service_token': '', 'external_service_timeout': 10,
             'external_service_bearer': False},
            dict(self.conf().blazar_enforcement.items()))

    def test_every_default_is_a_valid_value(self):
        conf = self.conf()
        options = opts.OPTS + nova_conf.OPTS
        for option in options:
            conf.set_override(option.name, option.default, 'blazar')
        self.assertEqual(len(options), len(conf.blazar))

    def test_database_connection_has_no_default(self):
        self.assertIsNone(self.conf().blazar_database.connection)

    def test_secret_options_are_marked_secret(self):
        secret = {option.name: option.secret for _group, options in
                  nova_conf.list_opts() for option in options}
        self.assertTrue(secret['encryption_keys'])
        self.assertTrue(secret['connection'])
        self.assertTrue(secret['external_service_token'])

    def test_options_can_be_registered_twice(self):
        conf = self.conf()
        nova_conf.register_opts(conf)
        self.assertEqual(8, conf.blazar.workers)

    def test_configurations_do_not_share_values(self):
        one, other = self.conf(), self.conf()
        one.set_override('workers', 2, 'blazar')
        one.set_override('connection', 'sqlite://', 'blazar_database')
        self.assertEqual(8, other.blazar.workers)
        self.assertIsNone(other.blazar_database.connection)

    def test_invalid_values_are_refused(self):
        conf = self.conf()
        for name in ('workers', 'max_sleep', 'sync_interval',
                     'worker_timeout'):
            self.assertRaises(ValueError, conf.set_override, name, 0,
                              'blazar')
        for name in ('admission_retries', 'event_max_retries',
                     'start_timeout', 'minutes_before_end_lease',
                     'reservation_length_days'):
            conf.set_override(name, 0, 'blazar')
            self.assertRaises(ValueError, conf.set_override, name, -1,
                              'blazar')
