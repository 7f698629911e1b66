# SPDX-License-Identifier: Apache-2.0


"""Lists of servers, many of which are reserved."""

import datetime
import itertools
from unittest import mock

from nova import context as nova_context
from nova import exception
from nova import objects
from oslo_utils import timeutils
from oslo_utils import uuidutils

from blazar_nova.compat import server_lists
from tests.functional import leased
from tests.functional import nova_box

#: Filters of members and admins, in the terms of Nova's search.
FILTERS = (
    {}, {'deleted': False}, {'project_id': nova_box.PROJECT_ID},
    {'project_id': 'other'}, {'display_name': 'copy-[24]'},
    {'display_name': '^(vm|copy-1)'}, {'vm_state': ['reserved']},
    {'vm_state': ['building', 'active'], 'deleted': False},
    {'vm_state': []}, {'task_state': [None]}, {'host': None},
    {'metadata': {'part': '1'}}, {'metadata': [{'part': '2'}]},
    {'tags': ['tag0']}, {'not-tags-any': ['tag0']}, {'user_id': 'alice'},
    {'user_id': 'bob'}, {'instance_type_id': 1}, {'locked': False},
    {'hidden': False}, {'launched_at': '2026'}, {'created_at': '20'},
    {'availability_zone': 'nova'}, {'nonsense': 'x'}, {'ip': '10.'},
    {'locked_by': 'owner'}, {'name': 'instance-'}, {'image_ref': '.*-.*'},
)
SORTS = (
    (['created_at'], ['desc']), (['display_name'], ['asc']),
    (['display_name', 'created_at'], ['desc', 'asc']), (['uuid'], ['asc']),
    (['project_id', 'id'], ['asc', 'desc']), (['vm_state'], ['desc']),
)


