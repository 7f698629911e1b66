# SPDX-License-Identifier: Apache-2.0

"""Base class of tests of leases: a listener without threads, and its clock."""

import contextlib
import json
import os
import sqlite3
import typing as ty
from unittest import mock

from neutronclient.common import exceptions as neutron_exceptions
from nova.tests import fixtures as nova_fixtures

from blazar_core.common import clocks
from blazar_nova.schemas import lease_queries
from blazar_nova.verify import verification
from tests import driven
from tests.functional import base

#: Hints for a lease with the defaults: from now on, for 30 days.
RESERVE = {'reserved': 'True'}


class LeasedTestCase(base.FunctionalTestCase):
    """A Nova with a filled reservation database, and time that tests drive.

    ``listener`` is created and not started: ``listener.engine.run_due()``
    carries out due events, ``listener.server_sync.compare_all()`` compares the
    reservation database with Nova. Its ``clock`` starts at ``began``, the
    machine's time at setUp(), and moves only by ``clock.advance()``. The API
    has the machine's clock, as always.

    The times of leases are counted from ``began``, so after
    ``clock.advance(3600)`` a lease with ``start_in=3600`` is due exactly.
    """

    def setUp(self) -> None:
        super().setUp()
        self.began = clocks.SystemClock().now()
        self.clock = driven.ManualClock(self.began)
        self.listener = self.new_listener(self.clock)
        self.run_sync()

    def new_listener(self, clock: ty.Any = None) -> ty.Any:
        """Create a listener; the test closes its database connections."""
        listener = super().new_listener(clock)
        self.addCleanup(listener.parts.database.engine.dispose)
        return listener

    def run_sync(self) -> None:
        """Record hosts, usage and leased servers in the database by a sync."""
        self.listener.server_sync.compare_all()

    def assert_verified(self) -> None:
        """Assert that ``verify`` finds nothing in the database and in Nova."""
        report = self.compared()
        self.assertEqual(
            [], [one.text for one in report.left] + report.failures)

    def compared(self, fix: bool = False) -> ty.Any:
        """Return the report of ``verify``."""
        return verification.Verifier(
            self.listener.parts, lambda _seconds: None, lambda _text: None,
            0).run(fix)

    def port_in_trunk(self, configured: bool = True) -> list[str]:
        """Let neutron delete no port of a server, as each is in a trunk, until
        the plugin deletes the trunk.

        :param configured: whether the plugin has credentials of neutron
        :returns: the servers whose ports the plugin frees
        """
        freed: list[str] = []
        delete = nova_fixtures.NeutronFixture.delete_port

        def refuse(fixture: ty.Any, port: str) -> ty.Any:
            if not freed:
                raise neutron_exceptions.Conflict(
                    message=f'Port {port} is currently a parent port.')
            return delete(fixture, port)

        self.stub_out('nova.tests.fixtures.NeutronFixture.delete_port', refuse)
        self.stub_out(
            'blazar_nova.compat.network_api.neutron', lambda: mock.Mock(
                is_configured=lambda: configured,
                free_ports_of=freed.append))
        return freed

    # -- requests for leases ----------------------------------------------

    def at(self, seconds: int) -> str:
        """Return a date in seconds after ``began``, as users write it."""
        return clocks.minute(self.began + seconds)

    def lease_hints(self, name: str | None = None,
                    start_in: int | None = None, length: int = 3600,
                    **params: ty.Any) -> dict[str, ty.Any]:
        """Return the hints of a boot with a lease.

        :param start_in: seconds from ``began`` on; None is "now"
        :param length: seconds from the start to the end; not used when
                       ``params`` have ``end`` or ``duration``
        :param params: other keys of lease_params
        """
        params.setdefault(
            'start', 'now' if start_in is None else self.at(start_in))
        if not params.keys() & {'end', 'duration'}:
            params['end'] = self.at((start_in or 0) + length)
        if name is not None:
            params['name'] = name
        return {'reserved': 'True', 'lease_params': json.dumps(params)}

    # -- leases and their states ------------------------------------------

    def leases(self) -> list[dict[str, ty.Any]]:
        """Return all leases, as the API describes them."""
        parts = self.listener.parts
        return [parts.answers.lease(one)
                for one in lease_queries.listed(parts.database, True)]

    def lease(self, name_or_id: str) -> dict[str, ty.Any]:
        """Return the one lease of that name or id."""
        found = [lease for lease in self.leases()
                 if name_or_id in (lease['name'], lease['id'])]
        self.assertEqual(1, len(found), f'{name_or_id} in {found}')
        return found[0]

    # -- time ---------------------------------------------------------------

    def run_due(self) -> int:
        """Carry out due events; return how many."""
        return driven.run_due(self.listener.engine)

    def hold(self, name: str = 'vm1', start_in: int = 3600,
             **kwargs: ty.Any) -> dict[str, ty.Any]:
        """Boot a server, or several, with a lease that starts later.

        The lease has the name of the server. :returns: as boot()
        """
        return self.boot(name, hints=self.lease_hints(name, start_in),
                         **kwargs)

    def flavor_with(self, key: str, value: str) -> str:
        """Create a flavor like '1' with an extra spec; return its id."""
        flavor = self.admin.post_flavor({'flavor': {
            'name': f'{key}={value}', 'ram': 512, 'vcpus': 1, 'disk': 1}})
        self.admin.post_extra_spec(
            flavor['id'], {'extra_specs': {key: value}})
        return ty.cast(str, flavor['id'])

    def bookings(self) -> dict[str, str | None]:
        """Return the hosts of the bookings: server id -> name of the host."""
        return dict(self.query(
            'SELECT server_id, hosts.name FROM bookings '
            'LEFT JOIN hosts ON hosts.id = bookings.host_id'))

    def row_counts(self) -> dict[str, int]:
        """Count the rows of leases in the reservation database, by table."""
        return {table: self.query(f'SELECT count(*) FROM {table}')[0][0]
                for table in ('leases', 'reservations', 'events',
                              'bookings', 'deferred_builds')}

    def query(self, query: str) -> list[tuple[ty.Any, ...]]:
        """Query the reservation database."""
        path = os.path.join(self.folder, 'blazar.sqlite')
        with contextlib.closing(sqlite3.connect(path)) as db:
            return db.execute(query).fetchall()
