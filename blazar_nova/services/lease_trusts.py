# SPDX-License-Identifier: Apache-2.0

"""Trusts of the owners of leases: created, stored, revoked.

A lease with deferred builds is built in the name of its owner and is refused
without a trust, as is a lease with an end policy or an event action that needs
one. Other leases only end in the name of their owner, and end without a trust
if the owner's token cannot create one.

Creating a trust takes keystone about as long as all the rest of a request, so
another thread does it meanwhile (:meth:`LeaseTrusts.in_background`). The trust
is recorded in the transaction that creates or changes the lease, so that a
process that dies leaves no lease without the trust that was created for it.
"""

import contextlib
import dataclasses
import functools
import typing as ty

from oslo_log import log as logging
from oslo_utils import excutils
from sqlalchemy import orm

from blazar_core.common import background
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import encryption
from blazar_core.db import models
from blazar_core.leases import credentials
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.plugins import end_policies
from blazar_core.plugins import resource_types
from blazar_nova.resource_types import extensions
from blazar_nova.services import service_user
from blazar_nova.services import user_credentials

LOG = logging.getLogger(__name__)

#: Logged if it is not known whether a lease is reserved.
_EXPIRES = ('It is not known whether a lease has the trust that was created '
            'for it; if none has, the trust expires by itself')


