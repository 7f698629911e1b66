# SPDX-License-Identifier: Apache-2.0

"""Trusts of the owners of leases: created, stored, revoked.

A lease with deferred builds is built in the name of its owner and is refused
without a trust, as is a lease with an end policy or an event action that needs
one. Other leases only end in the name of their owner, and end without a trust
if the owner's token cannot create one.

Creating a trust takes keystone about as long as all the rest of a request, so
another thread does it meanwhile (:func:`meanwhile`). The trust is recorded in
the transaction that creates or changes the lease, so that a process that dies
leaves no lease without the trust that was created for it.
"""

import contextlib
import dataclasses
import functools
import typing as ty

from oslo_log import log as logging
from oslo_utils import excutils
from sqlalchemy import orm

from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.plugins import end_policies
from blazar_core.plugins import resource_types
from blazar_nova.resource_types import extensions
from blazar_nova.services import service_user
from blazar_nova.services import wiring

LOG = logging.getLogger(__name__)

#: Logged if it is not known whether a lease is reserved.
_EXPIRES = ('It is not known whether a lease has the trust that was created '
            'for it; if none has, the trust expires by itself')


def entrust(parts: wiring.Parts, context: ty.Any, lease: dict[str, ty.Any],
            ) -> None:
    """Give a lease a trust by which it ends in the name of its owner, if
    possible.

    Nothing is raised: the lease is reserved, and its build may have been
    sent. Without a trust the service user deletes its servers, unless the
    owner extends the lease, which creates a trust.

    :param context: of a request of the owner
    :param lease: as it was created and recorded
    """
    trust = attempted(parts, context, lease['on_end'],
                      lease['end_date'] + lease['grace_period'],
                      f'Lease {lease["id"]}')
    if trust is not None:
        keep(parts, lease, trust)


def attempted(parts: wiring.Parts, context: ty.Any, on_end: str, until: int,
              what: str) -> str | None:
    """Return a trust that a lease does not require.

    Nothing is raised.

    :param what: the beginning of the log message: what needs the trust
    :returns: None: no trust could be created, and the log says why
    """
    try:
        return given(parts, context, on_end, until)
    except (errors.TrustUnavailable, errors.CloudUnavailable) as exc:
        LOG.info('%s: its servers will not be deleted in the name of its '
                 'owner: %s', what, exc.__cause__ or exc)
    except Exception:
        LOG.exception('%s: its servers will not be deleted in the name of its '
                      'owner', what)
    return None


def acts_for_owner(parts: wiring.Parts, names: ty.Iterable[ty.Any]) -> bool:
    """Return whether a resource type acts for the owner of its leases."""
    return any(parts.types.named[name].acts_for_owner for name in names
               if isinstance(name, str) and name in parts.types.named)


@contextlib.contextmanager
def prepared(parts: wiring.Parts, context: ty.Any, new: new_leases.NewLease,
             ) -> ty.Iterator[new_leases.NewLease]:
    """Do what the token of a request is needed for before a lease is created.

    It is undone if the lease is not created.

    :raises InvalidLeaseParams: see :meth:`.ResourceType.prepare`
    :raises CloudUnavailable: see there
    """
    with contextlib.ExitStack() as undone:
        ready = []
        for one in new.reservations:
            kind = parts.types.named.get(one.resource_type)
            if kind is None or not kind.acts_for_owner:
                ready.append(one)
                continue
            assert one.params is not None
            made = kind.prepare(context, one.params)
            spec = {**(one.spec or {}), **made}
            undone.enter_context(_unless_reserved(functools.partial(
                _withdraw, kind, context, one.params, spec), (
                f'Project {context.project_id}: it is not known whether a '
                f'lease has what was created for its {one.resource_type}, '
                f'{dict(made)}. If none has, delete that, as it does not '
                'expire')))
            ready.append(dataclasses.replace(one, spec=spec))
        yield dataclasses.replace(new, reservations=tuple(ready))


def _withdraw(kind: resource_types.ResourceType, *args: ty.Any) -> None:
    try:
        kind.withdraw(*args)
    except Exception:
        LOG.exception('What was prepared for a lease that is not created is '
                      'left')


def needs_one(on_end: str, actions: ty.Collection[str] = ()) -> bool:
    """Return whether an end policy or event actions require a trust."""
    return states.Action.SNAPSHOT in actions or end_policies.needs_owner(
        on_end, extensions.installed_policies())


