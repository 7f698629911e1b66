# SPDX-License-Identifier: Apache-2.0

"""The table of seams in Nova, and its check."""

import ast
import inspect
import re
import types
import typing as ty
from unittest import mock

from oslo_config import cfg

from blazar_core.common import errors
from blazar_nova.compat.seams import check
from blazar_nova.compat.seams import entry
from tests import imports as code
from tests import removal
from tests.unit import base

CHANGES = ('removed', 'renamed', 'swapped', 'required', 'optional')


def seams(*kinds: entry.Kind) -> list[entry.Seam]:
    """Return the entries that are compared with the installed Nova."""
    release = '.'.join(check.installed().split('.')[:2])
    return [seam for seam in check.TABLE if release in seam.releases and
            (not kinds or seam.kind in kinds)]


class TestTable(base.TestCase):

    def test_installed_nova_has_all_seams(self):
        self.assertEqual([], check.problems())
        check.require()

    def test_table_has_no_duplicates(self):
        self.assertEqual(len(check.TABLE), len({
            (seam.kind, seam.name, seam.detail) for seam in check.TABLE}))

    def test_each_seam_is_used(self):
        """By its name, anywhere: a method may belong to any object."""
        text = '\n'.join(
            open(path).read() for path in code.sources('blazar_nova')
            if '/seams/' not in path)
        words = {*re.findall(r'\w+', text), '__init__', '__getitem__'}
        # Names that Nova itself calls, and that the check itself uses.
        words |= {'_create_instance', 'resize', '_schedule',
                  'live_migrate_instance',
                  'pipeline_factory_v21', 'version_string'}
        self.assertEqual([], [
            seam.name for seam in check.TABLE
            if seam.name.rpartition('.')[2] not in words])


class TestEachRemoved(base.TestCase):

    def test_each_removed_seam_is_reported(self):
        found = seams()
        self.assertGreater(len(found), 400)
        missed = []
        for seam in found:
            with removal.removed(seam):
                try:
                    check.require()
                except errors.ConfigurationError as exc:
                    said = str(exc)
                else:
                    missed.append(check.describe(seam))
                    continue
            self.assertIn(seam.name, said)
            self.assertIn(seam.why, said)
            self.assertIn('is installed; this version is for Nova 33.0 and '
                          '34.0.', said)
        self.assertEqual([], missed)
        self.assertEqual([], check.problems())

    def test_changed_signature_is_reported(self):
        for seam in seams(entry.Kind.CALLED, entry.Kind.REPLACED):
            path, _, name = seam.name.rpartition('.')
            owner = removal.resolve(path)
            before = list(inspect.signature(
                getattr(owner, name)).parameters.values())
            for change in CHANGES:
                after = changed(before, change)
                if after is None:
                    continue
                with removal.replaced(owner, name, function(after)):
                    problems = [one for one in check.problems(seam.name)
                                if one.startswith(
                                    f'{seam.name} was expected to take '
                                    f'({seam.detail}), but takes (')]
                self.assertEqual(
                    0 if change == 'optional' and
                    seam.kind is entry.Kind.CALLED else 1, len(problems),
                    (seam.name, change))


def changed(parameters: list[inspect.Parameter], how: str,
            ) -> list[inspect.Parameter] | None:
    """Return changed parameters; None if the change is impossible."""
    new = inspect.Parameter('new', inspect.Parameter.POSITIONAL_OR_KEYWORD)
    plain = [one for one in parameters if one.kind is new.kind]
    rest = parameters[len(plain):]
    required = [one for one in plain if one.default is one.empty]
    if how == 'removed':
        return plain[:-1] + rest if plain else None
    if how == 'renamed':
        return [*plain[:-1], plain[-1].replace(name='other'), *rest] if (
            plain) else None
    if how == 'swapped':
        return [*plain[:-2], plain[-1].replace(default=plain[-2].default),
                plain[-2].replace(default=plain[-1].default), *rest] if (
            len(plain) > 1) else None
    if how == 'required':
        return [*required, new, *plain[len(required):], *rest]
    # Before *args and **kwargs it would not be at the end.
    return None if rest else [*plain, new.replace(default=None)]


def function(parameters: list[inspect.Parameter]) -> ty.Any:
    def stand_in() -> None:
        """Accept the given parameters."""
    stand_in.__module__ = 'nova'
    stand_in.__signature__ = inspect.Signature(parameters)
    return stand_in


