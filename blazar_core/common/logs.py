# SPDX-License-Identifier: Apache-2.0

"""Add the ids of leases, projects and servers to lines of the log.

The code that works on a lease says so once (:func:`about`), for all that is
logged meanwhile in its thread, by whatever module or library. In a process
that asked for it (:func:`install`), each of these lines ends with the ids
that its message does not have: ``[lease ..., project ..., server ...]``. An
operator who searches the log for one of them finds all lines about it.
"""

import contextlib
import contextvars
import logging
import typing as ty

__all__ = ['about', 'carried', 'install']

P = ty.ParamSpec('P')
R = ty.TypeVar('R')

_ABOUT: contextvars.ContextVar[ty.Mapping[str, str]] = contextvars.ContextVar(
    'about', default={})


@contextlib.contextmanager
def about(lease_id: str | None = None, project_id: str | None = None,
          server_id: str | None = None) -> ty.Iterator[None]:
    """Have lines name a lease, its project and a server.

    What is None is as it was before, as long as that is of the same lease.
    """
    before = _ABOUT.get()
    same = lease_id is None or lease_id == before.get('lease')
    token = _ABOUT.set({**(before if same else {}), **{
        noun: value for noun, value in (
            ('lease', lease_id), ('project', project_id),
            ('server', server_id)) if value is not None}})
    try:
        yield
    finally:
        _ABOUT.reset(token)


def carried(work: ty.Callable[P, R]) -> ty.Callable[P, R]:
    """Return the function, with its lines about the same when another thread
    calls it.
    """
    ids = _ABOUT.get()

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        _ABOUT.set(ids)
        try:
            return work(*args, **kwargs)
        finally:
            _ABOUT.set({})

    return call


def install() -> ty.Callable[[], None]:
    """Have all lines of this process name what they are about; returns what
    undoes that.

    By the factory of records: handlers may be replaced when the
    configuration is read anew, and those of all loggers are to do it.
    """
    make = logging.getLogRecordFactory()

    def named(*args: ty.Any, **kwargs: ty.Any) -> logging.LogRecord:
        return _named(make(*args, **kwargs))

    logging.setLogRecordFactory(named)
    return lambda: logging.setLogRecordFactory(make)


def _named(record: logging.LogRecord) -> logging.LogRecord:
    ids = _ABOUT.get()
    if not ids:
        return record
    try:
        text = record.getMessage()
    except Exception:
        # Its handler reports that, with the line that was wrong.
        return record
    if missing := ', '.join(f'{noun} {value}' for noun, value in ids.items()
                            if value not in text):
        record.msg, record.args = '%s [%s]', (text, missing)
    return record
