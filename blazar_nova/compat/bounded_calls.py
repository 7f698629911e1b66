# SPDX-License-Identifier: Apache-2.0

"""Calls of Nova with a time limit, so that they do not block a worker.

If the database or message bus of a cell is down, a call to it may wait without
an error. Nova leaves these calls in the threads of one pool for all cells,
until no thread is left. Here each call has a thread of its own, and while a
call is left behind, its cell is called less often: by one call after one
minute, after two more, after four, and so on until every 16 minutes. Of the
workers of a process, few wait for a cell that does not answer: others work for
other cells.
"""

import collections
from concurrent import futures
import contextvars
import threading
import time
import typing as ty

from nova import context as nova_context
from nova import exception
from nova import objects
from oslo_db import exception as db_exception
from oslo_log import log as logging
import oslo_messaging

from blazar_core.common import errors

LOG = logging.getLogger(__name__)

P = ty.ParamSpec('P')
R = ty.TypeVar('R')

#: Seconds that a call may take: as long as Nova waits for a cell.
LIMIT = 60
#: Seconds that a call may take while so many others wait for longer.
SHORT_LIMIT, WAITING = 10, 2
#: Seconds by which a call within another one ends before it, and the least
#: that it may take.
_EARLIER = 5
#: How often the time doubles for which a silent service is not called, since
#: some calls that are left behind never end.
_DOUBLED = 4

#: When the call must have ended within which another one is made.
_END: contextvars.ContextVar[float | None] = contextvars.ContextVar(
    'end', default=None)

#: The services within whose calls another one is made.
_WITHIN: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    'within', default=())

#: The errors that mean that a service does not answer.
_SILENCE = (db_exception.DBConnectionError, db_exception.CantStartEngineError,
            oslo_messaging.MessagingTimeout,
            oslo_messaging.MessageDeliveryFailure)


class Bounded:
    """Makes calls, each within :data:`LIMIT` seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By service, the calls that are waited for, the oldest first.
        self._waiting: dict[str, list[futures.Future[ty.Any]]] = (
            collections.defaultdict(list))
        #: The number of calls left behind, by service.
        self._left: collections.Counter[str] = collections.Counter()
        #: How often in a row each service was silent, and the time from which
        #: it may be called again, by one call.
        self._silences: collections.Counter[str] = collections.Counter()
        self._again: dict[str, float] = {}

    def __call__(self, who: str, work: ty.Callable[P, R], *args: P.args,
                 **kwargs: P.kwargs) -> R:
        """Return what a call returns, or raise what it raises.

        :param who: the name of the service that is called
        :raises CloudUnavailable: if the service does not answer; the call may
            still finish later, unless it is NotSent
        """
        if who in _WITHIN.get():
            # The limit of that call applies.
            return work(*args, **kwargs)
        answer: futures.Future[R] = futures.Future()
        limit, context = _limit(), contextvars.copy_context()
        context.run(_END.set, time.monotonic() + limit)
        context.run(_WITHIN.set, (*_WITHIN.get(), who))

        def run() -> None:
            try:
                result = context.run(work, *args, **kwargs)
            except BaseException as exc:
                answer.set_exception(exc)
            else:
                answer.set_result(result)

        was_silent = self._begin(who)
        threading.Thread(target=run, name='bounded', daemon=True).start()
        seconds = self._wait(who, answer, limit)
        if seconds:
            self._leave(who, answer, was_silent, limit)
            raise errors.CloudUnavailable(
                f'{who} does not answer within {seconds:.3g} s.')
        self._answered(who, answer)
        try:
            return answer.result()
        except _SILENCE as exc:
            raise errors.CloudUnavailable(
                f'{who} does not answer: {exc}') from exc
        except exception.NovaException as exc:
            # Nova has no class of its own for an unavailable cell.
            if type(exc) is exception.NovaException:
                raise errors.CloudUnavailable(f'{who}: {exc}') from exc
            raise

    def of_server(self, server_id: str, work: ty.Callable[P, R],
                  *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what a call about a server returns, or raise its error; the
        service is the cell of the server.

        :raises CloudUnavailable: if the cell does not answer
        """
        cell = self(API, _cell_of, server_id)
        return self(API if cell is None else f'Cell {name_of(cell)}', work,
                    *args, **kwargs)

    def _begin(self, who: str) -> bool:
        """Return whether a call is the first since a service was silent.

        :raises NotSent: if the service is silent, and not called now
        """
        with self._lock:
            again, now = self._again.get(who), time.monotonic()
            if again is not None:
                if now < again:
                    raise errors.NotSent(
                        f'{who} has not answered an earlier call yet.')
                self._again[who] = now + LIMIT
        return again is not None

    def _wait(self, who: str, answer: 'futures.Future[ty.Any]',
              limit: float) -> float:
        """Wait for an answer; return after how many seconds it is not waited
        for any longer, 0: it is there.
        """
        # Calls of the API database include calls of placement, and nothing
        # works without it: no worker is kept for others.
        first = limit if who == API else min(limit, SHORT_LIMIT)
        with self._lock:
            self._waiting[who].append(answer)
        try:
            if futures.wait([answer], first).done:
                return 0
            with self._lock:
                if answer not in self._waiting[who][:WAITING]:
                    return first
            return 0 if futures.wait(
                [answer], limit - first).done else limit
        finally:
            with self._lock:
                self._waiting[who].remove(answer)
                if not self._waiting[who]:
                    # Some names are of one project or server each.
                    del self._waiting[who]

    def _answered(self, who: str, answer: 'futures.Future[ty.Any]') -> None:
        """Call a service again, unless the call ended without an answer."""
        if isinstance(answer.exception(), _SILENCE):
            return
        with self._lock:
            self._again.pop(who, None)
            self._silences.pop(who, None)

    def _leave(self, who: str, answer: 'futures.Future[ty.Any]',
               was_silent: bool, limit: float) -> None:
        """Leave a call behind; call the service less often, unless the call
        had little time.
        """
        with self._lock:
            if limit >= min(LIMIT, SHORT_LIMIT) and (
                    was_silent or who not in self._again):
                self._again[who] = time.monotonic() + (
                    LIMIT * 2 ** min(self._silences[who], _DOUBLED))
                self._silences[who] += 1
            self._left[who] += 1
            self._forget()

        def come(answer: 'futures.Future[ty.Any]') -> None:
            with self._lock:
                self._left[who] -= 1
                is_last = not self._left[who]
                if is_last:
                    del self._left[who]
            if is_last:
                self._answered(who, answer)

        # Called at once if the answer has just arrived.
        answer.add_done_callback(come)

    def _forget(self) -> None:
        """Forget services that were not called again for long: many names are
        of one project or server each, which may be gone.
        """
        before = time.monotonic() - LIMIT * 2 ** _DOUBLED
        for who in [who for who, again in self._again.items()
                    if again < before]:
            del self._again[who]
            self._silences.pop(who, None)


