# SPDX-License-Identifier: Apache-2.0

"""Processes that run in turn, in a time that passes while all of them wait.

A *task* is the work of one thread of a process. One task runs at a time, and
yields at each *point*: before a statement and a commit, when it calls the
cloud, when it waits. The random generator of the seed chooses the next task,
and what happens to a process at a point: it may die there, or freeze for a
while.

A task is a greenlet: a switch costs a microsecond, and a process that dies is
never resumed. No cleanup of its code is run.
"""

import dataclasses
import heapq
import math
import random
import threading
import typing as ty

import greenlet

#: The start of the simulation, in seconds since the epoch.
START = 1_800_000_000
#: Seconds that pass at each point.
STEP = 0.0005
#: Seconds after which a waiting task wakes up without an event.
LOOK = 10


class Gone(greenlet.GreenletExit):
    """The simulation is over."""


@dataclasses.dataclass(eq=False)
class Task:
    """The work of one thread of a process.

    :ivar ready: whether the task can continue
    :ivar wakes: when the task continues at the latest
    """

    name: str
    process: 'Process'
    work: ty.Callable[[], None]
    wakes: float = 0
    ready: ty.Callable[[], bool] | None = None
    let: ty.Any = None


class Process:
    """Tasks that live and die together.

    :param boot: creates its tasks, each time that the process starts
    :ivar offset: seconds that its clock was set ahead
    :ivar frozen: until when it is frozen
    :ivar mortal: whether it may die or freeze
    """

    def __init__(self, baton: 'Baton', name: str,
                 boot: ty.Callable[['Process'], None],
                 mortal: bool = True) -> None:
        self.baton = baton
        self.name = name
        self.mortal = mortal
        self.offset = 0
        self.frozen = 0.0
        self.lives = 0
        #: Seconds that its clock gains in each second, since when, and what it
        #: had gained in total before that.
        self._rate, self.drifts_since, self._gained = 0.0, baton.now, 0.0
        self.tasks: list[Task] = []
        #: Called when it dies.
        self.wills: list[ty.Callable[[], None]] = []
        self._boot = boot
        self.start()

    def start(self) -> None:
        self.lives += 1
        self._boot(self)

    def spawn(self, name: str, work: ty.Callable[[], None],
              after: float = 0) -> Task:
        """Add a task."""
        task = Task(f'{self.name}.{name}', self, work,
                    self.baton.now + after)
        self.tasks.append(task)
        self.baton.tasks.append(task)
        return task

    @property
    def gained(self) -> float:
        """Return the seconds that its clock gained since it was last set."""
        return self._rate * (self.baton.now - self.drifts_since)

    @property
    def elapsed(self) -> float:
        """Return its monotonic clock, which drifts too and is never set."""
        return self.baton.now + self._gained + self.gained

    def drift(self, rate: float) -> None:
        """Set its clock to the correct time, and let it drift from now on.

        :param rate: seconds gained in each second
        """
        self._gained += self.gained
        self._rate, self.drifts_since = rate, self.baton.now

    def when(self, shown: int) -> float:
        """Return when its clock will show a time."""
        when = (shown - self.offset + self._rate * self.drifts_since) / (
            1 + self._rate)
        # The result must not be slightly early.
        return when + STEP if self._rate else when

    def die(self) -> None:
        """End all tasks and free their locks."""
        for task in self.tasks:
            self.baton.bury(task)
        self.tasks = []
        for will in self.wills:
            will()
        self.wills = []


