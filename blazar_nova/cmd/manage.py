# SPDX-License-Identifier: Apache-2.0

"""The command blazar-nova-manage, for tasks of operators."""

import argparse
import collections
import functools
import os
import signal
import sys
import threading
import typing as ty

from oslo_config import cfg
from oslo_db import exception as db_exception

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import words
from blazar_core.db import api
from blazar_core.db import encryption
from blazar_core.db import migration
from blazar_core.leases import credentials
from blazar_core.lifecycle import orphans
from blazar_nova.cmd import forecast
from blazar_nova.cmd import listings
from blazar_nova.cmd import maintenance
from blazar_nova.cmd import purge
from blazar_nova.cmd import usage
from blazar_nova.compat import nova_conf

if ty.TYPE_CHECKING:
    from blazar_nova.importer.items import Plan
    from blazar_nova.services.host_enrollment import HostEnrollment
    from blazar_nova.verify.verification import Report

#: Seconds between two checks whether a host is free.
_AGAIN = 10
#: The exit codes after writing to a closed pipe, and after Ctrl-C, as in a
#: shell.
_CLOSED, _INTERRUPTED = 128 + signal.SIGPIPE, 128 + signal.SIGINT

#: Runs a command, and returns the exit code, or None for 0.
_Action: ty.TypeAlias = ty.Callable[[argparse.Namespace], int | None]


def main(argv: ty.Sequence[str] | None = None) -> int:
    """Run the command.

    :returns: the exit code; 1 if an error was printed
    """
    # These options are allowed before and after the noun.
    files, others = _files().parse_known_args(argv)
    parsed = _parser().parse_args(others, files)
    try:
        code = _run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED
    return code


def _run(parsed: argparse.Namespace) -> int:
    try:
        return parsed.action(parsed) or 0
    except (errors.BlazarError, *nova_conf.FILE_ERRORS) as exc:
        listings.tell(str(exc))
        return 1
    except db_exception.DBConnectionError as exc:
        # Commands about the schema use the engine itself.
        listings.tell('The database of [blazar_database] connection does not '
                      f'answer: {exc.inner_exception}')
        return 1
    except KeyboardInterrupt:
        listings.tell('The command was interrupted; it is safe to repeat it.')
        return _INTERRUPTED


def _files() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(
        '--config-file', action='append', metavar='PATH',
        help='path of a nova.conf, here or after the command; can be '
             'repeated, the last one wins (default: the paths that Nova '
             'searches)')
    parser.add_argument(
        '--verbose', '-v', action='store_true',
        help='report progress on standard error (default: if that is a '
             'terminal)')
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='blazar-nova-manage', description=__doc__, parents=[_files()])
    nouns = parser.add_subparsers(required=True, metavar='NOUN')
    database = _noun(nouns, 'db', 'manage the schema of the database')
    _verb(database, 'sync', 'upgrade the schema to this version', _db_sync)
    _verb(database, 'version', 'print the version of the schema', _db_version)
    purge.add(database).set_defaults(action=_with_conf(purge.run))
    key = _noun(nouns, 'key', 'manage encryption keys')
    _verb(key, 'create', 'print a new key for [blazar] '
                         'encryption_keys', _key_create)
    _verb(key, 'rotate', 'encrypt all data again with the first key',
          _key_rotate)
    lease = _noun(nouns, 'lease', 'manage the leases of all projects')
    leases = _verb(lease, 'list', 'list them', _lease_list)
    leases.add_argument('--ended', action='store_true',
                        help='include leases that have ended')
    leases.add_argument('--host', help='list only leases that reserve '
                                       'capacity of this hypervisor, or of '
                                       'that of this nova-compute')
    listings.add_format(leases)
    listings.add_format(_verb(
        lease, 'announced', 'list the servers that would be past their end by '
                            'now if every boot had a default lease, as '
                            'announced in the last 30 days',
        _lease_announced))
    _add_orphans(lease)
    listings.add_format(_verb(
        nouns, 'health', 'list failed hosts, and leases whose hosts are '
                         'missing or were replaced', _health))
    usage.add(nouns).set_defaults(action=_with_conf(usage.run))
    forecast.add(nouns).set_defaults(action=_with_conf(forecast.run))
    _add_hosts(nouns)
    _add_verify(nouns)
    _add_import(nouns)
    return parser


def _add_orphans(verbs: ty.Any) -> None:
    text = ('check in keystone the projects and users of all leases, and list '
            'leases whose project or user no longer exists')
    found = verbs.add_parser('orphans', help=text, description=(
        f'{text[0].upper()}{text[1:]}.'))
    found.add_argument(
        '--end', action='store_true',
        help='end the leases whose project has been missing for [blazar] '
             'orphan_grace, as if they were deleted, whatever [blazar] '
             'orphaned_leases is')
    listings.add_format(found)
    found.set_defaults(action=_lease_orphans)


