# SPDX-License-Identifier: Apache-2.0

"""Create images of running servers at an event of their lease."""

import typing as ty

from oslo_log import log as logging

from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.lifecycle import lease_close
from blazar_core.lifecycle import lease_conditions
from blazar_core.lifecycle import lease_status
from blazar_core.lifecycle import retries
from blazar_core.plugins import cloud_api
from blazar_core.plugins import resource_types

LOG = logging.getLogger(__name__)


class _Event(ty.NamedTuple):
    """An event at which images are created.

    :ivar credential: of the owner of its lease
    """

    id: str
    event_type: str
    time: int
    lease_id: str
    lease_name: str
    credential: str | None

    @property
    def key(self) -> str:
        """The key of its images; another one if the event was moved."""
        return f'{self.id}@{self.time}'

    @property
    def label(self) -> str:
        """The part of image names that differs from those of other events."""
        return f'{self.event_type}-{clocks.iso(self.time)[:16]}'


class EventSnapshots:
    """Has images created of servers that continue to run.

    Includes servers that run, or can be started on their host. Servers that
    wait for their build, could not be built, are shelved or deleted are left
    out.
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 cloud: cloud_api.Cloud, closer: lease_close.LeaseClose,
                 types: resource_types.ResourceTypes) -> None:
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._closer = closer
        self._types = types

    def create_images(self, lease_id: str, event_id: str) -> retries.Result:
        """Create one image of each server of a lease for an event. Safe to
        repeat; done when the images can be used.

        :raises NotFound: when the event no longer exists
        """
        credential = self._closer.credential(lease_id)
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            row = session.get(models.Event, event_id)
            if row is None:
                raise errors.NotFound(f'Event {event_id} is no longer needed.')
            event = _Event(event_id, row.event_type, row.time, lease_id,
                           lease.name, credential)
            if event.time >= lease.end_date:
                # The lease was shortened: nothing is left to do.
                return None
            servers = lease_status.servers(lease)
            parts = self._types.reserved(session, lease)
        try:
            for kind, reserved in parts:
                servers += kind.hosted_servers(reserved)
        except errors.CloudUnavailable as exc:
            return self._again(event, [str(exc)])
        waiting = []
        for server_id in dict.fromkeys(servers):
            if self._is_over(lease_id):
                return retries.Failed('the lease has already ended')
            why = self._create_image(event, server_id)
            if why is not None:
                waiting.append(why)
        if self._is_over(lease_id):
            return retries.Failed('the lease has already ended')
        return self._again(event, waiting)

    def _again(self, event: _Event, waiting: list[str]) -> retries.Result:
        """Return whether to look again, and record in the lease why.

        :param waiting: for each server without an image, why it has none, if
            that is known
        """
        why = next(filter(None, waiting), '')
        self._explain(event.lease_id, event.event_type, why)
        if not waiting:
            return None
        return retries.RetryAfter(
            retries.AGAIN, 'not complete yet: '
            f'{words.count(len(waiting), "image")}. {why}',
            retries.LONGEST_PAUSE)

    def _is_over(self, lease_id: str) -> bool:
        """Return whether the lease is ending by now."""
        with self._database.reader() as session:
            return _is_ending(api.found(session, lease_id))

    def _create_image(self, event: _Event, server_id: str) -> str | None:
        """Carry out the next step towards the image of a server.

        A failure does not keep other servers of the lease from theirs.

        :returns: why there is no image, as far as that is known; None: there
            is one, or none is wanted
        """
        try:
            return self._ask(event, server_id)
        except errors.DatabaseUnavailable:
            raise
        except errors.Forbidden as exc:
            LOG.info('Lease %s: no image is created of server %s: %s',
                     event.lease_id, server_id, exc)
            return None
        except (errors.CloudUnavailable, errors.TrustUnavailable) as exc:
            LOG.warning('Lease %s: the image of server %s does not exist yet: '
                        '%s',
                        event.lease_id, server_id, exc)
            return f'server {server_id}: {exc}'
        except Exception:
            LOG.exception('Lease %s: creating the image of server %s failed',
                          event.lease_id, server_id)
            return f'server {server_id} failed; see the log.'

    def _ask(self, event: _Event, server_id: str) -> str | None:
        seen = self._cloud.look(server_id)
        if seen.state is cloud_api.ServerState.BUILDING:
            return ''
        if seen.state is not cloud_api.ServerState.RUNNING or (
                seen.rest is cloud_api.RestingState.SHELVED and seen.host is
                None):
            return None
        if self._cloud.has_image(server_id, event.lease_id, event.credential,
                                 event.key):
            return None
        # Also if the server is busy: the task may have died.
        self._cloud.create_image(server_id, event.lease_id, event.lease_name,
                                 event.credential, event.key, event.label)
        return ''

    def _explain(self, lease_id: str, event_type: str, why: str) -> None:
        """Record in a lease why there is no image yet, or that there is;
        another event may have recorded a reason.
        """
        def changes(lease: models.Lease,
                    ) -> list[conditions.Condition | conditions.Type]:
            if _is_ending(lease):
                return []
            if why:
                return [lease_conditions.no_image(event_type, why)]
            said = conditions.find(
                lease.conditions, conditions.Type.SNAPSHOT_DELAYED)
            return [] if said is None or (
                said['details']['event_type'] != event_type) else [
                    conditions.Type.SNAPSHOT_DELAYED]

        lease_conditions.explain(
            self._database, self._clock, lease_id, changes)


def _is_ending(lease: models.Lease) -> bool:
    return lease.status in states.ENDING or lease.deleted_at is not None
