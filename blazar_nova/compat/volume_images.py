# SPDX-License-Identifier: Apache-2.0

"""Images of servers that have volumes: Nova has cinder create a snapshot of
each volume, and then glance an image that names them.

Nova leaves the snapshots if there is no image in the end. As ends of leases
are repeated, that would be a snapshot for each attempt, until the user's quota
is used up.
"""

import time
import typing as ty

from nova.compute import api as compute_api
from nova.image import glance
from nova.volume import cinder
from oslo_log import log as logging

LOG = logging.getLogger(__name__)

#: Seconds for which cinder may still be creating a snapshot that is to be
#: deleted, and seconds between two looks at it.
_CREATING, _PAUSE = 30, 2


class _Recorded:
    """A client of Nova that records the calls of one of its functions.

    :ivar asked: whether it was called
    :ivar made: what it has returned
    """

    def __init__(self, client: ty.Any, name: str) -> None:
        self._client, self._name = client, name
        self.asked, self.made = False, list[ty.Any]()

    def __getattr__(self, name: str) -> ty.Any:
        real = getattr(self._client, name)
        return self._calling(real) if name == self._name else real

    def _calling(self, real: ty.Callable[..., ty.Any],
                 ) -> ty.Callable[..., ty.Any]:
        def call(*args: ty.Any, **kwargs: ty.Any) -> ty.Any:
            self.asked = True
            self.made.append(real(*args, **kwargs))
            return self.made[-1]

        return call


class VolumeImage:
    """One attempt to create an image of a server with volumes."""

    def __init__(self) -> None:
        self._volumes = _Recorded(cinder.API(), 'create_snapshot_force')
        self._images = _Recorded(glance.API(), 'create')

    def create(self, context: ty.Any, instance: ty.Any, name: str,
               extra_properties: ty.Mapping[str, str]) -> None:
        """Ask Nova for an image."""
        compute_api.API(
            image_api=self._images, volume_api=self._volumes,
        ).snapshot_volume_backed(
            context, instance, name, extra_properties=extra_properties)

    @property
    def asked(self) -> bool:
        """Whether glance was asked for the image."""
        return self._images.asked

    def undo(self, context: ty.Any) -> None:
        """Delete the snapshots of an image that surely does not exist."""
        for snapshot_id in [one['id'] for one in self._volumes.made]:
            LOG.info('Snapshot %s of an image that could not be created is '
                     'deleted', snapshot_id)
            try:
                self._wait(context, snapshot_id)
                self._volumes.delete_snapshot(context, snapshot_id)
            except Exception as exc:
                LOG.warning('Snapshot %s remains: %s', snapshot_id, exc)

    def _wait(self, context: ty.Any, snapshot_id: str) -> None:
        """Wait until cinder has created a snapshot, and can delete it."""
        until = time.monotonic() + _CREATING
        while time.monotonic() < until and self._volumes.get_snapshot(
                context, snapshot_id)['status'] == 'creating':
            time.sleep(_PAUSE)
