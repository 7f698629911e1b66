# SPDX-License-Identifier: Apache-2.0

"""Compare the table of seams with the Nova that is installed."""

import importlib
import inspect
import types
import typing as ty

from oslo_config import cfg

from blazar_core.common import errors
from blazar_nova.compat import nova_conf
from blazar_nova.compat.seams import api
from blazar_nova.compat.seams import entry
from blazar_nova.compat.seams import hosts
from blazar_nova.compat.seams import records
from blazar_nova.compat.seams import servers

TABLE: tuple[entry.Seam, ...] = (
    *api.TABLE, *records.TABLE, *servers.TABLE, *hosts.TABLE)

_KNOWN = ' and '.join(entry.RELEASES)
_Kind = entry.Kind
_OBJECTS = 'nova.objects.'


def require(within: str = '') -> None:
    """Return if Nova has every seam.

    :param within: compare only those whose names start so
    :raises ConfigurationError: with a sentence for each that it lacks
    """
    found = problems(within)
    if found:
        raise errors.ConfigurationError(
            'Leases cannot run with this Nova: ' + ' '.join(found))


def problems(within: str = '') -> list[str]:
    """Sentences about seams that Nova lacks, and about its release.

    :param within: compare only those whose names start so
    """
    release = _release(installed())
    found = [sentence for seam in TABLE
             if release in seam.releases and seam.name.startswith(within)
             and (sentence := _problem(seam))]
    return [*found, f'Nova {installed()} is installed; this version is for '
            f'Nova {_KNOWN}.'] if found else []


def require_tested(conf: ty.Any) -> None:
    """Return if the release of Nova is known, or admitted.

    :raises ConfigurationError: when it is not
    """
    found = untested(conf)
    if found:
        raise errors.ConfigurationError(' '.join(found))


def untested(conf: ty.Any) -> list[str]:
    """Sentences about a release of Nova that is not known; none where
    ``[blazar] allow_untested_nova`` admits it.
    """
    nova_conf.register_opts(conf)
    version = installed()
    if _series(version) in entry.RELEASES or conf.blazar.allow_untested_nova:
        return []
    return [
        f'Nova {version} is installed, and this version is tested with Nova '
        f'{_KNOWN}: install the version that belongs to your Nova. Nova '
        f'{version} has all that the start checks look for. To use it '
        f'untested:',
        'Write in nova.conf [blazar]: allow_untested_nova = True']


def installed() -> str:
    """The version of Nova, as it says itself."""
    try:
        return str(importlib.import_module('nova.version').version_string())
    except (AttributeError, ImportError):
        return 'of an unknown version'


def describe(seam: entry.Seam) -> str:
    """A seam as it is written in Python; what its code uses behind it."""
    if seam.kind in (_Kind.CALLED, _Kind.REPLACED):
        return f'{seam.name}({seam.detail})'
    return f'{seam.name} uses {seam.detail}' if seam.detail else seam.name


def _series(version: str) -> str:
    return '.'.join(version.split('.')[:2])


def _release(version: str) -> str:
    """The known release whose table is compared: of an unknown version the
    last one before it.
    """
    def number(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split('.')[:2]
                     if part.isdigit())

    before = [one for one in entry.RELEASES if number(one) <= number(version)]
    return before[-1] if before else entry.RELEASES[0]


def _problem(seam: entry.Seam) -> str:
    """A sentence about a seam that Nova lacks; empty where it has it."""
    is_function = seam.kind in (_Kind.CALLED, _Kind.REPLACED)
    try:
        found = _resolve(seam)
        if is_function and not _is_of_nova(found):
            # Its class has inherited another one from a library.
            raise AttributeError(seam.name)
    except (AttributeError, ImportError):
        return f'{describe(seam)} is missing ({seam.subject}: {seam.why}).'
    if seam.kind is _Kind.REFERS and seam.detail not in _names(found):
        return (f'{seam.name} does not use {seam.detail} '
                f'({seam.subject}: {seam.why}).')
    if is_function:
        taken = _parameters(found)
        if not _fits(seam, taken):
            return (f'{seam.name} was expected to take ({seam.detail}), but '
                    f'takes ({", ".join(taken)}) ({seam.subject}: '
                    f'{seam.why}).')
    return ''


def _resolve(seam: entry.Seam) -> ty.Any:
    """:raises AttributeError, ImportError: when there is nothing"""
    *parts, last = seam.name.split('.')
    owner: ty.Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        owner = _member(owner, part, '.'.join(parts[:number]))
    if seam.kind is _Kind.FIELD:
        known: ty.Any = owner.fields
    elif seam.kind is _Kind.COLUMN:
        known = owner.__table__.c
    elif isinstance(owner, cfg.ConfigOpts | cfg.ConfigOpts.GroupAttr):
        # An option; its value is not read before the files are.
        known = owner
    else:
        return _member(owner, last, seam.name)
    if last not in known:
        raise AttributeError(seam.name)
    return None


def _member(owner: ty.Any, part: str, path: str) -> ty.Any:
    if isinstance(owner, types.ModuleType) and not hasattr(owner, part):
        if path.startswith(_OBJECTS) and path[len(_OBJECTS)].isupper():
            # A class is a member of it once all are registered.
            owner.register_all()
        else:
            importlib.import_module(path)
    return getattr(owner, part)


def _is_of_nova(function: ty.Any) -> bool:
    module = getattr(function, '__module__', None) or ''
    return module.split('.')[0] == 'nova'


def _names(function: ty.Any) -> ty.Collection[str]:
    """The names that the code of a function uses."""
    code = getattr(_innermost(function), '__code__', None)
    return (*code.co_names, *code.co_freevars) if code else ()


def _innermost(function: ty.Any) -> ty.Any:
    """Return a function without its decorators and its replacements."""
    return inspect.unwrap(getattr(function, 'original_fn', function))


#: What stands before the name of a parameter that takes the rest.
_STARS: dict[ty.Any, str] = {inspect.Parameter.VAR_POSITIONAL: '*',
                             inspect.Parameter.VAR_KEYWORD: '**'}


def _parameters(function: ty.Any) -> list[str]:
    """In order; with ``=`` those that have a default, with stars the rest."""
    found: list[str] = []
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ['?']
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and not any(
                name.startswith('*') for name in found):
            found.append('*')
        found.append(_STARS.get(one.kind, '') + one.name + (
            '' if one.default is one.empty else '='))
    return found


def _fits(seam: entry.Seam, taken: list[str]) -> bool:
    wanted = seam.detail.split(', ') if seam.detail else []
    if seam.kind is _Kind.REPLACED:
        return taken == wanted
    first, more = taken[:len(wanted)], taken[len(wanted):]
    return len(first) == len(wanted) and all(
        has in (one, f'{one}=') for one, has in zip(
            wanted, first, strict=True)) and all(
        one.endswith('=') or one.startswith('*') for one in more)
