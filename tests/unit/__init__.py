# SPDX-License-Identifier: Apache-2.0

"""Unit tests."""

import gc

# Garbage collection would take a tenth of the time of these tests: each pass
# over all modules takes a fifth of a second.
gc.set_threshold(200_000, 20, 20)
