# SPDX-License-Identifier: Apache-2.0
"""The largest share of a host that one server can get."""

import collections
import itertools
import random

import fixtures

from blazar_core.capacity import admissions
from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.capacity import provider_limits
from blazar_core.capacity import timelines
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from tests.unit import base
from tests.unit.blazar_core import worlds

NOW = worlds.NOW


def group(single=False, required=(), forbidden=(), **resources):
    return model.Group(
        tuple(sorted(resources.items())), single,
        tuple(map(frozenset, required)), frozenset(forbidden))


def demand(*groups, count=1, **more):
    """Return a demand for servers of some request groups."""
    resources = {}
    for one in groups:
        for rc, amount in one.resources:
            resources[rc] = resources.get(rc, 0) + amount
    return model.Demand(resources, count, groups=groups, **more)


def of(**providers):
    """Return the providers of a host: for each, the units by class.

    The underscore is the root provider.
    """
    return model.Providers(
        tuple('' if one == '_' else one for one in providers),
        tuple(tuple(sorted((rc, model.Units(*numbers))
                           for rc, numbers in some.items()))
              for some in providers.values()))


#: Two graphics cards with one unit each.
CARDS = of(_={}, a={'VGPU': (1, 1, 1, 1)}, b={'VGPU': (1, 1, 1, 1)})


