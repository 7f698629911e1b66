# SPDX-License-Identifier: Apache-2.0

"""Ordinary servers are not affected: the same answers as in plain Nova."""

import re
import typing as ty

from nova import test as nova_test
import testtools

from tests.functional import base

#: Values that differ between any two runs: ids, times and addresses.
_CHANGING = [
    (re.compile(r'[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}'), 'UUID'),
    (re.compile(r'req-UUID'), 'REQUEST'),
    (re.compile(r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z?'), 'TIME'),
    (re.compile(r'\br-[a-z0-9]{8}\b'), 'RESERVATION'),
    (re.compile(r'"adminPass": "[^"]+"'), '"adminPass": "SECRET"'),
    (re.compile(r'"hostId": "[0-9a-f]+"'), '"hostId": "HOST"'),
    (re.compile(r'instance-[0-9a-f]{8}'), 'INSTANCE'),
    (re.compile(r'([0-9a-f]{2}:){5}[0-9a-f]{2}'), 'MAC'),
    (re.compile(r'192\.168\.1\.\d+'), 'ADDRESS'),
]

#: The host of the guest varies between runs.
_PLACE = re.compile(r'"(OS-EXT-SRV-ATTR:(host|hypervisor_hostname)|'
                    r'compute|host)": "host[12]"')


class Scenario(base.FunctionalTestCase):
    """Requests of a user with ordinary servers, and all answers."""

    def tour_all(self) -> None:
        self._transcript: list[tuple[ty.Any, ...]] = []
        for microversion in ('2.1', 'latest'):
            self.tour(microversion)

    def tour(self, microversion: str) -> None:
        self.me = self.api(microversion=microversion)
        self.networks = {'networks': 'none'} if (
            microversion == 'latest') else {}
        server_id = self.make('vm1')
        self.ask('GET', '/servers')
        self.ask('GET', '/servers/detail')
        self.ask('GET', '/servers/detail?status=ACTIVE')
        self.ask('GET', '/servers/detail?status=BUILD')
        self.ask('PUT', f'/servers/{server_id}', {'server': {'name': 'new'}})
        self.ask('POST', f'/servers/{server_id}/metadata',
                 {'metadata': {'key': 'value'}})
        self.ask('GET', f'/servers/{server_id}/metadata')
        self.act(server_id, {'os-stop': None}, 'SHUTOFF')
        self.act(server_id, {'os-start': None}, 'ACTIVE')
        self.act(server_id, {'resize': {'flavorRef': '3'}}, 'VERIFY_RESIZE')
        self.act(server_id, {'confirmResize': None}, 'ACTIVE')
        self.act(server_id, {'shelve': None}, 'SHELVED_OFFLOADED')
        self.act(server_id, {'unshelve': None}, 'ACTIVE')
        self.act(server_id, {'unshelve': None}, 'ACTIVE')
        self.ask('DELETE', f'/servers/{server_id}')
        self.wait_until_gone(server_id)
        self.ask('DELETE', f'/servers/{server_id}')
        self.ask('POST', f'/servers/{server_id}/action', {'os-stop': None})
        self.mistakes()
        self.with_hints()

    def mistakes(self) -> None:
        for body in ({}, {'server': {}}, {'server': None}, 'text', [1],
                     {'server': {'name': 'x', 'imageRef': base.IMAGE,
                                 'flavorRef': 'none', **self.networks}}):
            self.ask('POST', '/servers', body)
        self.ask('POST', '/servers/none/action', {'os-stop': None})
        self.ask('DELETE', '/servers/none')

    def with_hints(self) -> None:
        other = self.make('vm2')
        for hints in ({'different_host': [other]}, {'custom': 'hint'},
                      {'same_host': other}, {}):
            self.delete(self.make('vm3', hints))
        self.delete(other)

    def make(self, name: str, hints: ty.Any = None) -> str:
        body: dict[str, ty.Any] = {'server': {
            'name': name, 'imageRef': base.IMAGE, 'flavorRef': '1',
            **self.networks}}
        if hints is not None:
            body['os:scheduler_hints'] = hints
        server_id = self.ask('POST', '/servers', body)['server']['id']
        self.settled(server_id, 'ACTIVE')
        return ty.cast(str, server_id)

    def act(self, server_id: str, body: ty.Any, status: str) -> None:
        self.ask('POST', f'/servers/{server_id}/action', body)
        self.settled(server_id, status)

    def settled(self, server_id: str, status: str) -> None:
        self.wait_for_status(server_id, status)
        self.wait_for(lambda: self.admin.get_server(server_id)[
            'OS-EXT-STS:task_state'] is None)
        self.ask('GET', f'/servers/{server_id}')

    def delete(self, server_id: str) -> None:
        self.ask('DELETE', f'/servers/{server_id}')
        self.wait_until_gone(server_id)

    def ask(self, method: str, path: str, body: ty.Any = None) -> ty.Any:
        response = self.me.api_request(
            path, method=method,
            **({} if body is None else {
                'body': nova_test.jsonutils.dumps(body),
                'headers': {'Content-Type': 'application/json'}}))
        text = response.text
        for pattern, word in _CHANGING:
            text = pattern.sub(word, text)
        path = _CHANGING[0][0].sub('UUID', path)
        self._transcript.append((
            method, path, response.status_code,
            sorted(response.headers.keys()), _PLACE.sub('PLACE', text)))
        return response.json() if response.content else None


class PlainBesideTest(testtools.TestCase):
    """The same requests to two Novas, without and with the plugin."""

    def transcript_of(self, plugin: bool) -> list[tuple[ty.Any, ...]]:
        # Without a runTest of its own the class is not collected as a test.
        scenario = type('Scenario', (Scenario,), {
            'plugin': plugin, 'runTest': Scenario.tour_all})()
        result = testtools.TestResult()
        scenario.run(result)
        self.assertTrue(result.wasSuccessful(), '\n'.join(
            str(text) for _test, text in result.errors + result.failures))
        return ty.cast('list[tuple[ty.Any, ...]]', scenario._transcript)

    def test_answers_are_the_same_with_and_without_plugin(self):
        without = self.transcript_of(plugin=False)
        with_it = self.transcript_of(plugin=True)
        self.assertGreater(len(without), 90)
        for plain, ours in zip(without, with_it, strict=True):
            self.assertEqual(plain, ours)
        self.assertEqual(
            {200, 202, 204, 400, 404, 409},
            {200, 202, 204, 400, 404, 409} &
            {status for _method, _path, status, *_rest in without})
