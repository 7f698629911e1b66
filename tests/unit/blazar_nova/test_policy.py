# SPDX-License-Identifier: Apache-2.0

import configparser
import os
import textwrap

import fixtures
from nova import context as nova_context
from nova import policies as nova_policies
from nova import policy as nova_policy
from oslo_config import cfg
from oslo_policy import generator
import stevedore.extension

from blazar_core.common import errors
from blazar_nova.services import policy
from tests import imports
from tests.unit import base

HERE = {'project_id': 'here'}
ELSEWHERE = {'project_id': 'elsewhere'}
#: Tokens of keystone include implied roles.
ROLES = ['reader', 'member', 'manager', 'admin']

#: By rule, the lowest sufficient role on one's own project.
LEAST = {
    'blazar:leases:get': 'reader',
    'blazar:leases:get_all_projects': 'admin',
    'blazar:leases:get_hosts': 'reader',
    'blazar:leases:post': 'member',
    'blazar:leases:best_effort': 'member',
    'blazar:leases:offer': 'member',
    'blazar:leases:put': 'member',
    'blazar:leases:remove_servers': 'member',
    'blazar:leases:hand_over': 'admin',
    'blazar:leases:delete': 'member',
    'blazar:interruptible:get': 'reader',
    'blazar:interruptible:get_all_projects': 'admin',
    'blazar:interruptible:put': 'member',
    'blazar:interruptible:delete': 'member',
    'blazar:availability:get': 'reader',
    'blazar:calendar:get': 'reader',
    'blazar:calendar:get_all': 'admin',
    'blazar:usage:get': 'reader',
    'blazar:usage:costs': 'reader',
    'blazar:usage:get_all_projects': 'admin',
    'blazar:oshosts:get': 'admin',
    'blazar:oshosts:list': 'reader',
    'blazar:oshosts:post': 'admin',
    'blazar:oshosts:put': 'admin',
    'blazar:oshosts:delete': 'admin',
    'blazar:oshosts:get_allocations': 'admin',
    'blazar:oshosts:get_resource_properties': 'reader',
    'blazar:oshosts:update_resource_properties': 'admin',
    'blazar:floatingips:get': 'reader',
    'blazar:floatingips:post': 'admin',
    'blazar:floatingips:delete': 'admin',
    'blazar:maintenance:get': 'admin',
    'blazar:maintenance:put': 'admin',
    'blazar:maintenance:delete': 'admin',
}


def user(role, **values):
    """Return the context of a user with a role and the implied roles."""
    roles = ROLES[:ROLES.index(role) + 1] if role in ROLES else [role]
    return nova_context.RequestContext(**{
        'user_id': 'user', 'project_id': 'here', 'roles': roles,
        'is_admin': role == 'admin', **values})


class PolicyTestCase(base.TestCase):

    def setUp(self):
        super().setUp()
        self.log = self.useFixture(fixtures.FakeLogger())
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'policy.yaml')

    def write(self, text):
        """Write a text into the policy file that is shared with Nova."""
        with open(self.path, 'w') as file:
            file.write(textwrap.dedent(text))

    def conf(self):
        conf = cfg.ConfigOpts()
        conf([], default_config_files=[], default_config_dirs=[])
        return conf

    def policy(self):
        conf = self.conf()
        policy.Policy(conf)
        conf.set_override('policy_file', self.path, 'oslo_policy')
        return policy.Policy(conf)

    def allowed(self, who, target, rules=None):
        """Return the rules that allow a user something."""
        rules = rules or self.policy()
        return {rule for rule in LEAST if rules.allows(who, rule, target)}


#: The rules of Blazar 18.
OF_BLAZAR = {
    'admin', 'admin_or_owner', 'project_member_api', 'project_reader_api',
    'project_member_or_admin', 'project_reader_or_admin',
    *(f'blazar:leases:{name}' for name in ('get', 'post', 'put', 'delete')),
    *(f'blazar:oshosts:{name}' for name in (
        'get', 'post', 'put', 'delete', 'get_allocations',
        'get_resource_properties', 'update_resource_properties')),
    *(f'blazar:floatingips:{name}' for name in ('get', 'post', 'delete'))}


