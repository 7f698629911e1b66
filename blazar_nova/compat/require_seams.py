# SPDX-License-Identifier: Apache-2.0

"""Refuse a Nova that lacks what we rely on.

What a process of ours or of Nova's loads first of ours imports this module
before all others that touch Nova: those would fail with no more than an
ImportError or an AttributeError.

:raises ConfigurationError: at its import, with a sentence for each thing that
    Nova lacks
"""

from blazar_nova.compat.seams import check

check.require()
