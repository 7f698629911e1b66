# SPDX-License-Identifier: Apache-2.0

"""Requests that Nova would carry out although they break a lease.

Each function returns the answer to one kind of them; None: the request may
continue. Users who may not see the object get Nova's answer.
"""

import dataclasses
import re
import typing as ty

from oslo_serialization import jsonutils
from oslo_utils import strutils
import webob

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.leases import lookup
from blazar_core.leases import server_growth
from blazar_nova.api import assembly
from blazar_nova.compat import accelerators
from blazar_nova.compat import bound_servers
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import flavors
from blazar_nova.compat import nova_router
from blazar_nova.compat import pool
from blazar_nova.compat import reserved_edits
from blazar_nova.compat import server_demand
from blazar_nova.resource_types import extensions
from blazar_nova.schemas import error_answers
from blazar_nova.services import server_messages

Environ: ty.TypeAlias = dict[str, ty.Any]

#: Characters that databases reject: NUL, and unpaired surrogates.
_UNSTORABLE = re.compile('[\x00\ud800-\udfff]')

#: Server actions for which Nova chooses a host.
_NEED_A_HOST = frozenset({
    'evacuate', 'migrate', 'os-migrateLive', 'resize', 'unshelve'})

#: Server actions that do not change what a server does, or delete it.
_AT_THE_END = frozenset({
    'forceDelete', 'lock', 'os-getConsoleOutput', 'os-getRDPConsole',
    'os-getSerialConsole', 'os-getSPICEConsole', 'os-getVNCConsole', 'unlock'})