class TestRulesOfBlazar(PolicyTestCase):
    """The policy file of an operator of Blazar."""

    def test_all_rules_of_blazar_are_registered(self):
        self.addCleanup(cfg.CONF.reset)
        self.assertEqual(set(), OF_BLAZAR - set(
            policy.get_enforcer().registered_rules))

    def test_base_rules_of_blazar_keep_their_meaning(self):
        for made_of, who in (
                ('admin_or_owner', {'reader', 'member', 'manager', 'admin'}),
                ('admin', {'admin'}),
                ('project_member_or_admin', {'member', 'manager', 'admin'}),
                ('project_reader_or_admin',
                 {'reader', 'member', 'manager', 'admin'}),
                ('project_reader_api',
                 {'reader', 'member', 'manager', 'admin'})):
            self.write(f'"blazar:leases:get": "rule:{made_of}"')
            rules = self.policy()
            self.assertEqual(who, {
                role for role in ROLES if rules.allows(
                    user(role), 'blazar:leases:get', HERE)}, made_of)
            self.assertEqual(made_of != 'project_reader_api', rules.allows(
                user('admin'), 'blazar:leases:get', ELSEWHERE), made_of)
            self.assertIs(False, rules.allows(
                user('member'), 'blazar:leases:get', ELSEWHERE), made_of)

    def test_file_may_redefine_base_rules(self):
        self.write('''
            "admin_or_owner": "role:swiftoperator"
            "blazar:leases:get": "rule:admin_or_owner"
            ''')
        self.assertEqual({'blazar:leases:get'},
                         self.allowed(user('swiftoperator'), HERE))

    def test_undefined_rule_is_a_configuration_error(self):
        for text in ('"blazar:leases:get": "rule:admin_or_ovner"',
                     '"blazar:leases:get": "not (role:x and '
                     '(role:y or rule:admin_or_ovner))"',
                     '"blazar_admin": "rule:admin_or_ovner"',
                     '"blazar:leases:get": "rule:mine"\n'
                     '"mine": "rule:admin_or_ovner"'):
            self.write(text)
            said = str(self.assertRaises(
                errors.ConfigurationError, self.policy))
            self.assertIn('uses rule:admin_or_ovner, which is not '
                          'defined', said, text)
            self.assertIn(self.path, said)

    def test_undefined_rule_falls_back_to_default_rule(self):
        self.write('''
            "default": "role:member"
            "blazar:leases:get": "rule:mine"
            ''')
        self.assertIn('blazar:leases:get', self.allowed(user('member'), HERE))

    def test_undefined_rules_of_nova_are_ignored(self):
        self.write('"os_compute_api:servers:index": "rule:of_nova_alone"')
        self.policy()


class TestDefaults(PolicyTestCase):

    def test_table_of_this_test_has_each_rule(self):
        self.assertEqual(sorted(LEAST), sorted(
            rule.name for rule in policy.list_rules()
            if rule.name.startswith('blazar:')))

    def test_rules_allowed_to_each_role_on_own_project(self):
        for role in ROLES:
            self.assertEqual(
                {rule for rule, least in LEAST.items()
                 if ROLES.index(least) <= ROLES.index(role)},
                self.allowed(user(role), HERE), role)

    def test_only_admins_may_access_other_projects(self):
        for role in ('reader', 'member', 'manager'):
            self.assertEqual(set(), self.allowed(user(role), ELSEWHERE), role)
        self.assertEqual(set(LEAST), self.allowed(user('admin'), ELSEWHERE))

    def test_other_roles_are_allowed_nothing(self):
        for who in (user('service'), user('swiftoperator'),
                    user('reader', roles=[])):
            self.assertEqual(set(), self.allowed(who, HERE))

    def test_tokens_without_project_scope_are_allowed_nothing(self):
        for scope in ({'system_scope': 'all'}, {'domain_id': 'default'}, {}):
            for role in ('admin', 'member', 'reader'):
                who = user(role, project_id=None, **scope)
                for target in (HERE, {'project_id': None}):
                    self.assertEqual(set(), self.allowed(who, target), scope)
                exc = self.assertRaises(
                    errors.Forbidden, self.policy().authorize, who,
                    'blazar:leases:get', {'project_id': None})
                self.assertIn('no project scope', str(exc))

    def test_tokens_without_project_scope_fail_empty_rules(self):
        self.write('"blazar:leases:get": ""')
        self.assertEqual(set(), self.allowed(
            user('reader', project_id=None), {'project_id': None}))

    def test_an_elevated_context_is_an_admin(self):
        self.assertEqual(set(LEAST), self.allowed(
            user('reader').elevated(), ELSEWHERE))

    def test_a_refusal_names_the_rule(self):
        rules = self.policy()
        rules.authorize(user('member'), 'blazar:leases:post', HERE)
        self.assertIn('(blazar:leases:post)', str(self.assertRaises(
            errors.Forbidden, rules.authorize, user('reader'),
            'blazar:leases:post', HERE)))

    def test_unregistered_rule_raises(self):
        self.assertRaises(policy.policy.PolicyNotRegistered,
                          self.policy().allows, user('admin'),
                          'blazar:leases:nothing', HERE)


