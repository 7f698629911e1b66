# SPDX-License-Identifier: Apache-2.0

"""The imports of the files of a package, for tests and the documentation."""

import ast
import functools
import os
import typing as ty

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), '..'))


def sources(*folders: str) -> list[str]:
    """Return the Python files in folders, by their path from the root."""
    found = [os.path.relpath(os.path.join(path, name), ROOT)
             for folder in folders
             for path, _folders, names in os.walk(os.path.join(ROOT, folder))
             for name in names if name.endswith('.py')]
    return sorted(found)


def text(path: str) -> str:
    with open(os.path.join(ROOT, path)) as file:
        return file.read()


@functools.cache
def parsed(path: str) -> ast.Module:
    return ast.parse(text(path), path)


def imports(path: str) -> ty.Iterator[str]:
    """Return the full names that a file imports, anywhere in the file."""
    package = path.removesuffix('.py').split('/')[:-1]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[:len(package) - node.level + 1] if (
                node.level) else []
            module = '.'.join([*above, *filter(None, [node.module])])
            yield from (f'{module}.{alias.name}' for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(
                node.args[0], ast.Constant) and name_of(node.func) in (
                    '__import__', 'import_module', 'import_class',
                    'import_object', 'try_import'):
            yield str(node.args[0].value)


def name_of(function: ast.expr) -> str:
    """Return the last part of the name of a called function."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ''


def room(path: str) -> str:
    """Return the subpackage or top-level module of a file."""
    return path.split('/')[1].removesuffix('.py')


def arrows(package: str) -> dict[str, set[str]]:
    """Return, by file, the other files of its package that it imports."""
    paths = [path for path in sources(package) if '/alembic/' not in path]
    modules = {path.removesuffix('.py').removesuffix('/__init__').replace(
        '/', '.'): path for path in paths}
    return {path: {modules[name] for name in _imported_modules(path, modules)}
            for path in paths}


def exists(name: str) -> bool:
    """Return whether an imported module of this project exists, or a name
    that a module defines or imports.
    """
    path, _dot, last = name.replace('.', '/').rpartition('/')
    if os.path.exists(os.path.join(ROOT, f'{path}/{last}.py')) or (
            os.path.isdir(os.path.join(ROOT, path, last))):
        return True
    for module in (f'{path}.py', f'{path}/__init__.py'):
        if os.path.exists(os.path.join(ROOT, module)):
            return last in text(module)
    return False


def missing(path: str) -> list[str]:
    """Return the names that a file uses of imported modules of this project
    that do not define them.
    """
    modules = {}
    for node in ast.walk(parsed(path)):
        for one in node.names if isinstance(node, ast.ImportFrom) else ():
            module = f'{node.module}.{one.name}'.replace('.', '/') + '.py'
            if os.path.exists(os.path.join(ROOT, module)):
                modules[one.asname or one.name] = module
    return [f'{path}:{node.lineno}: {node.value.id}.{node.attr}'
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Attribute) and
            isinstance(node.value, ast.Name) and node.value.id in modules and
            node.attr not in _defined(modules[node.value.id])]


@functools.cache
def _defined(path: str) -> frozenset[str]:
    """Return the names that a module defines or imports, outside functions and
    classes.
    """
    found, nodes = {'__name__', '__file__', '__doc__'}, [parsed(path)]
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update(one.asname or one.name for one in node.names)
        nodes.extend(ast.iter_child_nodes(node))
    return frozenset(found)


def _imported_modules(path: str, known: ty.Collection[str],
                      ) -> ty.Iterator[str]:
    for name in imports(path):
        while name and name not in known:
            name = name.rpartition('.')[0]
        if name:
            yield name