class LeaseTrusts:
    """Creates, stores and revokes the trusts of leases.

    :param conf: ``[blazar]``: a trust is valid until the end actions of its
        lease are done
    :param trusts: creates and revokes them in keystone
    :param stored: those in the reservation database
    :param current: returns the decrypted credential of a lease, if it has one
    """

    def __init__(self, conf: ty.Any, trusts: user_credentials.Credentials,
                 secrets: encryption.Encryption,
                 stored: credentials.Credentials,
                 current: ty.Callable[[str], str | None],
                 types: resource_types.ResourceTypes,
                 threads: background.Background) -> None:
        self._options = conf.blazar
        self._trusts = trusts
        self._secrets = secrets
        self._stored = stored
        self._current = current
        self._types = types
        self._threads = threads

    def is_configured(self) -> bool:
        """Return whether keystone is configured."""
        return self._trusts.is_configured()

    def encrypt(self, text: str) -> str:
        """Return a trust or a stored call, encrypted."""
        return self._secrets.encrypt(text)

    # -- creation ------------------------------------------------------------

    def delegate(self, context: ty.Any, on_end: str, until: int,
                 as_owner: bool = False) -> str | None:
        """Return a trust until the end of a lease and of its end actions.

        :param as_owner: whether only a trust will do, not the service user
        :returns: what :meth:`Credentials.delegate
            <blazar_nova.services.user_credentials.Credentials.delegate>`
            returns
        :raises TrustUnavailable: if the token may not create a trust
        :raises CloudUnavailable: if keystone does not answer
        """
        limit = self._options.end_timeout if needs_one(on_end) else 0
        return self._trusts.delegate(context, until + limit, as_owner=as_owner)

    def optional(self, context: ty.Any, on_end: str, until: int, what: str,
                 ) -> str | None:
        """Return a trust that a lease does not require.

        Nothing is raised.

        :param what: the beginning of the log message: what needs the trust
        :returns: None: no trust could be created, and the log says why
        """
        try:
            return self.delegate(context, on_end, until)
        except (errors.TrustUnavailable, errors.CloudUnavailable) as exc:
            LOG.info('%s: its servers will not be deleted in the name of its '
                     'owner: %s', what, exc.__cause__ or exc)
        except Exception:
            LOG.exception('%s: its servers will not be deleted in the name of '
                          'its owner', what)
        return None

    def required(self, context: ty.Any, on_end: str, until: int,
                 acts: bool = False) -> str | None:
        """Return a trust that a lease requires; like :meth:`delegate`, with an
        error that says why it is required.

        :param acts: see :meth:`acts_for_owner`
        :raises TrustUnavailable: if the token may not create one; says what to
            do
        :raises CloudUnavailable: if keystone does not answer
        """
        try:
            return self.delegate(context, on_end, until, as_owner=True)
        except errors.TrustUnavailable as exc:
            what, instead = (
                'A stack is created in your name when its lease starts',
                'resource type') if acts else (
                f'"on_end": "{on_end}" is done in your name when the lease is '
                f'over', f'"on_end", such as "{end_policies.DELETE}"',
            ) if needs_one(on_end) else (
                f'"{states.Action.SNAPSHOT}" is done in your name at an event '
                f'of the lease', f'action, such as "{states.Action.NOTIFY}"')
            raise errors.TrustUnavailable(
                f'{what}, which takes a trust that your token may not make '
                f'({exc.__cause__ or exc}). Ask again with a token that you '
                f'got by your password, or write another {instead}.') from exc

    @contextlib.contextmanager
    def for_end(self, context: ty.Any, new: new_leases.NewLease,
                ) -> ty.Iterator[new_leases.NewLease]:
        """Return a lease that is about to be created, with the trust that its
        end or its events require.

        The trust is revoked if the lease is not created.

        :raises TrustUnavailable: see :meth:`required`
        :raises CloudUnavailable: see :meth:`required`
        """
        request = new.request
        trust = self.required(context, request.on_end, new.span.end) if (
            needs_one(request.on_end, request.actions)) else None
        with self.unless_reserved(trust):
            yield self.with_trust(new, trust)

    @contextlib.contextmanager
    def during_admission(self, context: ty.Any, request: requests.LeaseRequest,
                         offered: bool = False, acts: bool = False,
                         ) -> ty.Iterator[ty.Callable[[new_leases.NewLease],
                                                      new_leases.NewLease]]:
        """Create the trust of a lease of the lease API during the search for
        capacity.

        :param offered: whether a trust that the lease does not require is
            created only when the offer is accepted
        :param acts: see :meth:`acts_for_owner`
        :returns: a function that adds the trust to the new lease
        """
        takes_one = acts or needs_one(request.on_end, request.actions)
        # As long as the lease may take, of which not all is known yet.
        until = request.window.end + request.grace_period + (
            60 * self._options.cleaning_time) + (
            0 if request.duration is None else request.patience or 0)

        def make() -> str | None:
            if takes_one:
                return self.required(context, request.on_end, until, acts)
            return self.optional(context, request.on_end, until,
                                 f'A new lease of user {context.user_id}')

        if offered and not takes_one:
            yield lambda new: new
            return
        with self.in_background(make) as made:
            yield lambda new: self.with_trust(new, made())

    @contextlib.contextmanager
    def in_background(self, make: ty.Callable[[], str | None],
                      ) -> ty.Iterator[ty.Callable[[], str | None]]:
        """Create a trust in another thread while the block runs.

        It is revoked if the block fails.

        :returns: a function that waits for the trust, and raises what ``make``
            raises
        """
        made = self._threads.start(make)

        def undo() -> None:
            if made.exception() is None:
                self.revoke(made.result())

        with _unless_reserved(functools.partial(self._threads.later, undo),
                              _EXPIRES):
            yield made.result

    def with_trust(self, new: new_leases.NewLease, trust: str | None,
                   ) -> new_leases.NewLease:
        """Return a new lease with the encrypted trust, if there is one."""
        return new if trust is None else dataclasses.replace(
            new, credential=self.encrypt(trust))

    def acts_for_owner(self, names: ty.Iterable[ty.Any]) -> bool:
        """Return whether a resource type acts for the owner of its leases."""
        return any(self._types.named[name].acts_for_owner for name in names
                   if isinstance(name, str) and name in self._types.named)

    # -- those of leases -----------------------------------------------------

    def has_one(self, lease_id: str) -> bool:
        """Return whether a lease has a trust, which only a trust may replace.
        """
        kept = self._current(lease_id)
        return kept is not None and service_user.ServiceUser.read(kept) is None

    def lasts_for_build(self, lease_id: str, start: int) -> bool:
        """Return whether the credential of a lease, if it has one, is valid
        until its servers are built.

        :param start: when the lease starts
        :raises CloudUnavailable: if keystone does not answer
        """
        kept = self._current(lease_id)
        return kept is None or self._trusts.valid_until(kept) > (
            start + self._options.start_timeout)

    def add_to(self, context: ty.Any, lease: dict[str, ty.Any]) -> None:
        """Give a lease a trust by which it ends in the name of its owner, if
        possible.

        Nothing is raised: the lease is reserved, and its build may have been
        sent. Without a trust the service user deletes its servers, unless the
        owner extends the lease, which creates a trust.

        :param context: of a request of the owner
        :param lease: as it was created and recorded
        """
        trust = self._of(context, lease)
        if trust is not None:
            self.store(lease, trust)

    def _of(self, context: ty.Any, lease: dict[str, ty.Any]) -> str | None:
        return self.optional(
            context, lease['on_end'], lease['end_date'] +
            lease['grace_period'], f'Lease {lease["id"]}')

    @contextlib.contextmanager
    def of_offer(self, context: ty.Any, lease: dict[str, ty.Any],
                 ) -> ty.Iterator['NewTrusts']:
        """Return the trust of an offer that its owner accepts, to be stored in
        the transaction that accepts it.

        :param context: of a request of the owner
        :param lease: the offer
        """
        trust = self._of(context, lease)
        with self.unless_reserved(trust):
            yield self.to_store({} if trust is None else {lease['id']: trust})

    def to_store(self, given: ty.Mapping[str, str],
                 also: ty.Callable[[orm.Session], None] | None = None,
                 ) -> 'NewTrusts':
        """Return trusts that are stored with the change of their leases.

        :param given: the trusts, by lease
        :param also: writes other changes in the same transaction
        """
        return NewTrusts({
            lease_id: self.encrypt(trust) for lease_id, trust in given.items()
        }, self._stored.put, lambda lease_id, replaced: self._threads.later(
            functools.partial(self.revoke_replaced, lease_id, [replaced])),
            also)

    def store(self, lease: dict[str, ty.Any], trust: str) -> None:
        """Store the trust of a lease, and revoke those that it replaces and
        that are not in use.

        Failures are logged, as the lease exists in any case. If it is unknown
        whether the lease has the trust, it is kept until it expires.
        """
        try:
            self.revoke_replaced(lease['id'], self._stored.store(
                lease['id'], self.encrypt(trust)))
        except errors.NotFound:
            self.revoke(trust)
        except Exception:
            LOG.exception('Lease %s: storing its trust failed', lease['id'])

    # -- revocation ----------------------------------------------------------

    @contextlib.contextmanager
    def unless_reserved(self, trust: str | None) -> ty.Iterator[None]:
        """Revoke a trust if the block fails to reserve the lease that needs
        it.

        A trust is kept if a lease may have it, which could not start
        otherwise.
        """
        with _unless_reserved(functools.partial(self.revoke, trust), _EXPIRES):
            yield

    def revoke_replaced(self, lease_id: str, encrypted: ty.Iterable[str],
                        ) -> None:
        """Revoke encrypted trusts that a lease had before; failures are
        logged.
        """
        for one in encrypted:
            try:
                self.revoke(self._secrets.decrypt(one))
            except errors.DecryptionError as exc:
                LOG.warning('Lease %s: a trust that was replaced is not '
                            'revoked: %s', lease_id, exc)

    def revoke(self, trust: str | None) -> None:
        """Revoke a trust that no lease has; failures are logged."""
        try:
            if trust is not None:
                self._trusts.revoke(trust)
        except Exception:
            LOG.exception('A trust that no lease has could not be deleted; it '
                          'expires by itself')


