# SPDX-License-Identifier: Apache-2.0

"""Benchmarks: ``python -m benchmarks`` (or ``tox -e bench``).

A benchmark is a module of this package that is named in
:mod:`benchmarks.__main__` and has a function ``run(quick)``, which yields
records (:class:`benchmarks.records.Record`). :mod:`benchmarks.world` generates
hosts and bookings; ``bounds.toml`` has the upper bounds of the results.
"""
