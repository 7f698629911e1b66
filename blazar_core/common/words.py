# SPDX-License-Identifier: Apache-2.0

"""Phrases that several messages share."""

_UNITS = (('day', 86400), ('hour', 3600), ('minute', 60), ('second', 1))


def count(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 host``, ``2 hosts``."""
    return f'{number} {noun}' + ('' if number == 1 else 's')


def duration(seconds: int) -> str:
    """Return an exact duration in words: ``365 days``, ``1 hour 30 minutes``.
    """
    said, rest = [], seconds
    for unit, size in _UNITS:
        number, rest = divmod(rest, size)
        if number:
            said.append(count(number, unit))
    return ' '.join(said) or count(0, 'second')


def shown(text: str) -> str:
    """Return the user's own text, short and printable, for a sentence."""
    cut = text if len(text) <= 64 else text[:61] + '...'
    return ''.join(char if char.isprintable() else '?' for char in cut)
