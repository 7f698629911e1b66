# SPDX-License-Identifier: Apache-2.0

"""Upper bounds of the results (bounds.toml), and their comparison."""

import pathlib
import tomllib
import typing as ty

FILE = pathlib.Path(__file__).with_name('bounds.toml')

#: The name of a record and its metric.
Key: ty.TypeAlias = tuple[str, str]


def read() -> dict[Key, float]:
    """Return the bounds: the largest allowed values."""
    with FILE.open('rb') as file:
        return {(name, metric): float(value)
                for name, metrics in tomllib.load(file).items()
                for metric, value in metrics.items()}


def complaints(found: ty.Mapping[Key, float], allowed: ty.Mapping[Key, float],
               optional: ty.Collection[str] = ()) -> list[str]:
    """Return a message for each bound that is exceeded or was not measured.

    :param optional: prefixes of names that need not be measured
    """
    answer = []
    for key, bound in allowed.items():
        name, metric = key
        if key not in found:
            if name.partition('.')[0] in optional:
                continue
            answer.append(f'{name}: {metric} was not measured')
        elif found[key] > bound:
            answer.append(f'{name}: {metric} is {found[key]:.3g}, '
                          f'and must not exceed {bound:g}')
    return answer
