# SPDX-License-Identifier: Apache-2.0

"""Blazar's client for the users that test_lease_api leaves out."""

from tests.integration import test_lease_api


class EveryCommandTest(test_lease_api.EveryCommandTest):

    TOOLS = (('openstack', 'demo'), ('blazar', 'admin'))