class Guards:
    """Answers requests about servers and server groups of leases."""

    def __init__(self, services: assembly.ApiServices) -> None:
        parts = services.parts
        self._database = parts.database
        self._clock = parts.clock
        self._types = parts.types
        self._lookup = parts.leases.lookup
        self._limits = parts.limits
        self._policies = extensions.installed_policies()
        self._interruptible = services.interruptible

    def of_no_id(self, environ: Environ, action: nova_router.Action) -> ty.Any:
        """Return the answer to a request about an id that is not valid.

        Nova would query its database, which might find an object nevertheless.
        """
        what = 'Instance group' if (
            action.kind is nova_router.Kind.DELETE_GROUP) else 'Instance'
        return nova_router.fault(
            environ, 404, f'{what} {action.named} could not be found.')

    def of_action(self, environ: Environ, server_id: str,
                  kind: nova_router.Kind) -> ty.Any:
        """Return the answer to an action on a server."""
        return (self._held_back(environ, server_id, kind) or
                self._at_its_end(environ, server_id, kind) or
                self._of_fixed_size(environ, server_id) or
                self._evictable(environ, server_id) or
                self._beyond_limits(environ, server_id) or
                self._out_of_time(environ, server_id) or
                self._led_astray(environ, server_id))

    def of_update(self, environ: Environ, server_id: str) -> ty.Any:
        """Return the answer to an update of a server's name or description."""
        # Check the text first, to avoid a query for each renamed server.
        refused = self._unstorable(environ)
        return refused if refused and self._held(environ, server_id) else None

    def of_group(self, environ: Environ, group_id: str) -> ty.Any:
        """Return the answer to the deletion of a reservation's server group,
        without which no server could be booted in the reservation.
        """
        context = environ['nova.context']
        try:
            kind = self._lookup.reservation(
                group_id, context.project_id, anyones=context.is_admin)
        except errors.DatabaseUnavailable:
            return None
        if kind is None or not self._types.of(kind, False).for_servers:
            return None
        return nova_router.fault(environ, 409, (
            f'Server group {group_id} belongs to reservation {group_id} and '
            f'is deleted when the lease ends. Delete the lease instead.'))

    def _held_back(self, environ: Environ, server_id: str,
                   kind: nova_router.Kind) -> ty.Any:
        """Return the answer to an action on a reserved server, unless the
        action is supported (:mod:`compat.reserved_edits`).
        """
        held = self._held(environ, server_id)
        if held is None:
            return None
        body = body_of(environ)
        if kind is nova_router.Kind.METADATA:
            _leave_own(environ)
            return self._unstorable(environ)
        if kind is nova_router.Kind.ACTION and len(body) == 1 and (
                reserved_edits.ACTIONS.issuperset(body)):
            return self._unstorable(environ)
        return nova_router.fault(environ, 409, (
            f'Server {server_id} is RESERVED: it is held by lease '
            f'{held["name"]} ({held["lease_id"]}), to be built from '
            f'{clocks.minute(held["start_date"])} UTC on. Until it is, it can '
            f'be shown, renamed, described, given metadata, locked and '
            f'deleted.'))

    def _at_its_end(self, environ: Environ, server_id: str,
                    kind: nova_router.Kind) -> ty.Any:
        """Return the answer to an action on a server whose lease has ended:
        the end policy would have to wait for the action, or to undo it, and
        other leases have reserved the capacity.
        """
        context = environ['nova.context']
        if context.is_admin or kind is not nova_router.Kind.OTHER and (
                kind is not nova_router.Kind.ACTION or
                _AT_THE_END.issuperset(body_of(environ))):
            return None
        try:
            over = self._lookup.ended(
                server_id, context.project_id) or self._on_ended_hosts(
                    server_id, context.project_id)
        except (errors.DatabaseUnavailable, errors.CloudUnavailable):
            return None
        return over and nova_router.fault(environ, 409, (
            f'Lease {over.name} ({over.lease_id}) of server {server_id} has '
            f'ended, and its end policy is being carried out: {over.on_end}. '
            f'Until that is complete, the server can only be shown, locked '
            f'and deleted, its metadata and tags changed, and volumes and '
            f'ports detached.'))

    def _on_ended_hosts(self, server_id: str, project_id: str,
                        ) -> lookup.Ended | None:
        """Return the lease of the hosts that a server is bound to, if the
        lease is ending and the server cannot stay for as long as it likes.
        """
        found = self._lookup
        # Most requests are about servers without hosts of a lease.
        within = found.any_ending() and bound_servers.reservation_of_server(
            server_id, project_id)
        over = found.ended_hosts(within) if within else None
        return None if over is None or any(
            self._policies[name].for_hosted_servers
            for name in over.on_end.split(',')
            if name in self._policies) else over

    def _held(self, environ: Environ, server_id: str,
              ) -> dict[str, ty.Any] | None:
        """Return the lease of a reserved server; None if the server is not
        reserved, or the user may not see it.
        """
        try:
            held = self._lookup.held([server_id]).get(server_id)
        except errors.DatabaseUnavailable:
            # Ordinary servers must not depend on the database.
            return None
        context = environ['nova.context']
        return held if held is not None and (
            context.is_admin or held['project_id'] == context.project_id
        ) else None

    def _unstorable(self, environ: Environ) -> ty.Any:
        """Return the answer to a request with characters that databases
        reject.

        Nova would only fail at the build, for all servers of a boot.
        """
        # Traversed without recursion: Nova refuses bodies that are too deep.
        left: list[object] = [body_of(environ)]
        while left:
            one = left.pop()
            if isinstance(one, str) and _UNSTORABLE.search(one):
                break
            if isinstance(one, dict):
                left += [*one, *one.values()]
            elif isinstance(one, list):
                left += one
        else:
            return None
        return nova_router.fault(environ, 400, (
            'Metadata, names, descriptions and reasons must not have NUL or '
            'halves of surrogate pairs (such as \\ud800) in them. Leave them '
            'out.'))

    def _of_fixed_size(self, environ: Environ, server_id: str) -> ty.Any:
        """Return the answer to a resize of a server out of a reservation, or
        into one.
        """
        wanted = _resized(environ)
        if wanted is None:
            return None
        context, reservation_id = environ['nova.context'], None
        try:
            booked = self._lookup.booked(server_id)
            if booked is not None and booked.in_slot:
                if context.is_admin or (
                        booked.project_id == context.project_id):
                    reservation_id = booked.reservation_id
            else:
                reservation_id = flavors.reservation_named(context, wanted)
        except errors.DatabaseUnavailable:
            return None
        return reservation_id and nova_router.fault(environ, 409, (
            f'Servers of reservation {reservation_id} are of its flavor, and '
            f'no others are: servers cannot be resized out of it or into it. '
            f'Boot a new one.'))

    def _evictable(self, environ: Environ, server_id: str) -> ty.Any:
        """Return the answer to a resize of a server that is not interruptible
        to a flavor whose servers are.
        """
        wanted = _resized(environ)
        if wanted is None:
            return None
        try:
            why = self._interruptible.why_not_resized(
                environ['nova.context'], server_id, wanted)
        except (errors.DatabaseUnavailable, errors.CloudUnavailable):
            return None
        return why and nova_router.fault(environ, 409, why)

    def _beyond_limits(self, environ: Environ, server_id: str) -> ty.Any:
        """Return the answer to a resize, or to the revert of one, by which a
        project's leases would exceed its limits, or need what leases may not
        have. nova-scheduler checks the limits again when it chooses a host.
        """
        wanted, reverts = _resized(environ), 'revertResize' in body_of(environ)
        if wanted is None and not reverts:
            return None
        context = environ['nova.context']
        try:
            found = server_growth.booked(
                self._database, server_id) or self._lookup.next_of_kept(
                    server_id, None if context.is_admin
                    else context.project_id)
            if found is None or not (context.is_admin or (
                    context.project_id == found[0].project_id)):
                return None
            lease, booked = found
            revert = server_demand.reverted(
                server_id) if wanted is None else None
            takes = revert.takes if revert is not None else None
            if wanted is not None and (resized := server_demand.resized(
                    server_id, wanted)) is not None:
                takes, uncounted = resized
                accelerators.refuse_uncounted(uncounted)
            asked = server_growth.asked_of(lease, booked, takes or {})
            if asked is not None:
                words = self._limits.describe(self._lookup.get(lease.id))
                granted = self._limits.check(dataclasses.replace(
                    asked, current=words, described=words,
                    server_ids=(server_id,)))
                if revert is not None and granted is not None:
                    # No scheduler claims a host for a revert.
                    server_growth.revert(self._database, self._clock, granted,
                                         lease.id, server_id, revert)
        except (errors.DatabaseUnavailable, errors.NotFound):
            return None
        except errors.BlazarError as exc:
            code, _name = error_answers.code_of(exc)
            return nova_router.fault(environ, code, str(exc),
                                     error_answers.headers_of(exc))
        return None

    def _out_of_time(self, environ: Environ, server_id: str) -> ty.Any:
        """Return the answer to an action that needs a host for a server in a
        reservation of hosts whose lease has ended.

        Nova would accept it, but find no host.
        """
        if _NEED_A_HOST.isdisjoint(body_of(environ)):
            return None
        context = environ['nova.context']
        try:
            within = bound_servers.reservation_of_server(
                server_id, None if context.is_admin else context.project_id)
            found = within and self._lookup.lease_status(within)
            if within and (not found or found[1] == states.Lease.TERMINATED):
                # Such as one of a project that no longer shared the hosts.
                flavors.release(server_id)
        except (errors.DatabaseUnavailable, errors.CloudUnavailable):
            return None
        over = found[0] if found and (
            found[1] == states.Lease.TERMINATING) else None
        return nova_router.fault(environ, 409, (
            f'Server {server_id} is in reservation {within}, and its lease '
            f'{over} has ended: it cannot move to another host of the '
            f'reservation. If it is shelved, unshelve it when the lease is '
            f'TERMINATED: then it is an ordinary server.'
        )) if over is not None else None

    def _led_astray(self, environ: Environ, server_id: str) -> ty.Any:
        """Return the answer to a forced move, which no scheduler checks, to a
        host that the server may not use.
        """
        target = _forced_onto(environ)
        if target is None or not environ['nova.context'].is_admin:
            return None
        try:
            within = bound_servers.reservation_of_server(server_id)
            try:
                enrolled, holder = self._lookup.holder_of(target)
            except errors.DatabaseUnavailable:
                if within is not None or not pool.joined().isdisjoint(
                        one.uuid for one in compute_hosts.on_service_host(
                            target)):
                    raise
                # Ordinary servers must not depend on the database.
                return None
        except (errors.DatabaseUnavailable, errors.CloudUnavailable) as exc:
            return nova_router.fault(environ, 503, (
                f'Whether the server may be on host {target} is not known '
                f'now: {exc} Leave "force" out, or the host.'),
                error_answers.headers_of(exc))
        if holder == within and (within is not None or not enrolled):
            return None
        return nova_router.fault(environ, 409, (
            f'Host {target} serves leases only, and not one of this server. '
            if within is None else
            f'The server is in reservation {within}, which does not have host '
            f'{target}. ') + 'Leave "force" out, or the host: then it is '
            'moved to where it may be.')


