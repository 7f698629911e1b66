# SPDX-License-Identifier: Apache-2.0

"""Policy: the roles required for leases and enrolled hosts.

The rules are in the same file as Nova's, but have an enforcer of their own.
Roles have Nova's meaning, under names of our own, so that an operator may
change our rules and Nova's independently.
"""

import dataclasses
import typing as ty

from oslo_config import cfg
from oslo_log import log as logging
from oslo_policy import policy

from blazar_core.common import errors
from blazar_core.leases import accounting
from blazar_nova.schemas import lease_queries

LOG = logging.getLogger(__name__)

_Query = ty.TypeVar('_Query', accounting.Query, lease_queries.Query)

ADMIN = 'rule:blazar_admin'
PROJECT_MEMBER_OR_ADMIN = 'rule:blazar_project_member_or_admin'
PROJECT_READER_OR_ADMIN = 'rule:blazar_project_reader_or_admin'

_LEASE = '/v1/leases/{lease_id}'
_HOSTS = '/v1/os-hosts'
_HOST = f'{_HOSTS}/{{host_id}}'
_ADDRESSES = '/v1/floatingips'
_ADDRESS = f'{_ADDRESSES}/{{floatingip_id}}'
_INTERRUPTIBLE = '/v1/interruptible'
_MAINTENANCE = '/v1/maintenance/{host_name}'


def _persona(name: str, check: str, description: str) -> policy.RuleDefault:
    return policy.RuleDefault(f'blazar_{name}', check, description)


def _rule(name: str, check: str, description: str, *operations: str,
          ) -> policy.DocumentedRuleDefault:
    """Return a rule for operations such as ``GET /v1/leases``."""
    return policy.DocumentedRuleDefault(
        name=f'blazar:{name}', check_str=check, description=description,
        operations=[{'method': method, 'path': path} for method, path in (
            operation.split() for operation in operations)],
        scope_types=['project'])


#: Roles that no rule uses are for rules of the operator.
_PERSONAS = [
    _persona('admin', 'role:admin', 'Cloud administrator.'),
    _persona('service', 'role:service', 'Another service of the cloud.'),
    *(_persona(f'project_{role}',
               f'role:{role} and project_id:%(project_id)s',
               f'Users with the role {role} on the project of the lease.')
      for role in ('reader', 'member', 'manager')),
    _persona('service_or_admin', 'rule:blazar_service or rule:blazar_admin',
             'Another service of the cloud, or an administrator.'),
    *(_persona(f'project_{role}_or_admin',
               f'rule:blazar_project_{role} or rule:blazar_admin',
               f'Users with the role {role} on the project, or '
               'administrators.')
      for role in ('reader', 'member', 'manager')),
]

