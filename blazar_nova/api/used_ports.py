# SPDX-License-Identifier: Apache-2.0

"""Adds to Nova's refusal of a boot until when a port or an address is in use.

Nova refuses a boot with a port or an address that another server has, even if
the boot's lease starts after that server is deleted, and cannot say when that
is.
"""

import typing as ty

from oslo_log import log as logging
from oslo_serialization import jsonutils
from oslo_utils import netutils
from oslo_utils import uuidutils
import webob

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.leases import lookup
from blazar_nova.api import guards
from blazar_nova.compat import server_ports

LOG = logging.getLogger(__name__)

#: Maximum number of ports and addresses of a boot that are looked up.
_MOST = 20
#: Nova's answers in this case: for an address, and for a port.
CODES = (400, 409)


def explain(known: lookup.Lookup, environ: dict[str, ty.Any],
            response: webob.Response) -> None:
    """Add to the refusal of a boot with a lease when the boot would succeed,
    if it uses ports or addresses of servers in other leases of its project.
    """
    context = environ['nova.context']
    ports, addresses = _asked(environ)
    # Each address is a request to neutron.
    if not 0 < len(ports) + len(addresses) <= _MOST:
        return
    try:
        found = [said for one in server_ports.in_use(context, ports, addresses)
                 if (said := _until(known, context.project_id, one))]
    except (errors.DatabaseUnavailable, errors.CloudUnavailable) as exc:
        LOG.info('Until when what a boot needs is in use is not known: %s',
                 exc)
        return
    if found:
        body = jsonutils.loads(response.body)
        fault, = body.values()
        fault['message'] = ' '.join([fault['message'], *found])
        response.body = jsonutils.dump_as_bytes(body)


def _asked(environ: dict[str, ty.Any],
           ) -> tuple[list[str], list[server_ports.Address]]:
    """Return the ports and addresses that a boot names; malformed ones are
    ignored, as Nova has refused the boot for them.
    """
    server = guards.body_of(environ).get('server')
    wanted = server.get('networks') if isinstance(server, dict) else None
    ports, addresses = [], []
    for one in wanted if isinstance(wanted, list) else ():
        match one:
            case {'port': str(port)} if uuidutils.is_uuid_like(port):
                ports.append(port)
            case {'uuid': str(network), 'fixed_ip': str(ip)} if (
                    netutils.is_valid_ip(ip)):
                addresses.append(server_ports.Address(network, ip))
    return [*dict.fromkeys(ports)], [*dict.fromkeys(addresses)]


def _until(known: lookup.Lookup, project_id: str, one: server_ports.InUse,
           ) -> str | None:
    lease = None if one.server_id is None else (
        known.lease_of(one.server_id))
    if lease is None or lease['project_id'] != project_id:
        return None
    end = clocks.minute(lease['end_date'] + (lease['grace_period'] or 0))
    return (f'{one} That server is in lease {lease["name"]} ({lease["id"]}) '
            f'until {end} UTC: boot after that, or detach it before.')
