# SPDX-License-Identifier: Apache-2.0

"""What Nova's api-paste.ini loads in the place of Nova's own application.

Under ``[app:osapi_compute_app_v21]`` an operator writes::

    paste.app_factory = blazar_nova.api.app:factory

It is Nova's own application, built by Nova's own code; within it, behind
Nova's router, stands the middleware that reads the hints, and behind that what
holds the builds.
"""

from blazar_nova.compat import require_seams  # noqa: F401  (first of all)

import typing as ty

from oslo_log import log as logging

from blazar_nova.api import defaulting
from blazar_nova.api import held
from blazar_nova.api import lease_params
from blazar_nova.api import middleware
from blazar_nova.api import telling
from blazar_nova.compat import checks
from blazar_nova.compat import editing
from blazar_nova.compat import hold
from blazar_nova.compat import listing
from blazar_nova.compat import router
from blazar_nova.compat import service
from blazar_nova.compat import shown
from blazar_nova.parts import wiring

__all__ = ['factory']

LOG = logging.getLogger(__name__)


def factory(global_config: ty.Any, **local_config: ty.Any) -> ty.Any:
    """Make the application; paste calls this once for each API version.

    :raises ConfigurationError: when this Nova or its configuration is not
        as it has to be; it says which line to write
    """
    checks.refuse('nova-api', checks.nova_api() + listing.problems())
    listing.install()
    parts = wiring.shared()
    shown.install(telling.Telling(parts.leases.servers, parts.clock))
    editing.install()
    lease_params.check_defaults(
        lease_params.defaults(service.CONF), parts.clock.now())
    defaulting.check(service.CONF)
    for doubt in defaulting.doubts(service.CONF):
        LOG.warning('%s', doubt)
    admit = held.Admission(parts)
    with hold.intercepting(admit):
        app = router.build(global_config, **local_config)
    checks.refuse('nova-api', checks.scheduler(service.CONF) +
                  checks.notifications(service.CONF) + checks.router(app))
    LOG.info('Leases are on')
    router.wrap(app, lambda inner: middleware.LeaseMiddleware(inner, parts))
    return app
