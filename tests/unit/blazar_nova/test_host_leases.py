# SPDX-License-Identifier: Apache-2.0

"""The representation of leases of whole hosts."""

import types

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.leases import new_leases
from blazar_core.leases import views
from blazar_core.plugins import resource_types
from blazar_nova.services import host_leases
from tests import databases
from tests.unit import base

load_tests = databases.load_tests


class Machines(base.WholeType):
    """Whole hosts with servers; None if they are unknown."""

    def __init__(self):
        self.servers = []

    def so_many(self, params):
        return model.Demand(model.WHOLE, params['max'], least=params['min'],
                            among=model.HostPool.COMMON)

    def servers_on(self, service_hosts):
        if self.servers is None:
            raise errors.CloudUnavailable('A cell does not answer.')
        return [one for one in self.servers
                if one.service_host in service_hosts]


class TestHostLeases(base.LeaseTestCase):

    kind = 'sqlite'

    def more_types(self):
        self.machines = Machines()
        return {'machine': self.machines}

    def setUp(self):
        super().setUp()
        for name in ('one', 'two', 'three'):
            self.host(name, VCPU=4)
        self.allowed = True
        self.host_leases = host_leases.HostLeases(
            self.database, self.types,
            types.SimpleNamespace(allows=lambda *_args: self.allowed))
        params = {'min': 2, 'max': 2}
        self.lease = self.reserve(0, 100, new_leases.NewReservation(
            self.machines.so_many(params), resource_type='machine',
            params=params, spec={}), active=True)
        self.machines.servers = [
            resource_types.HostedServer(name, project, self.service_of(host))
            for name, project, host in (
                ('a', 'project', 'one'), ('b', 'others', 'two'),
                ('c', 'others', 'three'))]

    def service_of(self, name):
        return next(host.service_host for host in self.scalars(models.Host)
                    if host.name == name)

    def complete(self, lease=None):
        (found,) = self.host_leases.complete(None, [lease or self.lease])
        return found

    def test_reservation_shows_its_hosts_and_their_servers(self):
        (reservation,) = self.complete()['reservations']
        self.assertEqual(['a', 'b'], reservation['servers'])
        self.assertEqual([
            {'name': 'one', 'failed': False, 'servers': ['a']},
            {'name': 'two', 'failed': False, 'servers': ['b']},
        ], reservation['hosts'])

    def test_host_names_are_hidden_without_permission(self):
        self.allowed = False
        (reservation,) = self.complete()['reservations']
        self.assertEqual([(None, ['a']), (None, ['b'])], [
            (host['name'], host['servers'])
            for host in reservation['hosts']])

    def test_lease_shows_no_servers_before_its_start(self):
        params = {'min': 1, 'max': 1}
        later = self.reserve(200, 300, new_leases.NewReservation(
            self.machines.so_many(params), resource_type='machine',
            params=params, spec={}))
        self.machines.servers = None
        (reservation,) = self.complete(later)['reservations']
        self.assertEqual(1, len(reservation['hosts']))
        self.assertEqual([], reservation['servers'])
        self.host_leases.check_deletion(later)

    def test_unknown_servers_are_reported_as_warning(self):
        self.machines.servers = None
        lease = self.complete()
        self.assertEqual([host_leases._UNKNOWN], lease['warnings'])
        self.assertEqual(2, len(lease['reservations'][0]['hosts']))
        self.assertRaises(errors.CloudUnavailable,
                          self.host_leases.check_deletion, self.lease)

    def test_lease_of_servers_is_returned_unchanged(self):
        lease = self.reserve(0, 100, self.places())
        self.machines.servers = None
        self.assertEqual(lease, self.complete(lease))

    def test_deletion_with_servers_of_other_projects_is_refused(self):
        refused = self.assertRaises(
            errors.Conflict, self.host_leases.check_deletion, self.lease)
        self.assertIn('1 server of 1 other project', str(refused))
        del self.machines.servers[1]
        self.host_leases.check_deletion(
            views.get(self.database, self.lease['id']))