class Baton:
    """The scheduler of the tasks, and the time.

    :ivar dice: decides everything
    :ivar now: seconds since the epoch
    :ivar fate: what happens to a task at a point; see :class:`faults.Faults`
    :ivar story: the events so far
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.dice = random.Random(seed)
        self.now = float(START)
        self.points = 0
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.story: list[str] = []
        self.fate: ty.Callable[[Task, str], None] = lambda task, what: None
        self._buried: list[Task] = []
        self._alarms: list[float] = []
        self._main: ty.Any = None
        self.failure: BaseException | None = None
        self._init = Process(self, 'init', lambda _process: None, False)

    def alarm(self, when: float) -> None:
        """Check the waiting tasks at that time."""
        heapq.heappush(self._alarms, when)

    def later(self, seconds: float, work: ty.Callable[[], None]) -> None:
        """Schedule work that is part of no process."""
        self._init.spawn('later', work, seconds)

    # -- for tasks ---------------------------------------------------------

    def tell(self, what: str) -> None:
        """Add an event to the story."""
        who = self.current.name if self.current is not None else '-'
        self.story.append(f'{self.now - START:12.3f} {who}: {what}')

    def point(self, what: str) -> None:
        """Let other tasks run; the process of this one may die."""
        task = self.current
        if task is None:
            return
        self.points += 1
        self.now += STEP
        self.fate(task, what)
        # In half of the cases the task continues.
        if task.process.frozen > self.now or self.dice.random() < 0.5:
            self._switch(task)

    def wait(self, ready: ty.Callable[[], bool] | None,
             seconds: float) -> bool:
        """Wait until something is ready, and return whether it is."""
        task = self.current
        assert task is not None
        task.ready, task.wakes = ready, self.now + max(0, seconds)
        self._switch(task)
        task.ready, task.wakes = None, self.now
        return ready is None or ready()

    def let_pass(self, seconds: float) -> None:
        self.wait(None, seconds)

    def _switch(self, task: Task) -> None:
        self._main.switch()
        self.current = task

    def end_turn_for_ever(self) -> None:
        """Suspend the task of a process that has died."""
        while True:
            self._main.switch()

    def bury(self, task: Task) -> None:
        if task in self.tasks:
            self.tasks.remove(task)
        # Its greenlet must not be collected: that would run its cleanups.
        self._buried.append(task)

    # -- for the caller ----------------------------------------------------

    def run(self, until: float) -> None:
        """Run tasks until a time, or until one of them fails.

        :raises BaseException: the exception of a task
        """
        self._main = greenlet.getcurrent()
        while self.failure is None:
            task = self._next(until)
            if task is None:
                self.now = max(self.now, until)
                break
            if task.let is None:
                task.let = greenlet.greenlet(self._body(task))
            self.current = task
            task.let.switch()
            self.current = None
        if self.failure is not None:
            raise self.failure

    def _body(self, task: Task) -> ty.Callable[[], None]:
        def body() -> None:
            try:
                task.work()
            except greenlet.GreenletExit:
                raise
            except BaseException as exc:
                self.failure = self.failure or exc
            if task in self.tasks:
                self.tasks.remove(task)
            if task in task.process.tasks:
                task.process.tasks.remove(task)
        return body

    def _next(self, until: float) -> Task | None:
        """Return any task that can continue, or the first that can later."""
        while True:
            able, first = self._able()
            if able:
                return able[self.dice.randrange(len(able))] if (
                    len(able) > 1) else able[0]
            if self._alarms and (first is None or
                                 self._alarms[0] < first[0]):
                when = heapq.heappop(self._alarms)
                if when > until:
                    heapq.heappush(self._alarms, when)
                    return None
                self.now = max(self.now, when)
                continue
            if first is None or first[0] > until:
                return None
            self.now = first[0]
            return first[1]

    def _able(self) -> tuple[list[Task], tuple[float, Task] | None]:
        """Return the tasks that can continue, and the first later one."""
        # This loop runs at each switch.
        able, first, soonest, now = [], None, math.inf, self.now
        for task in self.tasks:
            at, frozen = task.wakes, task.process.frozen
            if frozen <= now:
                if at <= now or task.ready is not None and task.ready():
                    able.append(task)
                    continue
            elif frozen > at:
                at = frozen
            if at < soonest:
                first, soonest = task, at
        return able, first and (soonest, first)

    def close(self) -> None:
        """End all tasks; what they still do to the cloud has no effect."""
        for task in [*self.tasks, *self._buried]:
            if task.let is not None and not task.let.dead:
                try:
                    task.let.throw(Gone)
                except BaseException:
                    pass
        self.tasks, self._buried = [], []


class Clock:
    """The clock of a process.

    :ivar version: returns a number that changes when a waiting thread may have
        something to do
    :ivar is_idle: returns whether nothing becomes due as time passes
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self.version: ty.Callable[[], int] = lambda: 0
        self.is_idle: ty.Callable[[], bool] = lambda: False

    def now(self) -> int:
        process = self._process
        return int(process.baton.now + process.gained) + process.offset

    def elapsed(self) -> float:
        return self._process.elapsed

    def wait(self, event: threading.Event, until: int) -> None:
        baton, seen, most = self._process.baton, self.version(), LOOK
        if self.is_idle():
            # Waking up every few seconds for nothing takes long to simulate,
            # so the task wakes up when something has changed.
            baton.wait(lambda: event.is_set() or self.version() != seen,
                       until - self.now())
            most = baton.dice.randint(0, LOOK)
        baton.wait(event.is_set, min(until - self.now(), most))


class Lock:
    """A lock between the tasks of a process; other tasks run meanwhile."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self._locked = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._locked and blocking and self._baton.current is not None:
            self._baton.wait(lambda: not self._locked,
                             timeout if timeout >= 0 else 1e9)
        if self._locked:
            return False
        self._locked = True
        return True

    def release(self) -> None:
        self._locked = False

    def locked(self) -> bool:
        return self._locked

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_exc: ty.Any) -> None:
        self.release()
