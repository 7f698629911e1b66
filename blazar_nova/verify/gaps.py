# SPDX-License-Identifier: Apache-2.0

"""Gaps of a verification: objects that could not be compared, and why."""

import dataclasses


@dataclasses.dataclass
class Gaps:
    """The gaps of one look.

    :ivar failures: sentences for the report
    :ivar unseen: by uuid, why a host could not be looked at
    """

    failures: list[str] = dataclasses.field(default_factory=list)
    unseen: dict[str, str] = dataclasses.field(default_factory=dict)


def why(exc: Exception) -> str:
    """Return an error as a part of one line."""
    return f'{type(exc).__name__}: {" ".join(str(exc).split())}'
