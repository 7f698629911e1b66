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


"""The command for leases that recur."""

import argparse
import typing as ty

from osc_lib.command import command

from blazar_nova.osc import commands

__all__ = ['Occurrences']

_COLUMNS = ('id', 'start_date', 'end_date', 'status', 'reason')


class Occurrences(command.Lister):
    """List the occurrences of a lease that recurs."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        commands.add_lease(parser, 'The lease')
        return parser

    def take_action(self, parsed_args: argparse.Namespace,
                    ) -> tuple[tuple[str, ...], list[tuple[ty.Any, ...]]]:
        client = commands.client_of(self.app)
        lease = client.lease(client.find(parsed_args.lease))
        return _COLUMNS, [tuple(one[name] for name in _COLUMNS)
                          for one in lease['occurrences']]
