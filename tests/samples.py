# SPDX-License-Identifier: Apache-2.0
"""The sample files of etc/nova-leases, filled in as an operator does it."""

import configparser
import os
import sys

from oslo_config import cfg

_FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)),
                       'etc', 'nova-leases')
_CONF = os.path.join(_FOLDER, 'nova.conf')
_ADDED = os.path.join(_FOLDER, 'api-paste.ini')


def nova_conf(connection: str, encryption_keys: str) -> str:
    """Return the lines that an operator adds to nova.conf.

    :param connection: URL of the reservation database
    :param encryption_keys: the output of `blazar-nova-manage key create`
    :raises ValueError: if the sample lacks one of the two options
    """
    with open(_CONF) as file:
        text = file.read()
    for name, value in (('connection', connection),
                        ('encryption_keys', encryption_keys)):
        before, line, after = text.partition(f'\n{name} = ')
        if not line:
            raise ValueError(f'{_CONF} should have {name}')
        text = before + line + value + '\n' + after.partition('\n')[2]
    return text


def sections() -> dict[str, dict[str, list[str]]]:
    """Return the sample nova.conf: section, option, its values in order."""
    found: dict[str, dict[str, list[str]]] = {}
    cfg.ConfigParser(_CONF, found).parse()
    return found


def nova_paste() -> str:
    """Return the api-paste.ini that Nova's package installs."""
    with open(os.path.join(sys.prefix, 'etc', 'nova', 'api-paste.ini')) as f:
        return f.read()


def with_leases(paste: str) -> str:
    """Return Nova's api-paste.ini with the lines of etc/nova-leases added.

    :raises ValueError: if a section that is required is missing
    """
    added = configparser.RawConfigParser(strict=True)
    added.read(_ADDED)
    for section in added.sections():
        lines = dict(added.items(section))
        before, header, after = paste.partition(f'[{section}]\n')
        if header:
            here, more, rest = after.partition('\n[')
            kept = [line for line in here.split('\n')
                    if line.partition('=')[0].strip() not in lines]
            new = [f'{key} = {value}' for key, value in lines.items()]
            end = next((len(kept) - number for number, line in
                        enumerate(reversed(kept)) if line.strip()), 0)
            paste = before + header + '\n'.join(
                kept[:end] + new + kept[end:]) + more + rest
        elif 'osapi_compute' in section:
            raise ValueError(f'api-paste.ini should have [{section}]')
        else:
            paste += f'\n[{section}]\n' + ''.join(
                f'{key} = {value}\n' for key, value in lines.items())
    return paste
