# SPDX-License-Identifier: Apache-2.0

"""Show leases in Horizon as they are.

A customization module of Horizon, or imported by the one that there is.
"""

import importlib.util

from openstack_dashboard.dashboards.admin.instances import tables as of_admin
from openstack_dashboard.dashboards.project.instances import tables

# A status that Horizon does not know is shown with a progress bar, and asked
# for every few seconds. A reserved server waits for the start of its lease.
for table in (tables.InstancesTable, of_admin.AdminInstancesTable):
    table.base_columns['status'].status_choices += (('reserved', True),)


def text(value):
    """Return lists and objects of JSON as text, and all else unchanged."""
    if isinstance(value, dict):
        return ', '.join(f'{key}: {text(one)}' for key, one in value.items())
    if isinstance(value, list):
        return ', '.join(str(text(one)) for one in value)
    return value


if importlib.util.find_spec('blazar_dashboard'):
    from blazar_dashboard.content.leases import tabs

    class OverviewTab(tabs.OverviewTab):
        """The page of a lease."""

        def get_context_data(self, request):
            context = super().get_context_data(request)
            for reservation in context['lease'].reservations:
                reservation.update({
                    key: text(value) for key, value in reservation.items()})
            return context

    tabs.LeaseDetailTabs.tabs = (OverviewTab,)
