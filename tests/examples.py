# SPDX-License-Identifier: Apache-2.0

"""The number and the choice of the examples of property tests.

Every run tries the same ones, however slow, without an example database: a
test that fails once fails again. ``BLAZAR_EXAMPLES=20`` tries twenty times as
many; the gate tries a quarter.
"""

import math
import os

import hypothesis

_TIMES = float(os.environ.get('BLAZAR_EXAMPLES', '1'))


def many(count: int) -> int:
    """Return how many examples are tried instead of the usual count."""
    return math.ceil(count * _TIMES)


def repeatable(count: int) -> hypothesis.settings:
    """Return the settings of a test that usually tries this many examples."""
    return hypothesis.settings(
        derandomize=True, deadline=None, database=None,
        max_examples=many(count),
        suppress_health_check=list(hypothesis.HealthCheck))
