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

import threading
import time

from nova import context as nova_context
from nova.db.api import api as api_db
from nova.db.api import models as api_models
from nova import objects
from oslo_db.sqlalchemy import enginefacade
from oslo_utils.fixture import uuidsentinel as uuids
import sqlalchemy as sa

from blazar_nova.compat import reserved
from blazar_nova.compat import service
from tests import databases
from tests.unit import base

load_tests = databases.load_tests

#: How each database says that somebody waits for a lock.
_WAITING = {
    'mariadb': "SELECT count(*) FROM information_schema.processlist "
               "WHERE info LIKE '%FOR UPDATE' AND time_ms > 200",
    'postgresql': "SELECT count(*) FROM pg_stat_activity WHERE "
                  "wait_event_type = 'Lock' AND datname = current_database()",
}


class TestChanging(base.TestCase):
    """Two who change a held server at the same time."""

    scenarios = [one for one in databases.EACH if one[0] in _WAITING]

    def setUp(self):
        super().setUp()
        objects.register_all()
        service.CONF([], project='nova', default_config_files=[],
                     default_config_dirs=[])
        self.addCleanup(service.CONF.reset)
        self.books = self.useFixture(databases.Books(self.kind))
        api_models.BuildRequest.__table__.create(self.books.database.engine)
        manager = enginefacade.transaction_context()
        manager.configure(connection=self.books.url)
        self.addCleanup(api_db.context_manager.patch_factory(manager))
        objects.BuildRequest(
            self.context(), instance_uuid=uuids.server, project_id='mine',
            block_device_mappings=objects.BlockDeviceMappingList(),
            tags=objects.TagList(), instance=objects.Instance(
                uuid=uuids.server, project_id='mine', metadata={},
                vm_state=reserved.VM_STATE, task_state=None)).create()

    @staticmethod
    def context():
        return nova_context.RequestContext('alice', 'mine')

    def give(self, key):
        with reserved.changing(self.context(), uuids.server) as request:
            request.instance.metadata = {
                **request.instance.metadata, key: '1'}

    def whoever_comes_meanwhile(self, work):
        """Somebody who does his work, or waits to."""
        thread = threading.Thread(target=work)
        thread.start()
        self.addCleanup(thread.join)
        deadline, pause = time.monotonic() + 30, threading.Event()
        while thread.is_alive() and not self.is_waited_for():
            self.assertLess(time.monotonic(), deadline)
            pause.wait(0.05)
        return thread

    def is_waited_for(self):
        with self.books.database.engine.connect() as connection:
            return connection.scalar(sa.text(_WAITING[self.kind])) > 0

    def test_both_have_changed_it(self):
        with reserved.changing(self.context(), uuids.server) as request:
            thread = self.whoever_comes_meanwhile(lambda: self.give('other'))
            request.instance.metadata = {'mine': '1'}
        thread.join()
        self.assertEqual({'mine': '1', 'other': '1'}, self.now().metadata)

    def test_what_was_given_is_in_the_build(self):
        """The start has read it before, and waits."""
        build = objects.BuildRequest.get_by_instance_uuid(
            self.context(), uuids.server)
        with reserved.changing(self.context(), uuids.server) as request:
            thread = self.whoever_comes_meanwhile(
                lambda: reserved.unmark(build))
            request.instance.metadata = {'mine': '1'}
        thread.join()
        self.assertEqual(({'mine': '1'}, 'building'), (
            build.instance.metadata, build.instance.vm_state))
        self.assertEqual('building', self.now().vm_state)

    def now(self):
        return objects.BuildRequest.get_by_instance_uuid(
            self.context(), uuids.server).instance