def _limit() -> float:
    """Return the seconds that a call may take: within another one so much less
    that the service that does not answer is the reported one.
    """
    end = _END.get()
    return LIMIT if end is None else max(
        _EARLIER, min(LIMIT, end - time.monotonic() - _EARLIER))


#: The name of the service in calls that use no cell.
API = 'Nova\'s API database'


class Silent:
    """What a cell has answered if it has not, or if the call failed there."""


_SILENT = Silent()

_api, _cells = Bounded(), Bounded()
#: The cells as they were read last.
_known_cells: list[ty.Any] = []
#: The names of cells that did not answer last.
_silent_cells: set[str] = set()


def _cell_of(server_id: str) -> ty.Any:
    """Return the CellMapping of a server; None: it has none (yet)."""
    try:
        return objects.InstanceMapping.get_by_instance_uuid(
            nova_context.get_admin_context(), server_id).cell_mapping
    except exception.InstanceMappingNotFound:
        return None


def of_api(work: ty.Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return what a call of Nova's API database returns, or raise its error.

    :param work: calls cells by :func:`of_cell` or :func:`of_cells`, so that
        one that does not answer is not taken for the database
    :raises CloudUnavailable: if the database does not answer
    """
    return _api(API, work, *args, **kwargs)


def all_cells() -> list[ty.Any]:
    """Return the mappings of all cells, cell0 included, as they are now: Nova
    reads them once in the life of a process. While its API database does not
    answer, they are returned as they were.

    :raises CloudUnavailable: if they were never read
    """
    try:
        # Placement's calls, which are limited as those of the API database,
        # do not keep cells from being asked.
        _known_cells[:] = _cells('Nova\'s list of cells',
                                 objects.CellMappingList.get_all,
                                 nova_context.get_admin_context())
    except errors.CloudUnavailable:
        if not _known_cells:
            raise
    return [*_known_cells]


def of_cell(context: ty.Any, cell: ty.Any,
            work: ty.Callable[ty.Concatenate[ty.Any, P], R], *args: P.args,
            **kwargs: P.kwargs) -> R:
    """Return what a call of a cell returns, or raise its error.

    :param cell: a CellMapping
    :param work: its first argument is a context of the cell
    :raises CloudUnavailable: if the cell does not answer
    """
    with nova_context.target_cell(context, cell) as in_cell:
        return _cells(f'Cell {name_of(cell)}', work, in_cell, *args, **kwargs)


def of_cells(context: ty.Any, work: ty.Callable[..., ty.Any], *args: ty.Any,
             cells: ty.Sequence[ty.Any] | None = None, **kwargs: ty.Any,
             ) -> dict[str, ty.Any]:
    """Return the results of a function for each cell; all run in parallel.

    :param work: its first argument is a context of the cell
    :param cells: CellMappings; None: all
    :returns: by uuid of the cell; :class:`Silent` if a cell did not answer or
        the function failed
    :raises CloudUnavailable: if the cells are not known
    """
    asked = all_cells() if cells is None else cells

    def ask(cell: ty.Any) -> ty.Any:
        name = name_of(cell)
        try:
            answer = of_cell(context, cell, work, *args, **kwargs)
        except errors.CloudUnavailable as exc:
            LOG.log(logging.DEBUG if name in _silent_cells else
                    logging.WARNING, '%s', exc)
            _silent_cells.add(name)
            return _SILENT
        except Exception:
            LOG.exception('Cell %s could not be asked', name)
            return _SILENT
        if name in _silent_cells:
            _silent_cells.discard(name)
            LOG.info('Cell %s answers again', name)
        return answer

    with futures.ThreadPoolExecutor(max(1, len(asked))) as pool:
        # Threads of a pool do not know within which call they are.
        running = [pool.submit(contextvars.copy_context().run, ask, cell)
                   for cell in asked]
        return {cell.uuid: one.result() for cell, one in zip(
            asked, running, strict=True)}


def answers(context: ty.Any, work: ty.Callable[..., ty.Any], *args: ty.Any,
            silent: set[str] | None = None,
            cells: ty.Sequence[ty.Any] | None = None, **kwargs: ty.Any,
            ) -> list[tuple[ty.Any, ty.Any]]:
    """Return each cell that answers with its answer; see :func:`of_cells`.

    :param silent: the names of the other cells are added to this
    :raises CloudUnavailable: if the cells are not known
    """
    asked = all_cells() if cells is None else cells
    found = of_cells(context, work, *args, cells=asked, **kwargs)
    failed = {uuid for uuid, answer in found.items()
              if isinstance(answer, Silent)}
    if silent is not None:
        silent.update(name_of(cell) for cell in asked if cell.uuid in failed)
    return [(cell, found[cell.uuid]) for cell in asked
            if cell.uuid not in failed]


def of_all_cells(work: ty.Callable[..., ty.Any], *args: ty.Any,
                 **kwargs: ty.Any) -> list[tuple[ty.Any, ty.Any]]:
    """Return all cells with their answers; see :func:`of_cells`.

    :raises CloudUnavailable: if a cell does not answer
    """
    silent: set[str] = set()
    found = answers(nova_context.get_admin_context(), work, *args,
                    silent=silent, **kwargs)
    if silent:
        raise errors.CloudUnavailable(
            f'Cells do not answer: {", ".join(sorted(silent))}. Try again in '
            'a minute.')
    return found


def bound_nova() -> None:
    """Limit the calls that Nova itself makes to all cells in this process.

    They use the threads of one pool: some calls of a cell that does not answer
    take all of it, and then no cell is asked.
    """
    nova_context.scatter_gather_cells = _scatter_gather_cells


def _scatter_gather_cells(context: ty.Any, cell_mappings: ty.Iterable[ty.Any],
                          timeout: float, fn: ty.Callable[..., ty.Any],
                          *args: ty.Any, **kwargs: ty.Any,
                          ) -> dict[str, ty.Any]:
    """Call a function for each of these cells, as Nova's function does.

    :param timeout: not used: the limits of this module apply
    :returns: the results, by uuid of the cell; the exception of a failed call;
        Nova's sentinel for a cell that does not answer
    """
    def ask(in_cell: ty.Any) -> ty.Any:
        try:
            return fn(in_cell, *args, **kwargs)
        except exception.NovaException as exc:
            return exc

    found = of_cells(context, ask, cells=[*cell_mappings])
    return {uuid: nova_context.did_not_respond_sentinel
            if isinstance(answer, Silent) else answer
            for uuid, answer in found.items()}


def name_of(cell: ty.Any) -> str:
    """Return the name of a cell, which may have none, in messages."""
    return str(cell.name or cell.uuid)