def has_one(parts: wiring.Parts, lease_id: str) -> bool:
    """Return whether a lease has a trust, which only a trust may replace."""
    kept = parts.lifecycle.lease_close.credential(lease_id, False)
    return kept is not None and service_user.ServiceUser.read(kept) is None


def given(parts: wiring.Parts, context: ty.Any, on_end: str, until: int,
          as_owner: bool = False) -> str | None:
    """Return a trust until the end of a lease and of its end actions.

    :param as_owner: whether only a trust will do, not the service user
    :returns: what :meth:`Credentials.delegate
        <blazar_nova.services.user_credentials.Credentials.delegate>` returns
    :raises TrustUnavailable: if the token may not create a trust
    :raises CloudUnavailable: if keystone does not answer
    """
    limit = parts.conf.blazar.end_timeout if needs_one(on_end) else 0
    return parts.trusts.delegate(context, until + limit, as_owner=as_owner)


def needed(parts: wiring.Parts, context: ty.Any, on_end: str, until: int,
           acts: bool = False) -> str | None:
    """Return a trust that a lease requires; like :func:`given`, with an error
    that says why it is required.

    :param acts: see :func:`acts_for_owner`
    :raises TrustUnavailable: if the token may not create one; says what to do
    :raises CloudUnavailable: if keystone does not answer
    """
    try:
        return given(parts, context, on_end, until, as_owner=True)
    except errors.TrustUnavailable as exc:
        what, instead = (
            'A stack is created in your name when its lease starts',
            'resource type') if acts else (
            f'"on_end": "{on_end}" is done in your name when the lease is '
            f'over', f'"on_end", such as "{end_policies.DELETE}"',
        ) if needs_one(on_end) else (
            f'"{states.Action.SNAPSHOT}" is done in your name at an event of '
            f'the lease', f'action, such as "{states.Action.NOTIFY}"')
        raise errors.TrustUnavailable(
            f'{what}, which takes a trust that your token may not make '
            f'({exc.__cause__ or exc}). Ask again with a token that you got '
            f'by your password, or write another {instead}.') from exc


@contextlib.contextmanager
def for_end(parts: wiring.Parts, context: ty.Any, new: new_leases.NewLease,
            ) -> ty.Iterator[new_leases.NewLease]:
    """Return a lease that is about to be created, with the trust that its end
    or its events require.

    The trust is revoked if the lease is not created.

    :raises TrustUnavailable: see :func:`needed`
    :raises CloudUnavailable: see :func:`needed`
    """
    trust = needed(parts, context, new.request.on_end, new.span.end) if (
        needs_one(new.request.on_end, new.request.actions)) else None
    with unless_reserved(parts, trust):
        yield with_trust(parts, new, trust)


@contextlib.contextmanager
def ahead(parts: wiring.Parts, context: ty.Any,
          request: requests.LeaseRequest, offered: bool = False,
          acts: bool = False,
          ) -> ty.Iterator[ty.Callable[[new_leases.NewLease],
                                       new_leases.NewLease]]:
    """Create the trust of a lease of the lease API during the search for
    capacity.

    :param offered: whether a trust that the lease does not require is created
        only when the offer is accepted
    :param acts: see :func:`acts_for_owner`
    :returns: a function that adds the trust to the new lease
    """
    takes_one = acts or needs_one(request.on_end, request.actions)
    # As long as the lease may take, of which not all is known yet.
    until = request.window.end + request.grace_period + (
        60 * parts.conf.blazar.cleaning_time) + (
        0 if request.duration is None else request.patience or 0)

    def make() -> str | None:
        if takes_one:
            return needed(parts, context, request.on_end, until, acts)
        return attempted(parts, context, request.on_end, until,
                         f'A new lease of user {context.user_id}')

    if offered and not takes_one:
        yield lambda new: new
        return
    with meanwhile(parts, make) as made:
        yield lambda new: with_trust(parts, new, made())


def with_trust(parts: wiring.Parts, new: new_leases.NewLease,
               trust: str | None) -> new_leases.NewLease:
    """Return a new lease with the encrypted trust, if there is one."""
    return new if trust is None else dataclasses.replace(
        new, credential=parts.encryption.encrypt(trust))


