# SPDX-License-Identifier: Apache-2.0

"""Guests are the same with a lease as from an immediate boot."""

import time
import typing as ty

from tests.integration import base

USER_DATA = '#!/bin/sh\necho "grüße"\n'
FILES = [{'path': '/etc/motd', 'contents': base.encoded('welcome\n')},
         {'path': '/root/ä.txt', 'contents': base.encoded('ünïcode\n')}]
#: Fields that differ between any two servers.
OWN = {
    'id', 'links', 'created', 'updated', 'hostId',
    'OS-SRV-USG:launched_at', 'OS-EXT-SRV-ATTR:host',
    'OS-EXT-SRV-ATTR:hypervisor_hostname', 'OS-EXT-SRV-ATTR:instance_name',
    'OS-EXT-SRV-ATTR:reservation_id'}
#: The same in the driver's data.
OWN_OF_GUEST = {'uuid', 'name', 'host'}


class GuestTest(base.IntegrationTestCase):

    def setUp(self) -> None:
        super().setUp()
        key = self.demo('POST', '/os-keypairs', {'keypair': {
            'name': 'key', 'type': 'ssh'}})['keypair']
        self.public_key = key['public_key']
        self.addCleanup(self.demo, 'DELETE', '/os-keypairs/key')
        self.common = {
            'key_name': 'key', 'config_drive': True,
            'metadata': {'purpose': 'test', 'size': 'größer'},
            'user_data': base.encoded(USER_DATA), 'name': 'guest'}

    def test_guest_at_newest_microversion(self) -> None:
        guest, server = self.assert_same(
            '2.90', **self.common, adminPass='by-the-user',
            description='for later', hostname='guest-host',
            tags=['blue', 'green'])
        self.assert_common(guest)
        self.assertEqual('by-the-user', guest['admin_password'])
        self.assertEqual(['blue', 'green'], sorted(server['tags']))
        self.assertEqual('for later', server['description'])
        self.assertEqual('guest-host', server['OS-EXT-SRV-ATTR:hostname'])

    def test_guest_at_last_microversion_with_personality(self) -> None:
        guest, server = self.assert_same(
            '2.56', **self.common, personality=FILES, tags=['blue'],
            description='for later', adminPass='by-the-user')
        self.assert_common(guest)
        self.assertEqual([[one['path'], one['contents']] for one in FILES],
                         guest['injected_files'])
        self.assertEqual('by-the-user', guest['admin_password'])
        self.assertEqual(['blue'], server['tags'])

    def test_guest_at_first_microversion(self) -> None:
        """It sends nothing about networks."""
        guest, _server = self.assert_same(
            '2.1', **self.common, personality=FILES[:1],
            adminPass='by-the-user')
        self.assert_common(guest)
        self.assertEqual(1, len(guest['injected_files']))

    def test_guest_with_password_chosen_by_nova(self) -> None:
        answers, guests, _servers = self.both('2.90', name='plain')
        for answer, guest in zip(answers, guests, strict=True):
            self.assertEqual(answer['adminPass'], guest['admin_password'])
        self.assertNotEqual(answers[0]['adminPass'], answers[1]['adminPass'])
        self.assert_equal_but(OWN_OF_GUEST | {'admin_password'}, *guests)

    def assert_common(self, guest: base.Json) -> None:
        """Assert that it has what was requested; otherwise two guests that
        lack the same would be equal.
        """
        self.assertEqual(self.common['metadata'], guest['metadata'])
        self.assertEqual(self.common['user_data'], guest['user_data'])
        self.assertTrue(guest['config_drive'])
        self.assertEqual('key', guest['key_name'])
        self.assertEqual(self.public_key.split()[:2],
                         guest['key_data'].split()[:2])

    def assert_same(self, microversion: str, **server: ty.Any,
                    ) -> tuple[base.Json, base.Json]:
        """:returns: the guest and the server of the lease"""
        _answers, guests, servers = self.both(microversion, **server)
        self.assert_equal_but(OWN_OF_GUEST, *guests)
        self.assert_equal_but(OWN, *servers)
        return guests[1], servers[1]

    def assert_equal_but(self, own: set[str], *both: base.Json) -> None:
        immediate, leased = ({name: value for name, value in one.items()
                              if name not in own} for one in both)
        self.assertEqual(immediate, leased)

    def both(self, microversion: str, **server: ty.Any) -> tuple[
            list[base.Json], list[base.Json], list[base.Json]]:
        """Boot the same with a lease and at once.

        :returns: for each the answer of the API, the data of the driver, and
            the server as it is shown in the end; the immediate one first
        """
        boots = [self.boot(hints, microversion=microversion, **server)[
            'server'] for hints in (
                None, self.lease_hints(time.time() + 6))]
        server_ids = [answer['id'] for answer in boots]
        self.assertEqual('RESERVED', self.server(server_ids[1])['status'])
        shown = [self.wait_for_server(server_id) for server_id in server_ids]
        guests = [self.assert_built_once(server_id)
                  for server_id in server_ids]
        return boots, guests, shown
