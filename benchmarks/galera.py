# SPDX-License-Identifier: Apache-2.0

"""Galera: the long race of tests/races on three MariaDB nodes concurrently.

The nodes replicate over 127.0.0.1, on free ports; clients use Unix sockets.
Two of three processes use another node than their competitors. problems must
be 0: it counts errors in the tables, in any process's index, and exceptions.
"""

import contextlib
import os
import socket
import typing as ty
import unittest

import sqlalchemy as sa

from benchmarks import records
from benchmarks import servers
from tests.races import contest

NODES, SECONDS = 3, 30
PROVIDERS = ('/usr/lib/galera/libgalera_smm.so',
             '/usr/lib64/galera-4/libgalera_smm.so')


class Node(servers.Mariadb):
    """One of the nodes."""

    package = 'mariadb-server and galera-4'
    # As root, rsync would serve as user nobody, who cannot read the files.
    user = 'mysql'

    def __init__(self, port: int, members: ty.Sequence[int]) -> None:
        self._port, self._members = port, members
        super().__init__()

    def _find(self) -> dict[str, str] | None:
        self._provider = next(filter(os.path.exists, PROVIDERS), None)
        return super()._find() if self._provider else None

    @property
    def _common(self) -> list[str]:
        return [word for word in super()._common if word != '--user=root']

    def _serve(self) -> list[str]:
        members = ','.join(f'127.0.0.1:{port}' for port in self._members)
        return [*super()._serve(), '--binlog-format=ROW',
                '--innodb-autoinc-lock-mode=2',
                '--innodb-buffer-pool-size=128M',
                '--bind-address=127.0.0.1', '--wsrep-on=ON',
                f'--wsrep-provider={self._provider}',
                f'--wsrep-cluster-address=gcomm://{members}',
                '--wsrep-node-address=127.0.0.1',
                f'--wsrep-node-name=node{self._port}',
                '--wsrep-sst-method=rsync',
                # Each transaction first waits for earlier commits of other
                # nodes: processes see a lease that another one created and
                # announced.
                '--wsrep-sync-wait=1', '--wsrep-slave-threads=2',
                f'--wsrep-sst-receive-address=127.0.0.1:{self._port + 2}',
                '--wsrep-provider-options='
                f'base_host=127.0.0.1;base_port={self._port};'
                f'gmcast.listen_addr=tcp://127.0.0.1:{self._port};'
                f'ist.recv_addr=127.0.0.1:{self._port + 1};'
                'gcache.size=64M']

    def size(self) -> int:
        """Return the number of nodes in the cluster; 0: it is not ready."""
        try:
            with self._administrator.connect() as connection:
                status = {name: value for name, value in connection.execute(
                    sa.text("SHOW STATUS LIKE 'wsrep%'")).all()}
        except sa.exc.DBAPIError:
            return 0
        return int(status['wsrep_cluster_size']) * (
            status['wsrep_ready'] == 'ON')


def run(quick: bool) -> ty.Iterator[records.Record]:
    try:
        with contextlib.ExitStack() as stack:
            nodes: list[Node] = []
            ports = free_ports(NODES)
            for number in range(NODES):
                nodes.append(Node(ports[number], ports[:number]))
                stack.callback(nodes[-1].stop)
            if [node.size() for node in nodes] != [NODES] * NODES:
                raise RuntimeError('The nodes have not found each other.')
            name = nodes[0].create()
            yield from measure([node.url(name) for node in nodes],
                               3 if quick else SECONDS)
    except unittest.SkipTest as skip:
        print(f'galera: {skip}')


def measure(urls: list[str], seconds: float) -> ty.Iterator[records.Record]:
    """Run the race and yield its results."""
    with contest.Contest(urls, seed=20) as race:
        race.run(seconds)
        problems = race.problems() + race.failures
        # The nodes answer after the last writes were applied (sync wait).
        problems += race.wrong_pictures()
        for problem in problems[:5]:
            print(problem)
        done = sum(race.done().values())
        yield records.Record('galera.race', 'problems', len(problems))
        yield records.Record('galera.race', 'per_second', done / seconds)
        yield records.Record('galera.race', 'retries_pct',
                             100 * race.disturbed.total() / max(done, 1))


def free_ports(count: int) -> list[int]:
    """Return ports that are free, with the two that follow each."""
    found: list[int] = []
    port = 24_567
    while len(found) < count:
        port += 4
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for each in range(port, port + 3):
                one = stack.enter_context(socket.socket())
                one.bind(('127.0.0.1', each))
            found.append(port)
    return found


def main() -> None:
    table = records.Table()
    for record in run(quick=False):
        table.add(record, None)
    table.close()


if __name__ == '__main__':
    main()
