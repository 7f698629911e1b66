# SPDX-License-Identifier: Apache-2.0

"""Commands for the owner of a lease, and the projects that may use it."""

import argparse
import contextlib
import re
import typing as ty

from osc_lib import exceptions

from blazar_nova.osc import commands


def id_of(app: ty.Any, kind: str, name: str) -> str:
    """Return the ID of a project or user, by name or ID.

    Most users may not search in keystone. Then only names of their own are
    known, and what looks like an ID is left for the service to check.

    :param kind: 'project' or 'user'
    :raises CommandError: if there is none, or keystone does not answer
    """
    connection = app.client_manager.sdk_connection
    try:
        found = getattr(connection.identity, f'find_{kind}')(name)
    except Exception as exc:
        if re.fullmatch('[0-9a-f]{32}', name.replace('-', '')):
            return name
        if getattr(exc, 'status_code', None) != 403:
            raise exceptions.CommandError(
                f'Keystone cannot find the {kind} {name}: '
                f'{str(exc).rstrip(".")}. Use the ID of the {kind}.') from exc
        own = _own(app.client_manager.auth_ref, connection.identity, kind)
        if len(known := own.get(name, set())) != 1:
            raise exceptions.CommandError(
                f'You may look up only your own {kind}s by name in keystone, '
                f'and {len(known) or "none"} of them has the name {name}. Use '
                f'the ID of the {kind}: its members see it with "openstack '
                f'token issue -c {kind}_id".' if kind == 'project' else
                f'You may not look up other users by name in keystone. Use '
                f'the ID of user {name}, who sees it with "openstack token '
                f'issue -c user_id".') from exc
        return known.pop()
    if found is None:
        raise exceptions.CommandError(f'There is no {kind} {name}.')
    return ty.cast(str, found.id)


def _own(access: ty.Any, identity: ty.Any, kind: str) -> dict[str, set[str]]:
    """Return the IDs of the user, or of the user's projects, by name."""
    if kind == 'user':
        return {access.username: {access.user_id}}
    found: dict[str, set[str]] = {}
    # Without an answer, the message of the caller is right all the same.
    with contextlib.suppress(Exception):
        for project in identity.user_projects(access.user_id):
            found.setdefault(project.name, set()).add(project.id)
    return found


def project_params(app: ty.Any, name: str | None) -> commands.Json:
    """Return the query parameter for a project option, if it is given.

    :raises CommandError: as id_of
    """
    return {} if name is None else {
        'project_id': id_of(app, 'project', name)}


class HandOver(commands.LeaseChange):
    """Transfer a lease to another project or user (admin only).

    For another project, none of its servers may exist.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('--project', metavar='<project>',
                            help='New project (name or ID)')
        parser.add_argument('--user', metavar='<user>',
                            help='New user (name or ID)')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> commands.Shown:
        asked = {f'{kind}_id': id_of(self.app, kind, name)
                 for kind, name in (('project', parsed_args.project),
                                    ('user', parsed_args.user))
                 if name is not None}
        if not asked:
            raise exceptions.CommandError(
                'Name the new owner: --project, --user, or both.')
        return self.change(parsed_args.lease, asked)


class Share(commands.LeaseChange):
    """Set which other projects may use the whole hosts of a lease."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--project', metavar='<project>', action='append', default=[],
            help='Project to share the hosts with, in addition to the current '
                 'ones (name or ID; repeat for several)')
        parser.add_argument(
            '--remove-project', metavar='<project>', action='append',
            default=[],
            help='Project to stop sharing the hosts with (name or ID; repeat '
                 'for several)')
        parser.add_argument(
            '--no-project', action='store_true',
            help='Stop sharing with all projects; with --project, all but '
                 'those')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> commands.Shown:
        if not (parsed_args.project or parsed_args.remove_project
                or parsed_args.no_project):
            raise exceptions.CommandError(
                'Name the projects: --project, --remove-project or '
                '--no-project.')
        client = commands.client_of(self.app)
        lease_id = client.find(parsed_args.lease)
        lease = client.ask('GET', f'/leases/{lease_id}')['lease']
        hosts = [one for one in lease['reservations']
                 if one['resource_type'] == 'physical:host']
        if not hosts:
            raise exceptions.CommandError(
                f'Lease {parsed_args.lease} has no whole hosts to share.')
        more, less = ([id_of(self.app, 'project', one) for one in names]
                      for names in (parsed_args.project,
                                    parsed_args.remove_project))
        return self.change(lease_id, {'reservations': [{
            'id': one['id'], 'projects': self._projects(
                one['id'], [] if parsed_args.no_project else
                one.get('projects') or [], more, less)}
            for one in hosts]})

    @staticmethod
    def _projects(reservation_id: str, before: list[str], more: list[str],
                  less: list[str]) -> list[str]:
        """Return the projects that may use a reservation, without duplicates.
        """
        for one in less:
            if one not in before:
                raise exceptions.CommandError(
                    f'Reservation {reservation_id} is not shared with '
                    f'project {one}.')
        return [*dict.fromkeys(one for one in [*before, *more]
                               if one not in less)]