@contextlib.contextmanager
def meanwhile(parts: wiring.Parts, make: ty.Callable[[], str | None],
              ) -> ty.Iterator[ty.Callable[[], str | None]]:
    """Create a trust in another thread while the block runs.

    It is revoked if the block fails.

    :returns: a function that waits for the trust, and raises what ``make``
        raises
    """
    made = parts.background.start(make)

    def undo() -> None:
        if made.exception() is None:
            take_back(parts, made.result())

    with _unless_reserved(functools.partial(parts.background.later, undo),
                          _EXPIRES):
        yield made.result


@contextlib.contextmanager
def of_offer(parts: wiring.Parts, context: ty.Any, lease: dict[str, ty.Any],
             ) -> ty.Iterator['Keeping']:
    """Return the trust of an offer that its owner accepts, to be stored in the
    transaction that accepts it.

    :param context: of a request of the owner
    :param lease: the offer
    """
    trust = attempted(parts, context, lease['on_end'],
                      lease['end_date'] + lease['grace_period'],
                      f'Lease {lease["id"]}')
    with unless_reserved(parts, trust):
        yield Keeping(parts, {} if trust is None else {lease['id']: trust})


@contextlib.contextmanager
def unless_reserved(parts: wiring.Parts, trust: str | None,
                    ) -> ty.Iterator[None]:
    """Revoke a trust if the block fails to reserve the lease that needs it.

    A trust is kept if a lease may have it, which could not start otherwise.
    """
    with _unless_reserved(functools.partial(take_back, parts, trust),
                          _EXPIRES):
        yield


@contextlib.contextmanager
def _unless_reserved(undo: ty.Callable[[], None], doubt: str,
                     ) -> ty.Iterator[None]:
    """Undo something if the block fails to reserve the lease that needs it.

    :param doubt: logged if it is not known whether the lease is reserved
    """
    try:
        yield
    except errors.OutcomeUnknown:
        LOG.warning('%s', doubt)
        raise
    except Exception:
        with excutils.save_and_reraise_exception():
            undo()


def keep(parts: wiring.Parts, lease: dict[str, ty.Any], trust: str) -> None:
    """Store the trust of a lease, and revoke those that it replaces and that
    are not in use.

    Failures are logged, as the lease exists in any case. If it is unknown
    whether the lease has the trust, it is kept until it expires.
    """
    try:
        revoke_replaced(parts, lease['id'], parts.leases.credentials.store(
            lease['id'], parts.encryption.encrypt(trust)))
    except errors.NotFound:
        take_back(parts, trust)
    except Exception:
        LOG.exception('Lease %s: its trust could not be written down',
                      lease['id'])


class Keeping:
    """Trusts that are stored in the transaction that changes their leases, so
    that a process that dies leaves no lease with a trust that expires before
    its end.

    :param given: the trusts, by lease
    :param also: writes other changes in the same transaction
    """

    def __init__(
            self, parts: wiring.Parts, given: ty.Mapping[str, str],
            also: ty.Callable[[orm.Session], None] | None = None) -> None:
        self._parts = parts
        self._encrypted = {lease_id: parts.encryption.encrypt(trust)
                           for lease_id, trust in given.items()}
        self._also = also
        #: With the ids of their leases.
        self._unused = [*self._encrypted.items()]

    def write(self, session: orm.Session) -> None:
        """Store the trusts of leases that are locked."""
        self._unused = [
            (lease_id, one) for lease_id, encrypted in self._encrypted.items()
            for one in self._parts.leases.credentials.put(
                session, api.found(session, lease_id), encrypted)]
        if self._also is not None:
            self._also(session)

    def take_back(self) -> None:
        """Revoke the replaced trusts that are not in use, in the background.
        They would expire at the previous end of their lease. If nothing was
        written, revoke the given ones.
        """
        for lease_id, encrypted in self._unused:
            self._parts.background.later(functools.partial(
                revoke_replaced, self._parts, lease_id, [encrypted]))


def revoke_replaced(parts: wiring.Parts, lease_id: str,
                    encrypted: ty.Iterable[str]) -> None:
    """Revoke encrypted trusts that a lease had before; failures are logged."""
    for one in encrypted:
        try:
            take_back(parts, parts.encryption.decrypt(one))
        except errors.DecryptionError as exc:
            LOG.warning('Lease %s: a trust that was replaced is not revoked: '
                        '%s', lease_id, exc)


def take_back(parts: wiring.Parts, trust: str | None) -> None:
    """Revoke a trust that no lease has; failures are logged."""
    try:
        if trust is not None:
            parts.trusts.revoke(trust)
    except Exception:
        LOG.exception('A trust that no lease has could not be deleted; it '
                      'expires by itself')
