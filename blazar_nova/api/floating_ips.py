# SPDX-License-Identifier: Apache-2.0
"""Lease API for the addresses that leases may reserve."""

import webob

from blazar_nova.api import assembly
from blazar_nova.resource_types import inputs
from blazar_nova.schemas import floating_ip_schema
from blazar_nova.schemas import web_requests


class FloatingIPController:
    """Request handlers, behind the authentication."""

    def __init__(self, services: assembly.ApiServices) -> None:
        self._authorize = services.policy.authorizer('blazar:floatingips')
        self._addresses = services.address_enrollment

    def index(self, request: webob.Request) -> web_requests.Answer:
        self._authorize(web_requests.context(request), 'get')
        inputs.check_keys(web_requests.query(request), {}, 'the query')
        return 200, {'floatingips': self._addresses.listed()}

    def create(self, request: webob.Request) -> web_requests.Answer:
        self._authorize(web_requests.context(request), 'post')
        network_id, address = floating_ip_schema.create(
            web_requests.body(request, floating_ip_schema.EXAMPLE))
        return 201, {'floatingip': self._addresses.add(network_id, address)}

    def show(self, request: webob.Request,
             address_id: str) -> web_requests.Answer:
        self._authorize(web_requests.context(request), 'get')
        return 200, {'floatingip': self._addresses.show(address_id)}

    def delete(self, request: webob.Request,
               address_id: str) -> web_requests.Answer:
        self._authorize(web_requests.context(request), 'delete')
        self._addresses.remove(address_id)
        return 204, None