class UnitsTest(base.TestCase):
    """One host, and how many servers fit there."""

    def fits(self, wanted, providers, booked=(), usage=None, **capacity):
        line = timelines.Timeline()
        line.set_host(1, capacity, usage or {}, 'root', providers)
        for one in booked:
            line.apply(1, model.Window(0, 100), one, 1)
        found = int(line.fits(wanted, model.Window(10, 20))[0])
        start = line.earliest(wanted, 10, 10)
        # Both queries agree on what fits at once.
        if wanted.affinity is model.Affinity.NONE:
            self.assertEqual(found >= wanted.count, start == 10)
        return found

    def test_request_above_max_unit_does_not_fit(self):
        cpus = of(_={'VCPU': (16, 1, 4, 1)})
        for amount, fits in ((1, 9), (4, 4), (5, 0), (8, 0), (16, 0)):
            self.assertEqual(fits, self.fits(
                demand(group(VCPU=amount), count=9), cpus, VCPU=16), amount)

    def test_request_below_min_unit_or_off_step_does_not_fit(self):
        steps = of(_={'DISK_GB': (100, 20, 60, 10)})
        for amount, fits in ((10, 0), (20, 5), (25, 0), (60, 1), (70, 0)):
            self.assertEqual(fits, self.fits(
                demand(group(DISK_GB=amount), count=9), steps, DISK_GB=100))

    def test_demand_without_groups_is_checked_by_capacity_only(self):
        cpus = of(_={'VCPU': (16, 1, 4, 1)})
        self.assertEqual(2, self.fits(
            model.Demand({'VCPU': 8}, 9), cpus, VCPU=16))

    def test_resource_class_comes_from_one_provider(self):
        for amount, fits in ((1, 2), (2, 0)):
            self.assertEqual(fits, self.fits(
                demand(group(VCPU=1, VGPU=amount), count=9), CARDS,
                VCPU=16, VGPU=2))

    def test_each_numbered_group_comes_from_one_provider(self):
        two = [group(VCPU=1), group(True, VGPU=1), group(True, VGPU=1)]
        self.assertEqual(1, self.fits(
            demand(*two, count=9), CARDS, VCPU=16, VGPU=2))
        self.assertEqual(0, self.fits(
            demand(*two, group(True, VGPU=1), count=9), CARDS, VCPU=16,
            VGPU=2))

    def test_numbered_group_comes_from_one_provider_entirely(self):
        split = of(_={}, a={'VGPU': (1, 1, 1, 1)}, b={'FPGA': (1, 1, 1, 1)})
        for single, fits in ((False, 1), (True, 0)):
            self.assertEqual(fits, self.fits(
                demand(group(single, VGPU=1, FPGA=1)), split, VGPU=1, FPGA=1))

    def test_isolated_groups_come_from_different_providers(self):
        large = of(_={}, a={'VGPU': (4, 1, 4, 1)}, b={'FPGA': (4, 1, 4, 1)})
        two = group(True, VGPU=1), group(True, VGPU=1)
        for isolated, fits in ((False, 2), (True, 0)):
            self.assertEqual(fits, self.fits(
                demand(*two, count=9, isolated=isolated), large, VGPU=4,
                FPGA=4))

    def test_traits_are_matched_on_the_used_provider(self):
        mixed = of(_={}, a={'VGPU': (1, 1, 1, 1)}, b={'VGPU': (4, 1, 4, 1)})
        for single in (False, True):
            for required, amount, fits in (
                    ('a', 1, 1), ('a', 2, 0), ('b', 2, 2), ('root', 1, 0)):
                if required == 'root' and not single:
                    continue
                self.assertEqual(fits, self.fits(
                    demand(group(single, [required], VGPU=amount), count=9),
                    mixed, VGPU=5), (single, required, amount))

    def test_unnumbered_group_collects_traits_of_its_providers(self):
        mixed = of(_={'VCPU': (16, 1, 4, 1)}, a={'VGPU': (1, 1, 1, 1)},
                   b={'VGPU': (2, 1, 2, 1)})
        for required, fits in ((('root', 'a'), 1), (('a', 'b'), 0)):
            self.assertEqual(fits, self.fits(
                demand(group(False, [[one] for one in required],
                             VCPU=1, VGPU=1)), mixed, VCPU=16, VGPU=3))

    def test_forbidden_providers_are_not_used(self):
        for single in (False, True):
            for forbidden, fits in (((), 2), ('a', 1), ('ab', 0)):
                self.assertEqual(fits, self.fits(
                    demand(group(single, forbidden=forbidden, VGPU=1),
                           count=9), CARDS, VGPU=2))

    def test_traits_count_on_hosts_without_units(self):
        for required, fits in ((['root'], 1), (['other'], 0)):
            self.assertEqual(fits, self.fits(
                demand(group(True, [required], VCPU=1)), None, VCPU=4))

    def test_class_of_root_provider_is_not_taken_from_child(self):
        for single, fits in ((False, 1), (True, 0)):
            self.assertEqual(fits, self.fits(
                demand(group(single, MEMORY_MB=1, VGPU=1)), CARDS, VGPU=2,
                MEMORY_MB=4))

    def test_shared_storage_is_left_to_nova(self):
        self.assertEqual(1, self.fits(
            demand(group(VCPU=4, DISK_GB=9)), of(_={'VCPU': (16, 1, 4, 1)}),
            VCPU=16))

    def test_remainders_of_several_providers_are_not_summed(self):
        three = of(_={}, a={'VGPU': (3, 1, 3, 1)}, b={'VGPU': (3, 1, 3, 1)})
        wanted = demand(group(VGPU=2), count=9)
        for booked, fits in ((0, 2), (1, 1), (2, 0)):
            self.assertEqual(fits, self.fits(
                wanted, three, [{'VGPU': 2}] * booked, VGPU=6))
        # Wherever three of them are, one provider has two free.
        self.assertEqual(1, self.fits(
            wanted, three, usage={'VGPU': 3}, VGPU=6))

    def test_one_server_fits_on_empty_host_with_uneven_providers(self):
        uneven = of(_={}, a={'VGPU': (2, 1, 2, 1)}, b={'VGPU': (1, 1, 1, 1)})
        self.assertEqual(1, self.fits(
            demand(group(True, VGPU=2), group(True, VGPU=1), count=9),
            uneven, VGPU=3))

    def test_servers_with_affinity_need_one_host_for_all(self):
        line = timelines.Timeline()
        line.set_host(1, {'VGPU': 2}, {}, 'root', CARDS)
        for count, start in ((1, 0), (2, 0), (3, None)):
            self.assertEqual(start, line.earliest(demand(
                group(VGPU=1), count=count, affinity=model.Affinity.SAME),
                10, 0))

    def test_many_single_device_groups_are_matched(self):
        many = of(_={}, **{f'd{number}': {'PCI': (1, 1, 1, 1)}
                           for number in range(15)})
        groups = [group(True, PCI=1)] * 15
        for isolated in (False, True):
            self.assertEqual(1, self.fits(
                demand(*groups, isolated=isolated), many, PCI=15))
            self.assertEqual(0, self.fits(
                demand(*groups, group(True, PCI=1), isolated=isolated),
                many, PCI=16))

    def test_fits_match_all_distributions_over_two_cards(self):
        """Compare the answers with all ways to distribute two cards."""
        for sizes in itertools.product(range(1, 4), repeat=2):
            cards = of(_={}, **{
                name: {'VGPU': (size, 1, size, 1)}
                for name, size in zip('ab', sizes)})
            for amount in range(1, 4):
                found = self.fits(demand(group(VGPU=amount), count=9), cards,
                                  VGPU=sum(sizes))
                self.assertEqual(
                    sum(size // amount for size in sizes), found,
                    (sizes, amount))

    def test_changed_units_take_effect(self):
        line = timelines.Timeline()
        wanted = demand(group(VCPU=8))
        for most, fits in ((16, 1), (4, 0), (8, 1)):
            line.set_host(1, {'VCPU': 16}, {}, 'root',
                          of(_={'VCPU': (16, 1, most, 1)}))
            self.assertEqual([fits], line.fits(
                wanted, model.Window(0, 10)).tolist())

    def test_hosts_with_equal_units_are_evaluated_once(self):
        judged = []

        def count(*args):
            judged.append(1)
            return found(*args)

        found = provider_limits.limits_of
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.provider_limits.limits_of', count))
        line = timelines.Timeline()
        for number in range(50):
            line.set_host(number, {'VCPU': 16}, {}, f'uuid{number}',
                          of(_={'VCPU': (16, 1, 4, 1)}))
        for _each in range(3):
            line.fits(demand(group(VCPU=4)), model.Window(0, 10))
        self.assertLessEqual(len(judged), 2)


class AdmissionTest(worlds.WorldTestCase):
    """A demand for unavailable resources is refused with the reason."""

    def setUp(self):
        super().setUp()
        self.admission = admissions.Admission(self.database, self.clock)
        self.report('cpu', {'VCPU': 16, 'MEMORY_MB': 64}, {
            '': {'VCPU': [16, 1, 4, 1]}})

    def report(self, name, capacity, limited=None):
        with self.database.writer() as session:
            inventory.record_host(session, NOW, model.HostFacts(
                name, name, name, capacity, {}, units=limited), {},
                inventory.generations(session, [name]).get(name))

    def pick(self, wanted):
        return self.admission.pick(wanted, model.Window(NOW, NOW + 10))

    def refusal(self, wanted):
        return self.assertRaises(
            errors.Refused, self.pick, wanted).refusal

    def test_a_server_that_no_host_can_take_is_refused(self):
        self.assertEqual(4, len(self.pick(demand(group(VCPU=4), count=4))))
        refusal = self.refusal(demand(group(VCPU=8)))
        self.assertEqual(
            (refusals.Reason.TOO_BIG, 0, None),
            (refusal.reason, refusal.fits_now, refusal.next_start))
        self.assertIn('One server needs 8 VCPU, but no host gives one server '
                      'more than 4.', refusal.sentence())

    def test_refusal_names_largest_unit_of_permitted_hosts(self):
        self.report('large', {'VCPU': 8}, {'': {'VCPU': [8, 1, 6, 1]}})
        self.assertIn('more than 6', self.refusal(
            demand(group(VCPU=7))).sentence())
        self.assertIn('more than 4', self.refusal(demand(
            group(VCPU=7), hosts=frozenset(['cpu']))).sentence())
        self.report('step', {'FPGA': 8}, {'': {'FPGA': [8, 4, 8, 2]}})
        self.assertIn('less than 4', self.refusal(
            demand(group(FPGA=2))).sentence())
        self.assertIn('only multiples of 2', self.refusal(
            demand(group(FPGA=5))).sentence())

    def test_refusal_names_request_groups_if_amounts_fit(self):
        self.report('cards', {'VGPU': 2}, {
            '': {}, 'a': {'VGPU': [1, 1, 1, 1]},
            'b': {'VGPU': [1, 1, 1, 1]}})
        said = self.refusal(demand(
            group(True, [['cards']], VGPU=1))).sentence()
        self.assertIn('numbered request group', said)

    def test_lack_of_free_capacity_is_not_reported_as_too_large(self):
        wanted = demand(group(VCPU=4), count=5)
        self.assertEqual('', self.refusal(wanted).detail)

    def test_availability_is_zero_if_no_host_can_take_server(self):
        for amount, fits in ((4, 4), (5, 0)):
            found, _more = self.admission.starts.availability(
                demand(group(VCPU=amount), count=9),
                model.Window(NOW, NOW + 100), 10, 10)
            self.assertEqual([(NOW, fits)], found)

    def test_other_host_that_can_take_server_is_picked(self):
        self.report('large', {'VCPU': 8})
        self.assertEqual(
            [self.host_id('large')], self.pick(demand(group(VCPU=8))))

    def test_changed_units_are_followed(self):
        self.refusal(demand(group(VCPU=8)))
        self.report('cpu', {'VCPU': 16, 'MEMORY_MB': 64}, {
            '': {'VCPU': [16, 1, 8, 1]}})
        self.pick(demand(group(VCPU=8)))
        self.report('cpu', {'VCPU': 16, 'MEMORY_MB': 64})
        self.pick(demand(group(VCPU=16)))

    def test_newly_loaded_index_knows_units(self):
        fresh = admissions.Admission(self.database, self.clock)
        self.admission = fresh
        self.refusal(demand(group(VCPU=8)))

    def test_usable_hosts_are_those_that_can_take_server(self):
        self.report('large', {'VCPU': 8})
        for amount, names in ((4, {'cpu', 'large'}), (8, {'large'})):
            self.assertEqual(names, self.admission.usable(
                demand(group(VCPU=amount))))
            self.assertEqual(names - {'large'}, self.admission.usable(
                demand(group(VCPU=amount), hosts=frozenset(['cpu']))))

    def test_equal_hosts_share_provider_objects(self):
        for name in ('one', 'two'):
            self.report(name, {'VCPU': 16}, {'': {'VCPU': [16, 1, 4, 1]}})
        with self.admission.index.fresh():
            hosts = self.admission.index.hosts
        self.assertEqual(1, len({
            id(host.providers) for host in hosts.values()}))


class KindsTest(worlds.WorldTestCase):
    """Providers of a host with one class and different traits."""

    def setUp(self):
        super().setUp()
        self.admission = admissions.Admission(self.database, self.clock)
        one = [1, 1, 1, 1]
        self.units = {
            '': {}, **{uuid: {'GPU': one, f'GPU@{kind}': one}
                       for uuid, kind in (('a1', 'a'), ('a2', 'a'),
                                          ('b1', 'b'))}}
        self.report(self.capacity, self.units)

    def report(self, capacity, limited, **allocations):
        with self.database.writer() as session:
            inventory.record_host(session, NOW, model.HostFacts(
                'gpus', 'gpus', 'gpus', capacity, {}, units=limited),
                allocations,
                inventory.generations(session, ['gpus']).get('gpus'))

    capacity = {'VCPU': 9, 'GPU': 3, 'GPU@a': 2, 'GPU@b': 1}
    #: The groups that ask for one of each kind.
    of = {'a': group(True, [['a1', 'a2']], GPU=1),
          'b': group(True, [['b1']], GPU=1), '': group(True, GPU=1),
          'not a': group(True, (), ['a1', 'a2'], GPU=1)}

    def book(self, *wanted, start=0, end=10, count=1):
        """Admit a lease; return the booked kinds of each server."""
        wanted = demand(group(VCPU=1), *(self.of[one] for one in wanted),
                        count=count)
        window = model.Window(NOW + start, NOW + end)

        def write(connection, picked):
            edits = ledger.decide(connection, NOW, [
                ledger.Edit(None, ledger.NewBooking(
                    None, host_id, None, window, wanted.resources,
                    groups=wanted.groups)) for host_id in picked[0]])
            ledger.add(connection, NOW, edits, {})
            return [{rc: amount for rc, amount in new.resources.items()
                     if '@' in rc} for _row, new in edits]

        return self.admission.admit([wanted], window, write)

    def refuse(self, *wanted, **how):
        return self.assertRaises(
            errors.Refused, self.book, *wanted, **how).refusal

    def test_each_kind_is_counted_separately(self):
        self.assertEqual([{'GPU@b': 1}], self.book('b'))
        self.assertEqual(NOW + 10, self.refuse('b').next_start)
        self.assertEqual([{'GPU@b': 1}], self.book('not a', start=10, end=20))
        self.assertEqual([{'GPU@a': 1}] * 2, self.book('', count=2))
        self.refuse('')
        self.refuse('a', end=1)

    def test_server_may_have_one_of_each_kind(self):
        self.assertEqual([{'GPU@a': 1, 'GPU@b': 1}], self.book('b', ''))
        self.refuse('', '')
        self.assertEqual([{'GPU@a': 1}], self.book(''))

    def test_fits_count_all_free_providers(self):
        with self.admission.index.fresh() as timeline:
            for wanted, fits in (('', 3), ('a', 2), ('b', 1), ('not a', 1)):
                self.assertEqual([fits], timeline.fits(
                    demand(self.of[wanted], count=9),
                    model.Window(NOW, NOW + 9)).tolist()[-1:])

    def test_usage_counts_by_kind(self):
        self.report(self.capacity, self.units, vm={
            'VCPU': 1, 'GPU': 1, 'GPU@b': 1})
        self.refuse('b')
        self.assertEqual([{'GPU@a': 1}] * 2, self.book('', count=2))

    def test_kind_survives_loss_of_some_providers(self):
        """Some of the providers, or all of them, may disappear."""
        self.report({'VCPU': 9, 'GPU': 2, 'GPU@a': 1, 'GPU@b': 1}, {
            uuid: some for uuid, some in self.units.items() if uuid != 'a2'})
        wanted = demand(group(True, [['a1']], GPU=1))
        with self.admission.index.fresh() as timeline:
            self.assertEqual([{'GPU@a': 1}], timeline.units.ways(wanted))
        self.report({'VCPU': 9}, None)
        with self.admission.index.fresh() as timeline:
            self.assertEqual({}, timeline.units.kinds)

    def test_no_provider_is_booked_twice(self):
        """Compare random bookings with a check of each instant."""
        chance = random.Random(7)
        having, booked = {'GPU@a': 2, 'GPU@b': 1}, []
        answers = collections.Counter()
        for _number in range(150):
            start = chance.randrange(60)
            end = start + chance.randint(1, 15)
            wanted = chance.choice(['a', 'b', '', ''])
            free = [kind for kind, count in having.items() if all(
                sum(one == kind and since <= at < until
                    for one, since, until in booked) < count
                for at in range(start, end))]
            can = [one for one in free if one.endswith(wanted)]
            if not can:
                self.refuse(wanted, start=start, end=end)
            else:
                (kind, _one), = self.book(
                    wanted, start=start, end=end)[0].items()
                self.assertIn(kind, can)
                booked.append((kind, start, end))
            answers[bool(can)] += 1
        self.assertGreater(min(answers.values()), 20)
