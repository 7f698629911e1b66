# SPDX-License-Identifier: Apache-2.0

"""A cinder driver whose volumes are only rows, in pools of a finite size."""

from cinder.tests import fake_driver

_GIGABYTES = 2000


class Driver(fake_driver.FakeLoggingVolumeDriver):  # type: ignore[misc]
    """Reports the backend name of its configuration."""

    def _update_volume_stats(self) -> None:
        super()._update_volume_stats()
        name = self.configuration.safe_get('volume_backend_name')
        self._stats['volume_backend_name'] = name
        self._stats['pools'][0] |= {
            'pool_name': name, 'volume_backend_name': name,
            'total_capacity_gb': _GIGABYTES, 'free_capacity_gb': _GIGABYTES,
            'reserved_percentage': 0}
