# SPDX-License-Identifier: Apache-2.0

"""The command line of ./tools/stack, which has its help."""

import argparse
import glob
import os
import re
import shlex
import shutil
import sys

from tests import stack as stacks
from tests.stack import configuration
from tests.stack import stack as cloud

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog='./tools/stack')
    parser.add_argument('--folder', default=os.path.join(ROOT, '.stack'))
    commands = parser.add_subparsers(dest='command', required=True)
    up = commands.add_parser('up')
    up.add_argument('--database', choices=('mariadb', 'postgresql'))
    up.add_argument('--hosts', type=int)
    up.add_argument('--token-expiry', type=int)
    up.add_argument('--api', choices=('waitress', 'uwsgi'))
    up.add_argument('--with', dest='services', type=_services)
    # Only read by ./tools/stack, which has selected the environment.
    up.add_argument('--nova', choices=('33', '34'))
    commands.add_parser('down')
    commands.add_parser('status')
    logs = commands.add_parser('logs')
    logs.add_argument('name', nargs='?')
    for name in ('kill', 'restart'):
        commands.add_parser(name).add_argument('name')
    shell = commands.add_parser('shell')
    shell.add_argument('user', nargs='?', default='admin',
                       choices=('admin', *configuration.ACCOUNTS))
    for command in commands.choices.values():
        # The option is also accepted after the command.
        command.add_argument('--folder', default=argparse.SUPPRESS)
    return parser


def _services(text: str) -> list[str]:
    services = sorted({*text.split(',')})
    if not {*services} <= {*cloud.SERVICES}:
        raise argparse.ArgumentTypeError(
            f'there are {", ".join(cloud.SERVICES)}')
    return services


def main() -> int:
    words = _parser().parse_args()
    stack = stacks.Stack(words.folder, lambda line: print(line, flush=True))
    try:
        return globals()[f'_{words.command}'](stack, words) or 0
    except stacks.Failure as exc:
        print(exc, file=sys.stderr)
        return 1


def _up(stack: stacks.Stack, words: argparse.Namespace) -> None:
    stack.up(words.database, words.hosts, words.token_expiry, words.api,
             services=words.services)
    print('It is up. For the openstack client, as an ordinary user:\n'
          '  eval "$(./tools/stack shell demo)"')


def _down(stack: stacks.Stack, _words: argparse.Namespace) -> None:
    stack.down()


def _status(stack: stacks.Stack, _words: argparse.Namespace) -> int:
    found = stack.status()
    for process in found:
        print(f'{process.name:20} {process.state:12} {process.pid or ""}')
    if not found:
        print('There is no stack; ./tools/stack up makes one.')
    return int(not found or any(
        process.state != 'up' for process in found))


def _logs(stack: stacks.Stack, words: argparse.Namespace) -> None:
    """Print one log; or the lines of all logs that report errors."""
    if words.name:
        with open(stack.log(words.name), errors='replace') as file:
            shutil.copyfileobj(file, sys.stdout)
        return
    for path in sorted(glob.glob(f'{stack.folder}/log/*.log')):
        name = os.path.basename(path).removesuffix('.log')
        with open(path, errors='replace') as file:
            for line in file:
                if re.search(r'\b(ERROR|CRITICAL|Traceback)\b', line):
                    print(f'{name}: {line.rstrip()}')


def _kill(stack: stacks.Stack, words: argparse.Namespace) -> None:
    stack.kill(words.name)


def _restart(stack: stacks.Stack, words: argparse.Namespace) -> None:
    stack.restart(words.name)


def _shell(stack: stacks.Stack, words: argparse.Namespace) -> None:
    for name, value in stack.env(words.user).items():
        print(f'export {name}={shlex.quote(value)}')


if __name__ == '__main__':
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
