# SPDX-License-Identifier: Apache-2.0

"""The progress of a lease, for commands that wait for it."""

import typing as ty


class Progress:
    """Writes the progress of a lease to stderr: stdout has only the result.

    On a terminal it is one line that changes, otherwise a line for each
    status.
    """

    def __init__(self, stream: ty.TextIO, quiet: bool) -> None:
        self.stream = stream
        self.quiet = quiet
        self.last = ''

    def tell(self, lease: dict[str, ty.Any], elapsed: float) -> None:
        status = lease['status']
        line = f'{lease["name"]}: {status}'
        if status in ('OFFERED', 'PENDING'):
            line += f', starts {when(lease["start_date"])}'
        elif status in ('WAITING', 'IN_PROGRESS') and (
                lease.get('retry_until')):
            line += f', until {when(lease["retry_until"])}'
        elif status == 'ACTIVE':
            line += f', ends {when(lease["end_date"])}'
        if self.quiet:
            return
        if self.stream.isatty():
            # The escape sequence erases the rest of the previous text.
            self.stream.write(f'\r{line} ({elapsed:.0f} s)\x1b[K')
        elif status != self.last:
            self.stream.write(f'{line}\n')
        self.stream.flush()
        self.last = status

    def end(self) -> None:
        if self.last and self.stream.isatty():
            self.stream.write('\n')


def when(date: str) -> str:
    """Return a date of the API, without its fraction of a second."""
    return date.partition('.')[0].replace('T', ' ')
