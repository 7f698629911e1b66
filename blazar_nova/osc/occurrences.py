# SPDX-License-Identifier: Apache-2.0


"""The command for recurring leases."""

import argparse
import typing as ty

from osc_lib import exceptions

from blazar_nova.osc import commands

__all__ = ['Occurrences']

_COLUMNS = ('id', 'start_date', 'end_date', 'status', 'reason')


class Occurrences(commands.Lister):
    """List the occurrences of a recurring lease.

    The lease is the whole series, or one of its occurrences.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        commands.add_lease(parser, 'The lease')
        return parser

    def take_action(self, parsed_args: argparse.Namespace,
                    ) -> tuple[tuple[str, ...], list[tuple[ty.Any, ...]]]:
        client = commands.client_of(self.app)
        lease = client.lease(client.find(parsed_args.lease))
        if not lease['occurrences']:
            if lease.get('recurrence_id') is None:
                raise exceptions.CommandError(
                    f'Lease {parsed_args.lease} does not recur.')
            # It is an occurrence itself.
            lease = client.lease(lease['recurrence_id'])
        return _COLUMNS, [tuple(one[name] for name in _COLUMNS)
                          for one in lease['occurrences']]
