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

"""What becomes of the servers of a lease at its end: policies, by name.

``on_end`` of a lease is the name of one.
"""

import abc
import typing as ty

from blazar_core import cloud as clouds

__all__ = ['DELETE', 'Delete', 'EndPolicy', 'Policies', 'RECYCLE', 'Recycle']

#: The name of what is done if nothing else is wanted, and to the servers of
#: a lease whose deletion was asked for.
DELETE = 'delete'
#: The name of what is done where hosts wait until they are left.
RECYCLE = 'recycle'


class EndPolicy(abc.ABC):
    """What is done to each server; one object serves all threads.

    Only to servers that have run: those that wait for their build, or could
    not be built, are deleted.
    """

    #: Whether it is for servers on whole hosts only, which have no bookings
    #: of their own; all others are deleted.
    for_guests: ty.ClassVar[bool] = False

    @abc.abstractmethod
    def ask(self, cloud: clouds.Cloud, server_id: str,
            credential: str | None) -> None:
        """Ask for what is to be done to a server; safe to repeat.

        It is asked for again, after pauses that grow, until :meth:`is_over`.
        What raises is logged, and keeps no other server of the lease.

        :param credential: what lets us act for the owner of the lease
        :raises CloudUnavailable: when it is worth trying once more
        """

    @abc.abstractmethod
    def is_over(self, cloud: clouds.Cloud, server_id: str,
                seen: clouds.Seen) -> bool:
        """Whether all is done that was to be done to a server.

        :param seen: how it was seen after it was asked for
        """


class Delete(EndPolicy):
    """The server goes, and what Nova deletes with it."""

    def ask(self, cloud: clouds.Cloud, server_id: str,
            credential: str | None) -> None:
        cloud.delete(server_id, credential)

    def is_over(self, cloud: clouds.Cloud, server_id: str,
                seen: clouds.Seen) -> bool:
        return seen.state is clouds.ServerState.GONE


class Recycle(EndPolicy):
    """The server may stay as long as it likes, and its host with it: nobody
    else gets that before.
    """

    for_guests = True

    def ask(self, cloud: clouds.Cloud, server_id: str,
            credential: str | None) -> None:
        """Nothing is done to it."""

    def is_over(self, cloud: clouds.Cloud, server_id: str,
                seen: clouds.Seen) -> bool:
        return seen.state is clouds.ServerState.GONE


#: By name; what is named there once, and is not there any more, is
#: :data:`DELETE`: the room is promised to others.
Policies: ty.TypeAlias = ty.Mapping[str, EndPolicy]
