# SPDX-License-Identifier: Apache-2.0

"""The example of CloudKitty's metrics.yml, in an environment with CloudKitty.

That the listener serves these metrics is checked by the unit tests of metrics.
"""

import json
import os

import testtools
import yaml

from tests.packaging import environment

METRICS = os.path.join(environment.TOP, 'etc', 'nova-leases', 'monitoring',
                       'cloudkitty-metrics.yml')
PINS = ('tests/packaging/cloudkitty-constraints.txt',)

#: Loads a metrics.yml as CloudKitty does when it starts.
_LOAD = """
import json, sys, yaml
from cloudkitty.collector import prometheus
with open(sys.argv[1]) as file:
    found = prometheus.PrometheusCollector.check_configuration(
        yaml.safe_load(file))
json.dump(found, sys.stdout)
"""


class CloudKittyTest(testtools.TestCase):

    def test_cloudkitty_accepts_example_metrics_by_project(self):
        made = self.useFixture(environment.Environment(
            'cloudkitty', pins=PINS))
        found = json.loads(made.python(_LOAD, METRICS))
        with open(METRICS) as file:
            metrics = yaml.safe_load(file)['metrics']
        self.assertEqual({name: ['project_id'] for name in metrics}, {
            name.partition('@#')[0]: one['groupby']
            for name, one in found.items()})
