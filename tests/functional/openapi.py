# SPDX-License-Identifier: Apache-2.0

"""The OpenAPI description of the lease API, as tests use it."""

import functools
import os
import typing as ty

import jsonschema
import referencing
from referencing import jsonschema as specifications
import yaml

#: The folder of the API reference.
DOCUMENTS = os.path.join(
    os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
    'doc', 'source', 'api-ref')

_URI = 'urn:lease-api'
_METHODS = ('get', 'put', 'post', 'delete', 'patch', 'head', 'options')

Schema: ty.TypeAlias = dict[str, ty.Any]


class Operation(ty.NamedTuple):
    """One method of one path."""

    method: str
    path: str
    #: The base path, if it differs from that of all others.
    server: str | None
    parameters: tuple[Schema, ...]
    #: The schema of the body; None if there is none.
    body: Schema | None
    #: By code, the schema of the body; None allows anything.
    answers: dict[int, Schema | None]


@functools.cache
def description() -> Schema:
    """Return the whole document."""
    with open(os.path.join(DOCUMENTS, 'openapi.yaml')) as f:
        return ty.cast(Schema, yaml.load(f, Loader=_Strict))


class _Strict(yaml.SafeLoader):
    """Refuses duplicate keys, as other readers do."""

    def construct_mapping(self, node: ty.Any, deep: bool = False) -> ty.Any:
        keys = [key.value for key, _value in node.value]
        assert len(keys) == len(
            {*keys}), f'{sorted(keys)} at {node.start_mark}'
        return super().construct_mapping(node, deep)


def resolved(node: Schema) -> Schema:
    """Return the target of a reference; anything else as it is."""
    while set(node) == {'$ref'}:
        found: ty.Any = description()
        for part in node['$ref'].removeprefix('#/').split('/'):
            found = found[part]
        node = found
    return node


@functools.cache
def operations() -> tuple[Operation, ...]:
    """Return all operations of the document."""
    return tuple(
        Operation(
            method.upper(), path,
            path_item['servers'][0]['url'] if 'servers' in path_item else
            None,
            tuple(resolved(one) for one in (
                *path_item.get('parameters', ()),
                *operation.get('parameters', ()))),
            _content(operation['requestBody']) if 'requestBody' in operation
            else None,
            {int(code): _content(resolved(answer))
             for code, answer in operation['responses'].items()})
        for path, path_item in description()['paths'].items()
        for method, operation in path_item.items() if method in _METHODS)


def _content(node: Schema) -> Schema | None:
    if 'content' not in node:
        return None
    return ty.cast(Schema, node['content']['application/json']['schema'])


@functools.cache
def _registry() -> ty.Any:
    return referencing.Registry().with_resource(
        _URI, referencing.Resource.from_contents(
            description(), specifications.DRAFT202012))


def problems(schema: Schema, value: object) -> list[str]:
    """Return the differences of a value from a schema of the document."""
    # References of the schema are resolved within the document.
    validator = jsonschema.Draft202012Validator(
        _absolute(schema), registry=_registry())
    return [f'{error.json_path}: {error.message[:300]}'
            for error in validator.iter_errors(value)]


def _absolute(node: ty.Any) -> ty.Any:
    if isinstance(node, dict):
        return {key: f'{_URI}{value}' if key == '$ref' and isinstance(
            value, str) and value.startswith('#') else _absolute(value)
            for key, value in node.items()}
    if isinstance(node, list):
        return [_absolute(one) for one in node]
    return node
