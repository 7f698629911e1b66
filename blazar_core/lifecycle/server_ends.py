# SPDX-License-Identifier: Apache-2.0

"""The end of one server: what its policy says, one step after the other.

Each time it is looked how far the server has come, so that it does not matter
which worker goes on.
"""

from oslo_log import log as logging

from blazar_core import cloud as clouds
from blazar_core.common import errors
from blazar_core.lifecycle import ends
from blazar_core.lifecycle import leaving
from blazar_core.lifecycle import observing
from blazar_core.lifecycle import steps

__all__ = ['ServerEnds']

LOG = logging.getLogger(__name__)


class ServerEnds:
    """Brings servers whose lease is over to their end."""

    def __init__(self, cloud: clouds.Cloud, observing: observing.Observing,
                 leaving: leaving.Leaving, policies: ends.Policies) -> None:
        self._cloud = cloud
        self._observing = observing
        self._leaving = leaving
        self._policies = policies

    def bring(self, ended: ends.Ended, its: ends.Steps) -> str | None:
        """Bring a server nearer to its end.

        One that does not come to its end keeps no other of its lease.

        :returns: why it has not come, as far as that is known; None: it has
        """
        try:
            return self._carry_out(ended, its)
        except (errors.CloudUnavailable, errors.NotDelegated) as exc:
            LOG.warning('Lease %s: server %s has not come to its end yet: %s',
                        ended.lease_id, ended.server_id, exc)
            return f'server {ended.server_id}: {exc}'
        except Exception:
            LOG.exception('Lease %s: server %s could not be brought to its '
                          'end', ended.lease_id, ended.server_id)
            return f'server {ended.server_id} failed; the log says why.'

    def _carry_out(self, ended: ends.Ended, its: ends.Steps) -> str | None:
        asked, last = None, [self._policies[ends.DELETE]]
        if its == last:
            # Also of one that seems to be gone something may be left.
            asked = self._ask(ended, its[0])
        for _step in range(len(its) + 1):
            seen = self._cloud.look(ended.server_id)
            self._observing.observe(ended.server_id, seen)
            if asked is None and its != last and not its[-1].for_guests and (
                    seen.state is not clouds.ServerState.RUNNING):
                # There is nothing to be kept.
                return self._carry_out(ended, last)
            if seen.busy and its != last:
                # It may come to be elsewhere by that.
                return ''
            todo = ends.next_of(its, self._cloud, ended, seen)
            if todo is None:
                return self._leave(ended, its, seen)
            if todo is asked:
                return ''
            try:
                asked = self._ask(ended, todo)
            except errors.Forbidden as exc:
                LOG.info('Lease %s: server %s is deleted: %s',
                         ended.lease_id, ended.server_id, exc)
                return self._carry_out(ended, last)
        return ''

    def _ask(self, ended: ends.Ended, policy: ends.EndPolicy,
             ) -> ends.EndPolicy:
        policy.ask(self._cloud, ended)
        steps.reached(steps.Step.END_DELETED, ended.lease_id)
        return policy

    def _leave(self, ended: ends.Ended, its: ends.Steps, seen: clouds.Seen,
               ) -> str | None:
        """All is done to a server: its lease has nothing to do with it any
        more, if it is there.
        """
        if seen.state is clouds.ServerState.GONE:
            return None
        self._cloud.release(ended.server_id)
        if self._leaving.let_go(
                ended.lease_id, ended.server_id, seen.host is not None):
            return None
        moving = ends.moving(its, self._policies)
        if its == moving:
            return ''
        LOG.info('Lease %s: there is no capacity for server %s on its host '
                 'for ever', ended.lease_id, ended.server_id)
        return self._carry_out(ended, moving)
