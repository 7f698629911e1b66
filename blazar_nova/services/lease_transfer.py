# SPDX-License-Identifier: Apache-2.0


"""Handing leases over to other projects and users."""

import dataclasses
import typing as ty

from oslo_log import log as logging
from oslo_utils import excutils

from blazar_core.common import errors
from blazar_core.common import inputs
from blazar_core.common import states
from blazar_core.leases import limits
from blazar_core.leases import transfer
from blazar_core.leases import updates
from blazar_nova.services import lease_changes
from blazar_nova.services import lease_trusts
from blazar_nova.services import limit_requests
from blazar_nova.services import notifications
from blazar_nova.services import wiring

__all__ = ['LeaseTransfer', 'is_asked']

LOG = logging.getLogger(__name__)

_KEYS = ('project_id', 'user_id')
#: Characters that an id of keystone has at most.
_LONGEST = 64


def is_asked(body: object) -> bool:
    """Whether a change of a lease names a new owner."""
    return isinstance(body, dict) and any(
        body.get(key) is not None for key in _KEYS)


class LeaseTransfer:
    """Hands leases over; the caller has checked the policy."""

    def __init__(self, parts: wiring.Parts) -> None:
        self._parts = parts

    def make(self, context: ty.Any, body: object, lease_id: str,
             ) -> dict[str, ty.Any]:
        """Give a lease to whom the body of a request says; it is told.

        :returns: the lease as it is then
        :raises InvalidLeaseParams: with the sentence that the user reads
        :raises Conflict: when that cannot be done with it as it is
        :raises LimitExceeded: when the new owner may not have that much
        """
        values = inputs.json_object(body, 'The body of the request')
        others = sorted(values.keys() - {*_KEYS})
        if others:
            raise errors.InvalidLeaseParams(
                f'A lease that is handed over is not changed besides. Leave '
                f'"{inputs.shown(others[0])}" out, and write it in another '
                f'request.')
        looked = self._parts.leases.transfer.look(lease_id)
        before = looked.owner
        owner = dataclasses.replace(before, **{
            key: inputs.text(value, key, _LONGEST)
            for key, value in values.items()})
        if owner == before:
            return looked.described
        self._parts.identity.check_exist(
            {owner.project_id} - {before.project_id},
            {owner.user_id} - {before.user_id})
        if owner.project_id != before.project_id:
            self._check_hosts(looked)
        # Servers that were asked for stay their user's, in whose name they
        # are built.
        keep = looked.build and owner.project_id == before.project_id
        trust = None if keep else self._trust(context, looked, owner)
        keeping = lease_trusts.Keeping(
            self._parts, {} if trust is None else {lease_id: trust}, None)
        with lease_trusts.unless_reserved(self._parts, trust):
            granted = self._granted(looked, owner)
            lease, sealed = self._parts.leases.transfer.transfer(
                lease_id, looked.generation, owner, granted, keep,
                also=keeping.write)
        if owner.project_id != before.project_id:
            self._check_again(looked, before, trust)
        self._after(lease, before, sealed)
        return lease

    def _check_again(self, looked: transfer.OwnerLookup,
                     before: transfer.Owner, trust: str | None) -> None:
        """Give a lease back onto whose hosts a server came at that moment:
        no booking shows it. From now on no server of the project before is
        let in.

        :raises Conflict: when a server has come
        """
        try:
            self._check_hosts(looked)
        except errors.CloudUnavailable as exc:
            LOG.warning('Lease %s: Nova does not say what is on its hosts: %s',
                        looked.described['id'], exc)
        except errors.Conflict:
            with excutils.save_and_reraise_exception():
                own = self._parts.leases.transfer
                own.transfer(
                    looked.described['id'],
                    own.look(looked.described['id']).generation, before, None,
                    False, back=True)
                lease_trusts.take_back(self._parts, trust)

    def _after(self, lease: dict[str, ty.Any], before: transfer.Owner,
               sealed: ty.Iterable[str]) -> None:
        """A lease was handed over. What fails now does not change that."""
        LOG.info('Lease %s was handed over by project %s, user %s, to project '
                 '%s, user %s', lease['id'], before.project_id,
                 before.user_id, lease['project_id'], lease['user_id'])
        for one in sealed:
            try:
                lease_trusts.take_back(self._parts,
                                       self._parts.encryption.open(one))
            except errors.DecryptionError as exc:
                LOG.warning('Lease %s: the trust of its owner before is not '
                            'revoked: %s', lease['id'], exc)
        try:
            self._parts.orphans.forget(lease['id'])
        except errors.BlazarError as exc:
            LOG.warning('Lease %s: whether its owner exists is checked again '
                        'later: %s', lease['id'], exc)
        self._parts.notify('lease.update', lease | {
            'changed': ['project_id', 'user_id'],
            'reason': notifications.Reason.TRANSFERRED})

    def _check_hosts(self, looked: transfer.OwnerLookup) -> None:
        """Whether no servers are on the hosts of a lease that have no
        bookings.
        """
        count = sum(len(kind.servers_of(reserved))
                    for kind, reserved in looked.hosts)
        if count:
            raise errors.Conflict(transfer.occupied(
                looked.described['id'], count))

    def _trust(self, context: ty.Any, looked: transfer.OwnerLookup,
               owner: transfer.Owner) -> str | None:
        """The trust that a lease needs then.

        :returns: None when it needs none
        :raises Conflict: when it needs one that cannot be had; says what to do
        """
        lease = looked.described
        actions = lease_changes.actions_of(lease)
        if not lease_trusts.needs_one(lease['on_end'], actions) or (
                not self._parts.trusts.is_configured()):
            return None
        images = ', and images' if states.Action.SNAPSHOT in actions else ''
        if not lease_changes.is_owner(context, dataclasses.asdict(owner)):
            raise errors.Conflict(
                f'What happens at the end of lease {lease["id"]}, or at '
                f'its events, is done in the name of its user '
                f'("{lease["on_end"]}"{images}): no other user can give the '
                f'trust that takes. Change "on_end" to "delete", and '
                f'every "snapshot" of its events to "notify", first; the new '
                f'user may change that back.')
        return lease_trusts.needed(
            self._parts, context, lease['on_end'],
            lease['end_date'] + lease['grace_period'])

    def _granted(self, looked: transfer.OwnerLookup, owner: transfer.Owner,
                 ) -> limits.Granted | None:
        """Ask the limits of the new owner.

        For another project it is a new lease; for another user, a change.
        """
        lease, parts = looked.described, self._parts
        stays = owner.project_id == looked.owner.project_id
        new = limit_requests.as_changed(
            {**lease, **dataclasses.asdict(owner)}, updates.LeaseChange())
        asked = limit_requests.asked_of(new, False, parts.types)
        return parts.limits.check(asked if not stays else dataclasses.replace(
            asked, lease_id=lease['id'], resized=False,
            current=parts.answers.lease(lease)))
