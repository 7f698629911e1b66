# SPDX-License-Identifier: Apache-2.0


"""Lists of servers when many of them wait for their build.

Nova keeps a server that no conductor has received as one text, and for each
page of a list it reads the texts of all of them and creates objects: they were
meant to exist for a second, but reserved servers exist for weeks. Here Nova's
own search runs over rows that read only what it looks at, and objects are
created only for the results.
"""

import functools
import typing as ty

from nova.db.api import api as api_db
from nova.db.api import models as api_models
from nova import objects
from oslo_serialization import jsonutils
import re2
import sqlalchemy as sa
import webob.exc

from blazar_nova.compat import reserved_state

#: The most bytes that a compiled regular expression may have, which bounds the
#: cost of compiling and of searching.
_MEMORY = 2 ** 20
#: The most characters of a regular expression.
_LONGEST = 255
#: The number of texts that are read at a time.
_BATCH = 500

_novas: ty.Any = objects.BuildRequestList.get_by_filters
#: The members of the class that Nova's search uses, all defined here.
_USED = frozenset({'get_all', '_pass_exact_filters', '_pass_regex_filters',
                   '_sort_build_requests'})
_COLUMNS: ty.Any = api_models.BuildRequest.__table__.c
_FIELDS: ty.Any = objects.Instance.fields

#: Fields that the text does not have, or that Nova overrides when it reads one
#: (BuildRequest._load_instance).
_SET: ty.Mapping[str, ty.Any] = {
    'cell_name': None, 'compute_id': None, 'deleted': False,
    'disable_terminate': False,
    'host': None, 'launched_at': None, 'launched_on': None, 'node': None,
    'terminated_at': None}
#: Defaults of fields that may be missing in the text.
_DEFAULTS: dict[str, ty.Any] = {'hidden': False, 'locked_by': None}


class _Server:
    """A server that waits, with fields that are read when they are used."""

    def __init__(self, row: ty.Any, rows: '_Rows') -> None:
        self._id, self._rows = row.id, rows
        self.uuid: str = row.instance_uuid
        self.project_id: str = row.project_id
        for name in ('created_at', 'updated_at'):
            setattr(self, name, _FIELDS[name].coerce(
                objects.Instance, name, getattr(row, name)))

    def __getattr__(self, name: str) -> ty.Any:
        if not hasattr(objects.Instance, name):
            raise AttributeError(name)
        if name in _SET:
            return _SET[name]
        if name == 'tags':
            return self._rows.tags_of(self._id)
        text = self._rows.text_of(self._id)
        # It may be deleted meanwhile: then it is left out of the result.
        if not text and name.endswith('metadata'):
            return {}
        known = _DEFAULTS | text | (reserved_state.states_of(
            text.get('vm_state'), text.get('system_metadata') or {}) or {})
        if name not in known or _is_object(known[name]):
            whole = self._rows.whole(self._id)
            return None if whole is None else getattr(whole.instance, name)
        return _FIELDS[name].from_primitive(
            objects.Instance, name, known[name])

    def get(self, name: str, _default: ty.Any = None) -> ty.Any:
        return getattr(self, name)

    @property
    def is_held(self) -> bool:
        return bool(self._rows.text_of(self._id).get('vm_state') ==
                    reserved_state.VM_STATE)


def _is_object(value: ty.Any) -> bool:
    return isinstance(value, dict) and 'nova_object.name' in value


class _Row(ty.NamedTuple):
    """The part of a BuildRequest that Nova's search uses."""

    id: int
    instance: _Server


