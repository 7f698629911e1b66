# SPDX-License-Identifier: Apache-2.0

"""The checks of the command blazar-nova-status.

They are the checks of the services at their start, and say for each problem
which line to write.
"""

import sys
import textwrap
import typing as ty

from oslo_upgradecheck import upgradecheck

from blazar_core.capacity import enrollment
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.db import encryption
from blazar_core.db import leader_election
from blazar_nova.compat import configuration_checks
from blazar_nova.compat import nova_conf
from blazar_nova.compat import pool
from blazar_nova.compat import process
from blazar_nova.compat import reserved_state
from blazar_nova.compat.seams import check
from blazar_nova.listener import periodic_sync
from blazar_nova.schemas import hint_params
from blazar_nova.services import default_leases
from blazar_nova.services import policy
from blazar_nova.services import settings
from blazar_nova.services import user_credentials
from blazar_nova.services import wiring
from blazar_nova.verify import verification

CONF = process.CONF
Result = upgradecheck.Result
Code = upgradecheck.Code

#: The width of sentences in the table.
_WIDTH = 72


def _result(problems: ty.Sequence[str], code: Code = Code.FAILURE) -> Result:
    return Result(code, '\n'.join(problems)) if problems else Result(
        Code.SUCCESS)


def _checked(work: ty.Callable[[], object], code: Code = Code.FAILURE,
             ) -> Result:
    """Return the result of work that raises an error for a problem."""
    try:
        work()
    except errors.ConfigurationError as exc:
        return Result(code, str(exc))
    except errors.DatabaseUnavailable as exc:
        return Result(code, f'{exc} ({exc.__cause__})' if exc.__cause__
                      else str(exc))
    except Exception as exc:
        return Result(code, f'{type(exc).__name__}: {exc}')
    return Result(Code.SUCCESS)


def _unkept(conf: ty.Any) -> list[str]:
    """Return what admits other servers to enrolled hosts."""
    with wiring.open_database(conf).reader() as session:
        enrolled = enrollment.listed(session)
    return pool.problems(conf) if enrolled else []


def _undone(conf: ty.Any) -> ty.Iterator[str]:
    """Yield the signs that no listener runs."""
    parts = wiring.assemble(conf)
    overdue = list(verification.auditor(parts).unfinished.overdue())
    if overdue:
        yield (f'{len(overdue)} events of leases are overdue: start '
               f'blazar-listener. The first event: {overdue[0].text}')
    last = leader_election.last(parts.database, periodic_sync.NAME)
    if last is None:
        yield ('No blazar-listener has ever run on this database: start one. '
               'Until then no lease starts or ends.')
    elif last.claimed_until + conf.blazar.worker_timeout < parts.clock.now():
        yield ('No blazar-listener has run the periodic sync, which was due '
               f'by {clocks.minute(last.claimed_until)} UTC: start one. Until '
               'then no lease starts or ends.')
    elif last.worker is None:
        yield ('The blazar-listener that ran the last periodic sync was '
               'stopped. Another one takes over by '
               f'{clocks.minute(last.claimed_until)} UTC if it is running; '
               'otherwise start one.')


# Factories of checks, which oslo.upgradecheck calls with the commands

def _problems(find: ty.Callable[[ty.Any], ty.Sequence[str]],
              code: Code = Code.FAILURE) -> ty.Callable[..., Result]:
    """Check by a function that returns the problems of a configuration."""
    return lambda _commands: _result(find(CONF), code)


def _check(work: ty.Callable[[ty.Any], object],
           ) -> ty.Callable[..., Result]:
    """Check by a function that raises an error for a problem."""
    return lambda _commands: _checked(lambda: work(CONF))


def _found(find: ty.Callable[[ty.Any], ty.Iterable[str]],
           code: Code = Code.FAILURE) -> ty.Callable[..., Result]:
    """Check by a function that returns problems, or raises an error if it
    cannot find them, which is a warning.
    """
    def check(_commands: object) -> Result:
        found: list[str] = []
        result = _checked(lambda: found.extend(find(CONF)), Code.WARNING)
        return _result(found, code) if found else result

    return check


