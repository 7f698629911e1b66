# SPDX-License-Identifier: Apache-2.0

"""Unit tests."""

import gc

# Each pass over all modules takes a fifth of a second: garbage collection would
# take a tenth of the time of these tests.
gc.set_threshold(200_000, 20, 20)