def body_of(environ: Environ) -> dict[str, ty.Any]:
    """Return the JSON object of a request; empty if Nova would refuse it."""
    request = webob.Request(environ)
    try:
        # The body stays readable for the next application.
        body = jsonutils.loads(request.body)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _leave_own(environ: Environ) -> None:
    """Remove from a metadata request what a reserved server only shows;
    requests that Nova will refuse stay unchanged.
    """
    body = body_of(environ)
    metadata = body.get('metadata')
    if len(body) == 1 and isinstance(metadata, dict) and all(
            isinstance(value, str) for value in metadata.values()):
        webob.Request(environ).body = jsonutils.dump_as_bytes(
            {'metadata': server_messages.own(metadata)})


def _resized(environ: Environ) -> str | None:
    """Return the id of the flavor to which an action resizes a server."""
    resize = body_of(environ).get('resize')
    flavor = resize.get('flavorRef') if isinstance(resize, dict) else None
    # Nova refuses an id like that: no flavor has it.
    return None if flavor is None or _UNSTORABLE.search(str(flavor)) else (
        str(flavor))


def _forced_onto(environ: Environ) -> str | None:
    """Return the host to which an action moves a server without asking the
    scheduler: before microversions 2.29 and 2.30 any named host, later only
    with "force".
    """
    body, version = body_of(environ), nova_router.microversion(environ)
    for action, since in (('os-migrateLive', (2, 30)), ('evacuate', (2, 29))):
        values = body.get(action)
        if isinstance(values, dict) and isinstance(
                values.get('host'), str) and values['host'].isprintable():
            forced = strutils.bool_from_string(values.get('force', False))
            return values['host'] if forced or (
                version is not None and version < since) else None
    return None
