# SPDX-License-Identifier: Apache-2.0

"""The tour of ./tools/demo: leases on a real Nova, by the real client.

It checks what it shows. The exit status is 0 if all checks succeed, 1 if one
fails (the summary names it), 2 if Nova does not start.
"""

import time

BEGUN = time.monotonic()

import argparse  # noqa: E402
import collections.abc  # noqa: E402
import datetime  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import shlex  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import textwrap  # noqa: E402
import threading  # noqa: E402
import traceback  # noqa: E402
import typing as ty  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
#: Seconds after BEGUN at which the tour is aborted.
LIMIT = 85
#: Seconds between two checks of a condition that is waited for.
LOOK = 0.25

#: Options that stay on one line with their value.
WITH_VALUE = ('--hint', '--image', '--flavor', '--config-file', '-c')

#: Columns that are shown of the wide table of leases.
LEASE_COLUMNS = ('Name', 'Status', 'Start (UTC)', 'End (UTC)')

#: Warning of the openstack command if python-blazarclient 4.6 is installed,
#: which names a command that does not exist.
NOT_OURS = "Could not load 'reservation_host_unset'"

Command = ty.Literal['openstack', 'blazar-nova-manage']


#: Escape codes of each style.
STYLES = {'title': '1', 'look': '36', 'command': '1;32', 'right': '32',
          'wrong': '1;31'}


def say(text: str = '', style: str | None = None) -> None:
    """Print a line, in a style if the terminal supports colors."""
    if style is not None and sys.stdout.isatty() and (
            'NO_COLOR' not in os.environ and
            os.environ.get('TERM') not in (None, 'dumb')):
        text = f'\033[{STYLES[style]}m{text}\033[0m'
    print(text, flush=True)


def title(text: str) -> None:
    """Print the title of a step of the tour."""
    say()
    say(f'== {text}', 'title')


def look(text: str) -> None:
    """Print what to look at in the next output."""
    say()
    say(textwrap.fill(text, 79, initial_indent='# ', subsequent_indent='# '),
        'look')


def date(seconds: float) -> str:
    """Return a time in UTC as lease_params accepts it."""
    return datetime.datetime.fromtimestamp(
        seconds, datetime.UTC).strftime('%Y-%m-%d %H:%M:%S')


def quoted(word: str) -> str:
    """Return a word of a command, quoted for the shell."""
    name, equals, value = word.partition('=')
    if equals and shlex.quote(name) == name:
        return f'{name}={shlex.quote(value)}'
    return shlex.quote(word)


def as_typed(words: collections.abc.Sequence[str]) -> str:
    """Return a command as it would be typed, in lines of 79 columns."""
    parts: list[str] = []
    for word in words:
        if parts and parts[-1] in WITH_VALUE:
            parts[-1] += ' ' + quoted(word)
        else:
            parts.append(quoted(word))
    lines = ['$']
    for part in parts:
        # Quoted text may continue in the next line.
        first, *more = part.replace('", "', '",\n        "').split('\n') if (
            len(part) > 72) else [part]
        if len(lines[-1]) + len(first) > 76:
            lines[-1] += ' \\'
            lines.append('   ')
        lines[-1] += ' ' + first
        lines += more
    return '\n'.join(lines)


def written(line: str) -> str:
    """Return a line of a configuration file, wrapped if it is long."""
    return '\n'.join(textwrap.wrap(
        line.replace(',', ', '), 75, subsequent_indent='    ')).replace(
            ', ', ',') if len(line) > 75 else line


def show(output: str) -> None:
    """Show the output of a command, with lines wrapped and tables narrowed."""
    lines = [line for line in output.strip().splitlines()
             if not line.startswith(NOT_OURS)]
    cells = [[cell.strip() for cell in line.strip('|').split('|')]
             for line in lines if line.startswith('|')]
    if cells and set(LEASE_COLUMNS) <= set(cells[0]):
        lines = table([[row[cells[0].index(column)]
                        for column in LEASE_COLUMNS] for row in cells])
        lines.append('(without the columns of ids and reasons)')
    for line in lines:
        is_text = line[:1] not in '+|' and line.strip()
        say(textwrap.fill(line, 79) if is_text else line)