def _add_hosts(nouns: ty.Any) -> None:
    verbs = _noun(nouns, 'host', 'manage the enrolled hosts')
    listings.add_format(_verb(
        verbs, 'list', 'list them', _host_list))
    add = _verb(verbs, 'add', 'enroll hosts, which are then used by leases '
                              'only; waits for pending builds and resizes to '
                              'them; resumes an interrupted '
                              'enrollment', _host_add)
    add.add_argument('name', help='hypervisor, or its nova-compute; several '
                                  'are separated by commas')
    add.add_argument('extra', nargs='*', metavar='KEY=VALUE',
                     help='extra capability that users can ask for, in '
                          'addition to what Nova reports')
    remove = _verb(verbs, 'remove', 'remove an enrolled host, which is then '
                                    'available to all workloads again; '
                                    'resumes an interrupted '
                                    'removal', _host_remove)
    remove.add_argument('host', help='hypervisor, its nova-compute, or the ID '
                                     'of "host list"')
    remove.add_argument(
        '--wait', action='store_true',
        help='accept no new reservations of the host, and wait until all '
             'leases that have it have ended; if interrupted, blazar-listener '
             'completes the removal')
    maintenance.add(verbs).set_defaults(action=_host_maintain)
    switching = _verb(
        verbs, 'power', 'list which hosts are on, off or booting, and '
                        'what would be switched now', _host_power)
    switching.add_argument(
        '--dry-run', action='store_true',
        help='print which hosts would be switched now, and why; nothing is '
             'switched by this command in any case')
    switching.add_argument(
        '--retry', metavar='HOST',
        help='let a host be switched again whose power state is "failed"')
    listings.add_format(switching)


def _add_verify(nouns: ty.Any) -> None:
    text = 'compare the reservation database with Nova, placement and keystone'
    verify = nouns.add_parser('verify', help=text, description=(
        f'{text[0].upper()}{text[1:]}, and print one line for each '
        'difference. Changes nothing without --fix. Exit code 0: no '
        'differences, or all were fixed; 1: differences remain; 2: something '
        'could not be compared.'))
    verify.add_argument('--fix', action='store_true',
                        help='fix the differences that can be fixed safely')
    verify.add_argument(
        '--revoke-trusts', action='store_true',
        help='with --fix, revoke the trusts that no lease has; only if no '
             'other cloud or region uses the same service user')
    verify.add_argument(
        '--grace', type=int, default=10, metavar='SECONDS',
        help='check differences again after so many seconds, because an '
             'operation may be in progress (default: %(default)s)')
    listings.add_format(verify)
    verify.set_defaults(action=_verify)


def _add_import(nouns: ty.Any) -> None:
    text = 'import the hosts and leases of OpenStack Blazar 18'
    imports = nouns.add_parser('import', help=text, description=(
        f'{text[0].upper()}{text[1:]}, with their IDs. Prints what would be '
        'imported; imports it with --apply. Items that exist already are left '
        'unchanged. Exit code 0: everything was imported, or would be; 1: '
        'some items are refused; 2: something could not be read.'))
    imports.add_argument(
        'source', metavar='URL|PATH',
        help='URL of the database of Blazar, or path of its blazar.conf')
    imports.add_argument('--apply', action='store_true',
                         help='import the items; blazar-manager must not run')
    listings.add_format(imports)
    imports.set_defaults(action=_import)


def _noun(nouns: ty.Any, name: str, text: str) -> ty.Any:
    return nouns.add_parser(name, help=text, description=text).add_subparsers(
        required=True, metavar='VERB')


def _verb(verbs: ty.Any, name: str, text: str,
          action: _Action) -> ty.Any:
    verb = verbs.add_parser(name, help=text, description=text)
    verb.set_defaults(action=action)
    return verb


def _with_conf(run: ty.Callable[[cfg.ConfigOpts, argparse.Namespace], None],
               ) -> _Action:
    return lambda parsed: run(_conf(parsed.config_file), parsed)


def _database(parsed: argparse.Namespace, patient: bool = False,
              ) -> api.Database:
    return api.Database(_conf(parsed.config_file), patient=patient)


def _conf(files: ty.Sequence[str] | None) -> cfg.ConfigOpts:
    conf = cfg.ConfigOpts()
    nova_conf.register_opts(conf)
    conf([], project='nova', default_config_files=None if (
        files is None) else [*files])
    return conf


def _db_sync(parsed: argparse.Namespace) -> None:
    database = _database(parsed, patient=True)
    migration.upgrade(database)
    print(f'The schema is at version {migration.version(database)}.')