class Checks(upgradecheck.UpgradeCommands):
    """A check for each thing that an operator has to configure."""

    def _nova(self) -> Result:
        return _result([
            *check.untested(CONF),
            *configuration_checks.reserved_status(reserved_state.install())])

    def _default_reservation(self) -> Result:
        """Check that every boot can be a lease, and exempt ones recognized."""
        result = _checked(lambda: default_leases.check(CONF))
        return result if result.code != Code.SUCCESS else _result(
            default_leases.doubts(CONF), Code.WARNING)

    def _keystone(self) -> Result:
        """Check that the service user can log in and sees its trusts."""
        trusts = user_credentials.Credentials(CONF)
        result = _checked(trusts.held)
        if result.code == Code.SUCCESS and not trusts.is_configured():
            return Result(Code.WARNING, (
                'No service user is configured: leases that start later are '
                'built without a token of their users. Set auth_type, '
                'auth_url, username, password ... of a service user in '
                f'[{CONF[user_credentials.GROUP].auth_section}] of nova.conf'))
        return result if result.code != Code.SUCCESS else (
            self._without_trust(trusts))

    def _without_trust(self, trusts: user_credentials.Credentials) -> Result:
        """Check what is configured for users that cannot create a trust."""
        ours: list[bool] = []
        result = _checked(lambda: ours.append(trusts.check_without_trust()))
        return Result(Code.SUCCESS, (
            'If a user cannot create a trust (application credentials), '
            'leases that start later are ' + (
                'built with the token of the service user.' if ours[0] else
                'refused: [blazar_keystone] without_trust = refuse'))
        ) if ours else result

    def _get_details(self, upgrade_check_result: Result) -> str | None:
        """Return the text of the table, without breaking lines to write."""
        if upgrade_check_result.details is None:
            return None
        lines = []
        for problem in upgrade_check_result.details.splitlines():
            where, colon, line = problem.partition(': ')
            if not where.startswith('Write in '):
                where, colon, line = problem, '', ''
            lines += textwrap.wrap(where + colon.strip(), _WIDTH)
            lines += [line] if line else []
        return '\n'.join(lines)

    _upgrade_checks = (
        ('Nova', _nova),
        ('Database', _check(
            lambda conf: wiring.open_database(conf).status.check())),
        ('Clock', _check(
            lambda conf: wiring.open_database(conf).check_clock())),
        ('Encryption keys', _check(
            lambda conf: encryption.Encryption(conf.blazar.encryption_keys))),
        ('Defaults of a lease', _check(
            lambda conf: hint_params.check_defaults(
                hint_params.defaults(conf), clocks.SystemClock().now()))),
        ('Default reservation', _default_reservation),
        ('Lost builds', _check(wiring.lost_after)),
        ('Filter and weigher', _problems(configuration_checks.scheduler)),
        ('Order of filters', _problems(
            configuration_checks.filter_order, Code.WARNING)),
        ('Prefilters', _found(
            lambda conf: settings.differences(wiring.open_database(conf)))),
        ('Enrolled hosts', _found(_unkept)),
        ('Notifications', _problems(configuration_checks.notifications)),
        ('api-paste.ini', _problems(configuration_checks.api_paste)),
        ('Policy', _check(policy.check)),
        ('Keystone', _keystone),
        ('Volumes at the end', _problems(
            configuration_checks.volumes, Code.WARNING)),
        ('blazar-listener', _found(_undone, Code.WARNING)),
    )


def main() -> int:
    """Check, print a table (or JSON), and return the worst code."""
    nova_conf.register_opts(CONF)
    try:
        return int(upgradecheck.main(CONF, 'nova', Checks()))
    except nova_conf.FILE_ERRORS as exc:
        print(exc, file=sys.stderr)
        return int(Code.FAILURE)