class TestFile(PolicyTestCase):

    def test_file_changes_rules_and_personas(self):
        self.write('''
            blazar_admin: role:lessor
            blazar:leases:delete: rule:blazar_project_manager_or_admin
            blazar:leases:offer: "!"
            blazar:leases:post: rule:blazar_service_or_admin
        ''')
        self.assertEqual(set(LEAST) - {'blazar:leases:offer'},
                         self.allowed(user('lessor'), ELSEWHERE))
        self.assertEqual(set(), self.allowed(user('admin'), ELSEWHERE))
        self.assertNotIn('blazar:leases:delete',
                         self.allowed(user('member'), HERE))
        self.assertIn('blazar:leases:delete',
                      self.allowed(user('manager'), HERE))
        self.assertEqual({'blazar:leases:post'},
                         self.allowed(user('service'), HERE))

    def test_changed_file_applies_without_restart(self):
        self.write('blazar:leases:get: "!"')
        rules = self.policy()
        self.assertNotIn('blazar:leases:get',
                         self.allowed(user('admin'), HERE, rules))
        self.write('blazar:leases:get: "@"')
        self.touch()
        self.assertEqual({'blazar:leases:get'}, self.allowed(
            user('other'), HERE, rules))

    def touch(self):
        """Within one tick of the file system's clock no change is detected."""
        later = os.stat(self.path).st_mtime + 10
        os.utime(self.path, (later, later))

    def test_an_undefined_rule_in_a_changed_file_is_logged_and_refused(self):
        self.write('blazar:leases:get: "@"')
        rules = self.policy()
        for undefined in 'rule:mine', 'not rule:mine', 'rule:x or rule:mine':
            self.write(f"""
                x: "@"
                blazar:leases:delete: "@"
                blazar:leases:get: "{undefined}"
            """)
            self.touch()
            for _time in range(2):
                self.assertNotIn('blazar:leases:get', self.allowed(
                    user('admin'), HERE, rules), undefined)
            self.assertIn('blazar:leases:delete', self.allowed(
                user('other'), HERE, rules))
            # Once for each change of the file.
            self.assertEqual(1, self.log.output.count(
                f'blazar:leases:get in {self.path} uses rule:mine, which is '
                'not defined'), self.log.output)
            self.log.reset_output()
        self.write('blazar:leases:get: "@"')
        self.touch()
        self.assertEqual({'blazar:leases:get'}, self.allowed(
            user('other'), HERE, rules))


