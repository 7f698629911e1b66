# SPDX-License-Identifier: Apache-2.0

"""A process whose Nova lacks something, or is of another version.

Python imports this module when it starts, where its folder is in PYTHONPATH.
WITHOUT=nova.compute.api:API.lock removes that as soon as its module has been
imported. NOVA_VERSION=35.0.0 is what Nova says of itself.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
import typing as ty

_WITHOUT = os.environ.get('WITHOUT', '')
_VERSION = os.environ.get('NOVA_VERSION', '')


def remove(module: types.ModuleType) -> None:
    *path, name = _WITHOUT.partition(':')[2].split('.')
    owner: ty.Any = module
    for part in path:
        owner = getattr(owner, part)
    delattr(owner, name)


def rename(module: types.ModuleType) -> None:
    module.version_string = lambda: _VERSION  # type: ignore[attr-defined]


_CHANGES: dict[str, ty.Callable[[types.ModuleType], None]] = {
    **({_WITHOUT.partition(':')[0]: remove} if _WITHOUT else {}),
    **({'nova.version': rename} if _VERSION else {})}


class Loader(importlib.abc.Loader):
    """That of a module, and what is done to it then."""

    def __init__(self, loader: ty.Any) -> None:
        self._loader = loader

    def create_module(self, spec: ty.Any) -> ty.Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        _CHANGES[module.__name__](module)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that are changed."""

    def find_spec(self, name: str, path: ty.Any, target: ty.Any = None,
                  ) -> importlib.machinery.ModuleSpec | None:
        if name not in _CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = Loader(spec.loader)
        return spec


sys.meta_path.insert(0, Finder())