class _Rows:
    """Replaces BuildRequestList in Nova's search."""

    _pass_exact_filters = staticmethod(
        objects.BuildRequestList._pass_exact_filters)

    def __init__(self, context: ty.Any,
                 filters: ty.Mapping[str, ty.Any]) -> None:
        self._context = context
        self._filters = filters
        self._unread: list[int] = []
        self._texts: dict[int, dict[str, ty.Any]] = {}
        self._tags: dict[int, str | None] = {}
        self._patterns: dict[str, ty.Any] = {}

    def __call__(self, _context: ty.Any, objects: list[_Row]) -> list[_Row]:
        return objects

    # -- reading -------------------------------------------------------------

    def get_all(self, _context: ty.Any) -> list[_Row]:
        """Return the rows that match the filters on columns."""
        query = sa.select(*(_COLUMNS[name] for name in (
            'id', 'instance_uuid', 'project_id', 'created_at', 'updated_at')))
        if not self._context.is_admin:
            query = query.where(
                _COLUMNS.project_id == self._context.project_id)
        for name, column in (('project_id', _COLUMNS.project_id),
                             ('uuid', _COLUMNS.instance_uuid)):
            wanted = self._filters.get(name)
            if isinstance(wanted, str):
                query = query.where(column == wanted)
            elif isinstance(wanted, list | tuple | set | frozenset):
                query = query.where(column.in_(wanted))
        found = _execute(self._context, query)
        self._unread = [row.id for row in found]
        rows = [_Row(row.id, _Server(row, self)) for row in found]
        return [row for row in rows if self._has_changed(row.instance)]

    def _has_changed(self, server: _Server) -> bool:
        """Return whether a reserved server matches the filters on changes.

        To Nova, a server that is being built always matches.
        """
        since, before = map(
            self._filters.get, ('changes-since', 'changes-before'))
        changed = server.updated_at or server.created_at
        return (since is None or changed >= since) and (
            before is None or changed <= before) or not server.is_held

    def text_of(self, row_id: int) -> dict[str, ty.Any]:
        """Return the stored fields of a server; none if it was deleted."""
        while row_id not in self._texts and self._unread:
            ids, self._unread = self._unread[:_BATCH], self._unread[_BATCH:]
            for row in _execute(self._context, sa.select(
                    _COLUMNS.id, _COLUMNS.instance, _COLUMNS.tags).where(
                        _COLUMNS.id.in_(ids))):
                self._texts[row.id] = jsonutils.loads(
                    row.instance)['nova_object.data']
                self._tags[row.id] = row.tags
        return self._texts.get(row_id, {})

    def tags_of(self, row_id: int) -> ty.Any:
        self.text_of(row_id)
        # None while a nova-api of an older release runs, too.
        tags = self._tags.get(row_id)
        return [] if tags is None else objects.TagList.obj_from_primitive(
            jsonutils.loads(tags))

    def whole(self, row_id: int) -> ty.Any:
        """Return the BuildRequest of a row; None if it was deleted."""
        return next(iter(self.objects_of([row_id])), None)

    def objects_of(self, ids: ty.Sequence[int]) -> list[ty.Any]:
        """Return the BuildRequests of rows, of those that still exist."""
        found = {}
        for first in range(0, len(ids), _BATCH):
            for row in _execute(self._context, sa.select(
                    api_models.BuildRequest.__table__).where(
                        _COLUMNS.id.in_(ids[first:first + _BATCH]))):
                found[row.id] = objects.BuildRequest._from_db_object(
                    self._context, objects.BuildRequest(), row._mapping)
        return [found[one] for one in ids if one in found]

    # -- judging -------------------------------------------------------------

    def _pass_regex_filters(self, server: _Server,
                            filters: ty.Mapping[str, ty.Any]) -> bool:
        """Filter as Nova does, with regular expressions of bounded cost."""
        for name, wanted in filters.items():
            try:
                value = getattr(server, name)
            except AttributeError:
                continue
            if value and not self._is_in(str(wanted), str(value)):
                return False
        return True

    def _is_in(self, pattern: str, text: str) -> bool:
        if pattern not in self._patterns:
            self._patterns[pattern] = _compiled(pattern)
        return self._patterns[pattern].search(text) is not None

    @staticmethod
    def _sort_build_requests(rows: list[_Row], keys: list[str],
                             directions: list[str]) -> list[_Row]:
        """Sort as Nova does; unset values are first, as in a database."""
        for key, direction in reversed([*zip(keys, directions)]):
            def value_of(row: _Row, key: str = key) -> tuple[bool, ty.Any]:
                value = row.id if key == 'id' else getattr(row.instance, key)
                return value is not None, value

            rows.sort(key=value_of,
                      reverse=not direction.lower().startswith('asc'))
        return rows


def _compiled(pattern: str) -> ty.Any:
    """Return a regular expression that is searched in linear time.

    Python's own ones, and others that backtrack, may take exponential time.

    :raises HTTPBadRequest: if it is invalid or too large
    """
    options = re2.Options()
    options.max_mem, options.log_errors = _MEMORY, False
    try:
        if len(pattern) <= _LONGEST:
            return re2.compile(pattern, options)
        why = f'it has more than {_LONGEST} characters'
    except re2.error as exc:
        (why,) = exc.args
        why = why.decode(errors='replace') if isinstance(why, bytes) else why
    raise webob.exc.HTTPBadRequest(
        explanation=f'This is no regular expression that can be looked for: '
        f'{pattern[:80]} ({why}). Write a simpler one.')


@api_db.context_manager.reader  # type: ignore[untyped-decorator]
def _execute(context: ty.Any, query: sa.Select[ty.Any]) -> list[ty.Any]:
    return [*context.session.execute(query)]


def problems() -> list[str]:
    """Return a sentence if Nova's search has changed and cannot be used."""
    used: ty.Collection[str] | None = {
        name for name in _novas.original_fn.__code__.co_names
        if hasattr(objects.BuildRequestList, name)} if hasattr(
            _novas, 'original_fn') else None
    return [] if used == _USED else [
        f'nova.objects.BuildRequestList.get_by_filters was expected to use '
        f'{", ".join(sorted(_USED))} of its class, but uses '
        f'{", ".join(sorted(used or ())) or "nothing that can be seen"}.']


def install() -> None:
    """Make this process search this way. Idempotent."""
    @functools.wraps(_novas)
    def get_by_filters(cls: ty.Any, context: ty.Any,
                       filters: dict[str, ty.Any], *args: ty.Any,
                       **kwargs: ty.Any) -> ty.Any:
        rows = _Rows(context, filters)
        found = _novas.original_fn(rows, context, filters, *args, **kwargs)
        return cls(context, objects=rows.objects_of(
            [row.id for row in found]))

    objects.BuildRequestList.get_by_filters = classmethod(get_by_filters)
