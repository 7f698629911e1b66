# SPDX-License-Identifier: Apache-2.0


"""Transfer of leases to other projects and users."""

import dataclasses
import typing as ty

from oslo_log import log as logging
from oslo_utils import excutils

from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.leases import limits
from blazar_core.leases import transfer
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.lifecycle import orphans
from blazar_nova.resource_types import inputs
from blazar_nova.services import lease_changes
from blazar_nova.services import lease_trusts
from blazar_nova.services import limit_requests
from blazar_nova.services import notifications

LOG = logging.getLogger(__name__)

_KEYS = ('project_id', 'user_id')
#: Maximum length of an id of keystone.
_LONGEST = 64


def is_asked(body: object) -> bool:
    """Return whether an update of a lease names a new owner."""
    return isinstance(body, dict) and any(
        body.get(key) is not None for key in _KEYS)


class LeaseTransfer:
    """Transfers leases; the caller has checked the policy.

    :param check_exist: refuses ids of projects and users that do not exist
    :param owners: which of them no longer exist
    """

    def __init__(self, transfers: transfer.Transfer,
                 limit_checks: limit_requests.LimitRequests,
                 trusts: lease_trusts.LeaseTrusts,
                 check_exist: ty.Callable[
                     [ty.Collection[str], ty.Collection[str]], None],
                 owners: orphans.Orphans, notify: views.Notify) -> None:
        self._transfer = transfers
        self._limits = limit_checks
        self._trusts = trusts
        self._check_exist = check_exist
        self._owners = owners
        self._notify = notify

    def make(self, context: ty.Any, body: object, lease_id: str,
             ) -> dict[str, ty.Any]:
        """Transfer a lease as the body of a request says, and send a
        notification.

        :returns: the lease with its new owner
        :raises InvalidLeaseParams: with the message for the user
        :raises Conflict: if the lease cannot be transferred in this state
        :raises LimitExceeded: if it exceeds the limits of the new owner
        """
        values = inputs.json_object(body, 'The body of the request')
        others = sorted(values.keys() - {*_KEYS})
        if others:
            raise errors.InvalidLeaseParams(
                f'A lease that is handed over is not changed besides. Leave '
                f'"{words.shown(others[0])}" out, and write it in another '
                f'request.')
        looked = self._transfer.look(lease_id)
        before = looked.owner
        owner = dataclasses.replace(before, **{
            key: inputs.text(value, key, _LONGEST)
            for key, value in values.items()})
        if owner == before:
            return looked.described
        if self._trusts.acts_for_owner(
                one['resource_type']
                for one in looked.described['reservations']):
            raise errors.InvalidLeaseParams(
                f'Lease {lease_id} has a stack, which belongs to its user and '
                'cannot be handed over.')
        self._check_exist(
            {owner.project_id} - {before.project_id},
            {owner.user_id} - {before.user_id})
        if owner.project_id != before.project_id:
            self._check_hosts(looked)
        # Servers that were booted stay their user's, in whose name they are
        # built.
        keep = looked.build and owner.project_id == before.project_id
        trust = None if keep else self._trust(context, looked, owner)
        trusts = self._trusts.to_store(
            {} if trust is None else {lease_id: trust})
        with self._trusts.unless_reserved(trust):
            granted = self._granted(looked, owner)
            lease, encrypted = self._transfer.transfer(
                lease_id, looked.generation, owner, granted, keep,
                also=trusts.write)
        if owner.project_id != before.project_id:
            self._check_again(looked, before, trust)
        self._after(lease, before, encrypted)
        return lease

    def _check_again(self, looked: transfer.OwnerLookup,
                     before: transfer.Owner, trust: str | None) -> None:
        """Undo a transfer if a server was placed on the hosts of the lease
        during it, which no booking shows. From the transfer on, no server of
        the previous project is admitted.

        :raises Conflict: if there is such a server
        """
        try:
            self._check_hosts(looked)
        except errors.CloudUnavailable as exc:
            LOG.warning('Lease %s: Nova does not say what is on its hosts: %s',
                        looked.described['id'], exc)
        except errors.Conflict:
            with excutils.save_and_reraise_exception():
                lease_id = looked.described['id']
                self._transfer.transfer(
                    lease_id, self._transfer.look(lease_id).generation, before,
                    None, False, back=True)
                self._trusts.revoke(trust)

    def _after(self, lease: dict[str, ty.Any], before: transfer.Owner,
               encrypted: ty.Iterable[str]) -> None:
        """Complete a transfer. Failures do not undo it."""
        LOG.info('Lease %s was handed over by project %s, user %s, to project '
                 '%s, user %s', lease['id'], before.project_id,
                 before.user_id, lease['project_id'], lease['user_id'])
        self._trusts.revoke_replaced(lease['id'], encrypted)
        try:
            self._owners.forget(lease['id'])
        except errors.BlazarError as exc:
            LOG.warning('Lease %s: whether its owner exists is checked again '
                        'later: %s', lease['id'], exc)
        self._notify('lease.update', lease | {
            'changed': ['project_id', 'user_id'],
            'reason': notifications.Reason.TRANSFERRED})

    def _check_hosts(self, looked: transfer.OwnerLookup) -> None:
        """Check that the hosts of a lease have no servers without bookings.

        :raises Conflict: if they have
        """
        count = sum(len(kind.servers_of(reserved))
                    for kind, reserved in looked.hosts)
        if count:
            raise errors.Conflict(transfer.occupied(
                looked.described['id'], count),
                errors.ConflictReason.IN_USE)

    def _trust(self, context: ty.Any, looked: transfer.OwnerLookup,
               owner: transfer.Owner) -> str | None:
        """Return the trust that the new owner's lease needs; None: none.

        :raises Conflict: if the required trust cannot be created; says what
            to do
        """
        lease = looked.described
        actions = lease_changes.actions_of(lease)
        if not lease_trusts.needs_one(lease['on_end'], actions) or (
                not self._trusts.is_configured()):
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
        return self._trusts.required(
            context, lease['on_end'],
            lease['end_date'] + lease['grace_period'])

    def _granted(self, looked: transfer.OwnerLookup, owner: transfer.Owner,
                 ) -> limits.Granted | None:
        """Check the limits of the new owner.

        For another project the lease counts as new; for another user, as
        changed.
        """
        lease = looked.described
        stays = owner.project_id == looked.owner.project_id
        asked = self._limits.asked_of(limit_requests.as_changed(
            {**lease, **dataclasses.asdict(owner)}, updates.LeaseChange()),
            False)
        return self._limits.check(asked if not stays else dataclasses.replace(
            asked, lease_id=lease['id'], resized=False,
            current=self._limits.describe(lease)))
