#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.
"""Nova's api-paste.ini, as an operator changes it."""

import configparser
import os
import sys

__all__ = ['nova_paste', 'with_leases']

_ADDED = os.path.join(os.path.dirname(os.path.dirname(__file__)),
                      'etc', 'blazar', 'api-paste.ini')


def nova_paste() -> str:
    """The api-paste.ini that Nova's package installs below the prefix."""
    with open(os.path.join(sys.prefix, 'etc', 'nova', 'api-paste.ini')) as f:
        return f.read()


def with_leases(paste: str) -> str:
    """A file of Nova's with the lines of etc/blazar/api-paste.ini.

    :raises ValueError: when a section that should be there is not
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
