# SPDX-License-Identifier: Apache-2.0

"""The directive ``lease-api``: one request of the lease API.

    .. lease-api:: POST /leases

prints its method, status codes and parameters by os-api-ref. They are those of
``api-ref/openapi.yaml``, from which the files that os-api-ref reads are
generated.
"""

import os

from docutils.parsers import rst
import yaml

_FILE = os.path.join('api-ref', 'openapi.yaml')
_PARAMETERS, _CODES = 'api-parameters.yaml', 'api-codes.yaml'
#: In the order that os-api-ref wants.
_PLACES = ('header', 'path', 'query', 'body')
_METHODS = ('get', 'put', 'post', 'delete', 'patch')


class LeaseApi(rst.Directive):
    """A request, by its method and the path of the description."""

    required_arguments = 2

    def run(self):
        env = self.state.document.settings.env
        path = os.path.join(env.srcdir, _FILE)
        env.note_dependency(path)
        method, url = self.arguments
        api = _Api(path)
        operation = api.document['paths'][url][method.lower()]
        codes = [(int(code), operation['operationId'])
                 for code in operation['responses']]
        lines = [
            f'.. rest_method:: {method} {"" if url == "/" else "/v1"}{url}',
            '']
        for title, some in (
                ('success', [one for one in codes if one[0] < 400]),
                ('error', [one for one in codes if one[0] >= 400])):
            if some:
                lines += [
                    f'.. rest_status_code:: {title} ../_static/{_CODES}', '',
                    *(f'   - {code}: {name}' for code, name in some), '']
        parameters = api.parameters(url, method.lower())
        if parameters:
            lines += [
                f'.. rest_parameters:: ../_static/{_PARAMETERS}', '',
                *(f'   - {name}: {key}'
                  for key, (name, _described) in parameters.items())]
        # In the section of the directive, whose id os-api-ref reads.
        self.state_machine.insert_input(['', *lines, ''], path)
        return []


class _Api:
    """The description in a file."""

    def __init__(self, path):
        with open(path, encoding='utf-8') as file:
            self.document = yaml.safe_load(file)

    def operations(self):
        """Yield each path with its methods."""
        for url, item in self.document['paths'].items():
            for method in _METHODS:
                if method in item:
                    yield url, method, item[method]

    def parameters(self, url, method):
        """Return by key the name of each parameter, and what it is."""
        item = self.document['paths'][url]
        operation, found = item[method], {}
        for node in (*item.get('parameters', ()),
                     *operation.get('parameters', ())):
            one = self._resolved(node)
            found[one['in'], one['name']] = self._described(
                {**one['schema'], 'description': one.get('description')},
                one['in'], one.get('required', False))
        body = operation.get('requestBody')
        if body is not None:
            keys, required = self._keys(
                body['content']['application/json']['schema'])
            for name, node in keys.items():
                found['body', name] = self._described(
                    node, 'body', name in required)
        keyed = {f'{operation["operationId"]}_{name}_{place}': (
            place, name, described)
            for (place, name), described in found.items()}
        return {key: (name, described) for key, (_place, name, described) in
                sorted(keyed.items(), key=lambda item: (
                    _PLACES.index(item[1][0]), item[0].lower()))}

    def _keys(self, node):
        """Return the properties of an object, and which are required."""
        node = self._resolved(node)
        keys, required = {}, set(node.get('required', ()))
        for part in node.get('allOf', ()):
            others, needed = self._keys(part)
            keys |= others
            required |= needed
        return keys | node.get('properties', {}), required

    def _described(self, node, place, required):
        schema = self._resolved(node)
        text = node.get('description') or self._text(schema)
        if not text:
            raise ValueError(f'a parameter without a description: {node}')
        values = schema.get('enum', ())
        if len(values) > 1:
            text += ' One of ' + ', '.join(
                f'``{value}``' for value in values) + '.'
        return {'description': text.strip(), 'in': place,
                'required': required, 'type': self._type(schema)}

    def _text(self, schema):
        """Return the first description of a schema."""
        schema = self._resolved(schema)
        parts = (*schema.get('oneOf', ()), *schema.get('anyOf', ()))
        return schema.get('description') or next(
            filter(None, map(self._text, parts)), '')

    def _type(self, schema):
        """Return the types that a value may have."""
        schema = self._resolved(schema)
        kinds = schema.get('type', ())
        kinds = [kinds] if isinstance(kinds, str) else [*kinds]
        for part in (*schema.get('oneOf', ()), *schema.get('anyOf', ())):
            kinds += self._type(part).split(' or ')
        if not kinds and 'allOf' in schema:
            kinds = [self._type(schema['allOf'][0])]
        return ' or '.join(dict.fromkeys(kinds)) or 'string'

    def _resolved(self, node):
        """Return the target of a reference, with the keys next to it."""
        while '$ref' in node:
            found = self.document
            for part in node['$ref'].removeprefix('#/').split('/'):
                found = found[part]
            node = {**found, **{
                key: value for key, value in node.items()
                if key != '$ref' and value is not None}}
        return node

    def codes(self):
        """Return by status code and operation what an answer means."""
        found = {}
        for _url, _method, operation in self.operations():
            for code, answer in operation['responses'].items():
                found.setdefault(int(code), {})[operation['operationId']] = (
                    self._resolved(answer)['description'])
        return found


def _generate(app):
    """Write the files that os-api-ref reads."""
    api = _Api(os.path.join(app.srcdir, _FILE))
    parameters = {}
    for url, method, _operation in api.operations():
        parameters |= {key: described for key, (_name, described)
                       in api.parameters(url, method).items()}
    folder = os.path.join(app.srcdir, '_static')
    os.makedirs(folder, exist_ok=True)
    for name, content in (
            (_PARAMETERS, dict(sorted(parameters.items(), key=lambda item: (
                _PLACES.index(item[1]['in']), item[0].lower())))),
            (_CODES, api.codes())):
        text = yaml.safe_dump(content, sort_keys=False)
        path = os.path.join(folder, name)
        if not os.path.exists(path) or open(path).read() != text:
            with open(path, 'w', encoding='utf-8') as file:
                file.write(text)


def setup(app):
    app.add_directive('lease-api', LeaseApi)
    app.connect('builder-inited', _generate)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
