# SPDX-License-Identifier: Apache-2.0

"""The application that api-paste.ini loads in place of Nova's own.

Under ``[app:osapi_compute_app_v21]`` an operator writes::

    paste.app_factory = blazar_nova.api.app:factory

It is Nova's own application, built by Nova's code, with two additions: a
middleware behind Nova's router that reads the hints, and the interception of
the build calls.
"""

from blazar_nova.compat import require_seams  # noqa: F401  (first of all)

import typing as ty

from oslo_log import log as logging

from blazar_nova.api import assembly
from blazar_nova.api import boots
from blazar_nova.api import middleware
from blazar_nova.compat import build_calls
from blazar_nova.compat import configuration_checks
from blazar_nova.compat import nova_router
from blazar_nova.compat import process
from blazar_nova.compat import reserved_edits
from blazar_nova.compat import reserved_state
from blazar_nova.compat import reserved_view
from blazar_nova.compat import server_lists
from blazar_nova.schemas import hint_params
from blazar_nova.services import default_leases
from blazar_nova.services import server_messages
from blazar_nova.services import wiring

LOG = logging.getLogger(__name__)


def factory(global_config: ty.Any, **local_config: ty.Any) -> ty.Any:
    """Create the application; paste calls this once for each API version.

    :raises ConfigurationError: if this release of Nova or its configuration
        is not as required; names the line to write
    """
    configuration_checks.refuse('nova-api', [
        *configuration_checks.reserved_status(reserved_state.install()),
        *server_lists.problems()])
    server_lists.install()
    services = assembly.ApiServices(wiring.shared())
    reserved_view.install(server_messages.ServerMessages(
        services.parts.leases.lookup, services.parts.clock,
        services.interruptible.metadata))
    reserved_edits.install()
    hint_params.check_defaults(services.defaults, services.parts.clock.now())
    default_leases.check(process.CONF)
    for doubt in default_leases.doubts(process.CONF):
        LOG.warning('%s', doubt)
    with build_calls.intercepting(boots.BootHandler(services)):
        app = nova_router.build(global_config, **local_config)
    configuration_checks.refuse('nova-api', [
        *configuration_checks.scheduler(process.CONF),
        *configuration_checks.notifications(process.CONF),
        *configuration_checks.router(app)])
    LOG.info('Leases are on')
    nova_router.wrap(
        app, lambda inner: middleware.LeaseMiddleware(inner, services))
    return app