def _db_version(parsed: argparse.Namespace) -> None:
    print(migration.version(_database(parsed)) or 'none')


def _key_create(_parsed: argparse.Namespace) -> None:
    print(encryption.new_key())


def _key_rotate(parsed: argparse.Namespace) -> None:
    conf = _conf(parsed.config_file)
    secrets = encryption.Encryption(conf.blazar.encryption_keys)
    count = credentials.reencrypt(
        api.Database(conf), secrets.reencrypt,
        functools.partial(listings.progress, parsed))
    print(f'{count} deferred builds and trusts are encrypted with the first '
          f'key.')


def _lease_announced(parsed: argparse.Namespace) -> None:
    listings.show(parsed.format, listings.announced(_database(parsed)))


def _lease_list(parsed: argparse.Namespace) -> None:
    database = _database(parsed)
    listings.show(parsed.format, listings.leases(
        database, parsed.ended, parsed.host))
    if parsed.ended:
        purge.say_since(database)


def _lease_orphans(parsed: argparse.Namespace) -> None:
    parts = _parts(parsed)
    from blazar_nova.compat import process

    ended = parts.orphans.find(parsed.end)
    process.flush()
    found = orphans.known(parts.database)
    listings.show(parsed.format, listings.orphaned(found))
    if ended:
        print(f'Ended: {", ".join(ended)}.', file=sys.stderr if (
            parsed.format == listings.JSON) else sys.stdout)


def _health(parsed: argparse.Namespace) -> None:
    hosts, leases, counts = listings.healths(
        _database(parsed), clocks.SystemClock().now())
    listings.show(parsed.format, hosts, leases, counts)
    failed = sum(one['status'] in ('failed', 'coming back')
                 for one in hosts.rows)
    degraded = sum(1 for _lease in leases.rows)
    if parsed.format != listings.JSON:
        print(f'Failed: {words.count(failed, "host")}. Degraded: '
              f'{words.count(degraded, "lease")}.')


def _host_list(parsed: argparse.Namespace) -> None:
    listings.show(parsed.format, listings.hosts(
        _enrollment(parsed).listed()))


def _host_add(parsed: argparse.Namespace) -> int:
    from blazar_nova.schemas import host_schema

    body = {}
    for pair in parsed.extra:
        key, equals, body[key] = pair.partition('=')
        if not equals:
            raise errors.InvalidLeaseParams(
                f'{pair} is not in the form KEY=VALUE, such as gpu=A100.')
    asked = [host_schema.create({**body, 'name': name.strip()})
             for name in parsed.name.split(',')]
    hosts, failed = _enrollment(parsed), 0
    for number, (name, extra) in enumerate(asked, 1):
        if len(asked) > 1:
            listings.progress(parsed, f'Host {number} of {len(asked)}: {name}')
        try:
            _enroll(hosts, parsed, name, extra)
        except errors.BlazarError as exc:
            if len(asked) == 1 or isinstance(exc, _Interrupted):
                raise
            failed += 1
            listings.tell(str(exc))
    if failed:
        listings.tell(f'{failed} of {len(asked)} hosts could not be enrolled.')
    return 1 if failed else 0


class _Interrupted(errors.BlazarError):
    """The operator has interrupted an enrollment."""


def _enroll(hosts: 'HostEnrollment', parsed: argparse.Namespace, name: str,
            extra: ty.Mapping[str, str]) -> None:
    from blazar_nova.services import host_enrollment

    try:
        host = hosts.add(name, extra, pause=host_enrollment.patient(
            float('inf'), functools.partial(print, flush=True)),
            say=functools.partial(listings.progress, parsed))
    except KeyboardInterrupt:
        raise _Interrupted(
            f'Host {name} accepts no new servers until it is enrolled by this '
            'command, or removed by "host remove".') from None
    print(f'Host {name} has the ID {host["id"]}: it serves leases only.',
          flush=True)


def _host_remove(parsed: argparse.Namespace) -> None:
    hosts = _enrollment(parsed)
    host_id = hosts.id_of(parsed.host)
    if parsed.wait:
        hosts.retire(host_id)
    listings.progress(
        parsed, f'Making host {parsed.host} available to servers of all '
        'projects ...')
    said = ''
    while True:
        try:
            hosts.remove(host_id)
            break
        except errors.NotFound:
            if not said:
                raise
            # A blazar-listener has removed it meanwhile.
            break
        except errors.Conflict as exc:
            if not parsed.wait:
                raise
            if str(exc) != said:
                said = str(exc)
                print(f'Waiting: {said}', flush=True)
            _pause(_AGAIN)
    print(f'Host {parsed.host} is available to all workloads again.')


def _host_maintain(parsed: argparse.Namespace) -> int:
    return maintenance.run(_parts(parsed), parsed, lambda: _pause(_AGAIN))


