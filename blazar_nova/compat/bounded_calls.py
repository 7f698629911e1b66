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
#: How often the time doubles for which a silent service is not called, since
#: some calls that are left behind never end.
_DOUBLED = 4

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
            still finish later
        """
        answer: futures.Future[R] = futures.Future()
        context = contextvars.copy_context()

        def run() -> None:
            try:
                result = context.run(work, *args, **kwargs)
            except BaseException as exc:
                answer.set_exception(exc)
            else:
                answer.set_result(result)

        was_silent = self._begin(who)
        threading.Thread(target=run, name='bounded', daemon=True).start()
        seconds = self._wait(who, answer)
        if seconds:
            self._leave(who, answer, was_silent)
            raise errors.CloudUnavailable(
                f'{who} does not answer within {seconds} s.')
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

    def _begin(self, who: str) -> bool:
        """Return whether a call is the first since a service was silent.

        :raises CloudUnavailable: if the service is silent, and not called now
        """
        with self._lock:
            again, now = self._again.get(who), time.monotonic()
            if again is not None:
                if now < again:
                    raise errors.CloudUnavailable(
                        f'{who} has not answered an earlier call yet.')
                self._again[who] = now + LIMIT
        return again is not None

    def _wait(self, who: str, answer: 'futures.Future[ty.Any]') -> int:
        """Wait for an answer; return after how many seconds it is not waited
        for any longer, 0: it is there.
        """
        # Calls of the API database include calls of placement, and nothing
        # works without it: no worker is kept for others.
        first = LIMIT if who == API else min(LIMIT, SHORT_LIMIT)
        with self._lock:
            self._waiting[who].append(answer)
        try:
            if futures.wait([answer], first).done:
                return 0
            with self._lock:
                if answer not in self._waiting[who][:WAITING]:
                    return first
            return 0 if futures.wait(
                [answer], LIMIT - first).done else LIMIT
        finally:
            with self._lock:
                self._waiting[who].remove(answer)
                if not self._waiting[who]:
                    # Some names are of one server each.
                    del self._waiting[who]

    def _answered(self, who: str, answer: 'futures.Future[ty.Any]') -> None:
        """Call a service again, unless the call ended without an answer."""
        if isinstance(answer.exception(), _SILENCE):
            return
        with self._lock:
            self._again.pop(who, None)
            self._silences.pop(who, None)

    def _leave(self, who: str, answer: 'futures.Future[ty.Any]',
               was_silent: bool) -> None:
        with self._lock:
            if was_silent or who not in self._again:
                self._again[who] = time.monotonic() + (
                    LIMIT * 2 ** min(self._silences[who], _DOUBLED))
                self._silences[who] += 1
            self._left[who] += 1

        def come(answer: 'futures.Future[ty.Any]') -> None:
            with self._lock:
                self._left[who] -= 1
                is_last = not self._left[who]
            if is_last:
                self._answered(who, answer)

        # Called at once if the answer has just arrived.
        answer.add_done_callback(come)


#: The name of the service in calls that use no cell.
API = 'Nova\'s API database'

_api, _cells = Bounded(), Bounded()


def of_api(work: ty.Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return what a call of Nova's API database returns, or raise its error.

    :raises CloudUnavailable: if the database does not answer
    """
    return _api(API, work, *args, **kwargs)


def of_cells(context: ty.Any, work: ty.Callable[..., ty.Any], *args: ty.Any,
             cells: ty.Sequence[ty.Any] | None = None, **kwargs: ty.Any,
             ) -> dict[str, ty.Any]:
    """Return the results of a function for each cell; all run in parallel.

    :param work: its first argument is a context of the cell
    :param cells: CellMappings; None: all
    :returns: by uuid of the cell; Nova's sentinel
        (``nova.context.is_cell_failure_sentinel``) if a cell did not answer
        or the function failed
    """
    if cells is None:
        nova_context.load_cells()
        cells = nova_context.CELLS

    def ask(cell: ty.Any) -> ty.Any:
        name = f'Cell {name_of(cell)}'
        try:
            with nova_context.target_cell(context, cell) as of_cell:
                return _cells(name, work, of_cell, *args, **kwargs)
        except errors.CloudUnavailable as exc:
            LOG.warning('%s', exc)
            return nova_context.did_not_respond_sentinel
        except Exception as exc:
            LOG.exception('%s could not be asked', name)
            return exc

    with futures.ThreadPoolExecutor(max(1, len(cells))) as pool:
        return {cell.uuid: answer for cell, answer in zip(
            cells, pool.map(ask, cells), strict=True)}


def answers(context: ty.Any, work: ty.Callable[..., ty.Any], *args: ty.Any,
            silent: set[str] | None = None,
            cells: ty.Sequence[ty.Any] | None = None, **kwargs: ty.Any,
            ) -> list[tuple[ty.Any, ty.Any]]:
    """Return each cell that answers with its answer; see :func:`of_cells`.

    :param silent: the names of the other cells are added to this
    """
    if cells is None:
        nova_context.load_cells()
        cells = list(nova_context.CELLS)
    found = of_cells(context, work, *args, cells=cells, **kwargs)
    failed = {uuid for uuid, answer in found.items()
              if nova_context.is_cell_failure_sentinel(answer)}
    if silent is not None:
        silent.update(name_of(cell) for cell in cells if cell.uuid in failed)
    return [(cell, found[cell.uuid]) for cell in cells
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


def name_of(cell: ty.Any) -> str:
    """Return the name of a cell, which may have none, in messages."""
    return str(cell.name or cell.uuid)
