#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""How fast it is: ``python -m benchmarks`` (or ``tox -e bench``).

A benchmark is a module of this package that is named in
:mod:`benchmarks.__main__` and has a function ``run(quick)``, which yields
records (:class:`benchmarks.records.Record`). What makes the world it is run
in stands in :mod:`benchmarks.world`, what it must not exceed in
``bounds.toml``.
"""
