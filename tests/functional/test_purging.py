# SPDX-License-Identifier: Apache-2.0

"""``blazar-nova-manage db purge``, while an API and a listener run."""

import contextlib
import io

import fixtures

from blazar_nova.cmd import manage
from tests.functional import api_base

DAY = 86400


class PurgeTest(api_base.ApiTestCase):

    def command(self, *words):
        """Run a command; return its exit code and its output."""
        out = io.StringIO()
        with (fixtures.MonkeyPatch('blazar_nova.cmd.manage._conf',
                                   lambda _files: self.listener.parts.conf),
              fixtures.MonkeyPatch('blazar_core.common.clocks.SystemClock',
                                   lambda: self.clock),
              contextlib.redirect_stdout(out),
              contextlib.redirect_stderr(out)):
            return manage.main([*words]), out.getvalue()

    def test_purge_deletes_only_leases_that_ended_before_date(self):
        over = self.make_active(name='over')
        used = self.boot_active('vm', hints=self.lease_hints('used'))
        later = self.hold('later', start_in=5 * DAY)
        self.alice.delete_server(used['id'])
        self.wait_until_gone(used['id'])
        self.run_sync()
        self.run_until(self.began + 7200)
        self.assertEqual('TERMINATED', self.get(over)['status'])
        self.clock.advance(3 * DAY)
        before = self.at(DAY)
        code, text = self.command('db', 'purge', '--before', before)
        self.assertEqual(0, code, text)
        self.assertIn(f'Deleted 2 leases that ended before {before}',
                      text)
        self.ask('GET', f'/leases/{over["id"]}', code=404)
        self.assertEqual(['later'], [one['name'] for one in self.leases()])
        self.assertEqual([], self.query(
            f"SELECT * FROM events WHERE lease_id = '{over['id']}'"))
        self.assertIn('were purged', self.command(
            'lease', 'list', '--ended')[1])
        self.run_sync()
        self.assert_verified()
        self.run_until(self.began + 5 * DAY)
        self.wait_for_status(later['id'], 'ACTIVE')
