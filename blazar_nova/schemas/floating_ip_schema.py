# SPDX-License-Identifier: Apache-2.0
"""Parsing of the JSON body that enrolls an address for floating IPs."""

from blazar_nova.resource_types import inputs

EXAMPLE = ('{"floating_network_id": "the ID of an external network", '
           '"floating_ip_address": "203.0.113.10"}')


def create(body: object) -> tuple[str, str]:
    """Read the body of ``POST /floatingips``.

    :returns: the id of the network, and the address
    :raises InvalidLeaseParams: with the message for the user
    """
    values = inputs.json_object(body, 'The body of the request')
    known = {'floating_network_id': '', 'floating_ip_address': ''}
    inputs.check_keys(values, known, 'a floating IP')
    network_id, address = (inputs.needed(values, key) for key in known)
    return (inputs.text(network_id, 'floating_network_id'),
            inputs.address(address, 'floating_ip_address'))
