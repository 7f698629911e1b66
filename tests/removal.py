# SPDX-License-Identifier: Apache-2.0

"""Remove or replace a part of Nova for a moment."""

import contextlib
import functools
import importlib
import inspect
import sys
import types
import typing as ty
from unittest import mock

from nova import objects
from oslo_config import cfg

from blazar_nova.compat.seams import entry


def resolve(name: str) -> ty.Any:
    """Return the object of a dotted name."""
    # Nova's objects are attributes of their module once they are registered.
    objects.register_all()
    first, *parts = name.split('.')
    return functools.reduce(_member, parts, importlib.import_module(first))


def _member(owner: ty.Any, part: str) -> ty.Any:
    if isinstance(owner, types.ModuleType) and not hasattr(owner, part):
        return importlib.import_module(f'{owner.__name__}.{part}')
    return getattr(owner, part)


@contextlib.contextmanager
def removed(seam: entry.Seam) -> ty.Iterator[None]:
    """Remove what a seam names within this block."""
    path, _, name = seam.name.rpartition('.')
    owner = resolve(path)
    if seam.kind is entry.Kind.REFERS:
        with replaced(owner, name, lambda: None):
            yield
    elif seam.kind is entry.Kind.FIELD:
        with _without_key(owner.fields, name):
            yield
    elif seam.kind is entry.Kind.COLUMN:
        columns = {one.name: one for one in owner.__table__.c}
        del columns[name]
        with replaced(owner, '__table__', types.SimpleNamespace(c=columns)):
            yield
    elif isinstance(owner, cfg.ConfigOpts):
        with _without_key(owner._opts, name):
            yield
    elif isinstance(owner, cfg.ConfigOpts.GroupAttr):
        with _without_key(owner._group._opts, name):
            yield
    else:
        with _without_attribute(owner, name):
            yield


@contextlib.contextmanager
def _without_key(where: dict[str, ty.Any], key: str) -> ty.Iterator[None]:
    with mock.patch.dict(where):
        del where[key]
        yield


@contextlib.contextmanager
def _without_attribute(owner: ty.Any, name: str) -> ty.Iterator[None]:
    holder, delete, put = _holder(owner, name)
    value = vars(holder)[name]
    modules = {value.__name__: None} if inspect.ismodule(value) else {}
    delete(holder, name)
    try:
        with mock.patch.dict(sys.modules, modules):
            yield
    finally:
        put(holder, name, value)


@contextlib.contextmanager
def replaced(owner: ty.Any, name: str, value: ty.Any) -> ty.Iterator[None]:
    """Replace an attribute within this block."""
    holder, _delete, put = _holder(owner, name)
    before = vars(holder)[name]
    put(holder, name, value)
    try:
        yield
    finally:
        put(holder, name, before)


def _holder(owner: ty.Any, name: str) -> tuple[ty.Any, ty.Any, ty.Any]:
    """Return the object that has an attribute, and how to delete and set it.

    Bypasses the metaclass: SQLAlchemy's refuses.
    """
    if inspect.ismodule(owner):
        return owner, delattr, setattr
    kinds = inspect.getmro(owner if inspect.isclass(owner) else type(owner))
    holder = next(kind for kind in kinds if name in vars(kind))
    return holder, type.__delattr__, type.__setattr__
