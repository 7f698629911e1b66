# SPDX-License-Identifier: Apache-2.0

"""A headless browser: Chromium, by the WebDriver protocol of the W3C.
"""

import base64
import os
import shutil
import typing as ty

import requests

from tests.stack import processes
from tests.stack import stack as stacks

#: The required commands.
COMMANDS = ('chromium', 'chromedriver')
#: Seconds to wait for a page, and for an element.
_PATIENCE = 90
_LOOK = 30
#: The key of the id of an element.
_ELEMENT = 'element-6066-11e4-a52e-4f735466cecf'
_ARGUMENTS = ('--headless=new', '--disable-dev-shm-usage', '--disable-gpu',
              '--lang=en-US', '--window-size=1400,1000',
              # Root has no sandbox.
              '--no-sandbox')


def missing() -> list[str]:
    """Return the required commands that are missing."""
    return [name for name in COMMANDS if shutil.which(name) is None]


class Folder(ty.Protocol):

    folder: str


class Browser:
    """One window; the caller has to stop it.

    :param cloud: the stack, or any object whose ``folder`` gets its log
    :param url: the base of all paths
    :param shots: the folder for its screenshots
    """

    def __init__(self, cloud: Folder, url: str, shots: str) -> None:
        self._url, self._shots = url, shots
        port = stacks.free_ports(1)[0]
        self._driver = f'http://127.0.0.1:{port}/session'
        self._process = processes.Process(cloud.folder, processes.Program(
            # A test may have several.
            f'chromedriver-{port}', ['chromedriver', f'--port={port}'],
            'started successfully'))

    def start(self) -> None:
        """Open the window."""
        self._process.start()
        self._process.wait_until_up(_PATIENCE)
        made = self._send('POST', '', {'capabilities': {'alwaysMatch': {
            'browserName': 'chrome',
            'goog:chromeOptions': {
                'binary': shutil.which('chromium'), 'args': _ARGUMENTS},
            'timeouts': {'pageLoad': 1000 * _PATIENCE,
                         'implicit': 1000 * _LOOK, 'script': 1000 * _LOOK}}}})
        self._driver += f'/{made["sessionId"]}'

    def stop(self) -> None:
        """Close the window."""
        self._process.stop()

    def open(self, path: str) -> None:
        """Open a page; return when it is loaded."""
        self._send('POST', '/url', {'url': self._url + path})

    @property
    def path(self) -> str:
        """Return the path of the current page."""
        return ty.cast(str, self._send('GET', '/url')).removeprefix(self._url)

    def click(self, css: str) -> None:
        """Click on the first element, as soon as it exists."""
        self._send('POST', f'/element/{self._find(css)}/click', {})

    def write(self, css: str, text: str) -> None:
        """Replace the content of a field."""
        element = self._find(css)
        self._send('POST', f'/element/{element}/clear', {})
        self._send('POST', f'/element/{element}/value', {'text': text})

    def text(self, css: str = 'body') -> str:
        """Return the displayed text of the first element, or an empty string.
        """
        return ty.cast(str, self.run(
            # In one request: the page may change at any time.
            'const found = document.querySelector(arguments[0]);'
            'return found ? found.innerText ?? found.textContent : "";', css))

    def run(self, script: str, *arguments: ty.Any) -> ty.Any:
        """Run a script on the page; return its result.

        :param arguments: the script's ``arguments``
        """
        return self._send('POST', '/execute/sync', {
            'script': script, 'args': arguments})

    def count(self, css: str) -> int:
        """Return how many elements there are at the moment."""
        return ty.cast(int, self.run(
            'return document.querySelectorAll(arguments[0]).length', css))

    def prefer(self, scheme: str) -> None:
        """Set the colour scheme that pages query: ``light`` or ``dark``."""
        self._send('POST', '/goog/cdp/execute', {
            'cmd': 'Emulation.setEmulatedMedia', 'params': {'features': [{
                'name': 'prefers-color-scheme', 'value': scheme}]}})

    def shoot(self, name: str) -> None:
        """Save a screenshot."""
        os.makedirs(self._shots, exist_ok=True)
        with open(os.path.join(self._shots, f'{name}.png'), 'wb') as file:
            file.write(base64.b64decode(self._send('GET', '/screenshot')))

    def _find(self, css: str) -> str:
        return ty.cast(str, self._send('POST', '/element', {
            'using': 'css selector', 'value': css})[_ELEMENT])

    def _send(self, method: str, path: str, body: ty.Any = None) -> ty.Any:
        answer = requests.request(method, self._driver + path, json=body,
                                  timeout=2 * _PATIENCE)
        value = answer.json()['value']
        if not answer.ok:
            raise AssertionError(f'{method} {path} {body}: {value["error"]}: '
                                 f'{value["message"]}')
        return value