class TestSharedPolicyFile(PolicyTestCase):
    """Nova reads the same file."""

    SHOW = 'os_compute_api:servers:show'
    DELETE = 'os_compute_api:servers:delete'

    def nova(self):
        """Return Nova's own check, with the current file."""
        cfg.CONF([], project='nova', default_config_files=[],
                 default_config_dirs=[])
        self.addCleanup(cfg.CONF.reset)
        nova_policy.reset()
        self.addCleanup(nova_policy.reset)
        nova_policy.init(policy_file=self.path)
        return lambda who, rule: bool(nova_policy.authorize(
            who, rule, HERE, do_raise=False))

    def all_of(self, nova):
        """Return what each role may do of all of Nova's rules."""
        return {(role, rule.name): nova(user(role), rule.name)
                for role in (*ROLES, 'lessor')
                for rule in nova_policies.list_rules()}

    def test_names_of_rules_differ_from_those_of_nova(self):
        self.assertEqual(set(), {rule.name for rule in policy.list_rules()} & {
            rule.name for rule in nova_policies.list_rules()})

    def test_rules_of_nova_do_not_affect_rules_of_blazar(self):
        self.write('{}')
        before = {role: self.allowed(user(role), HERE) for role in ROLES}
        # Aliases of Nova's own rules are not in the plugin's enforcer.
        self.write(f'''
            context_is_admin: role:lessor
            project_reader_api: "!"
            project_member_api: "!"
            default: "@"
            {self.SHOW}: rule:project_reader_or_admin or is_admin:True
            {self.DELETE}: rule:nothing_that_there_is
        ''')
        self.assertEqual(before, {
            role: self.allowed(user(role), HERE) for role in ROLES})
        self.assertEqual(set(), self.allowed(user('lessor'), HERE))
        self.assertNotIn('not defined', self.log.output)

    def test_rules_of_blazar_do_not_affect_rules_of_nova(self):
        self.write(f'{self.DELETE}: role:manager')
        before = self.all_of(self.nova())
        self.write(f'''
            {self.DELETE}: role:manager
            blazar_admin: role:lessor
            blazar_project_reader: "!"
            blazar:leases:get: "@"
            blazar:leases:delete: rule:blazar_project_manager_or_admin
        ''')
        nova = self.nova()
        self.policy().allows(user('lessor'), 'blazar:leases:get', HERE)
        self.assertEqual(before, self.all_of(nova))
        self.assertTrue(nova(user('manager'), self.DELETE))
        self.assertFalse(nova(user('member'), self.DELETE))
        self.assertIn('blazar:leases:delete',
                      self.allowed(user('manager'), HERE))


class TestSample(base.TestCase):

    def sample(self):
        """Return the output of oslopolicy-sample-generator."""
        manager = stevedore.extension.ExtensionManager.make_test_instance([
            stevedore.extension.Extension(
                'blazar_nova', None, None, policy.list_rules())])
        with fixtures.MonkeyPatch(
                'oslo_policy.generator.stevedore.named.NamedExtensionManager',
                lambda *_args, **_options: manager):
            path = os.path.join(
                self.useFixture(fixtures.TempDir()).path, 'sample')
            generator._generate_sample(['blazar_nova'], path)
        with open(path) as file:
            return file.read()

    def test_each_rule_names_its_operations(self):
        sample = self.sample()
        for rule in policy.list_rules():
            self.assertIn(f'#"{rule.name}": "{rule.check_str}"', sample)
            if rule.name.startswith('blazar:'):
                self.assertTrue(rule.operations, rule.name)
                self.assertEqual(['project'], rule.scope_types)
                for operation in rule.operations:
                    self.assertEqual({'method', 'path'}, operation.keys())

    def test_entry_points_of_oslo_policy_are_declared(self):
        parser = configparser.ConfigParser()
        parser.read(os.path.join(imports.ROOT, 'setup.cfg'))
        for group, function in (('policies', policy.list_rules),
                                ('enforcer', policy.get_enforcer)):
            self.assertEqual(
                'blazar_nova = blazar_nova.services.policy:' +
                function.__name__,
                parser['entry_points'][f'oslo.policy.{group}'].strip())

    def test_enforcer_of_oslo_policy_tools_has_all_rules(self):
        self.addCleanup(cfg.CONF.reset)
        known = set(policy.get_enforcer().registered_rules)
        self.assertEqual({rule.name for rule in policy.list_rules()},
                         {name for name in known if name.startswith('blazar')})
        # These are in no sample: Nova has some of the same names.
        self.assertIn('admin_or_owner', known)
