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

"""How many examples the tests of properties try, and which.

The same ones in every run, however slow, with no memory of others: what fails
once fails again. Others, and more, are tried where somebody asks for them:
``BLAZAR_EXAMPLES=20`` tries twenty times as many.
"""

import os

import hypothesis

__all__ = ['many', 'repeatable']

_TIMES = int(os.environ.get('BLAZAR_EXAMPLES', '1'))


def many(count: int) -> int:
    """How many are tried where usually so many are."""
    return count * _TIMES


def repeatable(count: int) -> hypothesis.settings:
    """For a test that usually tries so many examples."""
    return hypothesis.settings(
        derandomize=True, deadline=None, database=None,
        max_examples=many(count),
        suppress_health_check=list(hypothesis.HealthCheck))