class TestReleases(base.TestCase):

    def conf(self, allow=False):
        conf = cfg.ConfigOpts()
        check.nova_conf.register_opts(conf)
        conf.set_override('allow_untested_nova', allow, 'blazar')
        return conf

    def installed(self, version):
        return mock.patch('nova.version.version_string',
                          return_value=version)

    def test_untested_release_is_refused_unless_allowed(self):
        for version, known in (
                ('34.0.0', True), ('34.0.1.dev5', True), ('33.0.2', True),
                ('34.1.0', False), ('32.0.0', False), ('35.0.0', False),
                ('340.0.0', False)):
            with self.installed(version):
                problems = check.untested(self.conf())
                self.assertEqual([], check.untested(self.conf(True)))
                if known:
                    check.require_tested(self.conf())
                else:
                    self.assertRaises(
                        errors.ConfigurationError, check.require_tested,
                        self.conf())
            self.assertEqual(known, not problems, version)
            self.assertTrue(known or f'Nova {version} is' in problems[0])
            self.assertTrue(known or '33.0 and 34.0' in problems[0])

    def test_unknown_release_is_compared_with_nearest_one(self):
        for version, release in (
                ('32.0.0', '33.0'), ('33.0.2', '33.0'), ('33.4.0', '33.0'),
                ('34.0.7', '34.0'), ('35.0.0.0rc1', '34.0'),
                ('of an unknown version', '33.0')):
            self.assertEqual(release, check._release(version), version)

    def test_seams_that_only_one_release_has(self):
        only = {release: [seam.name for seam in check.TABLE
                          if seam.releases == (release,)]
                for release in entry.RELEASES}
        self.assertEqual({
            '33.0': ['nova.limit.placement.enforce_num_instances_and_flavor',
                     'nova.scheduler.utils.resources_for_limits'],
            '34.0': ['nova.limit.placement.'
                     'enforce_num_instances_and_resources',
                     'nova.scheduler.utils.resources_from_flavor_and_bfv']},
            only)


class TestUses(base.TestCase):
    """The table has all names of Nova in the code of compat."""

    def test_all_names_of_nova_in_compat_are_in_table(self):
        paths = [path for path in code.sources('blazar_nova/compat')
                 if '/seams/' not in path]
        found = {name for path in paths for name in uses(code.parsed(path))}
        self.assertGreater(len(found), 100)
        self.assertEqual([], sorted(filter(is_missing, found)))

    def test_name_of_nova_missing_in_table_is_found(self):
        for source in (
                'from nova import utils\nutils.novel()',
                'from nova.compute import api as a\na.API.novel',
                'import nova.utils\nnova.utils.novel',
                'import nova.utils as u\nu.novel',
                'def f():\n    from nova import objects\n'
                '    return objects.Novel()',
                'from nova import objects\nA = objects.Flavor\nA.novel()',
                'from nova import objects\n'
                'A, B = objects.Flavor, objects.Instance\nB.novel',
                'from nova import utils\ngetattr(utils, "novel", None)',
                'from nova.utils import novel\nnovel()',
                'from nova import exception\n'
                'exception.Forbidden.novel'):
            found = list(filter(is_missing, uses(ast.parse(source))))
            self.assertEqual(1, len(found), (source, found))

    def test_names_of_other_libraries_are_not_missing(self):
        for source in (
                'import novaclient\nnovaclient.novel',
                'import nova.conf\nnova.conf.CONF.register_opts([])',
                'from nova.db.api import models\n'
                'models.RequestSpec.spec.like("")'):
            self.assertEqual([], list(filter(
                is_missing, uses(ast.parse(source)))), source)


def uses(tree: ast.Module) -> ty.Iterator[str]:
    """Return the dotted names of Nova in a module."""
    known = _imported(tree)
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            target = (node.targets[0] if isinstance(node, ast.Assign)
                      else node.target)
            pairs = zip(target.elts, node.value.elts) if isinstance(
                target, ast.Tuple) and isinstance(
                node.value, ast.Tuple) else [(target, node.value)]
            for one, value in pairs:
                name = _name_of(value, known)
                if isinstance(one, ast.Name) and name:
                    known[one.id] = name
    inner = {id(node.value) for node in ast.walk(tree)
             if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        name = _name_of(node, known)
        if name and id(node) not in inner:
            yield name


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return Nova's names that a module has imported."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and (
                node.module.split('.')[0] == 'nova'):
            known |= {one.asname or one.name: f'{node.module}.{one.name}'
                      for one in node.names}
        elif isinstance(node, ast.Import):
            known |= {one.asname or 'nova': one.name if one.asname else 'nova'
                      for one in node.names
                      if one.name.split('.')[0] == 'nova'}
    return known


def _name_of(node: ast.AST, known: ty.Mapping[str, str]) -> str | None:
    """Return the dotted name of attributes of an object of Nova."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        before, name = _name_of(node.value, known), node.attr
    elif isinstance(node, ast.Call) and code.name_of(
            node.func) == 'getattr' and isinstance(
            node.args[1], ast.Constant):
        before, name = _name_of(node.args[0], known), node.args[1].value
    else:
        return None
    return before and f'{before}.{name}'


_NAMES = {seam.name: seam for seam in check.TABLE}
_CONF = 'nova.conf.CONF'
#: Options of oslo.log.
_LOGGING = ('log_dir', 'log_file', 'use_journal')


def is_missing(name: str) -> bool:
    """Return whether a name of Nova is missing in the table: it is not an
    entry, does not lead to one, and belongs to none of another library.
    """
    # An entry covers all fields of an object, or columns of a table.
    name = re.sub(r'\.(fields|__table__(\.c)?)\b', '', name)
    if name in _NAMES or any(
            one.startswith(f'{name}.') for one in _NAMES):
        return False
    if name.startswith(f'{_CONF}.'):
        part = name.split('.')[3]
        return part not in _LOGGING and not hasattr(cfg.ConfigOpts, part)
    owner = name.rpartition('.')[0]
    while owner and owner not in _NAMES:
        owner = owner.rpartition('.')[0]
    return not owner or isinstance(
        removal.resolve(owner), type | types.ModuleType)
