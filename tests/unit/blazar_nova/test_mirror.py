#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""Which hosts are looked at again."""

import types

import fixtures
from oslo_utils import uuidutils
import testscenarios

from blazar_core import books
from blazar_core.db import models
from blazar_nova.listener import mirror
from tests.unit import base

load_tests = testscenarios.load_tests_apply_scenarios


class TestRecheck(base.DatabaseTestCase):

    def test_after_a_move_a_host_is_looked_at_until_that_succeeds(self):
        looked = mirror.Mirror(types.SimpleNamespace(
            database=self.database, clock=self.clock), lambda: None)
        answers = [OSError('placement is away'), None, None]
        asked = []

        def compare_usage(service_host):
            asked.append(service_host)
            if answer := answers.pop(0):
                raise answer

        looked.compare_usage = compare_usage
        looked.watch('one')
        self.clock.advance(2)
        looked.recheck()
        self.assertEqual(['one'], asked)
        self.clock.advance(10)
        looked.recheck()
        self.assertEqual(['one'] * 2, asked)
        self.clock.advance(3)
        looked.recheck()
        looked.recheck()
        self.assertEqual(['one'] * 3, asked)


class TestTwoListeners(base.DatabaseTestCase):
    """Whoever asked first is the last one to write."""

    def test_what_has_left_meanwhile_does_not_come_again(self):
        uuid = uuidutils.generate_uuid()
        self.report(uuid, 'one', {'VCPU': 1}, {'VCPU': 4})
        asked = []

        def taken(_providers):
            asked.append(None)
            if len(asked) > 1:
                return {}
            with self.database.writer() as session:
                books.report_usage(
                    session, self.clock.now(), uuid, {},
                    books.generations(session, [uuid])[uuid])
            return {'somebody': {'VCPU': 1}, 'another': {'VCPU': 1}}

        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.compat.hosts.taken', taken))
        looked = mirror.Mirror(types.SimpleNamespace(
            database=self.database, clock=self.clock), lambda: None)
        looked._facts[uuid] = types.SimpleNamespace(
            capacity={'VCPU': 4}, providers={})
        looked.compare_usage('one')
        self.assertEqual(2, len(asked))
        self.assertEqual([{}], self.scalars(models.Host.usage))
