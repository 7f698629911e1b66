# SPDX-License-Identifier: Apache-2.0

"""openstacksdk: the lease API as a proxy, and boots with hints."""

import json
import time
import typing as ty

import openstack
from openstack import exceptions

from tests.integration import base
from tests.integration import test_lease_api as lease_api


class SdkTest(lease_api.LeaseApiTestCase):

    def setUp(self) -> None:
        super().setUp()
        env = self.cloud.env('demo')
        self.sdk = openstack.connect(**{
            name.removeprefix('OS_').lower(): value
            for name, value in env.items() if name.startswith('OS_') and
            name not in ('OS_COMPUTE_API_VERSION', 'OS_AUTH_TYPE')})
        self.addCleanup(self.sdk.close)

    def test_leases_by_sdk_proxy(self) -> None:
        """It has no resources of reservations, but knows the service."""
        proxy = self.sdk.reservation
        body = self.body(lease_api.days_ahead(1), name='sdk')
        made = proxy.post('/leases', json=body)
        self.assertEqual(201, made.status_code, made.text)
        path = f'/leases/{made.json()["lease"]["id"]}'
        changed = proxy.put(path, json={'name': 'new'})
        self.assertEqual('new', changed.json()['lease']['name'])
        self.assertIn('new', [one['name'] for one in proxy.get(
            '/leases').json()['leases']])
        self.assertEqual(changed.json(), proxy.get(path).json())
        refused = proxy.post('/leases', json={
            **body, 'reservations': [{**body['reservations'][0],
                                      'vcpus': 99}]})
        self.assertEqual(409, refused.status_code)
        self.assertIn('fits_now: 0', refused.json()['error_message'])
        self.assertEqual(204, proxy.delete(path).status_code)
        self.assertEqual(404, proxy.get(path).status_code)

    def create(self, start: str, **more: ty.Any) -> ty.Any:
        compute = self.sdk.compute
        return compute.create_server(
            name='sdk', image_id=self.image_id, networks='none',
            flavor_id=compute.find_flavor('m1.nano').id, scheduler_hints={
                'reserved': 'True', 'lease_params': json.dumps(
                    {'name': 'sdk', 'start': start, 'duration': '1h'})},
            **more)

    def test_server_with_lease_from_now_on(self) -> None:
        compute = self.sdk.compute
        server = compute.wait_for_server(
            self.create('now'), wait=base.PATIENCE)
        self.assertEqual('ACTIVE', server.status)
        compute.delete_server(server)
        compute.wait_for_delete(server, wait=base.PATIENCE)

    def test_server_with_lease_for_later(self) -> None:
        """It waits through RESERVED, until its timeout."""
        compute = self.sdk.compute
        server = self.create(base.date(time.time() + 20))
        self.assertEqual('RESERVED', compute.get_server(server).status)
        self.assertEqual(['sdk'], [
            one.name for one in compute.servers(status='RESERVED')])
        self.assertRaises(exceptions.ResourceTimeout,
                          compute.wait_for_server, server, wait=2)
        self.assertEqual('ACTIVE', compute.wait_for_server(
            server, wait=base.PATIENCE).status)
