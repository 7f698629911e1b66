# SPDX-License-Identifier: Apache-2.0

"""Refuse a Nova that lacks what we rely on.

The first of our modules that a process loads imports this one before all
others that touch Nova: those would fail with no more than an ImportError or an
AttributeError.

:raises ConfigurationError: at its import, with a sentence for each thing that
    Nova lacks
"""

from blazar_nova.compat.seams import check

check.require()
