# SPDX-License-Identifier: Apache-2.0

"""Every touch of Nova's internals, and nothing else: one file for each thing.

Nova supports no wiring from outside its tree. All that this package relies on
is in a table (:mod:`blazar_nova.compat.seams`), which each process compares
with the installed Nova before it imports the rest. No other package imports
Nova; a test makes sure of that.
"""