def _host_power(parsed: argparse.Namespace) -> None:
    parts = _parts(parsed)
    from blazar_nova.listener import power

    if parsed.retry:
        power.retry(parts.database, parsed.retry)
    if parsed.dry_run:
        switch = power.of_parts(parts)
        found = switch.hosts()
        listing = listings.switched(found, switch.decide(found))
    else:
        listing = listings.power(parts.host_enrollment.switched())
    listings.show(parsed.format, listing)


def _enrollment(parsed: argparse.Namespace) -> 'HostEnrollment':
    """Load Nova, which takes a while: check the arguments before."""
    return ty.cast('HostEnrollment', _parts(parsed).host_enrollment)


def _parts(parsed: argparse.Namespace) -> ty.Any:
    """Load Nova and assemble the process, for commands that need it."""
    listings.progress(parsed, 'Loading Nova ...')
    from blazar_nova.compat import threads  # noqa: F401  (the first of all)

    from blazar_nova.compat import process
    from blazar_nova.services import wiring

    nova_conf.register_opts(process.CONF)
    process.configure(['blazar-nova-manage', *(
        word for path in parsed.config_file or ()
        for word in ('--config-file', path))],
        'blazar', quiet=True)
    return wiring.assemble(process.CONF)


def _pause(seconds: int) -> None:
    threading.Event().wait(seconds)


def _verify(parsed: argparse.Namespace) -> int:
    try:
        parts = _parts(parsed)
        from blazar_nova.verify import verification

        verifier = verification.Verifier(
            parts, _pause, functools.partial(listings.progress, parsed),
            parsed.grace, parsed.revoke_trusts)
        sizes = verifier.size()
        report = verifier.run(parsed.fix)
    except Exception as exc:
        listings.tell(f'Nothing could be compared: {exc}')
        return 2
    return _tell(report, sizes, parsed.format)


def _tell(report: 'Report', sizes: ty.Mapping[str, int], form: str,
          ) -> int:
    """Print the differences; return the exit code."""
    code = 2 if report.failures else 1 if report.left else 0
    if form == listings.JSON:
        listings.dump({
            'left': [{'text': one.text, 'remedy': one.remedy}
                     for one in report.left],
            'fixed': [one.text for one in report.fixed],
            'problems': report.problems, 'failures': report.failures,
            'compared': sizes})
        return code
    for difference in report.fixed:
        print(f'Fixed: {difference.text}')
    for difference in report.left:
        print(f'{difference.text} [{difference.remedy}]')
    for sentence in (*report.problems, *report.failures):
        print(sentence)
    found = len(report.fixed) + len(report.left)
    print(f'{words.count(found, "difference") if found else "No difference"}, '
          f'{len(report.fixed)} fixed, {len(report.left)} left; compared: ' +
          ', '.join(f'{count} {what}' for what, count in sizes.items()) + (
              '; NOT EVERYTHING COULD BE COMPARED.'
              if report.failures else '.'))
    return code


def _import(parsed: argparse.Namespace) -> int:
    try:
        parts = _parts(parsed)
        from blazar_nova.importer import blazar_import
        from blazar_nova.importer import blazar_source

        importer = blazar_import.Importer(
            parts, blazar_source.read(blazar_source.url_of(parsed.source)),
            functools.partial(listings.progress, parsed))
        plan = importer.run(parsed.apply)
    except Exception as exc:
        listings.tell(f'Nothing was imported: {exc}')
        return 2
    return _tell_import(plan, parsed.apply, parsed.format)


def _tell_import(plan: 'Plan', applied: bool, form: str) -> int:
    """Print the outcome of everything; return the exit code."""
    from blazar_nova.importer import items

    counts = collections.Counter(item.outcome for item in plan.items())
    code = 1 if items.Outcome.REFUSED in counts else 0
    if form == listings.JSON:
        listings.dump({'applied': applied, 'over': plan.over, 'items': [
            {'kind': one.kind, 'id': one.id, 'name': one.name,
             'outcome': one.outcome, 'text': one.text}
            for one in plan.items()]})
        return code
    for item in plan.items():
        named = item.name if item.id == item.name else (
            f'{item.name} ({item.id})')
        print(f'{item.kind} {named}: {item.outcome}' + (
            f': {item.text}' if item.text else '.'))
    if plan.over:
        print('Left out, because they have ended: '
              f'{words.count(plan.over.total(), "lease")}: ' +
              ', '.join(f'{count} {status}' for status, count in sorted(
                  plan.over.items())) + '.')
    print((', '.join(f'{count} {outcome}' for outcome, count in
                     counts.items()) or 'There is nothing') + (
        '.' if applied else '. Nothing was changed; use --apply to import.'))
    return code
