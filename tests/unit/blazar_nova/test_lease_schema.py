# SPDX-License-Identifier: Apache-2.0

import dataclasses

import hypothesis
from hypothesis import strategies as st

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.leases import requests
from blazar_core.leases import updates
from blazar_nova.schemas import hint_params
from blazar_nova.schemas import lease_queries
from blazar_nova.schemas import lease_schema
from tests import examples
from tests.unit import base

#: 2027-01-15 08:00:20 UTC.
NOW = base.NOW + 20
HOUR = 3600

DEFAULTS = hint_params.Defaults(
    start='now', length=HOUR, minutes_before_end=0)

#: A whole request, as python-blazarclient 4.6.0 sends it.
CREATE = {
    'name': 'lease1', 'start_date': '2027-01-15 09:00',
    'end_date': '2027-01-15 10:00', 'before_end_date': None,
    'reservations': [{
        'resource_type': 'virtual:instance', 'amount': 2, 'vcpus': 2,
        'memory_mb': 1024, 'disk_gb': 10, 'affinity': 'None',
        'resource_properties': ''}],
    'events': [],
}


class TestCreate(base.RefusalTestCase):

    def create(self, defaults=DEFAULTS, without=(), **values):
        body = {key: value for key, value in {**CREATE, **values}.items()
                if key not in without}
        return lease_schema.create(body, NOW, defaults)

    def assert_create_refused(self, parts, **values):
        self.assert_refused(parts, lambda: self.create(**values))

    def test_body_of_client_is_parsed(self):
        begin = base.NOW + HOUR
        self.assertEqual(lease_schema.CreateRequest(
            requests.LeaseRequest(
                'lease1', model.Window(begin, begin + HOUR), None, (),
                'delete', False),
            (CREATE['reservations'][0],), None), self.create())

    def test_only_end_date_is_required(self):
        for body in ({'end_date': '2027-01-15 10:00'},
                     {**dict.fromkeys(CREATE), 'offer_seconds': None,
                      'end_date': '2027-01-15 10:00'}):
            self.assertEqual(lease_schema.CreateRequest(
                requests.LeaseRequest(
                    None, model.Window(NOW, base.NOW + 2 * HOUR), None, (),
                    'delete', True), (), None),
                lease_schema.create(body, NOW, DEFAULTS))

    def test_duration_may_replace_end_date(self):
        lease = self.create(without=['end_date'], duration='1h30m').lease
        self.assertEqual(model.Window(
            base.NOW + HOUR, base.NOW + 2 * HOUR + HOUR // 2), lease.window)
        self.assert_create_refused(['"end_date" and "duration"'],
                                   duration='1h')

    def test_waiting_lease_keeps_requested_duration(self):
        for more in ({'lease_type': 'retry'}, {'lease_type': 'best_effort',
                                               'start_date': 'now'}):
            self.assertEqual(5400, self.create(
                without=['end_date'], duration='1h30m', **more,
            ).lease.duration)
            self.assertIsNone(self.create(**more).lease.duration)
        self.assertIsNone(self.create(
            without=['end_date'], duration='1h30m').lease.duration)

    def test_series_with_duration_equals_series_with_end_date(self):
        """Also over a change of daylight saving."""
        recurrence = {'rule': 'FREQ=DAILY;COUNT=4',
                      'timezone': 'Europe/Berlin'}
        by_end, by_duration = (self.create(
            without=without, start_date='2027-03-26 02:15', events=[],
            recurrence=recurrence, **end).lease.recurrence
            for without, end in (
                ([], {'end_date': '2027-03-26 02:45'}),
                (['end_date'], {'duration': '30m'})))
        self.assertEqual(by_end, by_duration)
        self.assertEqual([1800] * 4, [
            one.end - one.start for one in by_end.windows])
        self.assertEqual(1, len(by_end.shifted))

    def test_defaults_replace_missing_dates(self):
        defaults = hint_params.Defaults(
            start='2027-01-15 09:30', length=1, minutes_before_end=10)
        lease = self.create(defaults, without=['start_date']).lease
        self.assertEqual(
            (base.NOW + HOUR + HOUR // 2, base.NOW + 2 * HOUR - 600),
            (lease.window.start, lease.before_end))

    def test_start_in_last_minute_is_now(self):
        for start in ('now', '2027-01-15 08:00', '2027-01-15 08:00:20',
                      '2027-01-15 07:59:21', '2027-01-15 07:59',
                      '2027-01-15T08:00:00.000000'):
            lease = self.create(start_date=start).lease
            self.assertEqual((NOW, True), (
                lease.window.start, lease.starts_now), start)
        for start in ('2027-01-15 07:59:20', '2027-01-15 07:58'):
            self.assert_create_refused('is in the past', start_date=start)
        self.assertFalse(self.create(start_date='2027-01-15 08:00:21')
                         .lease.starts_now)

    def test_invalid_window_is_refused(self):
        self.assert_create_refused(
            'End date must be later than start date.',
            end_date='2027-01-15 09:00')
        self.assert_create_refused(
            'is an invalid date', end_date='9999-01-01 00:00')
        self.assert_create_refused(
            'soon is an invalid date', start_date='soon')

    def test_missing_end_date_is_refused_with_example(self):
        for values in ({'without': ['end_date']}, {'end_date': None}):
            self.assert_create_refused(
                'Missing parameter end_date. Write for example "end_date": '
                '"2026-12-02 16:07", or "duration": "2d".', **values)

    def test_numbers_instead_of_strings_are_refused(self):
        for key in ('name', 'start_date', 'end_date', 'before_end_date'):
            self.assert_create_refused(
                f'"{key}" is a number. Write a string, such as "{key}": "',
                **{key: 5})

    def test_unknown_key_is_refused_with_suggestion(self):
        self.assert_create_refused(
            ('The key "end" is not known in the lease.',
             'Did you mean "end_date"?'), end='2027-01-15 10:00')

    def test_on_end_and_grace_period_are_validated(self):
        defaults = hint_params.Defaults(
            start='now', length=1, minutes_before_end=0,
            ends=('recycle', 'delete'), grace_period=60)
        for values, expected in (
                ({}, ('recycle', 60)), ({'on_end': None}, ('recycle', 60)),
                ({'on_end': 'delete', 'grace_period': 0}, ('delete', 0)),
                ({'grace_period': '1h30m'}, ('recycle', 5400)),
                ({'grace_period': ' 90 '}, ('recycle', 90))):
            lease = self.create(defaults, **values).lease
            self.assertEqual(expected, (lease.on_end, lease.grace_period))
        self.assert_create_refused(
            '"on_end": "recycle" is not available. What is available at the '
            'end of a lease: delete.', on_end='recycle')
        self.assert_create_refused('"on_end" is a number', on_end=1)
        for value in (-1, True, 1.5, [], 2592001, 2 ** 31):
            self.assert_create_refused(
                'Write a whole number from 0 to', grace_period=value)
        for value in ('soon', '', '-1'):
            self.assert_create_refused(
                'is an invalid duration', grace_period=value)

    def test_names_are_normalized_and_validated(self):
        self.assertEqual('a b', self.create(name='  a b ').lease.name)
        self.assertIsNone(self.create(name=None).lease.name)
        self.assertIsNone(self.create(without=['name']).lease.name)
        self.assert_create_refused('The name has 0 characters', name=' ')
        self.assert_create_refused('control characters', name='a\nb')
        self.assert_create_refused('Write 1 to 255', name='x' * 256)

    def test_before_end_date_must_be_within_lease(self):
        for date, seconds in (('2027-01-15 09:00', 0),
                              ('2027-01-15 09:50', 3000),
                              ('2027-01-15 10:00', HOUR)):
            self.assertEqual(base.NOW + HOUR + seconds, self.create(
                before_end_date=date).lease.before_end)
        for date in ('2027-01-15 08:59', '2027-01-15 10:01'):
            self.assert_create_refused(
                'is not within the lease', before_end_date=date)

    def test_user_events_are_validated(self):
        event = {'event_type': 'remind', 'event_date': '2027-01-15 09:30'}
        self.assertEqual(
            (requests.EventRequest('remind', base.NOW + 3 * HOUR // 2),),
            self.create(events=[event]).lease.events)
        for events, part in (
                ('remind', '"events" is a string'),
                ([5], 'An entry of "events" is a number'),
                ([{**event, 'event_type': None}], 'has no "event_type"'),
                ([{'event_type': 'remind'}], 'has no "event_date"'),
                ([{**event, 'event_type': 'expire_offer'}],
                 'belongs to every lease'),
                ([{**event, 'event_date': '2027-01-15 10:01'}],
                 'is not within the lease'),
                ([event] * 101, 'has 101 entries')):
            self.assert_create_refused(part, events=events)

    def test_event_actions_are_validated(self):
        defaults = dataclasses.replace(DEFAULTS, ends=('delete', 'snapshot'))
        event = {'event_type': 'remind', 'event_date': '2027-01-15 09:30',
                 'action': 'snapshot'}
        lease = self.create(
            defaults, events=[event], before_end_action='snapshot',
            before_end_date='2027-01-15 09:45').lease
        self.assertEqual(('snapshot', 'snapshot'), (
            lease.before_end_action, lease.events[0].action))
        self.assertEqual('notify', self.create(
            defaults, before_end_action=None).lease.before_end_action)
        self.assert_create_refused('Add "before_end_date": ',
                                   before_end_action='notify')
        self.assert_create_refused('"snapshot" is not available.',
                                   events=[event])

    def test_reservations_are_kept_without_null_values(self):
        one, two = {'resource_type': 'a', 'amount': '2', 'b': None}, {'c': [5]}
        self.assertEqual(
            ({'resource_type': 'a', 'amount': '2'}, {'c': [5]}),
            self.create(reservations=[one, two]).reservations)
        self.assertEqual((), self.create(reservations=[]).reservations)
        self.assertEqual(20, len(self.create(
            reservations=[one] * 20).reservations))

    def test_reservations_must_be_a_list_of_objects(self):
        for reservations in ({}, 'virtual:instance', 5, [{}] * 21):
            self.assert_create_refused(
                '"reservations" must be a list of at most 20 objects, such '
                'as [{"resource_type": "virtual:instance", ...}].',
                reservations=reservations)
        self.assert_create_refused(
            'An entry of "reservations" is a string. Write a JSON object.',
            reservations=[{}, 'one'])
        self.assert_create_refused(
            'An entry of "reservations" is null.', reservations=[None])

    def test_total_amount_of_reservations_is_limited(self):
        lease_schema.check_total([1000], 1000)
        lease_schema.check_total([500, 500], 1000)
        # A lease that was larger before may shrink.
        lease_schema.check_total([1500, 10], 1000, before=2000)
        for amounts, before in (([1001], 0), ([1000, 1], 0),
                                ([600, 500], 1000), ([2001], 2000)):
            self.assert_refused(
                f'The amounts of the reservations of one lease add up to '
                f'{sum(amounts)}. Write amounts of at most 1000 in all',
                lease_schema.check_total, amounts, 1000, before)

    def test_total_amount_counts_all_occurrences(self):
        lease_schema.check_total([4, 6], 1000, times=100)
        # A lease that was larger before may shrink.
        lease_schema.check_total([900], 1000, before=1000, others=99_000)
        for more, part in (
                ({'times': 101}, 'add up to 10, and to 1010 in 101 '
                 'occurrences. Write amounts of at most 1000 in all'),
                ({'others': 991}, 'add up to 10, and to 1001 with those of '
                 'the other occurrences. Write')):
            self.assert_refused(
                part, lambda: lease_schema.check_total([10], 1000, **more))

    def test_offer_seconds_are_limited(self):
        for value in (60, '60', 86400):
            self.assertEqual(int(value), self.create(
                offer_seconds=value).offer_seconds)
        for value in (59, 86401, 'soon', True):
            self.assert_create_refused(
                '"offer_seconds" is', offer_seconds=value)

    def test_body_must_be_an_object(self):
        for body in (None, [], 'x', 5):
            self.assert_refused(
                'The body of the request is', lease_schema.create, body, NOW,
                DEFAULTS)


class TestChange(base.RefusalTestCase):

    #: From 09:00 to 10:00:30, the same day.
    lease = {'start_date': base.NOW + HOUR,
             'end_date': base.NOW + 2 * HOUR + 30,
             'before_end_date': None, 'on_end': 'delete', 'grace_period': 0,
             'reservations': []}

    def test_extending_a_short_lease_sets_before_end(
            self):
        defaults = dataclasses.replace(DEFAULTS, minutes_before_end=60)
        for before_end, expected in (
                (None, base.NOW + 2 * HOUR), (NOW + 60, None)):
            lease = {**self.lease, 'start_date': base.NOW,
                     'end_date': base.NOW + HOUR,
                     'before_end_date': before_end}
            self.assertEqual(expected, lease_schema.change(
                {'end_date': '2027-01-15 11:00'}, NOW, lease,
                defaults).change.before_end)
            self.assertIsNone(lease_schema.change(
                {'name': 'other'}, NOW, lease, defaults).change.before_end)
            # The order of the dates is checked later, with a message.
            self.assertIsNone(lease_schema.change(
                {'start_date': '2027-01-15 13:00',
                 'end_date': '2027-01-15 12:00'}, NOW, lease,
                defaults).change.before_end)

    def test_resources_changed_can_be_acknowledged(self):
        self.assertEqual((False, True), (
            self.change(name='new').change.seen,
            self.change(resources_changed=False).change.seen))
        for value in (True, 'false', 0):
            self.assert_refused(
                'Write false to acknowledge it',
                lambda value=value: self.change(resources_changed=value))

    def change(self, now=NOW, lease=None, **values):
        return lease_schema.change(
            values, now, lease or self.lease, dataclasses.replace(
                DEFAULTS, ends=('recycle', 'delete')))

    def test_missing_and_null_values_change_nothing(self):
        for values in ({}, dict.fromkeys((
                'name', 'start_date', 'end_date', 'before_end_date',
                'reservations', 'events', 'on_end', 'grace_period'))):
            self.assertEqual(
                lease_schema.ChangeRequest(updates.LeaseChange(), ()),
                self.change(**values))

    def test_each_field_may_be_changed(self):
        change = self.change(
            name=' new ', start_date='2027-01-15 09:01',
            end_date='2027-01-15 11:00', before_end_date='2027-01-15 10:30',
            events=[{'event_type': 'remind',
                     'event_date': '2027-01-15 09:30'}],
            reservations=[{'id': 'one', 'amount': '3', 'vcpus': None}],
            on_end='recycle', grace_period='1h')
        self.assertEqual(lease_schema.ChangeRequest(
            updates.LeaseChange(
                name='new', start=base.NOW + HOUR + 60,
                end=base.NOW + 3 * HOUR,
                before_end=base.NOW + 2 * HOUR + HOUR // 2,
                events=(requests.EventRequest(
                    'remind', base.NOW + HOUR + HOUR // 2),),
                on_end='recycle', grace_period=HOUR),
            ({'id': 'one', 'amount': '3'},)), change)

    def test_current_on_end_is_accepted_even_if_unavailable(self):
        """Sending back the current value is no change."""
        lease = {**self.lease, 'on_end': 'keep'}
        self.assertIsNone(
            self.change(lease=lease, on_end='keep').change.on_end)
        self.assert_refused('"on_end": "keep" is not available.',
                            lambda: self.change(on_end='keep'))

    def test_before_end_action_may_be_changed(self):
        self.assertIsNone(self.change().change.before_end_action)
        self.assertEqual('notify', self.change(
            before_end_action='notify').change.before_end_action)
        self.assert_refused('"snapshot" is not available.', lambda:
                            self.change(before_end_action='snapshot'))

    def test_empty_events_differ_from_missing_events(self):
        self.assertEqual((), self.change(events=[]).change.events)
        self.assertIsNone(self.change().change.events)

    def test_current_date_without_seconds_changes_nothing(self):
        """Clients show and send minutes only."""
        for date in ('2027-01-15 10:00', '2027-01-15 10:00:30',
                     '2027-01-15T10:00:30.000000'):
            self.assertIsNone(self.change(end_date=date).change.end, date)
        self.assertIsNone(
            self.change(start_date='2027-01-15 09:00').change.start)

    def test_end_may_be_given_as_in_lease_params(self):
        start = self.lease['start_date']
        for values, end in (
                ({'duration': '2d'}, start + 48 * HOUR),
                ({'duration': '1d12h'}, start + 36 * HOUR),
                ({'duration': ' 90m '}, start + 5400),
                ({'end': '2027-01-15 11:00'}, start + 2 * HOUR),
                ({'end': 'now'}, NOW),
                ({'duration': '2h', 'start_date': '2027-01-15 10:00'},
                 start + 3 * HOUR)):
            self.assertEqual(end, self.change(**values).change.end, values)
        for same in ({'duration': '60m30s'}, {'end': '2027-01-15 10:00'},
                     {'duration': None}):
            self.assertIsNone(self.change(**same).change.end)
        for values, part in (
                ({'duration': '2h', 'end': '2027-01-15 11:00'},
                 'both "end" and "duration"'),
                ({'end_date': 'now', 'duration': '2h'},
                 'both "end_date" and "duration"'),
                ({'duration': '2'}, 'invalid duration'),
                ({'duration': 2}, '"duration": "2d"'),
                ({'end': 2}, 'Write a string'), ({'end': '2d'}, 'date'),
                ({'duration': '9999999999w'}, 'would not end before')):
            self.assert_refused(part, lambda: self.change(**values))

    def test_end_date_with_seconds_is_exact(self):
        for date, seconds in (('2027-01-15 10:00:00', 0),
                              ('2027-01-15 10:00:31', 31),
                              ('2027-01-15T10:00:59.000000', 59),
                              ('2027-01-15T10:00:10+00:00', 10)):
            self.assertEqual(base.NOW + 2 * HOUR + seconds, self.change(
                end_date=date).change.end, date)

    def test_now_ends_lease_within_its_last_minute(self):
        now = base.NOW + 2 * HOUR + 10
        self.assertEqual(now, self.change(now, end_date='now').change.end)
        self.assertIsNone(self.change(
            now, end_date='2027-01-15 10:00').change.end)

    def test_before_end_date_changes_only_if_it_differs(self):
        date = '2027-01-15 09:50'
        time = base.NOW + HOUR + 3000
        self.assertEqual(time, self.change(
            before_end_date=date).change.before_end)
        lease = {**self.lease, 'before_end_date': time}
        self.assertIsNone(self.change(
            lease=lease, before_end_date=date).change.before_end)

    def test_current_before_end_date_is_kept_when_end_changes(self):
        """Otherwise it would move with the end."""
        time = base.NOW + HOUR + 3000
        lease = {**self.lease, 'before_end_date': time}
        self.assertEqual(time, self.change(
            lease=lease, before_end_date='2027-01-15 09:50',
            end_date='2027-01-15 12:00').change.before_end)

    def test_invalid_changes_are_refused(self):
        for part, values in (
                ('The key "offer_seconds" is not known in a change of a '
                 'lease.', {'offer_seconds': 60}),
                ('"updated_at" cannot be changed, and this lease has another '
                 'value of it now. Read the lease again',
                 {'name': 'x', 'updated_at': '2027-01-15 08:00:00'}),
                ('"end_date" is a number. Write a string, such as '
                 '"end_date": "2026-12-02 16:07".', {'end_date': 5}),
                ('soon is an invalid date', {'start_date': 'soon'}),
                ('The name has 0 characters', {'name': ''}),
                ('"name" is a list.', {'name': []}),
                ('"events" is an object', {'events': {}}),
                ('must be a list of at most 20', {'reservations': 'x'}),
                ('"on_end" is a number.', {'on_end': 5}),
                ('Write a whole number from 0 to 2592000',
                 {'grace_period': -1})):
            self.assert_refused(part, lambda: self.change(**values))
        self.assert_refused('The body of the request is a list',
                            lease_schema.change, [], NOW, self.lease, DEFAULTS)


class TestQuery(base.RefusalTestCase):

    def query(self, **values):
        return lease_schema.query(values, NOW, 0)

    def test_recently_ended_leases_are_listed_by_default(self):
        for values, ended_after in (({}, NOW - 60), ({'ended': 'false'}, None),
                                    ({'ended': 'true'}, None)):
            self.assertEqual(ended_after, lease_schema.query(
                values, NOW, 60)[0].ended_after)

    def test_default_query_lists_leases_that_have_not_ended(self):
        self.assertEqual((lease_queries.Query(
            ended=False, limit=10000, paged=False), None), self.query())

    def test_ended_must_be_a_boolean(self):
        for text, ended in (('true', True), ('1', True), ('False', False)):
            self.assertEqual(ended, self.query(ended=text)[0].ended)
        self.assert_refused('"ended" is yes. Write true or false.',
                            lambda: self.query(ended='yes'))

    def test_all_filters_are_parsed(self):
        self.assertEqual((lease_queries.Query(
            project_id='p', name='lease1', status='ACTIVE',
            resource_type='virtual:instance', start=base.NOW + HOUR,
            end=NOW, sort=(('created_at', True), ('name', False)),
            marker='m', limit=10), ['id', 'name']), self.query(
                project_id='p', name='lease1', status='active',
                resource_type='virtual:instance',
                start_date='2027-01-15 09:00', end_date='now',
                sort='created_at:desc, name:asc', marker='m', limit='10',
                fields='id, name'))

    def test_sort_accepts_each_key_and_direction(self):
        for key in ('start_date', 'end_date', 'created_at', 'updated_at',
                    'name', 'status', 'id'):
            for text, descending in ((key, False), (key + ':asc', False),
                                     (key + ':desc', True)):
                self.assertEqual(((key, descending),),
                                 self.query(sort=text)[0].sort)

    def test_invalid_queries_are_refused(self):
        for part, values in (
                ('"size" cannot be sorted by. Write one or more of '
                 'start_date, end_date,', {'sort': 'size'}),
                ('"name:up" cannot be sorted by', {'sort': 'name:up'}),
                ('"" cannot be sorted by', {'sort': ''}),
                ('"" cannot be sorted by', {'sort': 'name,'}),
                ('"limit" is 0. Write a whole number from 1 to 1000.',
                 {'limit': '0'}),
                ('"limit" is 1001.', {'limit': '1001'}),
                ('"FOO" is no status of a lease. Write one of ',
                 {'status': 'FOO'}),
                ('"" is no status', {'status': ''}),
                ('"virtual:server" is no resource type. Write one of '
                 'flavor:instance, physical:host, virtual:floatingip, ',
                 {'resource_type': 'virtual:server'}),
                ('"" is no resource type', {'resource_type': ''}),
                ('"limit" is all.', {'limit': 'all'}),
                ('soon is an invalid date', {'start_date': 'soon'}),
                ('The key "color" is not known in the query of leases.',
                 {'color': 'red'})):
            self.assert_refused(part, lambda: self.query(**values))


class TestAnyBody(base.RefusalTestCase):
    """Any body is accepted or refused with a message."""

    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() |
        st.text(max_size=12) | st.sampled_from((
            'now', '2027-01-15 09:00', '+-5', '-0', '99999-01-01 00:00')),
        lambda some: st.lists(some, max_size=3) | st.dictionaries(
            st.sampled_from(('event_type', 'event_date', 'id', 'x')), some,
            max_size=3), max_leaves=5)

    def check_all(self, keys, work):
        outcomes = set()

        def check(body):
            try:
                work(body)
                outcomes.add('understood')
            except errors.InvalidLeaseParams:
                outcomes.add('refused')

        examples.repeatable(200)(hypothesis.given(st.dictionaries(
            st.sampled_from(keys), self.values, max_size=4) | self.values)(
                check))()
        return outcomes

    def test_any_create_or_change_body_is_parsed_or_refused(self):
        keys = (*CREATE, 'offer_seconds')
        self.check_all(keys, lambda body: lease_schema.create(
            {**body, 'end_date': '2027-01-15 10:00'} if isinstance(
                body, dict) else body, NOW, DEFAULTS))
        self.assertEqual(
            {'understood', 'refused'}, self.check_all(
                keys, lambda body: lease_schema.change(
                    body, NOW, TestChange.lease, DEFAULTS)))