class NewTrusts:
    """Trusts that are stored in the transaction that changes their leases, so
    that a process that dies leaves no lease with a trust that expires before
    its end.

    :param encrypted: by lease
    :param put: see :meth:`.credentials.Credentials.put`
    :param revoke: revokes an encrypted trust of a lease, in the background
    :param also: writes other changes in the same transaction
    """

    def __init__(self, encrypted: ty.Mapping[str, str],
                 put: ty.Callable[[orm.Session, models.Lease, str], list[str]],
                 revoke: ty.Callable[[str, str], None],
                 also: ty.Callable[[orm.Session], None] | None) -> None:
        self._encrypted = encrypted
        self._put = put
        self._revoke = revoke
        self._also = also
        #: With the ids of their leases.
        self._unused = [*encrypted.items()]

    def write(self, session: orm.Session) -> None:
        """Store the trusts of leases that are locked."""
        self._unused = [
            (lease_id, one) for lease_id, encrypted in self._encrypted.items()
            for one in self._put(
                session, api.found(session, lease_id), encrypted)]
        if self._also is not None:
            self._also(session)

    def revoke_unused(self) -> None:
        """Revoke the replaced trusts that are not in use, in the background.
        They would expire at the previous end of their lease. If nothing was
        written, revoke the new ones.
        """
        for lease_id, encrypted in self._unused:
            self._revoke(lease_id, encrypted)


@contextlib.contextmanager
def prepared(types: resource_types.ResourceTypes, context: ty.Any,
             new: new_leases.NewLease) -> ty.Iterator[new_leases.NewLease]:
    """Do what the token of a request is needed for before a lease is created.

    It is undone if the lease is not created.

    :raises InvalidLeaseParams: see :meth:`.ResourceType.prepare`
    :raises CloudUnavailable: see there
    """
    with contextlib.ExitStack() as undone:
        ready = []
        for one in new.reservations:
            kind = types.named.get(one.resource_type)
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


def needs_one(on_end: str, actions: ty.Collection[str] = ()) -> bool:
    """Return whether an end policy or event actions require a trust."""
    return states.Action.SNAPSHOT in actions or end_policies.needs_owner(
        on_end, extensions.installed_policies())


def _withdraw(kind: resource_types.ResourceType, *args: ty.Any) -> None:
    try:
        kind.withdraw(*args)
    except Exception:
        LOG.exception('What was prepared for a lease that is not created is '
                      'left')


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
