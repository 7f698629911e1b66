# SPDX-License-Identifier: Apache-2.0

"""Runs benchmarks, prints tables, writes records, compares with bounds.

::

    python -m benchmarks                        all but the next ones
    python -m benchmarks search growth          some of them
    python -m benchmarks boots latency          on a whole OpenStack
    python -m benchmarks galera                 on three nodes of Galera
    python -m benchmarks --output r.jsonl       write the records there
    python -m benchmarks --quick                a hundredth, as a smoke test
    python -m benchmarks check r.jsonl          compare with bounds.toml

Every line of the records is an object with name, metric, value and bound
(null if there is none).
"""

import argparse
import importlib
import json
import pathlib
import sys

from benchmarks import bounds
from benchmarks import records

#: Modules that run by default, in this order.
NAMES = ('search', 'upkeep', 'growth', 'availability', 'abuse', 'coldload',
         'wide', 'devices', 'admission', 'large', 'due', 'healing', 'filters',
         'planning', 'comparison', 'accounts')
#: Modules that run only if named.
ON_REQUEST = ('boots', 'latency', 'galera')


def main(arguments: list[str]) -> int:
    if arguments[:1] == ['check']:
        return check(arguments[1:])
    parser = argparse.ArgumentParser(prog='python -m benchmarks')
    parser.add_argument('names', nargs='*', metavar='name',
                        help=f'one of {", ".join(NAMES + ON_REQUEST)}; '
                             f'none: all but {", ".join(ON_REQUEST)}')
    parser.add_argument('--output', type=pathlib.Path,
                        default=pathlib.Path('bench-results.jsonl'))
    parser.add_argument('--quick', action='store_true')
    options = parser.parse_args(arguments)
    for unknown in set(options.names) - {*NAMES, *ON_REQUEST}:
        parser.error(f'There is no benchmark {unknown}')
    run(options.names or NAMES, options.output, options.quick)
    return 0


def run(names: list[str], output: pathlib.Path, quick: bool) -> None:
    """Run benchmarks; write each record at once."""
    allowed = bounds.read()
    with output.open('w') as lines:
        for name in names:
            module = importlib.import_module(f'benchmarks.{name}')
            print(f'\n{module.__doc__.strip()}\n', flush=True)
            table = records.Table()
            for record in module.run(quick):
                bound = None if quick else allowed.get(
                    (record.name, record.metric))
                lines.write(json.dumps(record.line(bound)) + '\n')
                lines.flush()
                table.add(record, bound)
            table.close()
    print(f'\nWritten to {output}')


def check(arguments: list[str]) -> int:
    """Compare records with the bounds; return 1 if one is exceeded."""
    parser = argparse.ArgumentParser(prog='python -m benchmarks check')
    parser.add_argument('results', type=pathlib.Path)
    options = parser.parse_args(arguments)
    found = {}
    for line in options.results.read_text().splitlines():
        one = json.loads(line)
        found[one['name'], one['metric']] = one['value']
    complaints = bounds.complaints(found, bounds.read(), ON_REQUEST)
    for complaint in complaints:
        print(complaint)
    print(f'{len(complaints)} of {len(bounds.read())} bounds are not kept.')
    return 1 if complaints else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
