# SPDX-License-Identifier: Apache-2.0

"""Fakes of the BMCs and nova-computes of machines, for tests of power.

Their state is in a file, so that several processes share it. They use the
clock of the test.
"""

import contextlib
import fcntl
import json
import os

from blazar_core.common import errors
from blazar_core.healing import host_status
from blazar_nova.compat import power_services
from blazar_nova.listener import power
from blazar_nova.listener import power_planner


def policy(**values):
    """Return a policy as an operator configures it."""
    return power_planner.Policy(**{
        'spare_hosts': 0, 'minimum_off': 1800, 'minimum_on': 900,
        'boot_time': 600, 'boot_time_floor': 120, 'margin': 180,
        'shutdown_timeout': 300, 'max_switching': 10, 'claim': 120, **values})


def switcher(database, clock, machines, notify=lambda event, payload: None,
             later=lambda work: work(), **values):
    """Return the power management as a listener has it.

    :param values: of the policy that differ from its defaults
    """
    return power.Power(
        database, clock, host_status.HostStatus(
            database, clock, host_status.Thresholds(30, 120, 3600),
            lambda event, lease: None),
        power.Machines(machines, machines), policy(**values), notify, later)


class Machines:
    """All machines.

    Replaces :class:`power_services.Computes` and
    :class:`power_hosts.PowerHosts`.

    :ivar boots: seconds that a boot takes
    :ivar broken: raised by each request to a BMC
    """

    def __init__(self, path, clock, boots=240):
        self.path, self.clock, self.boots = path, clock, boots
        self.broken = None
        if not os.path.exists(path):
            with open(path, 'w') as file:
                json.dump({'log': [], 'all': {}}, file)

    @contextlib.contextmanager
    def _all(self):
        with open(self.path, 'r+') as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            known = json.load(file)
            yield known
            file.seek(0)
            file.truncate()
            json.dump(known, file)
            file.flush()

    def add(self, name, **values):
        """Add a machine that is on."""
        with self._all() as known:
            known['all'][name] = {
                'on': True, 'up_at': 0, 'silent_at': None, 'reason': None,
                'forced': False, 'servers': [], 'dies': True, 'lies': False,
                'bmc': name, 'excluded': '', 'common': False, **values}

    def change(self, name, **values):
        with self._all() as known:
            known['all'][name].update(values)

    def get(self, name):
        with self._all() as known:
            return known['all'][name]

    def commands(self, *names):
        """Return the commands that machines got, in order."""
        with self._all() as known:
            return [what for _at, name, what in known['log']
                    if not names or name in names]

    def times(self):
        """Return all commands, each with its time and machine."""
        with self._all() as known:
            return [tuple(one) for one in known['log']]

    # -- PowerHosts ----------------------------------------------------------

    def known(self, host, service):
        return True

    def is_on(self, host, service):
        self._ask()
        return self.get(host)['on']

    def mismatch(self, host, service):
        self._ask()
        found = self.get(host)['bmc']
        return '' if found == host else f'The BMC is that of {found}.'

    def on(self, host, service):
        self._do(host, 'on')

    def off(self, host, service, force):
        self._do(host, 'force-off' if force else 'off')

    def _ask(self):
        if self.broken is not None:
            raise self.broken

    def _do(self, host, what):
        self._ask()
        now = self.clock.now()
        with self._all() as known:
            one = known['all'][host]
            known['log'].append((now, host, what))
            if one['lies']:
                return
            if what == 'on' and not one['on']:
                one.update(on=True, up_at=now + self.boots)
            elif what == 'force-off' or what == 'off' and one['dies']:
                if one['servers']:
                    known['log'].append((now, host, 'killed servers'))
                one.update(on=False, silent_at=now)

    # -- Computes ------------------------------------------------------------

    def services(self):
        now, found = self.clock.now(), {}
        with self._all() as known:
            for name, one in known['all'].items():
                up = one['on'] and now >= one['up_at']
                ours = one['reason'] == 'ours'
                found[name] = power_services.ComputeService(
                    up or (one['silent_at'] or 0) > now - 60,
                    now if up else one['silent_at'] or 0, ours,
                    one['forced'] or one['reason'] not in (None, 'ours'))
        return found

    def service(self, name):
        return Machines.services(self)[name]

    def zone(self, service):
        return 'nova'

    has_common = True

    def is_common(self, host, service, properties):
        return self.get(host)['common']

    def excluded(self, host, service, properties):
        return self.get(host)['excluded']

    def disable(self, service):
        with self._all() as known:
            one = known['all'][service]
            if one['reason'] is None and not one['forced']:
                one['reason'] = 'ours'
            return one['reason'] == 'ours' and not one['forced']

    def enable(self, service, uuid):
        with self._all() as known:
            if known['all'][service]['reason'] == 'ours':
                known['all'][service]['reason'] = None

    def forget_disabled(self, service, uuid):
        pass

    def occupied(self, uuid, service):
        return ', '.join(self.get(service)['servers'])


#: For tests that set ``broken``.
Error = errors.PowerUnavailable
