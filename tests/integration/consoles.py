# SPDX-License-Identifier: Apache-2.0

"""The commands in the documentation, and the tests that run them."""

import os
import re
import shlex
import typing as ty

_DOC = os.path.join(os.path.dirname(__file__), '..', '..')
_BLOCK = re.compile(r'( *)\.\. code-block:: console$')
#: The comment before a block that is left out, with the reason.
_LEFT_OUT = re.compile(r' *\.\. not run: \S')

#: By page, the section title of each block that test_commands runs, and the
#: method that creates what the block needs.
PAGES: dict[str, tuple[tuple[str, str | None], ...]] = {
    'README.rst': (('nova-leases', None),),
    'doc/source/user/index.rst': (('User guide', None), ('Terms', None)),
    'doc/source/user/future-server.rst': (
        ('A server for later', None),
        ('While the server is RESERVED', 'held')),
    'doc/source/user/server-class.rst': (
        ('A class of forty', 'few'),
        ('Create a lease without a boot', None),
        ('Boot into the lease', 'reserved')),
    'doc/source/user/gpu-class.rst': (
        ('A class of GPUs for a course', 'gpus'),
        ('A class of GPUs for a course', 'gpus')),
    'doc/source/user/whole-hosts.rst': (
        ('Request hosts', 'enrolled'),
        ('Boot on the hosts', 'hosts_leased'),
        ('Boot on the hosts', 'hosts_leased'),
        ('Change and end', 'hosts_leased')),
    'doc/source/user/recurring.rst': (('A recurring boot', None),),
    'doc/source/user/best-effort.rst': (
        ('Wait for capacity', 'enrolled'),
        ('Have servers moved', None),
        ('Your own servers', 'servers')),
    'doc/source/user/interruptible.rst': (
        ('Interruptible servers', None),
        ('Until when it is safe', None),
        ('Eviction', None),
        ('Eviction', None),
        ('Change a running server', 'servers')),
    'doc/source/user/change-and-end.rst': (
        ('Change a lease', 'booted'),
        ('Change a lease', 'booted'),
        ('Extend automatically', None),
        ('What happens at the end', None)),
    'doc/source/user/existing-servers.rst': (('Add servers', 'servers'),),
    'doc/source/user/clients.rst': (('Watch a lease', None),),
    'doc/source/user/default-leases.rst': (
        ('Keep the server', 'booted'), ('Keep the server', None)),
    'doc/source/user/troubleshooting.rst': (('What can go wrong', None),),
    'doc/source/cli/openstack.rst': (
        ('openstack reservation ...', 'booted'),
        ('See what fits', None),
        ('Quote', None),
        ('Offer and accept', None),
        ('Request a lease', None),
        ('Recurring leases', 'occurrence'),
        ('Share hosts', 'hosts_leased'),
        ('Delete', 'several'),
        ('Existing servers', 'servers'),
        ('Interruptible servers', 'servers'),
        ('Acknowledge a host change', 'reserved'),
        ('Transfer', 'handed_over'),
        ('Wait', 'starting')),
    'doc/source/cli/blazar-nova-manage.rst': (('blazar-nova-manage', None),),
    'doc/source/cli/blazar-nova-status.rst': (
        ('blazar-nova-status', 'warnings'),),
    'doc/source/install/index.rst': (
        ('5. Create the tables and start', None),),
    'doc/source/admin/best-effort.rst': (
        ('Servers that are moved', 'two_flavors'),),
    'doc/source/admin/consistency.rst': (('Verifying and fixing', None),),
    'doc/source/admin/database.rst': (('Database and keys', None),),
    'doc/source/admin/maintenance.rst': (
        ('Maintenance', 'host'), ('Several hosts', 'host')),
    'doc/source/admin/monitoring.rst': (('Monitoring', None),),
    'doc/source/admin/troubleshooting.rst': (('Troubleshooting', None),),
    'doc/source/admin/whole-hosts.rst': (('Whole hosts', 'host'),),
}
#: By page and title, the method of test_recipes that checks the result of all
#: blocks of the section together.
STORIES: dict[tuple[str, str], str] = {
    ('doc/source/user/future-server.rst', 'A demo that ends itself'):
        'demo_is_over',
    ('doc/source/user/recurring.rst', 'A training class on Mondays'):
        'one_class_is_skipped',
    ('doc/source/user/nightly-ci.rst', 'A fleet for the nightly builds'):
        'each_night_has_a_server',
    ('doc/source/user/whole-hosts.rst', 'A host with a GPU for a week'):
        'the_host_is_given_back',
    ('doc/source/user/change-and-end.rst', 'Keep what a server has become'):
        'it_is_gone',
}
#: By page, the module that runs all of it.
ELSEWHERE = {
    'doc/source/install/horizon.rst': 'test_horizon',
    'doc/source/admin/blazar-migration.rst': 'test_changing_over',
}


class Block(ty.NamedTuple):
    """A block of commands.

    :ivar title: the title of its section
    :ivar typed: the commands, without prompts and without their output
    :ivar is_run: whether no comment excludes it
    """

    title: str
    typed: str
    is_run: bool


def blocks(path: str) -> list[Block]:
    """Return the blocks of commands of a page.

    :param path: relative to the top folder of the repository
    """
    with open(os.path.join(_DOC, path), encoding='utf-8') as file:
        lines = file.read().splitlines()
    found, title, before = [], '', ''
    for number, line in enumerate(lines):
        if re.fullmatch(r'([=\-~])\1{2,}', line):
            title = lines[number - 1]
        start = _BLOCK.fullmatch(line)
        if start is not None:
            found.append(Block(
                title, _typed(_indented(lines[number + 1:], start[1])),
                _LEFT_OUT.match(before) is None))
        before = line or before
    return found


def _indented(lines: ty.Iterable[str], indent: str) -> ty.Iterator[str]:
    """Return the lines of a block, from its first one."""
    for line in lines:
        if line.strip() and not line.startswith(indent + ' '):
            break
        yield line.strip()


def _typed(lines: ty.Iterable[str]) -> str:
    """Return the commands: lines after a prompt, and their continuations."""
    commands: list[str] = []
    goes_on = False
    for line in lines:
        prompt = re.match(r'[$#>] ', line)
        if goes_on or line.startswith('> '):
            commands[-1] += '\n' + line.removeprefix('> ')
        elif prompt:
            commands.append(line[prompt.end():])
        else:
            continue
        goes_on = line.endswith('\\') or _is_open(commands[-1])
    return '\n'.join(commands)


def _is_open(command: str) -> bool:
    """Return whether a quotation continues in the next line."""
    try:
        shlex.split(command)
    except ValueError:
        return True
    return False
