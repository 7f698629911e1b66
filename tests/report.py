# SPDX-License-Identifier: Apache-2.0

"""Show the results of a run of tests, and write what its failures logged.

::

    stestr run --subunit | python -m tests.report NAME FOLDER

One dot per test. A failed test takes one screen: its name, the end of its
traceback, the last lines that it logged, and the path of a file in FOLDER that
has all of it. ``FOLDER/NAME.json`` counts the results, and
``FOLDER/NAME.times`` has the seconds of each test. ::

    python -m tests.report --total FOLDER NAME...

prints the results of several suites; the last line is the sum.
"""

import argparse
import json
import pathlib
import re
import sys
import time
import typing as ty

import subunit
import testtools

#: The numbers of lines of a traceback and of a log that fit on one screen.
TRACEBACK, LOGGED = 16, 12
#: The longest line that is shown, in characters.
WIDTH = 300
#: One character per status.
MARKS = {'success': '.', 'xfail': '.', 'skip': 's', 'fail': 'F',
         'uxsuccess': 'F', 'inprogress': 'F', 'unknown': 'F'}
#: Details of a failed test that are not part of its log.
_NOISE = ('traceback', 'reason')


class Report:
    """The results of one suite.

    :param folder: in which the files are written
    :ivar count: how many tests passed, failed and were skipped
    :ivar failed: the names of the failed tests
    """

    def __init__(self, name: str, folder: pathlib.Path,
                 out: ty.TextIO) -> None:
        self._name, self._folder, self._out = name, folder, out
        self._column = 0
        self._began = time.monotonic()
        self.count = {'passed': 0, 'failed': 0, 'skipped': 0}
        self.failed: list[str] = []
        self._times: list[str] = []

    def on_test(self, test: dict[str, ty.Any]) -> None:
        """Show one result.

        :param test: as :class:`testtools.StreamToDict` describes it
        """
        if test['status'] == 'exists':
            # The test is only listed.
            return
        mark = MARKS.get(test['status'], 'F')
        kind = {'.': 'passed', 's': 'skipped', 'F': 'failed'}[mark]
        if mark == 'F':
            self._show_failure(test)
        else:
            self._dot(mark)
        self.count[kind] += 1
        start, stop = test['timestamps']
        if start and stop:
            self._times.append(
                f'{(stop - start).total_seconds():.3f} {test["id"]}\n')

    def on_text(self, data: bytes) -> None:
        """Show output that is not a result, such as an import error."""
        self._line(bytes(data).decode(errors='replace'), end='')

    def close(self) -> None:
        """Write the counts, for tools/test."""
        self._line('', end='')
        path = self._folder / f'{self._name}.json'
        path.write_text(json.dumps({
            **self.count, 'names': self.failed,
            'seconds': round(time.monotonic() - self._began)}))
        (self._folder / f'{self._name}.times').write_text(
            ''.join(self._times))

    def _show_failure(self, test: dict[str, ty.Any]) -> None:
        name = test['id'] or 'a test without a name'
        self.failed.append(name)
        details = {key: content.as_text().strip()
                   for key, content in test['details'].items()
                   if content.content_type.type == 'text'}
        if test['status'] == 'inprogress':
            details['traceback'] = (
                'The test did not end: its process died or was killed.')
        path = self._write(name, details)
        reason = ''.join(text for key, text in details.items()
                         if key.startswith(_NOISE))
        logged = '\n'.join(text for key, text in details.items()
                           if not key.startswith(_NOISE) and text)
        self._line(f'FAILED {name}')
        self._indent(ends_of(reason, TRACEBACK))
        if logged:
            self._line('  its log ends with:')
            self._indent(logged.splitlines()[-LOGGED:])
        self._line(f'  all of it: {path}\n')

    def _write(self, name: str, details: dict[str, str]) -> pathlib.Path:
        safe = re.sub(r'[^\w.-]+', '_', name.removeprefix('tests.'))[-180:]
        path = self._folder / f'{safe}.log'
        path.write_text(f'{name}\n' + ''.join(
            f'\n== {key}\n{text}\n' for key, text in details.items()))
        return path

    def _indent(self, lines: ty.Iterable[str]) -> None:
        for line in lines:
            self._line(f'  {line[:WIDTH]}')

    def _dot(self, mark: str) -> None:
        self._column += 1
        self._out.write(mark + '\n' * (self._column % 72 == 0))
        self._out.flush()

    def _line(self, text: str, end: str = '\n') -> None:
        """Write a line that begins in the first column."""
        if self._column % 72:
            self._out.write('\n')
        self._column = 0
        self._out.write(text + end)
        self._out.flush()


def ends_of(text: str, count: int) -> list[str]:
    """Return the first line of a long text and the lines at its end."""
    lines = text.splitlines()
    if len(lines) <= count:
        return lines
    return [lines[0], '...', *lines[2 - count:]]


def total(folder: pathlib.Path, names: ty.Iterable[str]) -> int:
    """Print the results of suites, and the sum as the last line."""
    passed = failed = 0
    print(f'{"suite":12} {"passed":>7} {"failed":>7} {"skipped":>7} '
          f'{"seconds":>8}')
    failures: list[str] = []
    for name in names:
        try:
            found = json.loads((folder / f'{name}.json').read_text())
        except FileNotFoundError:
            found = {'passed': 0, 'failed': 0, 'skipped': 0, 'seconds': 0,
                     'names': []}
        if not found['passed'] and not found['failed']:
            # The suite cannot be loaded, or was killed.
            found['failed'] = 1
            found['names'] = [f'{name}: no test has been run']
        elif not found['failed'] and (folder / f'{name}.broken').exists():
            found['failed'] = 1
            found['names'] = [f'{name}: stestr failed, though no test did']
        print(f'{name:12} {found["passed"]:7} {found["failed"]:7} '
              f'{found["skipped"]:7} {found["seconds"]:8}')
        passed += found['passed']
        failed += found['failed']
        failures += found['names']
    print(''.join(f'failed: {name}\n' for name in failures), end='')
    print(f'{passed} passed, {failed} failed')
    return 1 if failed or not passed else 0


def main(arguments: ty.Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog='python -m tests.report', description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--total', type=pathlib.Path, metavar='FOLDER',
                        help='print what became of the suites named')
    parser.add_argument('words', nargs='+', metavar='NAME FOLDER',
                        help='a suite, and where its files go')
    options = parser.parse_args(arguments)
    if options.total is not None:
        return total(options.total, options.words)
    name, folder = options.words
    report = Report(name, pathlib.Path(folder), sys.stdout)
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    read(sys.stdin.buffer, report)
    report.close()
    return 1 if report.count['failed'] else 0


def read(stream: ty.BinaryIO, report: Report) -> None:
    """Report all results of a stream."""
    tests = testtools.StreamToDict(report.on_test)
    text = _Text(report.on_text)
    both = testtools.CopyStreamResult([tests, text])
    both.startTestRun()
    try:
        subunit.ByteStreamToStreamResult(
            stream, non_subunit_name='stdout').run(both)
    finally:
        both.stopTestRun()


class _Text(testtools.StreamResult):
    """Pass on output that belongs to no test."""

    def __init__(self, work: ty.Callable[[bytes], None]) -> None:
        self._work = work

    def status(self, *args: ty.Any, **kwargs: ty.Any) -> None:
        if kwargs.get('test_id') is None and kwargs.get('file_bytes'):
            self._work(kwargs['file_bytes'])


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