def table(rows: list[list[str]]) -> list[str]:
    """Return rows, the first with the titles, as a table of the client."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = '+' + ''.join('-' * (width + 2) + '+' for width in widths)
    drawn = ['|' + ''.join(f' {cell:{width}} |' for cell, width in
                           zip(row, widths, strict=True)) for row in rows]
    return [rule, drawn[0], rule, *drawn[1:], rule]


class Waiting:
    """Shows what is waited for: one changing line on a terminal, or several.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.since = self.shown = time.monotonic()
        self.terminal = sys.stdout.isatty()

    def show(self) -> None:
        now = time.monotonic()
        text = f'  ... waiting for {self.what}: {now - self.since:.0f} s'
        if self.terminal:
            print(f'\r{text}', end='', flush=True)
        elif now - self.shown >= 5:
            self.shown = now
            say(text)

    def done(self) -> float:
        """Show the end of the wait.

        :returns: the seconds it took
        """
        if self.terminal:
            print('\r\033[K', end='')
        took = time.monotonic() - self.since
        say(f'  ... {self.what}: {took:.1f} s')
        return took


class Tour:
    """Shows commands, runs them, and records which checks fail."""

    def __init__(self, cloud: ty.Any) -> None:
        self.cloud = cloud
        self.admin = cloud.client()
        self.member = cloud.member()
        self.results: list[tuple[bool, str]] = []
        self.environ = {**os.environ, **cloud.exports(),
                        'PYTHONWARNINGS': 'ignore', 'COLUMNS': '79'}

    def check(self, right: bool, what: str) -> None:
        self.results.append((bool(right), what))
        say(textwrap.fill(
            f'[{"as it should be" if right else "WRONG"}] {what}', 79,
            initial_indent='  ', subsequent_indent='      '),
            'right' if right else 'wrong')

    def left(self) -> float:
        """Return the seconds until the tour is aborted."""
        return BEGUN + LIMIT - time.monotonic()

    def run(self, command: Command, *words: str, see: str) -> tuple[int, str]:
        """Show a command and run it.

        :param see: what to look at
        :returns: its exit status and output
        """
        look(see)
        say(as_typed([command, *words]), 'command')
        path = os.path.join(os.path.dirname(sys.executable), command)
        try:
            done = subprocess.run(
                [path, *words], env=self.environ, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                timeout=max(self.left(), 1))
        except subprocess.TimeoutExpired:
            say('  (did not end in time)')
            return -1, ''
        show(done.stdout)
        return done.returncode, done.stdout

    def openstack(self, *words: str, see: str) -> tuple[int, str]:
        return self.run('openstack', *words, see=see)

    def boot(self, name: str, flavor: str, see: str,
             lease: dict[str, str] | None = None) -> tuple[int, str]:
        hints = [] if lease is None else [
            '--hint', 'reserved=True',
            '--hint', f'lease_params={json.dumps(lease)}']
        return self.openstack(
            'server', 'create', '--image', 'cirros', '--flavor', flavor,
            '--no-network', *hints, name, '-c', 'name', '-c', 'status',
            see=see)

    def servers(self, see: str) -> tuple[int, str]:
        """Show the table of the servers."""
        return self.openstack('server', 'list', '-c', 'Name', '-c', 'Status',
                              '-c', 'Flavor', see=see)

    def leases(self, see: str, **expected: str) -> None:
        """Show the table of the leases, and check their statuses."""
        _, text = self.run('blazar-nova-manage', '--config-file',
                           self.cloud.conf_file, 'lease', 'list',
                           '--ended', see=see)
        rows = [[cell.strip() for cell in line.split('|')]
                for line in text.splitlines()]
        self.check(
            all(any({name, status} <= set(row) for row in rows)
                for name, status in expected.items()),
            'in the database ' + ' and '.join(
                f'the {name} lease is {status}'
                for name, status in expected.items()))

    def status(self, name: str) -> str:
        found = self.member.get_servers(search_opts={'name': f'^{name}$'})
        return found[0]['status'] if found else 'gone'

    def wait(self, name: str, *statuses: str, about: str = '') -> str:
        """Wait until a server has one of the statuses, or is in ERROR.

        :returns: its status then, or at the timeout
        """
        waiting = Waiting(f'{name} to be {statuses[0]}{about}')
        statuses += ('ERROR',)
        pause = threading.Event()
        while ((status := self.status(name)) not in statuses
               and self.left() > 0):
            waiting.show()
            pause.wait(LOOK)
        waiting.done()
        return status

    def host(self, name: str) -> str | None:
        """Return the host of a server, as an admin sees it."""
        (server,) = self.admin.get_servers(search_opts={'name': f'^{name}$'})
        return ty.cast('str | None', server['OS-EXT-SRV-ATTR:host'])


