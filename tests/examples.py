# SPDX-License-Identifier: Apache-2.0

"""How many examples the tests of properties try, and which.

The same ones in every run, however slow, with no memory of others: what fails
once fails again. Others, and more, are tried where somebody asks for them:
``BLAZAR_EXAMPLES=20`` tries twenty times as many.
"""

import os

import hypothesis

__all__ = ['many', 'repeatable']

_TIMES = int(os.environ.get('BLAZAR_EXAMPLES', '1'))


def many(count: int) -> int:
    """How many are tried where usually so many are."""
    return count * _TIMES


def repeatable(count: int) -> hypothesis.settings:
    """For a test that usually tries so many examples."""
    return hypothesis.settings(
        derandomize=True, deadline=None, database=None,
        max_examples=many(count),
        suppress_health_check=list(hypothesis.HealthCheck))
