# SPDX-License-Identifier: Apache-2.0

"""The user's token expires long before the lease starts."""

import collections.abc
import glob
import os
import time
import typing as ty

import sqlalchemy as sa

from blazar_core.db import encryption
from tests.integration import base
from tests import stack


class ExpiryTest(base.IntegrationTestCase):
    """A small stack of its own: services get a new token for every request
    if tokens are valid for less than two minutes.
    """

    EXPIRY = 60
    _stack: ty.ClassVar[stack.Stack]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        # Not kept: it is seldom needed.
        cls._stack = stack.Stack(base.folder() + '-expiry')
        cls._stack.down()
        cls.addClassCleanup(cls._stack.down)
        base.start(cls._stack, hosts=1, token_expiry=cls.EXPIRY)

    @classmethod
    def stack(cls) -> stack.Stack:
        return cls._stack

    def test_lease_starts_after_the_token_has_expired(self) -> None:
        user, begun = self.client('demo'), time.time()
        server_id, lease_id = self.hold(starts_in=self.EXPIRY + 15,
                                        client=user)
        trust_id = self.trust_of(lease_id)
        self.assertEqual({trust_id}, self.trusts())
        secrets = {'the token': user.token, 'the trust': trust_id}
        self.assert_nowhere(secrets, server_id)

        self.wait_for(lambda: user.request('GET', '/servers').status_code ==
                      401, 'the token has expired', self.EXPIRY + 10)
        self.assertGreater(time.time() - begun, self.EXPIRY - 5)
        self.log_in_again()
        self.assertEqual('RESERVED', self.server(server_id)['status'])
        self.wait_for_lease(lease_id, 'ACTIVE')
        guest = self.assert_built_once(server_id)
        self.assertEqual({'user_id': self.demo.user_id,
                          'project_id': self.demo.project_id},
                         guest['request'])
        # The host has fetched the image as the user.
        self.assertEqual(2 ** 20, guest['image_bytes'])
        self.assert_nowhere(secrets, server_id)

        self.log_in_again()
        self.demo('DELETE', f'/servers/{server_id}')
        self.wait_for_lease(lease_id, 'TERMINATED')
        self.wait_for(lambda: not self.trusts(), 'the trust is gone')
        self.assertEqual([(0,)], self.sql('SELECT count(*) FROM credentials'))
        self.assert_nowhere(secrets, server_id)
        self.log_in_again()

    def log_in_again(self) -> None:
        self.admin = self.client('admin')
        self.demo = self.client('demo')

    def trust_of(self, lease_id: str) -> str:
        """Return the trust's id, which is stored encrypted."""
        (encrypted,), = self.sql(
            'SELECT encrypted FROM credentials WHERE lease_id = :lease_id',
            lease_id=lease_id)
        return encryption.Encryption(
            self.conf.blazar.encryption_keys).decrypt(encrypted)

    def assert_nowhere(self, secrets: dict[str, str], server_id: str) -> None:
        """Assert that no secret is stored, logged or answered in clear."""
        self.log_in_again()
        found = set()
        for where, text in (*self.databases(), *self.logs(), *self.answers(
                server_id)):
            for what, secret in secrets.items():
                self.assertNotIn(secret, text, f'{what} is in {where}')
            if server_id in text:
                found.add(where.partition(' ')[0])
        # The search works: it finds values that are not secret.
        self.assertEqual({'database', 'log', 'answer'}, found)

    def databases(self) -> collections.abc.Iterator[tuple[str, str]]:
        """Return every row of the plugin's and Nova's databases."""
        for name in ('blazar_nova', 'nova', 'nova_api', 'nova_cell0',
                     'placement'):
            engine = sa.create_engine(self.cloud.database_url(name),
                                      poolclass=sa.pool.NullPool)
            metadata = sa.MetaData()
            metadata.reflect(engine)
            with engine.connect() as connection:
                for table in metadata.tables.values():
                    rows = connection.execute(sa.select(table)).all()
                    yield f'database {name}.{table.name}', repr(rows)

    def logs(self) -> collections.abc.Iterator[tuple[str, str]]:
        for path in glob.glob(f'{self.cloud.folder}/log/*.log'):
            with open(path, errors='replace') as file:
                yield f'log {os.path.basename(path)}', file.read()

    def answers(self, server_id: str,
                ) -> collections.abc.Iterator[tuple[str, str]]:
        """Return all of Nova's answers about a server."""
        for client in (self.demo, self.admin):
            for path in ('/servers/detail', f'/servers/{server_id}',
                         f'/servers/{server_id}/metadata',
                         f'/servers/{server_id}/os-instance-actions'):
                for microversion in ('2.1', '2.100'):
                    answer = client.request('GET', path,
                                            microversion=microversion)
                    yield f'answer {path}', answer.text + str(answer.headers)