class Leases(Tour):
    """The steps of the tour in their order."""

    #: Duration in seconds of the lease of the second step.
    LENGTH = 15

    def walk(self) -> None:
        self.show_configuration()
        self.lease_now()
        self.lease_later()
        self.boots_without_lease()
        self.lease_refused()
        self.lease_starts()
        self.lease_ends()

    def show_configuration(self) -> None:
        title('What the operator wrote')
        look('These lines, and those below in api-paste.ini, are all that it '
             'takes; Nova itself is as it was installed. Added to nova.conf:')
        say(textwrap.indent('\n'.join(
            written(line) for line in self.cloud.operator_conf.splitlines()
            if not line.startswith('#')).strip(), '    '))
        look('Changed in api-paste.ini:')
        for line in self.cloud.paste_changes():
            say(textwrap.indent(written(line), '    '))
        begun = time.monotonic()
        self.openstack('flavor', 'list', '-c', 'Name', '-c', 'VCPUs',
                       '-c', 'RAM', see=(
                           'There are two hosts of 4 VCPUs: a medium flavor '
                           'takes half of a host, a large one all of it.'))
        # The start of that lease depends on how fast commands are on this
        # machine: six of them run before it.
        self.ahead = max(20, round(9 * (time.monotonic() - begun)))

    def lease_now(self) -> None:
        title('A lease from now on')
        self.boot('vm-now', 'm1.medium', (
            'The two hints make a lease of an ordinary boot. This one starts '
            'now, so that its server is built at once.'),
            {'name': 'first', 'start': 'now', 'duration': '1h'})
        self.check(self.wait('vm-now', 'ACTIVE') == 'ACTIVE',
                   'vm-now runs at once')

    def lease_later(self) -> None:
        title(f'A lease that starts in {self.ahead} seconds and lasts '
              f'{self.LENGTH}')
        self.start = int(time.time()) + self.ahead
        self.end = self.start + self.LENGTH
        self.boot('vm-later', 'm1.large', (
            'It wants a whole host, later. It is accepted only if that will '
            'be there.'), {
            'name': 'second', 'start': date(self.start),
            'duration': f'{self.LENGTH}s'})
        _, text = self.servers('vm-later exists, and is RESERVED: no host '
                               'works for it yet.')
        self.check('RESERVED' in text, 'vm-later is RESERVED')
        # The --status of this client only accepts Nova's own states.
        found = self.member.get_servers(search_opts={'status': 'RESERVED'})
        self.check([server['name'] for server in found] == ['vm-later'],
                   'GET /servers?status=RESERVED finds it')
        self.check(self.host('vm-later') is None, 'it takes no host yet')
        self.leases('An operator sees both leases: one is ACTIVE, one waits '
                    'for its start (PENDING).',
                    first='ACTIVE', second='PENDING')

    def boots_without_lease(self) -> None:
        title('Without a lease: not where the capacity is promised ...')
        self.boot('vm-large', 'm1.large', (
            'An ordinary boot that wants a whole host. One is empty, but '
            'promised: this one must fail.'))
        self.boot('vm-medium', 'm1.medium', (
            'An ordinary boot that wants half of a host. It fits beside '
            'vm-now.'))
        self.check(self.wait('vm-large', 'ERROR', 'ACTIVE') == 'ERROR',
                   'vm-large finds no host: the free one is promised')
        self.openstack('server', 'show', 'vm-large', '-c', 'status',
                       '-c', 'fault', '-f', 'yaml',
                       see='The fault is that of Nova\'s scheduler.')
        title('... and let in where it fits')
        self.check(self.wait('vm-medium', 'ACTIVE') == 'ACTIVE',
                   'vm-medium runs')
        self.check(self.host('vm-medium') == self.host('vm-now'),
                   'it runs beside vm-now, not on the promised host')

    def lease_refused(self) -> None:
        title('A lease that cannot be kept is refused, and told when')
        code, text = self.boot('vm-never', 'm1.large', (
            'A lease for which there is no room. The answer says from when '
            'on there is some (next_start).'), {
            'name': 'third', 'start': 'now', 'duration': '1h'})
        self.check(code != 0 and '409' in text, 'it is answered with 409')
        self.check('next_start' in text and date(self.end) in text,
                   'its next_start is the end of the lease in the way')
        self.check(self.status('vm-never') == 'gone', 'no server is left')

    def lease_starts(self) -> None:
        title('The lease starts')
        early = self.status('vm-later')
        if time.time() < self.start - 1:
            self.check(early == 'RESERVED', 'until then it was RESERVED')
        status = self.wait('vm-later', 'ACTIVE', 'gone',
                           about=f' (from {date(self.start)})')
        self.check(status == 'ACTIVE', 'vm-later runs')
        self.check(time.time() >= self.start, 'not before its lease started')
        self.servers('vm-later has its host, without anybody asking again.')
        self.leases('Its lease is ACTIVE until its end.', second='ACTIVE')

    def lease_ends(self) -> None:
        title('The lease ends')
        status = self.wait('vm-later', 'gone',
                           about=f' (at {date(self.end)})')
        self.check(status == 'gone', 'vm-later is gone')
        self.check(time.time() >= self.end, 'not before its lease ended')
        self.boot('vm-large-again', 'm1.large', (
            'What was refused before: a whole host without a lease.'))
        self.check(
            self.wait('vm-large-again', 'ACTIVE') == 'ACTIVE',
            'its capacity is free for others')
        self.servers('vm-later was reclaimed, and vm-large-again has its '
                     'host.')
        self.leases('Its lease is TERMINATED.', second='TERMINATED')


