# SPDX-License-Identifier: Apache-2.0

"""The comparison of utilization with and without leases is fair."""

from oslotest import base

from tests.simulation import utilization

HOUR, DAY = utilization.HOUR, utilization.DAY


def job(start, length, vcpus=8, count=1, leased=True):
    return utilization.Job(0, start, length, vcpus, count, leased)


class TestPolicies(base.BaseTestCase):

    def boot(self, policy, start, length):
        """Return whether a boot is granted."""
        answers = []
        policy.boot(job(start, length, leased=False),
                    lambda when, granted: answers.append(granted))
        policy.advance(start + utilization.LATE)
        (answer,) = answers
        return answer

    def test_pools_lease_whole_hosts_exclusively(self):
        pools = utilization.Pools(4, 8, 0.5)
        self.assertTrue(pools.lease(job(0, 10, vcpus=1), 0))
        self.assertTrue(pools.lease(job(5, 10, vcpus=1), 5))
        self.assertFalse(pools.lease(job(9, 1, vcpus=1), 9))
        # Two of them share a host.
        self.assertTrue(pools.lease(job(10, 1, vcpus=4, count=2), 10))
        pools.advance(5)
        self.assertEqual(2, pools.used())
        pools.advance(10)
        self.assertEqual(9, pools.used())
        pools.advance(20)
        self.assertEqual(0, pools.used())

    def test_pools_refuse_boots_on_hosts_set_aside(self):
        pools = utilization.Pools(4, 8, 0.5)
        self.assertEqual([True, True, False], [
            self.boot(pools, 0, 10) for _boot in range(3)])

    def test_without_leases_capacity_is_first_come_first_served(self):
        none = utilization.Unreserved(1, 8)
        self.assertTrue(none.lease(job(10, 10), 10))
        none.advance(5)
        self.assertTrue(self.boot(none, 5, 10))
        self.assertEqual((8, 1), (none.used(), none.broken()))

    def test_leases_guarantee_reserved_capacity(self):
        leases = utilization.Leases(1, 8, 1)
        self.addCleanup(leases.close)
        self.assertTrue(leases.lease(job(HOUR, HOUR), HOUR))
        self.assertFalse(self.boot(leases, 0, 10))
        self.assertFalse(leases.lease(job(0, 2 * HOUR), 0))
        self.assertTrue(leases.lease(job(0, HOUR / 2), 0))
        leases.advance(HOUR / 4)
        self.assertEqual(8, leases.used())
        leases.advance(3 * HOUR / 4)
        self.assertEqual(0, leases.used())
        leases.advance(HOUR + utilization.LATE)
        self.assertEqual((8, 0), (leases.used(), leases.broken()))
        leases.advance(2 * HOUR + utilization.LATE)
        self.assertEqual((0, 0), (leases.used(), leases.broken()))

    def test_refused_request_is_retried(self):
        result = utilization.replay(utilization.Unreserved(1, 8), [
            job(0, 2.5 * HOUR), *[job(0, 9 * DAY, leased=False)
                                  for _other in range(2)]], 3)
        self.assertEqual([0, 3 * HOUR], result.waited)
        self.assertEqual((1, 0), (result.refused.total(), result.asking))

    def test_concurrent_boots_run_soon(self):
        result = utilization.replay(utilization.Leases(20, 8, 1), [
            job(0, DAY, vcpus=1, leased=False) for _boot in range(100)], 0.5)
        self.assertEqual(100, len(result.waited))
        self.assertLess(max(result.waited), utilization.LATE)

    def test_short_lease_does_not_count_as_broken(self):
        result = utilization.replay(
            utilization.Leases(1, 8, 1), [job(HOUR, 120)], 0.5)
        self.assertEqual((0, 1), (result.broken, len(result.waited)))


class TestFilled(base.BaseTestCase):
    """Leases beside an endless demand."""

    def filled(self, interruptible):
        policy = utilization.Filled(2, 8, 1, interruptible)
        self.addCleanup(policy.close)
        policy.advance(HOUR)
        self.assertEqual(16, policy.used())
        return policy

    def test_leases_get_capacity_of_interruptible_servers(self):
        filled = self.filled(True)
        self.assertTrue(filled.lease(job(3 * HOUR, HOUR), 3 * HOUR))
        # After the notice.
        self.assertTrue(filled.lease(job(HOUR, HOUR), HOUR))
        filled.advance(1.5 * HOUR)
        self.assertEqual((16, 0), (filled.used(), filled.broken()))
        self.assertGreater(filled.evictions['delete'], 0)
        filled.advance(3 * HOUR + utilization.LATE)
        self.assertEqual((16, 0), (filled.used(), filled.broken()))

    def test_ordinary_servers_keep_leases_out(self):
        filled = self.filled(False)
        self.assertFalse(filled.lease(job(3 * HOUR, HOUR), 3 * HOUR))


class TestWorkloads(base.BaseTestCase):

    def test_workload_has_requested_load_and_leased_share(self):
        jobs = utilization.workload(1, 300, 1000, 32, 0.9, 0.5)
        wanted = sum(job.total * job.length for job in jobs) / (
            300 * DAY * 1000)
        self.assertAlmostEqual(0.9, wanted, 1)
        self.assertAlmostEqual(
            0.5, sum(job.leased for job in jobs) / len(jobs), 1)

    def test_read_swf_trace(self):
        trace = """\
; Computer: any
1 0 5 3600 4 -1 -1 4 7200 -1 1 1 1 1 1 -1 -1 -1
2 10 5 3600 -1 -1 -1 70 -1 -1 1 1 1 1 1 -1 -1 -1
3 20 5 -1 4 -1 -1 4 7200 -1 0 1 1 1 1 -1 -1 -1
"""
        leased, boots = ([(
            one.asked, one.length, one.vcpus, one.count, one.leased)
            for one in utilization.read_swf(
                trace.splitlines(), 32, share, 1)] for share in (1, 0))
        self.assertEqual([(0, 7200, 4, 1, True), (10, 3600, 24, 3, True)],
                         leased)
        self.assertEqual([(0, 3600, 4, 1, False), (10, 3600, 24, 3, False)],
                         boots)
