# SPDX-License-Identifier: Apache-2.0

"""Everything that touches Nova's internals, and our options in nova.conf.

Nova supports no integration from outside its tree. All that this package
relies on is in a table (:mod:`blazar_nova.compat.seams`), which each process
compares with the installed Nova before it imports the rest. No other package
imports Nova; a test enforces that.
"""
