# SPDX-License-Identifier: Apache-2.0

import types

from nova import context as nova_context
from nova.db.api import api as api_db
from nova.db.api import models as api_models
from nova import exception
from nova import objects
from oslo_db.sqlalchemy import enginefacade
from oslo_utils.fixture import uuidsentinel as uuids

from blazar_nova.compat import process
from blazar_nova.compat import reserved_edits
from blazar_nova.compat import reserved_state
from tests import databases
from tests.unit import base

load_tests = databases.load_tests


class TestConcurrentChanges(base.TestCase):
    """Concurrent changes of a reserved server."""

    scenarios = [one for one in databases.EACH if one[0] != 'sqlite']

    def setUp(self):
        super().setUp()
        objects.register_all()
        process.CONF([], project='nova', default_config_files=[],
                     default_config_dirs=[])
        self.addCleanup(process.CONF.reset)
        self.db = self.useFixture(databases.DatabaseFixture(self.kind))
        api_models.BuildRequest.__table__.create(self.db.database.engine)
        manager = enginefacade.transaction_context()
        manager.configure(connection=self.db.url)
        self.addCleanup(api_db.context_manager.patch_factory(manager))
        objects.BuildRequest(
            self.context(), instance_uuid=uuids.server, project_id='mine',
            block_device_mappings=objects.BlockDeviceMappingList(),
            tags=objects.TagList(), instance=objects.Instance(
                uuid=uuids.server, project_id='mine', metadata={},
                vm_state=reserved_state.VM_STATE, task_state=None,
                locked=False, display_name='old', system_metadata={
                    'image_os': 'x'})).create()

    @staticmethod
    def context():
        return nova_context.RequestContext('alice', 'mine')

    def give(self, key):
        with reserved_state.changing(self.context(), uuids.server) as request:
            request.instance.metadata = {
                **request.instance.metadata, key: '1'}

    def test_concurrent_changes_of_metadata_are_both_kept(self):
        with reserved_state.changing(self.context(), uuids.server) as request:
            thread = self.db.meanwhile(lambda: self.give('other'))
            request.instance.metadata = {'mine': '1'}
        thread.join()
        self.assertEqual({'mine': '1', 'other': '1'}, self.now().metadata)

    def test_change_during_start_is_in_the_build(self):
        """The start has read it before the change, and waits."""
        build = objects.BuildRequest.get_by_instance_uuid(
            self.context(), uuids.server)
        with reserved_state.changing(self.context(), uuids.server) as request:
            thread = self.db.meanwhile(
                lambda: reserved_state.unmark(build))
            request.instance.metadata = {'mine': '1'}
        thread.join()
        self.assertEqual(({'mine': '1'}, 'building'), (
            build.instance.metadata, build.instance.vm_state))
        self.assertEqual('building', self.now().vm_state)

    def test_late_rename_keeps_server_reserved(self):
        """The start has failed meanwhile, and the build is deferred again."""
        reserved_state.unmark(objects.BuildRequest.get_by_instance_uuid(
            self.context(), uuids.server))
        building = self.now()
        with reserved_state.changing(self.context(), uuids.server) as request:
            thread = self.db.meanwhile(
                lambda: reserved_edits._update_instance(
                    None, self.context(), building, {'display_name': 'new'}))
            request.instance.vm_state = reserved_state.VM_STATE
        thread.join()
        self.assertEqual((reserved_state.VM_STATE, 'new'), (
            self.now().vm_state, self.now().display_name))

    def test_server_shown_as_build_is_so_whenever_reserved(self):
        build = objects.BuildRequest.get_by_instance_uuid(
            self.context(), uuids.server)
        reserved_state.show_as_build(build)
        held = {'vm_state': 'building', 'task_state': 'reserved'}
        for change, state, shown in (
                (reserved_state.mark, 'reserved', held),
                (reserved_state.unmark, 'building', None),
                (reserved_state.mark, 'reserved', held)):
            change(build)
            for its in (build.instance, self.now()):
                self.assertEqual(state, its.vm_state)
                self.assertEqual(shown, reserved_state.states_of(
                    its.vm_state, its.system_metadata))
        self.assertEqual('x', self.now().system_metadata['image_os'])

    def test_show_as_build_is_not_a_concurrent_change(self):
        reserved_state.unmark(objects.BuildRequest.get_by_instance_uuid(
            self.context(), uuids.server))
        build = objects.BuildRequest.get_by_instance_uuid(
            self.context(), uuids.server)
        # As on a record that was just written.
        build.updated_at = None
        reserved_state.show_as_build(build)
        reserved_state.mark(build, unless_changed=True)
        self.assertEqual(reserved_state.VM_STATE, self.now().vm_state)

    def test_metadata_limit_counts_concurrent_changes(self):
        def limit(_context, metadata):
            if len(metadata) > 1:
                raise exception.MetadataLimitExceeded(allowed=1)

        nova, held, refused = types.SimpleNamespace(
            _check_metadata_properties_quota=limit), self.now(), []

        def give():
            try:
                reserved_edits._update_instance_metadata(
                    nova, self.context(), held, {'other': '1'})
            except exception.MetadataLimitExceeded as exc:
                refused.append(exc)

        with reserved_state.changing(self.context(), uuids.server) as request:
            thread = self.db.meanwhile(give)
            request.instance.metadata = {'mine': '1'}
        thread.join()
        self.assertEqual(({'mine': '1'}, 1), (
            self.now().metadata, len(refused)))

    def now(self):
        return objects.BuildRequest.get_by_instance_uuid(
            self.context(), uuids.server).instance