_RULES = [
    _rule('leases:get', PROJECT_READER_OR_ADMIN,
          'List the leases of a project, or show a lease.',
          'GET /v1/leases', f'GET {_LEASE}'),
    _rule('leases:get_all_projects', ADMIN,
          'List the leases of all projects, or of another project.',
          'GET /v1/leases'),
    _rule('leases:get_hosts', PROJECT_READER_OR_ADMIN,
          'Show the host names of a lease of whole hosts. Also requires '
          'permission to show the lease.',
          'GET /v1/leases', f'GET {_LEASE}'),
    _rule('leases:post', PROJECT_MEMBER_OR_ADMIN,
          'Create a lease, or preview one (dry_run).',
          'POST /v1/leases'),
    _rule('leases:best_effort', PROJECT_MEMBER_OR_ADMIN,
          'Create a lease that live-migrates servers of other projects to '
          'free capacity (lease_type best_effort), at most [blazar] '
          'best_effort_moves of them. Also requires permission to create a '
          'lease.',
          'POST /v1/leases', 'POST /servers'),
    _rule('leases:offer', PROJECT_MEMBER_OR_ADMIN,
          'Create an offer, which holds capacity for a limited time '
          '(offer_seconds), or accept '
          'one.', 'POST /v1/leases', f'POST {_LEASE}/accept'),
    _rule('leases:put', PROJECT_MEMBER_OR_ADMIN, 'Update a lease.',
          f'PUT {_LEASE}'),
    _rule('leases:remove_servers', PROJECT_MEMBER_OR_ADMIN,
          'Remove servers from a lease and keep them (remove_servers). Also '
          'requires permission to update the lease.', f'PUT {_LEASE}'),
    _rule('leases:hand_over', ADMIN,
          'Transfer a lease to another project or user (project_id, user_id). '
          'Also requires permission to update the lease.', f'PUT {_LEASE}'),
    _rule('leases:delete', PROJECT_MEMBER_OR_ADMIN,
          'Delete a lease and its servers.', f'DELETE {_LEASE}'),
    _rule('interruptible:get', PROJECT_READER_OR_ADMIN,
          'List the interruptible servers of a project, or show one.',
          f'GET {_INTERRUPTIBLE}', f'GET {_INTERRUPTIBLE}/{{server_id}}'),
    _rule('interruptible:get_all_projects', ADMIN,
          'List the interruptible servers of all projects, with their hosts. '
          'Also show one of another project, or make it an ordinary one, as '
          'far as interruptible:get and interruptible:delete allow.',
          f'GET {_INTERRUPTIBLE}', f'GET {_INTERRUPTIBLE}/{{server_id}}',
          f'DELETE {_INTERRUPTIBLE}/{{server_id}}'),
    _rule('interruptible:put', PROJECT_MEMBER_OR_ADMIN,
          'Make a server interruptible, at its creation or later.',
          f'PUT {_INTERRUPTIBLE}/{{server_id}}', 'POST /servers'),
    _rule('interruptible:delete', PROJECT_MEMBER_OR_ADMIN,
          'Make an interruptible server an ordinary one.',
          f'DELETE {_INTERRUPTIBLE}/{{server_id}}'),
    _rule('availability:get', PROJECT_READER_OR_ADMIN,
          'Show when how many servers of a given size could be reserved.',
          'GET /v1/availability'),
    _rule('calendar:get', PROJECT_READER_OR_ADMIN,
          'Show when which leases of a project have what, and how much '
          'capacity is free then, in a few levels.',
          'GET /v1/calendar'),
    _rule('calendar:get_all', ADMIN,
          'Show the calendar of all projects, by project or by host.',
          'GET /v1/calendar'),
    _rule('usage:get', PROJECT_READER_OR_ADMIN,
          'Show what the leases of a project planned, reserved and used.',
          'GET /v1/usage'),
    _rule('usage:get_all_projects', ADMIN,
          'Show the usage of all projects, or of another project.',
          'GET /v1/usage'),
    _rule('usage:costs', PROJECT_READER_OR_ADMIN,
          'Show what usage costs, by the rates of the operator.',
          'GET /v1/usage'),
    _rule('oshosts:get', ADMIN,
          'List the enrolled hosts, show a host, and see which host '
          'properties are private.',
          f'GET {_HOSTS}', f'GET {_HOST}', f'GET {_HOSTS}/properties'),
    _rule('oshosts:list', PROJECT_READER_OR_ADMIN,
          'List the enrolled hosts without their names and private '
          'properties. Heat does so before it creates a lease.',
          f'GET {_HOSTS}'),
    _rule('oshosts:post', ADMIN,
          'Enroll a host: from then on it serves leases only.',
          f'POST {_HOSTS}'),
    _rule('oshosts:put', ADMIN, 'Update the properties of a host.',
          f'PUT {_HOST}'),
    _rule('oshosts:delete', ADMIN, 'Remove an enrolled host: it is available '
                                   'to all workloads again.',
          f'DELETE {_HOST}'),
    _rule('oshosts:get_allocations', ADMIN,
          'List which reservations, of any project, have which hosts.',
          f'GET {_HOSTS}/allocations', f'GET {_HOST}/allocation'),
    _rule('oshosts:get_resource_properties', PROJECT_READER_OR_ADMIN,
          'List the host properties that a reservation can ask for.',
          f'GET {_HOSTS}/properties'),
    _rule('oshosts:update_resource_properties', ADMIN,
          'Make a host property private or public.',
          f'PATCH {_HOSTS}/properties/{{name}}'),
    _rule('floatingips:get', PROJECT_READER_OR_ADMIN,
          'List the addresses that leases can reserve as floating IPs, or '
          'show one.', f'GET {_ADDRESSES}', f'GET {_ADDRESS}'),
    _rule('floatingips:post', ADMIN,
          'Enroll an address: leases can reserve it as a floating IP.',
          f'POST {_ADDRESSES}'),
    _rule('floatingips:delete', ADMIN, 'Remove an enrolled address.',
          f'DELETE {_ADDRESS}'),
    _rule('maintenance:get', ADMIN,
          'List the hosts in maintenance, and their bookings of leases of any '
          'project.', 'GET /v1/maintenance',
          f'GET {_MAINTENANCE}'),
    _rule('maintenance:put', ADMIN,
          'Schedule host maintenance, or preview it (dry_run).',
          f'PUT {_MAINTENANCE}'),
    _rule('maintenance:delete', ADMIN, 'End host maintenance.',
          f'DELETE {_MAINTENANCE}'),
]


#: Rules that an operator's rules for Blazar may refer to, unless the file
#: defines them, for Nova or for Blazar.
_BLAZARS = [policy.RuleDefault(name, check) for name, check in (
    ('admin', 'role:admin'),
    ('admin_or_owner', 'rule:admin or project_id:%(project_id)s'),
    ('project_member_api', 'role:member and project_id:%(project_id)s'),
    ('project_reader_api', 'role:reader and project_id:%(project_id)s'),
    ('project_member_or_admin', 'rule:project_member_api or rule:admin'),
    ('project_reader_or_admin', 'rule:project_reader_api or rule:admin'),
)]


def list_rules() -> list[policy.RuleDefault]:
    """Return all rules, for oslopolicy-sample-generator and similar tools."""
    return [*_PERSONAS, *_RULES]


def get_enforcer() -> policy.Enforcer:
    """Return the enforcer for oslo.policy's tools that check the file."""
    cfg.CONF([], project='nova')
    return _enforcer(cfg.CONF)