def summarize(tour: Tour) -> bool:
    """Print the summary.

    :returns: whether all checks have succeeded
    """
    wrong = [what for right, what in tour.results if not right]
    title(f'{len(tour.results) - len(wrong)} of {len(tour.results)} '
          f'as it should be, after {time.monotonic() - BEGUN:.0f} s')
    for what in wrong:
        say(f'  WRONG: {what}', 'wrong')
    return not wrong


def go_on() -> None:
    """Print three suggestions."""
    say('''
To go on:
    ./tools/demo --keep                 the same, and the cloud stays for you
    ./tools/stack up                    a whole OpenStack, each service for
                                        itself
    less doc/source/user/index.rst      a nightly CI pool, a training class,
                                        a GPU for a week ...''')


def keep(cloud: ty.Any) -> None:
    """Leave the cloud running until Ctrl-C."""
    say('\nIt goes on running. In another shell:\n')
    for name, value in cloud.exports().items():
        say(f'    export {name}={value}')
    say(f'    export PATH={os.path.dirname(sys.executable)}:$PATH')
    say(f'''
    openstack server list
    openstack server delete vm-large-again      (makes room for yours)
    openstack --os-username admin hypervisor list
    blazar-nova-manage --config-file {cloud.conf_file} lease list

Nova's log is {cloud.log_file}. Ctrl-C ends it.''')
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()


def open_cloud() -> ty.Any:
    say('Starting Nova: API, conductor, scheduler, two computes, placement '
        '...')
    import demo_cloud
    cloud = demo_cloud.Cloud()
    cloud.open()
    say(f'It runs after {time.monotonic() - BEGUN:.1f} s; its files are in '
        f'{cloud.folder}')
    return cloud


def main() -> int:
    parser = argparse.ArgumentParser(
        prog='tools/demo', description='Shows leases on a real Nova, in one '
        'process, through the openstack client.')
    parser.add_argument('--keep', action='store_true',
                        help='leave it running at the end, for other shells')
    wanted = parser.parse_args()
    sys.argv[1:] = []
    sys.path.insert(0, ROOT)
    try:
        cloud = open_cloud()
    except Exception:
        # Nova's excepthook would only log it.
        traceback.print_exc(file=sys.stdout)
        return 2
    tour = Leases(cloud)
    try:
        tour.walk()
    except Exception:
        traceback.print_exc(file=sys.stdout)
        tour.check(False, 'the tour came to its end')
    right = summarize(tour)
    if wanted.keep:
        keep(cloud)
    elif not right:
        say(f'Nova\'s log is {cloud.log_file}')
    else:
        go_on()
    cloud.close(keep_folder=not right)
    return 0 if right else 1


def run() -> ty.NoReturn:
    """Run main() and exit in any case.

    Busy threads of Nova would otherwise keep the process running.
    """
    status = 1
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe.
        pass
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == '__main__':
    run()
