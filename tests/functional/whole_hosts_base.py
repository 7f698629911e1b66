# SPDX-License-Identifier: Apache-2.0

"""Base classes of the tests of leases of whole hosts."""

import contextlib
import io
import pydoc

import fixtures
from nova import context as nova_context
from nova import objects
from oslo_utils.fixture import uuidsentinel as uuids
from testtools import matchers

from blazar_core.common import clocks
from blazar_nova.cmd import manage
from blazar_nova.compat import compute_hosts
from tests.functional import api_base
from tests.functional import nova_box


class HostsTestCase(api_base.ApiTestCase):
    """Three hosts, and nothing reserved."""

    hosts = {name: nova_box.Capacity(vcpus=4, memory_mb=8192, disk_gb=100)
             for name in ('host1', 'host2', 'plain')}

    def setUp(self):
        super().setUp()
        self.enrolling = self.listener.parts.host_enrollment
        self.bob = self.api(project=uuids.other, user='bob')

    def enrol(self, *names, **extra):
        return [self.enrolling.add(name, extra, pause=None) for name in names]

    def look(self):
        """Sync the usage of hosts: the next lease waits for that."""
        self.clock.advance(max(
            0, clocks.SystemClock().now() - self.clock.now()))
        self.listener.server_sync.compare_all()

    def hosts_wanted(self, least=1, most=1, **params):
        return {'resource_type': 'physical:host', 'min': least, 'max': most,
                'hypervisor_properties': '', 'resource_properties': '',
                **params}

    def lease_hosts(self, least=1, most=1, **params):
        """Create an active lease of hosts; return it and its reservation id.
        """
        lease = self.get(self.make_active(
            reservations=[self.hosts_wanted(least, most, **params)]))
        return lease, lease['reservations'][0]['id']

    def delete(self, lease_id):
        """Delete a lease, and carry out what is due."""
        self.ask('DELETE', f'/leases/{lease_id}', code=204)
        self.run_until(clocks.SystemClock().now())

    def wait_until_over(self, lease_id):
        """Carry out what is due until a deleted lease no longer exists.

        While servers of it remain, or Nova answers late, its end is tried
        again.
        """
        def is_over():
            self.run_until(self.clock.now() + 600)
            try:
                self.ask('GET', f'/leases/{lease_id}', code=404)
            except matchers.MismatchError:
                return False
            return True

        self.wait_for(is_over)

    def within(self, name, reservation_id, **kwargs):
        """Boot with the hint that names a reservation."""
        return self.boot(name, hints={'reservation': reservation_id},
                         **kwargs)

    def host_of(self, server):
        return self.admin.get_server(server['id'])['OS-EXT-SRV-ATTR:host']

    def aggregates(self):
        """Return the hosts of each aggregate, by its name."""
        return {one.name: sorted(one.hosts) for one in
                objects.AggregateList.get_all(
                    nova_context.get_admin_context())}

    def traits(self, host):
        """Return the plugin's traits of a host in placement."""
        uuid, = (one.uuid for one in compute_hosts.all_hosts()[0]
                 if one.name == host)
        return {one for one in compute_hosts.ask_placement(
            f'/resource_providers/{uuid}/traits')['traits']
            if one.startswith('CUSTOM_BLAZAR_')}

    def trait_of(self, reservation_id):
        return 'CUSTOM_BLAZAR_' + reservation_id.upper().replace('-', '_')

    def command(self, *words):
        """Run a command of blazar-nova-manage; return its exit code and its
        output.
        """
        out = io.StringIO()
        with (fixtures.MonkeyPatch('blazar_nova.cmd.manage._parts',
                                   lambda _parsed: self.listener.parts),
              contextlib.redirect_stdout(out),
              contextlib.redirect_stderr(out)):
            return manage.main([*words]), out.getvalue()

    def fails(self, server):
        """Assert that a server finds no host."""
        self.wait_for_status(server['id'], 'ERROR')
        self.assertIn('No valid host', self.admin.get_server(
            server['id'])['fault']['message'])


class PartsTestCase(HostsTestCase):
    """Reservations of servers, on hosts that serve leases only."""

    def parts_wanted(self, amount, **params):
        return self.reservation(
            amount=amount, vcpus=2,
            resource_properties='["==", "$rack", "7"]', **params)


class Died(BaseException):
    """The death of a process; nothing catches it."""


class Dying(fixtures.Fixture):
    """Kills a process that changes Nova or placement, at one of its steps.

    :ivar steps: the steps that were reached, in order
    :param at: the number of the step
    :param after: whether the step is still carried out
    """

    PLACES = ('nova.objects.aggregate.Aggregate.create',
              'blazar_nova.compat.aggregate_members.put',
              'blazar_nova.compat.aggregate_members.take_out',
              'nova.scheduler.client.query.SchedulerQueryClient.'
              'update_aggregates',
              'nova.compute.api.AggregateAPI.delete_aggregate',
              'blazar_nova.compat.compute_hosts.tell_placement',
              'blazar_core.capacity.enrollment._write',
              'blazar_core.capacity.assignments.assign',
              'blazar_core.lifecycle.event_queue.EventQueue.done',
              'blazar_core.capacity.assignments.unassign')

    def __init__(self, at, after):
        super().__init__()
        self.at, self.after = at, after
        self.steps = []

    def _setUp(self):
        for place in self.PLACES:
            self.useFixture(fixtures.MonkeyPatch(place, self._mortal(
                place.rpartition('.')[2], pydoc.locate(place))))

    def _mortal(self, name, real):
        def step(*args, **kwargs):
            self.steps.append(name)
            if len(self.steps) == self.at and not self.after:
                raise Died(name)
            result = real(*args, **kwargs)
            if len(self.steps) == self.at:
                raise Died(name)
            return result

        return step