class ListTest(leased.LeasedTestCase):

    def setUp(self):
        super().setUp()
        self.alices = nova_context.RequestContext(
            'alice', nova_box.PROJECT_ID)
        self.admins = nova_context.get_admin_context()
        # Later microversions show the hints, which the copies lack.
        self.old_client = self.api(microversion='2.90')
        self.held = self.hold('vm1')['id']

    def copies(self, count):
        """Create servers like the reserved one, each different."""
        ids = []
        for number in range(count):
            request = objects.BuildRequest.get_by_instance_uuid(
                self.admins, self.held)
            instance = request.instance
            instance.uuid = uuidutils.generate_uuid()
            instance.display_name = f'copy-{number % 7}'
            instance.metadata = {'part': str(number % 3)}
            instance.vm_state = ('reserved', 'building')[number % 4 == 3]
            instance.project_id = (
                nova_box.PROJECT_ID, 'other')[number % 5 == 4]
            objects.BuildRequest(
                self.admins, instance=instance, instance_uuid=instance.uuid,
                project_id=instance.project_id,
                block_device_mappings=request.block_device_mappings,
                tags=objects.TagList(objects=[objects.Tag(
                    resource_id=instance.uuid, tag=f'tag{number % 2}')]),
            ).create()
            ids.append(instance.uuid)
        return ids

    def ids(self, search, context, filters, **how):
        """Return the ids that a search finds, or a text if it fails."""
        how = {name: [*value] if isinstance(value, list) else value
               for name, value in how.items()}
        try:
            return [one.instance.uuid for one in search(
                context, dict(filters), **how)]
        except exception.MarkerNotFound:
            return 'no such marker'

    def novas(self, context, filters, **how):
        return server_lists._novas.original_fn(
            objects.BuildRequestList, context, filters, **how)

    def test_list_finds_same_servers_as_nova(self):
        ids = self.copies(12)
        self.assertNotEqual(
            server_lists._novas, objects.BuildRequestList.get_by_filters)
        hows = itertools.cycle(itertools.product(SORTS, (
            (None, None), (5, None), (5, ids[0]), (1, ids[11]),
            (0, ids[0]), (3, uuidutils.generate_uuid()))))
        seen = set()
        for filters, context in itertools.product(
                FILTERS, (self.alices, self.admins)):
            for (keys, directions), (limit, marker) in itertools.islice(
                    hows, 7):
                asked = {'limit': limit, 'marker': marker, 'sort_keys': keys,
                         'sort_dirs': directions}
                found = self.ids(objects.BuildRequestList.get_by_filters,
                                 context, filters, **asked)
                self.assertEqual(
                    self.ids(self.novas, context, filters, **asked), found,
                    (context.is_admin, filters, asked))
                seen.add(tuple(found))
        self.assertGreater(len(seen), 50)

    def test_rows_have_same_fields_as_instances(self):
        self.copies(4)
        rows = server_lists._Rows(self.admins, {})
        for row in rows.get_all(self.admins):
            real = rows.whole(row.id).instance
            for name in objects.Instance.fields:
                if real.obj_attr_is_set(name) and not hasattr(
                        getattr(real, name), 'obj_name'):
                    self.assertEqual(getattr(real, name),
                                     getattr(row.instance, name), name)

    def test_build_requests_deleted_during_list_are_omitted(self):
        """Its request is deleted when it was found, or when it was read."""
        for name in ('get_all', 'text_of'):
            real, deleted = getattr(server_lists._Rows, name), []

            def then_delete(*args, real=real, deleted=deleted):
                found = real(*args)
                for server_id in ids if not deleted else ():
                    deleted.append(server_id)
                    objects.BuildRequest.get_by_instance_uuid(
                        self.admins, server_id).destroy()
                return found

            for filters in ({'display_name': 'copy'},
                            {'metadata': {'part': '0'}}, {'tags': ['tag0']},
                            {'flavor': 'x'}):
                ids = self.copies(4)
                deleted.clear()
                with mock.patch.object(
                        server_lists._Rows, name, then_delete):
                    found = self.ids(objects.BuildRequestList.get_by_filters,
                                     self.admins, {
                                         **filters, 'project_id': [
                                             nova_box.PROJECT_ID, 'other']},
                                     sort_keys=['display_name', 'flavor'],
                                     sort_dirs=['asc', 'asc'])
                self.assertEqual(([], ids), (
                    [one for one in found if one in ids], deleted), filters)

    def test_list_creates_objects_only_for_shown_servers(self):
        self.copies(30)
        with mock.patch.object(
                objects.BuildRequest, '_from_db_object',
                wraps=objects.BuildRequest._from_db_object) as made:
            for query in ('', '&name=copy', '&status=RESERVED',
                          '&sort_key=display_name', '&not-tags=tag1',
                          f'&marker={self.held}&sort_dir=asc'):
                made.reset_mock()
                response = self.old_client.api_request(
                    f'/servers/detail?limit=3{query}')
                self.assertEqual(
                    3, len(response.json()['servers']), response.text)
                self.assertEqual(3, made.call_count, query)

    def test_changes_since_omits_unchanged_reserved_servers(self):
        (building,) = [one for number, one in enumerate(self.copies(4))
                       if number == 3]
        for client in (self.old_client, self.admin):
            for seconds, there in ((-60, True), (60, False)):
                since = timeutils.utcnow() + datetime.timedelta(
                    seconds=seconds)
                found = {one['id'] for one in client.api_request(
                    f'/servers?changes-since={since.isoformat()}Z'
                ).json()['servers']}
                self.assertEqual(there, self.held in found, found)
                self.assertIn(building, found)

    def test_list_sorts_by_fields_that_some_servers_lack(self):
        self.copies(5)
        for key in ('updated_at', 'key_name', 'availability_zone',
                    'launched_at', 'terminated_at'):
            response = self.old_client.api_request(
                f'/servers/detail?sort_key={key}')
            self.assertEqual(200, response.status_code, response.text)
            self.assertLess(4, len(response.json()['servers']))

    def test_expensive_regular_expressions_are_bounded(self):
        slow = self.hold('a' * 60 + '!')['id']
        for pattern, found in (('(a|a)%2B$', []), ('(a)%2B!$', [slow])):
            response = self.alice.api_request(f'/servers?name={pattern}')
            self.assertEqual(found, [
                one['id'] for one in response.json()['servers']])
        # The cost of compiling an expression is bounded too.
        for pattern in ('(x?(x?(x?){50}){50}){50}vm', '((x?){65000}){9}vm',
                        'a|' * 128):
            response = self.alice.api_request(f'/servers?name={pattern}')
            self.assertEqual(400, response.status_code, response.text)
            self.assertIn('Write a simpler one', response.text)

    def test_list_reads_details_only_if_query_needs_them(self):
        self.copies(30)
        with mock.patch.object(
                server_lists._Rows, 'text_of', autospec=True,
                side_effect=server_lists._Rows.text_of) as read:
            for client, query in ((self.old_client, ''), (
                    self.admin, '&all_tenants=1')):
                response = client.api_request(f'/servers?limit=3{query}')
                self.assertEqual(3, len(response.json()['servers']))
            self.assertEqual(0, read.call_count)
            self.old_client.api_request('/servers?limit=3&name=copy')
            self.assertLess(0, read.call_count)
