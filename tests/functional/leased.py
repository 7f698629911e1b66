# SPDX-License-Identifier: Apache-2.0

"""What tests of leases share: a listener without threads, and its clock."""

import contextlib
import json
import os
import sqlite3
import typing as ty

from blazar_core.common import clocks
from blazar_core.leases import views
from blazar_nova.verify import verification
from tests import driven
from tests.functional import base


__all__ = ['LeasedTestCase', 'RESERVE']

#: Hints that ask for a lease of the defaults: from now on, for 30 days.
RESERVE = {'reserved': 'True'}


class LeasedTestCase(base.FunctionalTestCase):
    """A Nova whose hosts are in the books, and time that tests drive.

    ``listener`` is made and not started: ``listener.engine.run_due()``
    carries out what is due, ``listener.mirror.compare_all()`` compares the
    books with Nova. Its ``clock`` begins at ``began``, the machine's time at
    setUp(), and moves only by ``clock.advance()``. The API has the machine's
    clock, as always.

    The times of leases are counted from ``began``, so after
    ``clock.advance(3600)`` a lease with ``start_in=3600`` is due exactly.
    """

    def setUp(self) -> None:
        super().setUp()
        self.began = clocks.SystemClock().now()
        self.clock = driven.ManualClock(self.began)
        self.listener = self.new_listener(self.clock)
        self.fill_books()

    def new_listener(self, clock: ty.Any = None) -> ty.Any:
        """A listener that leaves no connection to the books behind."""
        listener = super().new_listener(clock)
        self.addCleanup(listener.parts.database.engine.dispose)
        return listener

    def fill_books(self) -> None:
        """Make the books true to Nova: hosts, usage, leased servers."""
        self.listener.mirror.compare_all()

    def assert_verified(self) -> None:
        """``verify`` finds nothing in the books and in Nova."""
        report = self.compared()
        self.assertEqual(
            [], [one.text for one in report.left] + report.failures)

    def compared(self, fix: bool = False) -> ty.Any:
        """What ``verify`` finds."""
        return verification.Verifier(
            self.listener.parts, lambda _seconds: None, lambda _text: None,
            0).run(fix)

    # -- asking for leases ------------------------------------------------

    def at(self, seconds: int) -> str:
        """The date so many seconds after ``began``, as users write it."""
        return clocks.minute(self.began + seconds)

    def lease_hints(self, name: str | None = None,
                    start_in: int | None = None, length: int = 3600,
                    **params: ty.Any) -> dict[str, ty.Any]:
        """The hints of a boot with a lease.

        :param start_in: seconds from ``began`` on; None is "now"
        :param length: seconds from there to the end; not used when
                       ``params`` have ``end`` or ``duration``
        :param params: more of lease_params
        """
        params.setdefault(
            'start', 'now' if start_in is None else self.at(start_in))
        if not params.keys() & {'end', 'duration'}:
            params['end'] = self.at((start_in or 0) + length)
        if name is not None:
            params['name'] = name
        return {'reserved': 'True', 'lease_params': json.dumps(params)}

    # -- looking at leases ------------------------------------------------

    def leases(self) -> list[dict[str, ty.Any]]:
        """All leases, as the API describes them."""
        parts = self.listener.parts
        return [parts.answers.lease(one)
                for one in views.listed(parts.database, True)]

    def lease(self, name_or_id: str) -> dict[str, ty.Any]:
        """The one lease of that name or id."""
        found = [lease for lease in self.leases()
                 if name_or_id in (lease['name'], lease['id'])]
        self.assertEqual(1, len(found), f'{name_or_id} in {found}')
        return found[0]

    # -- time ---------------------------------------------------------------

    def run_due(self) -> int:
        """Carry out what is due; returns how many events."""
        return driven.run_due(self.listener.engine)

    def hold(self, name: str = 'vm1', start_in: int = 3600,
             **kwargs: ty.Any) -> dict[str, ty.Any]:
        """Boot a server, or several, whose lease starts later.

        The lease has the name of the server. :returns: as boot()
        """
        return self.boot(name, hints=self.lease_hints(name, start_in),
                         **kwargs)

    def flavor_with(self, key: str, value: str) -> str:
        """The id of a flavor of the size of '1' with an extra spec."""
        flavor = self.admin.post_flavor({'flavor': {
            'name': f'{key}={value}', 'ram': 512, 'vcpus': 1, 'disk': 1}})
        self.admin.post_extra_spec(
            flavor['id'], {'extra_specs': {key: value}})
        return ty.cast(str, flavor['id'])

    def bookings(self) -> dict[str, str | None]:
        """Where servers are booked: server id -> name of the host."""
        return dict(self.books(
            'SELECT server_id, hosts.name FROM bookings '
            'LEFT JOIN hosts ON hosts.id = bookings.host_id'))

    def book_rows(self) -> dict[str, int]:
        """How many rows the books keep of leases, by table."""
        return {table: self.books(f'SELECT count(*) FROM {table}')[0][0]
                for table in ('leases', 'reservations', 'events',
                              'bookings', 'held_builds')}

    def books(self, query: str) -> list[tuple[ty.Any, ...]]:
        """Ask the plugin's database something."""
        path = os.path.join(self.folder, 'blazar.sqlite')
        with contextlib.closing(sqlite3.connect(path)) as db:
            return db.execute(query).fetchall()
