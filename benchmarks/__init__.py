# SPDX-License-Identifier: Apache-2.0

"""How fast it is: ``python -m benchmarks`` (or ``tox -e bench``).

A benchmark is a module of this package that is named in
:mod:`benchmarks.__main__` and has a function ``run(quick)``, which yields
records (:class:`benchmarks.records.Record`). What makes the world it is run
in stands in :mod:`benchmarks.world`, what it must not exceed in
``bounds.toml``.
"""
