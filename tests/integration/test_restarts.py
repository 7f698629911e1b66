# SPDX-License-Identifier: Apache-2.0

"""Restarting any service while a lease starts."""

import time
import typing as ty

from tests.integration import base

#: All services of the stack, except epmd, with which RabbitMQ's commands find
#: RabbitMQ.
SERVICES = (
    'database', 'rabbitmq', 'keystone', 'placement', 'glance', 'neutron',
    'nova-conductor', 'nova-compute-1', 'nova-compute-2', 'nova-computes',
    'nova-scheduler-1', 'nova-scheduler-2', 'nova-api-1', 'nova-api-2',
    'blazar-listener-1', 'blazar-listener-2')
#: Maximum seconds until everything works again.
SOON = 30
#: A message may be lost with its queue. That is noticed after
#: lost_build_timeout, 80, and with the next periodic sync.
SLOWLY = {'rabbitmq': 180}
#: Without these nothing is built. (Guests that only pretend need no glance and
#: neutron, and of the other services there are two.)
NEEDED = ('database', 'rabbitmq', 'keystone', 'placement', 'nova-conductor',
          'nova-compute-1', 'nova-compute-2', 'nova-computes')


class RestartTest(base.IntegrationTestCase):
    """One service after the other is stopped when a lease starts."""

    def test_all_services_are_covered(self) -> None:
        self.assertEqual({*SERVICES, 'epmd'}, set(self.cloud.names()))

    def survive(self, name: str) -> None:
        """Start one lease while a service is stopped, and one just after."""
        hosts = [host for host, process in self.cloud.hosts().items()
                 if process == name]
        # On a host of a nova-compute that is stopped; only administrators
        # may select it.
        where: base.Json = {'host': hosts[0], 'client': self.admin} if (
            hosts) else {}
        # With one host, it completes its work before it is stopped.
        first = int(time.time()) + (25 if len(hosts) == 1 else 5)
        then = first + 10
        while_down, lease_1 = self.hold_at(first, **where)
        pending, lease_2 = self.hold_at(then, **where)
        self.cloud.stop(name)
        gone = time.time()
        self.wait_for(lambda: time.time() > first + 1, 'a lease has started')
        self.cloud.restart(name)
        back = time.time()
        soon = SLOWLY.get(name, SOON)
        self.wait_for_lease(lease_1, 'ACTIVE', soon + base.PATIENCE)
        self.wait_for_lease(lease_2, 'ACTIVE', soon + base.PATIENCE)
        launched = self.launched(while_down), self.launched(pending)
        base.say(f'  {name}: down for {back - gone:.0f} s; leases started '
                 f'{launched[0] - first:.0f} s and {launched[1] - then:.0f} s '
                 'late')
        if name in NEEDED:
            self.assertLess(gone, first, f'{name} took long to end')
            self.assertGreaterEqual(launched[0], int(gone))
        self.assertLess(launched[0] - max(back, first), soon)
        self.assertLess(launched[1] - max(back, then), soon)
        for server_id in (while_down, pending):
            guest = self.assert_built_once(server_id)
            if hosts:
                self.assertEqual(hosts[0], guest['host'])
            self.assertEqual(guest['host'], self.booked_hosts()[server_id])

    def hold_at(self, start: int, **boot: ty.Any) -> tuple[str, str]:
        server_id = self.boot(self.lease_hints(start), **boot)['server']['id']
        return server_id, self.lease_of(server_id)['id']

    def launched(self, server_id: str) -> float:
        return base.seconds(self.wait_for_server(server_id)[
            'OS-SRV-USG:launched_at'])


def _test(name: str) -> ty.Callable[[RestartTest], None]:
    return lambda test: test.survive(name)


# A separate test for each, so that a failure names the service.
for _name in SERVICES:
    setattr(RestartTest, f'test_{_name.replace("-", "_")}', _test(_name))
