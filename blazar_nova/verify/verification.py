# SPDX-License-Identifier: Apache-2.0

"""Compare the reservation database with itself, Nova, placement and keystone.

Each difference is described in one line. Differences that can be fixed without
harm are fixed on request, by the functions that blazar-listener uses: each of
them reads the current state before it changes anything.

A cloud changes while it is compared. So differences are checked again after a
while, and count only if they are the same then.

* :mod:`~blazar_nova.verify.verification` compares, fixes, and compares again;
* :mod:`~blazar_nova.verify.host_capacity`,
  :mod:`~blazar_nova.verify.enrolled_hosts`,
  :mod:`~blazar_nova.verify.leased_servers`,
  :mod:`~blazar_nova.verify.open_reservations` and
  :mod:`~blazar_nova.verify.owner_trusts` compare what their names say;
* :mod:`~blazar_nova.verify.gaps` has what could not be compared.
"""

import itertools
import typing as ty

from oslo_log import log as logging

from blazar_core.audit import audit
from blazar_core.audit.findings import Difference
from blazar_nova.listener import server_sync
from blazar_nova.services import wiring
from blazar_nova.verify import enrolled_hosts
from blazar_nova.verify import gaps
from blazar_nova.verify import host_capacity
from blazar_nova.verify import leased_servers
from blazar_nova.verify import open_reservations
from blazar_nova.verify import owner_trusts

LOG = logging.getLogger(__name__)

#: Differences by the section in which they were found.
_Found: ty.TypeAlias = dict[str, list[Difference]]

#: Seconds, in addition to its longest sleep, within which a listener must have
#: taken due events.
_LATE = 60

#: How often to fix and compare: a fix may reveal other differences.
_ROUNDS = 3


class Report(ty.NamedTuple):
    """The result of a verification.

    :ivar fixed: differences that no longer exist
    :ivar left: differences that remain
    :ivar problems: fixes that failed
    :ivar failures: what could not be compared, and why
    """

    fixed: list[Difference]
    left: list[Difference]
    problems: list[str]
    failures: list[str]


def auditor(parts: wiring.Parts) -> audit.Audit:
    """Return the audit of the reservation database by itself."""
    return audit.Audit(
        parts.database, parts.clock, parts.lifecycle, parts.encryption.decrypt,
        parts.conf.blazar.max_sleep + _LATE)


class Verifier:
    """Finds differences, and fixes them.

    :param pause: waits so many seconds
    :param say: called with lines of progress
    :param grace: seconds between two looks at differences
    :param trusts_are_ours: whether no other cloud is given trusts for our
        service user
    """

    def __init__(self, parts: wiring.Parts, pause: ty.Callable[[int], None],
                 say: ty.Callable[[str], None], grace: int,
                 trusts_are_ours: bool = False) -> None:
        self._clock = parts.clock
        self._pause = pause
        self._say = say
        self._grace = grace
        self._sync = server_sync.of_parts(parts, lambda *_lease: None)
        self._audit = auditor(parts)
        self._gaps = gaps.Gaps()
        database, clock, life = parts.database, parts.clock, parts.lifecycle
        of_hosts = host_capacity.HostCapacity(
            database, clock, parts.cloud, self._sync.hosts, self._gaps, say)
        of_servers = leased_servers.LeasedServers(
            parts.conf, database, clock, parts.cloud, self._sync, self._gaps,
            say)
        of_trusts = owner_trusts.OwnerTrusts(
            database, clock, parts.trusts, life.lease_close,
            self._audit.encrypted, trusts_are_ours)
        # Hosts first: a booking can only follow its server to a known host.
        self._sections: dict[str, ty.Callable[[
            set[ty.Hashable] | None], ty.Iterable[Difference]]] = {
                'hosts': of_hosts.differences,
                'servers': lambda _only: of_servers.differences(),
                'database': lambda _only: self._audit.differences(),
                'enrolled hosts':
                    lambda _only: enrolled_hosts.differences(
                        database, clock.now(), parts.host_enrollment,
                        life.lease_opening.open),
                'reservations':
                    lambda _only: open_reservations.differences(
                        database, parts.types, life),
                'trusts': lambda _only: of_trusts.differences()}

    def size(self) -> dict[str, int]:
        """Return how much there is to compare."""
        return self._audit.size()

    def run(self, fix: bool) -> Report:
        """Compare, fix if ``fix``, and compare again."""
        left = self._stays()
        ever = dict.fromkeys(_all(left))
        problems: list[str] = []
        for _round in range(_ROUNDS if fix else 0):
            if not any(one.fix for one in _all(left)):
                break
            problems = self._fix(_all(left))
            left = self._stays(left)
            ever.update(dict.fromkeys(_all(left)))
        remaining = set(_all(left))
        return Report([one for one in ever if one not in remaining],
                      _all(left), problems, self._gaps.failures)

    def _fix(self, differences: ty.Iterable[Difference]) -> list[str]:
        """Fix what can be fixed; return what could not be, and why."""
        problems = []
        for difference in differences:
            if difference.fix is None:
                continue
            young = difference.fix_after - self._clock.now()
            if young > 0:
                self._say(f'Waiting {young} s, in case an operation is in '
                          f'progress: {difference.text}')
                self._pause(young)
            self._say(f'Fixing: {difference.text}')
            try:
                difference.fix()
            except Exception as exc:
                LOG.exception('%s This could not be fixed', difference.text)
                problems.append(f'Fix failed, {gaps.why(exc)}: '
                                f'{difference.text}')
        # Fixes may have left hints about other hosts.
        self._sync.catch_up()
        return problems

    # -- looking -------------------------------------------------------------

    def _stays(self, before: _Found | None = None) -> _Found:
        """Return the differences that remain after a while.

        :param before: the differences of what cannot be compared now
        """
        self._gaps.failures = []
        found = self._look(dict.fromkeys(self._sections), before or {})
        suspects = {name: {one.key[1] for one in differences}
                    for name, differences in found.items() if differences}
        if suspects:
            count = sum(map(len, found.values()))
            self._say(f'Checking again in {self._grace} s: {count} may be '
                      'temporary')
            self._pause(self._grace)
            again = self._look(suspects, found)
            found = {name: [one for one in differences
                            if one in set(found[name])]
                     for name, differences in again.items()}
        self._gaps.failures = list(dict.fromkeys(self._gaps.failures))
        return found

    def _look(self, sections: ty.Mapping[str, set[ty.Hashable] | None],
              before: _Found) -> _Found:
        """Return the current differences.

        :param sections: where to look; each with the objects to compare, None:
            all
        :param before: the differences of what cannot be compared now
        """
        found = {}
        for name, only in sections.items():
            self._say(f'Comparing {name}')
            self._gaps.unseen.clear()
            try:
                found[name] = list(self._sections[name](only)) + [
                    one for one in before.get(name, [])
                    if not self._gaps.unseen.keys().isdisjoint(one.key)]
            except Exception as exc:
                LOG.exception('Comparing %s failed', name)
                self._gaps.failures.append(
                    f'The {name} could not be compared: {gaps.why(exc)}')
                found[name] = before.get(name, [])
        return found


def _all(found: _Found) -> list[Difference]:
    return list(itertools.chain.from_iterable(found.values()))
