# SPDX-License-Identifier: Apache-2.0
"""Lease API for the hosts that serve leases only."""

import typing as ty

import webob

from blazar_nova.api import assembly
from blazar_nova.schemas import host_schema
from blazar_nova.schemas import web_requests
from blazar_nova.services import host_enrollment


class HostController:
    """Request handlers, behind the authentication."""

    def __init__(self, services: assembly.ApiServices) -> None:
        self._policy = services.policy
        self._authorize = self._policy.authorizer('blazar:oshosts')
        self._power = services.parts.conf.blazar_power
        self._enrolling = services.parts.host_enrollment

    # -- hosts -------------------------------------------------------------

    def index(self, request: webob.Request) -> web_requests.Answer:
        may_show = self._policy.allows(
            web_requests.context(request), 'blazar:oshosts:get')
        if not may_show:
            self._authorize(web_requests.context(request), 'list')
        after, limit = host_schema.page(web_requests.query(request))
        found = self._enrolling.listed(
            after, None if limit is None else limit + 1, may_show)
        if not may_show:
            private = [name for name, one in
                       self._enrolling.properties().items() if one.private]
            found = [_public(host, private) for host in found]
        body: dict[str, ty.Any] = {
            'hosts': [self._shown(host) for host in found[:limit]]}
        if len(body['hosts']) < len(found):
            body['hosts_links'] = web_requests.next_page(
                request, body['hosts'][-1]['id'])
        return 200, body

    def create(self, request: webob.Request) -> web_requests.Answer:
        self._authorize(web_requests.context(request), 'post')
        name, extra = host_schema.create(
            web_requests.body(request, host_schema.EXAMPLE))
        return 201, {'host': self._shown(self._enrolling.add(
            name, extra, pause=host_enrollment.patient(
                host_enrollment.PATIENCE)))}

    def show(self, request: webob.Request,
             host_id: str) -> web_requests.Answer:
        self._authorize(web_requests.context(request), 'get')
        return 200, {'host': self._shown(self._enrolling.show(int(host_id)))}

    def update(self, request: webob.Request,
               host_id: str) -> web_requests.Answer:
        self._authorize(web_requests.context(request), 'put')
        extra, reservable = host_schema.change(
            web_requests.body(request, host_schema.CHANGE))
        return 200, {'host': self._shown(self._enrolling.change(
            int(host_id), extra, reservable))}

    def delete(self, request: webob.Request,
               host_id: str) -> web_requests.Answer:
        self._authorize(web_requests.context(request), 'delete')
        self._enrolling.remove(int(host_id))
        return 204, None

    # -- bookings ----------------------------------------------------------

    def allocations(self, request: webob.Request) -> web_requests.Answer:
        self._authorize(web_requests.context(request), 'get_allocations')
        return 200, {'allocations': self._enrolling.allocations(
            host_schema.allocations(web_requests.query(request)))}

    def allocation(self, request: webob.Request,
                   host_id: str) -> web_requests.Answer:
        self._authorize(web_requests.context(request), 'get_allocations')
        return 200, {'allocation': self._enrolling.allocation(int(
            host_id), host_schema.allocations(web_requests.query(request)))}

    # -- properties --------------------------------------------------------

    def properties(self, request: webob.Request) -> web_requests.Answer:
        self._authorize(web_requests.context(request),
                        'get_resource_properties')
        asked = host_schema.properties(web_requests.query(request))
        # Private properties are for users who may see the hosts.
        private = asked['all'] and self._policy.allows(
            web_requests.context(request), 'blazar:oshosts:get')
        return 200, {'resource_properties': [
            {'property': name, 'private': one.private,
             **({'values': one.values} if asked['detail'] else {})}
            for name, one in self._enrolling.properties().items()
            if private or not one.private]}

    def update_property(self, request: webob.Request, name: str,
                        ) -> web_requests.Answer:
        self._authorize(web_requests.context(request),
                        'update_resource_properties')
        private = host_schema.private(
            web_requests.body(request, host_schema.PRIVATE))
        self._enrolling.set_private(name, private)
        return 200, {'resource_property': {
            'id': name, 'property': name, 'property_name': name,
            'private': private, 'resource_type': 'physical:host',
            'created_at': None, 'updated_at': None}}

    def _shown(self, host: ty.Mapping[str, ty.Any]) -> dict[str, ty.Any]:
        """Return a host, without the keys of its power unless hosts are
        switched off and on in this cloud: Blazar's clients show unknown keys
        as extra capabilities.
        """
        return {key: value for key, value in host.items()
                if self._power.enabled or key not in host_schema.POWER}


def _public(host: ty.Mapping[str, ty.Any], private: ty.Collection[str],
            ) -> dict[str, ty.Any]:
    """Return a host for users who may not identify it."""
    return {**{key: value for key, value in host.items()
               if key not in private},
            'hypervisor_hostname': None, 'service_name': None,
            **dict.fromkeys(host_schema.POWER)}
