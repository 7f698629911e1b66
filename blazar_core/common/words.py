# SPDX-License-Identifier: Apache-2.0

"""Words of sentences that are the same in all of them."""

__all__ = ['count']


def count(number: int, noun: str) -> str:
    """A number with its noun: ``1 host``, ``2 hosts``."""
    return f'{number} {noun}' + ('' if number == 1 else 's')
