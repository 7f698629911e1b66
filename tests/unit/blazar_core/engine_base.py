# SPDX-License-Identifier: Apache-2.0

"""Base classes of the tests of the engine."""

import collections
import threading

from oslo_utils import uuidutils

from blazar_core.db import models
from blazar_core.lifecycle import engine
from tests import driven
from tests.unit import base

NOW, HOUR = base.NOW, 3600


class Actions:
    """A lifecycle that records the actions that are requested.

    :ivar done: the actions, as (action, lease), in the order of their ends
    :ivar running: the actions under way
    :ivar doors: by lease, the event that its action waits for
    :ivar answers: by lease, what its actions return or raise, one by one
    :ivar read_with: by started lease, the leases it was read with
    :ivar unread: the exception of reading several leases
    """

    def __init__(self, database):
        self.lease_start = self.lease_end = self.notices = self
        self.admission_queue = self.best_effort = self
        self.auto_extension = self.budget_events = self
        self.read_with = {}
        self.unread = None
        self.done = []
        self.database = database
        self.begun = collections.Counter()
        self.running = []
        self.most = 0
        self.given_up = []
        self.doors = {}
        self.answers = collections.defaultdict(list)
        self._lock = threading.Lock()

    def read(self, lease_ids):
        if self.unread:
            raise self.unread
        return dict.fromkeys(lease_ids, sorted(lease_ids))

    def start(self, lease_id, when_due, read):
        with self._lock:
            self.read_with[lease_id] = read
        return self._act('start_lease', lease_id)

    def due(self, lease_id):
        return self._act('retry', lease_id)

    def go_on(self, lease_id):
        return self._act('make_room', lease_id)

    def extend(self, lease_id):
        return self._act('extend', lease_id)

    def end(self, lease_id, when_due):
        return self._act('end_lease', lease_id)

    def expire(self, lease_id):
        return self._act('expire', lease_id)

    def happen(self, lease_id, event_type, event_id):
        return self._act(event_type, lease_id)

    def changed(self, lease_id):
        return self._act('changed', lease_id)

    def charge(self, lease_id):
        return self._act('charge', lease_id)

    def refund(self, lease_id):
        return self._act('refund', lease_id)

    def orphaned(self, lease_id):
        return self._act('orphaned', lease_id)

    def give_up(self, lease_id, event_type, settle):
        with self.database.writer() as session:
            if settle(session):
                self.given_up.append((event_type, lease_id))

    def _act(self, what, lease_id):
        with self._lock:
            self.begun[what, lease_id] += 1
            self.running.append((what, lease_id))
            self.most = max(self.most, len(self.running))
        try:
            if lease_id in self.doors:
                assert self.doors[lease_id].wait(20)
            answers = self.answers[lease_id]
            answer = answers.pop(0) if answers else None
            if isinstance(answer, BaseException):
                raise answer
            return answer
        finally:
            with self._lock:
                self.running.remove((what, lease_id))
                self.done.append((what, lease_id))


class WatchedClock(driven.ManualClock):
    """A clock that records until when it was waited for."""

    def __init__(self, now):
        super().__init__(now)
        self.waits = []

    def wait(self, event, until):
        self.waits.append(until)
        super().wait(event, until)


class EngineTestCase(base.DatabaseTestCase):

    def setUp(self):
        super().setUp()
        self.clock = WatchedClock(NOW)
        self.actions = Actions(self.database)
        self.addCleanup(self.open_doors)

    def open_doors(self):
        for door in self.actions.doors.values():
            door.set()

    def shut(self, lease_id):
        """Block the actions of a lease until the returned event is set."""
        door = self.actions.doors[lease_id] = threading.Event()
        return door

    def engine(self, name='first', **options):
        for option, value in options.items():
            self.db.conf.set_override(option, value, 'blazar')
        return engine.Engine(self.db.conf, self.db.connect(),
                             self.clock, self.actions, name)

    def started(self, name='first', **options):
        """Return an engine that runs in a thread until the test ends."""
        worker = self.engine(name, **options)
        thread = self.in_thread(worker.run)
        self.addCleanup(worker.stop)
        self.addCleanup(self.open_doors)
        worker.thread = thread
        return worker

    def event(self, lease_id, due=0, event_type='mine', project='',
              **values):
        """Add an event that is due at so many seconds from NOW."""
        event_id = uuidutils.generate_uuid()
        with self.database.writer() as session:
            if session.get(models.Lease, lease_id) is None:
                session.add(models.Lease(
                    lease_type='immediate',
                    id=lease_id, name='', project_id=project, user_id='',
                    start_date=NOW, end_date=NOW + 1, on_end='',
                    status='ACTIVE', created_at=0, updated_at=0))
                session.flush()
            session.add(models.Event(**{
                'id': event_id, 'lease_id': lease_id, 'time': NOW + due,
                'event_type': event_type, 'run_at': NOW + due,
                'status': 'UNDONE', 'attempts': 0, 'claimed_until': 0,
                'created_at': 0, 'updated_at': 0, **values}))
        return event_id

    def many(self, lease_id, number, due, project='', event_type='mine'):
        """Add several events of a lease."""
        self.event(lease_id, due, event_type, project)
        with self.database.begin() as connection:
            connection.execute(models.Event.__table__.insert(), [{
                'id': f'{lease_id}-{one}', 'lease_id': lease_id,
                'event_type': event_type, 'time': NOW + due,
                'run_at': NOW + due, 'status': 'UNDONE', 'attempts': 0,
                'deferrals': 0, 'claimed_until': 0, 'created_at': 0,
                'updated_at': 0} for one in range(number - 1)])

    def row(self, event_id):
        row, = self.scalars(models.Event, models.Event.id == event_id)
        return row

    def done(self):
        """Return the leases whose actions have ended, in this order."""
        return [lease_id for _what, lease_id in self.actions.done]