def _enforcer(conf: cfg.ConfigOpts) -> policy.Enforcer:
    enforcer = policy.Enforcer(conf)
    # Nova's rules in the same file refer to rules that are unknown here.
    enforcer.skip_undefined_check = True
    enforcer.register_defaults([*list_rules(), *_BLAZARS])
    return enforcer


def check(conf: cfg.ConfigOpts) -> None:
    """Check that our rules refer to defined rules only.

    oslo.policy denies everything by a rule that refers to an undefined one.

    :raises ConfigurationError: if one does not; names both
    """
    enforcer = _enforcer(conf)
    enforcer.load_rules()
    undefined = _undefined(conf, enforcer.rules)
    if undefined:
        raise errors.ConfigurationError(' '.join(undefined.values()))


def check_scope(context: ty.Any, what: str) -> None:
    """Check that a token is for a project.

    :param what: that needs it
    :raises Forbidden: if it is not
    """
    if not context.project_id:
        raise errors.Forbidden(
            'Your token has no project scope, which all requests for leases '
            f'need ({what}). Try again with a token for a project.')


def _undefined(conf: cfg.ConfigOpts, rules: ty.Mapping[str, ty.Any],
               ) -> dict[str, str]:
    """Return a message for each of our rules that uses an undefined one."""
    if conf.oslo_policy.policy_default_rule in rules:
        return {}
    return {
        rule.name: f'{rule.name} in {conf.oslo_policy.policy_file} uses '
        f'rule:{name}, which is not defined. Define that rule there, or use '
        'another one.'
        for rule in sorted(list_rules(), key=lambda one: one.name)
        for name in _named(rules, rule.name, set()) if name not in rules}


def _named(rules: ty.Mapping[str, ty.Any], name: str, seen: set[str],
           ) -> set[str]:
    """Return a rule's name and the names of all rules that it uses."""
    if name not in seen:
        seen.add(name)
        left = [rules[name]] if name in rules else []
        while left:
            one = left.pop()
            left += getattr(one, 'rules', [])
            left += [one.rule] if hasattr(one, 'rule') else []
            if isinstance(one, policy.RuleCheck):
                _named(rules, one.match, seen)
    return seen


class Policy:
    """The rules, with the changes of ``[oslo_policy] policy_file``.

    A change of the file takes effect without a restart. Rules that then use
    an undefined one allow nothing, and an error is logged for each.

    :raises ConfigurationError: see :func:`check`
    """

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        check(conf)
        self._conf = conf
        self._enforcer = _enforcer(conf)
        # Load them now, while there is only one thread.
        self._enforcer.load_rules()
        #: The rules that were checked, and the messages about undefined ones.
        self._checked: tuple[ty.Any, dict[str, str]] = (
            self._enforcer.rules, {})

    def authorizer(self, group: str) -> ty.Callable[[ty.Any, str], None]:
        """Return :meth:`authorize` for the rules of a group, such as
        ``blazar:leases``, and objects of the user's project.
        """
        return lambda context, rule: self.authorize(
            context, f'{group}:{rule}')

    def authorize(self, context: ty.Any, rule: str,
                  target: ty.Mapping[str, ty.Any] | None = None) -> None:
        """Check that a user may do something.

        :param context: the user, as oslo.context's RequestContext
        :param rule: the action, such as ``blazar:leases:get``
        :param target: the object: its ``project_id``; None: it is of the
            user's project
        :raises Forbidden: if the user may not
        """
        check_scope(context, rule)
        if not self.allows(context, rule, target):
            raise errors.Forbidden(
                f'The policy does not allow this ({rule}).')

    def limited(self, context: ty.Any, rule: str, query: _Query, why: str,
                ) -> _Query:
        """Return a query for a list, limited to the project of a user who may
        not list the objects of others.

        :param rule: the action of listing those of all projects
        :param why: the beginning of the message
        :raises Forbidden: if the query is for another project, and the user
            may not list its objects
        """
        if self.allows(context, rule):
            return query
        if query.project_id not in (None, context.project_id):
            raise errors.Forbidden(f'{why} Leave "project_id" out.')
        return dataclasses.replace(query, project_id=context.project_id)

    def allows(self, context: ty.Any, rule: str,
               target: ty.Mapping[str, ty.Any] | None = None) -> bool:
        """Return whether a user may do something; see :meth:`authorize`.

        A token that is not project-scoped allows nothing.
        """
        # Without a project, a rule would match the missing project of the
        # token with that of the request.
        return bool(context.project_id) and bool(
            self._enforcer.authorize(
                rule, dict(target or {'project_id': context.project_id}),
                context)) and rule not in self._refused()

    def _refused(self) -> ty.Container[str]:
        """Return the rules that use an undefined one since a reload.

        oslo.policy would allow what "not" inverts of such a rule.
        """
        checked, undefined = self._checked
        if checked is not self._enforcer.rules:  # A reload replaces them.
            rules = self._enforcer.rules
            undefined = _undefined(self._conf, rules)
            self._checked = rules, undefined
            for sentence in undefined.values():
                LOG.error('%s Until then it allows nothing.', sentence)
        return undefined
