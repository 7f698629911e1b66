# SPDX-License-Identifier: Apache-2.0

"""Add the ids of leases, projects and servers to log records.

Code that works on a lease sets its ids once (:func:`about`), for all records
that its thread logs meanwhile, in any module or library. In a process that
has called :func:`install`, each of these records ends with the ids that its
message does not contain: ``[lease ..., project ..., server ...]``. An operator
who searches the log for an id finds all lines about it.
"""

import contextlib
import contextvars
import logging
import typing as ty

from blazar_core.common import errors

LOG = logging.getLogger(__name__)

P = ty.ParamSpec('P')
R = ty.TypeVar('R')

_ABOUT: contextvars.ContextVar[ty.Mapping[str, str]] = contextvars.ContextVar(
    'about', default={})


@contextlib.contextmanager
def about(lease_id: str | None = None, project_id: str | None = None,
          server_id: str | None = None) -> ty.Iterator[None]:
    """Add the ids of a lease, its project and a server to log records.

    An id that is None is inherited from the outer context if that is about
    the same lease.
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


@contextlib.contextmanager
def apart(lease_id: str, project_id: str) -> ty.Iterator[None]:
    """Log a failure with a lease, so that it affects no other lease; what is
    logged meanwhile names the lease and its project.
    """
    with about(lease_id, project_id):
        try:
            yield
        except errors.DatabaseUnavailable:
            raise
        except errors.CloudUnavailable as exc:
            LOG.warning('Lease %s: it could not be processed yet, and is '
                        'retried: %s', lease_id, exc)
        except Exception:
            LOG.exception('Lease %s: processing it failed, and is retried',
                          lease_id)


def carried(work: ty.Callable[P, R]) -> ty.Callable[P, R]:
    """Return the function, bound to the ids of this context, for another
    thread.
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
    """Add the ids to all log records of this process.

    Replaces the record factory, which affects all loggers and survives a
    reload of the configuration, which may replace handlers.

    :returns: a function that undoes it
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
        # The handler reports the error, with the location of the log call.
        return record
    if missing := ', '.join(f'{noun} {value}' for noun, value in ids.items()
                            if value not in text):
        record.msg, record.args = '%s [%s]', (text, missing)
    return record
