#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""Is this the Nova we were written for, and is it configured for us?

Each check returns sentences, one for each thing that is not as it must be;
each sentence says what was expected and, where it is an operator's to mend,
which line to write. A process with such a sentence does not start.
"""

import configparser
import inspect
import os
import typing as ty

from nova.api.openstack import common
from nova.api.openstack.compute.views import servers as views
from nova.api.openstack import wsgi_app
from nova import availability_zones
from nova.compute import api as compute_api
from nova.compute import vm_states
from nova import conductor
from nova.db.api import models as api_models
from nova.limit import placement
from nova import objects
from nova.objects import instance
from nova.scheduler.client import query
from nova import version
import oslo_messaging

from blazar_core.common import errors
from blazar_nova.compat import hold
from blazar_nova.compat import reserved
from blazar_nova.compat import router as routing

__all__ = ['api_paste', 'filter_order', 'notifications', 'nova_api',
           'nova_objects', 'nova_version', 'refuse', 'router', 'scheduler',
           'signature', 'volumes']

#: The release of Nova that this one was written for.
_NOVA = '34.0'
_OTHER = (f'this is not the Nova that this version was written for '
          f'({_NOVA}).')

_CALL = ['self', 'context', 'build_requests', 'request_spec', 'image',
         'admin_password', 'injected_files', 'requested_networks',
         'block_device_mapping', 'tags']

_RESIZE = ['self', 'context', 'instance', 'scheduler_hint', 'flavor',
           'reservations', 'clean_shutdown', 'request_spec', 'host_list',
           'do_cast']

_LIVE_MIGRATE = ['self', 'context', 'instance', 'block_migration',
                 'disk_over_commit', 'host_name', 'force', 'async_']

#: What we call of Nova about aggregates, and what it takes.
_AGGREGATES: tuple[tuple[str, ty.Any, str, list[str]], ...] = (
    ('nova.compute.api.AggregateAPI', compute_api.AggregateAPI,
     'delete_aggregate', ['self', 'context', 'aggregate_id']),
    ('nova.compute.api.AggregateAPI', compute_api.AggregateAPI,
     'update_aggregate_metadata',
     ['self', 'context', 'aggregate_id', 'metadata']),
    ('nova.scheduler.client.query.SchedulerQueryClient',
     query.SchedulerQueryClient, 'update_aggregates',
     ['self', 'context', 'aggregates']),
    ('nova.availability_zones', availability_zones,
     'update_host_availability_zone_cache',
     ['context', 'host', 'availability_zone']),
    ('nova.objects.InstanceList', instance.InstanceList,
     'get_count_by_hosts', ['context', 'hosts']),
)

_API, _ACTIONS = 'nova.compute.api.API', 'nova.compute.api.InstanceActionAPI'
#: What we put something in the place of, so that held servers are known there
#: (:mod:`compat.editing`, :mod:`compat.shown`), and what it takes.
_REPLACED: tuple[tuple[str, ty.Any, str, list[str]], ...] = (
    *((_API, compute_api.API, name, ['self', 'context', 'instance', *more])
      for name, more in (
          ('update_instance', ['updates']), ('get_instance_metadata', []),
          ('update_instance_metadata', ['metadata', 'delete']),
          ('delete_instance_metadata', ['key']),
          ('lock', ['reason']), ('unlock', []))),
    *((_ACTIONS, compute_api.InstanceActionAPI, name,
       ['self', 'context', 'instance', *more]) for name, more in (
        ('actions_get', ['limit', 'marker', 'filters']),
        ('action_get_by_request_id', ['request_id']),
        ('action_events_get', ['action_id']))),
    ('nova.api.openstack.compute.views.servers.ViewBuilder',
     views.ViewBuilder, 'detail',
     ['self', 'request', 'instances', 'cell_down_support']),
)

#: Fields that we read or write, by object.
_FIELDS = {
    'BuildRequest': ('instance', 'instance_uuid', 'created_at',
                     'block_device_mappings'),
    'InstanceMapping': ('instance_uuid', 'cell_mapping', 'project_id',
                        'queued_for_delete'),
    'RequestSpec': ('instance_uuid', 'instance_group', 'flavor',
                    'request_level_params'),
    'InstanceGroup': ('id', 'members', 'policy'),
    'Instance': ('vm_state', 'task_state', 'host', 'node', 'updated_at',
                 'launched_at', 'system_metadata', 'flavor', 'old_flavor',
                 'new_flavor', 'metadata', 'locked', 'locked_by'),
    'InstanceAction': ('action', 'request_id', 'start_time', 'message'),
    'InstanceActionEvent': ('event', 'start_time', 'finish_time', 'result',
                            'details'),
    'ComputeNode': ('uuid', 'hypervisor_hostname', 'host'),
    'Aggregate': ('id', 'uuid', 'name', 'hosts', 'metadata'),
}

FILTER = 'BlazarFilter'
FILTER_CLASS = 'blazar_nova.scheduler.filters.BlazarFilter'
WEIGHER = 'blazar_nova.scheduler.weights.BlazarWeigher'

#: What api-paste.ini must say, by section.
_PASTE = {
    'app:osapi_compute_app_v21': {
        'paste.app_factory': 'blazar_nova.api.app:factory'},
    'composite:osapi_compute': {
        '/reservation': 'blazar_versions', '/reservation/v1': 'blazar_v1'},
    'app:blazar_versions': {
        'paste.app_factory': 'blazar_nova.api.rest:versions'},
    'app:blazar_app': {'paste.app_factory': 'blazar_nova.api.rest:factory'},
    'composite:blazar_v1': {
        'use': 'call:nova.api.auth:pipeline_factory_v21',
        'keystone': 'cors http_proxy_to_wsgi compute_req_id request_log '
                    'sizelimit authtoken keystonecontext blazar_app'},
}


def refuse(process: str, problems: ty.Sequence[str]) -> None:
    """Nothing, or an error that names every problem.

    :raises ConfigurationError: when there is a problem
    """
    if problems:
        raise errors.ConfigurationError(
            f'{process} does not start with leases: ' + ' '.join(problems))


def nova_objects() -> list[str]:
    """The call that is held, and the objects that are read and written."""
    objects.register_all()
    problems = signature('nova.conductor.ComputeTaskAPI',
                         'schedule_and_build_instances',
                         conductor.ComputeTaskAPI, _CALL)
    problems += signature('nova.conductor.ComputeTaskAPI', 'resize_instance',
                          conductor.ComputeTaskAPI, _RESIZE)
    problems += signature('nova.compute.api.API', 'live_migrate',
                          compute_api.API, _LIVE_MIGRATE)
    for where, owner, name, takes in _AGGREGATES:
        problems += signature(where, name, owner, takes)
    for column in ('aggregate_id', 'host'):
        problems += attribute('nova.db.api.models.AggregateHost', column,
                              api_models.AggregateHost)
    if not callable(getattr(placement, '_get_enforcer', None)):
        problems.append('nova.limit.placement was expected to have '
                        '_get_enforcer, which knows the unified limits.')
    for name, fields in _FIELDS.items():
        found = getattr(objects, name, None)
        missing = set(fields) - set(getattr(found, 'fields', ()))
        if missing:
            problems.append(f'nova.objects.{name} was expected to have '
                            f'{", ".join(sorted(missing))}.' if found else
                            f'nova.objects was expected to have {name}.')
    return problems


def attribute(where: str, name: str, owner: object) -> list[str]:
    """Nova has something of that name there.

    :param where: what Nova calls the owner
    """
    return [] if getattr(owner, name, None) is not None else [
        f'{where} was expected to have {name}; {_OTHER}']


def signature(where: str, name: str, owner: object,
              wanted: ty.Sequence[str]) -> list[str]:
    """Nova has a function there that takes what it is expected to take.

    :param where: what Nova calls the owner
    """
    missing = attribute(where, name, owner)
    if missing:
        return missing
    taken = list(inspect.signature(getattr(owner, name)).parameters)
    return [] if taken == [*wanted] else [
        f'{where}.{name} was expected to take ({", ".join(wanted)}), but '
        f'takes ({", ".join(taken)}); {_OTHER}']


def nova_version() -> list[str]:
    """Nova is of the release that this one was written for."""
    found = version.version_string()
    return [] if found.startswith(f'{_NOVA}.') else [
        f'Nova {found} is installed, and this release was written for Nova '
        f'{_NOVA}: install the release that belongs to your Nova.']


def nova_api() -> list[str]:
    """The state RESERVED, as :func:`reserved.install` left it, and what held
    servers can say and be told.
    """
    problems = [problem for where, owner, name, takes in _REPLACED
                for problem in signature(where, name, owner, takes)]
    problems += attribute(_API, '_check_metadata_properties_quota',
                          compute_api.API)
    if reserved.install() == 0:
        problems.append('the lists of server states in Nova\'s response '
                        'schemas were not found where they were expected.')
    shown = getattr(common, 'status_from_state', lambda _state: None)
    if shown(reserved.VM_STATE) != reserved.STATUS:
        problems.append('nova.api.openstack.common does not show the state '
                        'reserved as RESERVED.')
    if reserved.VM_STATE in vars(vm_states).values():
        problems.append('Nova has a state named reserved of its own.')
    return problems


def router(app: ty.Any) -> list[str]:
    """Every controller that builds servers asks us first, and every request
    that is routed comes to us.
    """
    return [*(f'{name} builds servers without asking for leases.'
              for name in hold.unwired(app)), *routing.problems(app)]


def notifications(conf: ty.Any) -> list[str]:
    """Nova's notifications reach our listener."""
    problems = []
    if 'oslo_messaging_notifications' not in conf:
        # This makes its options known, as Nova does it when it starts.
        oslo_messaging.get_notification_transport(conf)
    topic = conf.blazar.notification_topic
    if conf.notifications.notification_format == 'unversioned':
        problems.append('Write in nova.conf [notifications]: '
                        'notification_format = versioned')
    if topic not in conf.notifications.versioned_notifications_topics:
        problems.append(
            'Write in nova.conf [notifications]: '
            'versioned_notifications_topics = ' + ','.join([
                *conf.notifications.versioned_notifications_topics, topic]))
    if not set(conf.oslo_messaging_notifications.driver) & {
            'messaging', 'messagingv2'}:
        problems.append('Write in nova.conf [oslo_messaging_notifications]: '
                        'driver = messagingv2')
    return problems


def scheduler(conf: ty.Any) -> list[str]:
    """The filter keeps the promises, the weigher stands beside it."""
    problems = []
    group = conf.filter_scheduler
    if FILTER_CLASS not in group.available_filters:
        # An operator who writes one line has to write the default as well.
        problems += [f'Write in nova.conf [filter_scheduler]: '
                     f'available_filters = {name}'
                     for name in [*group.available_filters, FILTER_CLASS]]
    if FILTER not in group.enabled_filters:
        problems.append('Write in nova.conf [filter_scheduler]: '
                        'enabled_filters = ' + ','.join(
                            [*group.enabled_filters, FILTER]))
    if WEIGHER not in group.weight_classes:
        problems.append('Write in nova.conf [filter_scheduler]: '
                        'weight_classes = ' + ','.join(
                            [*group.weight_classes, WEIGHER]))
    return problems


def filter_order(conf: ty.Any) -> list[str]:
    """Filters behind ours may take away the hosts that it has chosen."""
    enabled = conf.filter_scheduler.enabled_filters
    if FILTER not in enabled or enabled[-1] == FILTER:
        return []
    return ['Write in nova.conf [filter_scheduler] the filter at the end: '
            'enabled_filters = ' + ','.join(
                [*(name for name in enabled if name != FILTER), FILTER])]


def volumes(conf: ty.Any) -> list[str]:
    """Volumes are given back when no token of their owner can be had."""
    if conf.cinder.auth_type or conf.cinder.auth_section:
        return []
    return ['Servers that cannot be deleted in the name of the owner of '
            'their lease leave their volumes attached.',
            'Write in nova.conf [cinder], on machines with nova-compute too, '
            'a user with auth_url, username, password ... and: '
            'auth_type = password']


def api_paste(conf: ty.Any) -> list[str]:
    """The api-paste.ini that nova-api reads loads our application.

    The environment tells nova-api where that is; the process that checks may
    have another environment, and then looks beside its nova.conf.
    """
    path = wsgi_app._get_config_files()[0]
    if not os.path.exists(path):
        path = conf.find_file(conf.wsgi.api_paste_config) or path
    parser = configparser.RawConfigParser(strict=False)
    try:
        with open(path) as file:
            parser.read_file(file)
    except (OSError, configparser.Error) as exc:
        return [f'{path} could not be read ({exc}). Set OS_NOVA_CONFIG_DIR '
                f'and OS_NOVA_CONFIG_FILES as nova-api has them.']
    return [
        f'Write in {path} under [{section}]: {key} = {wanted} (it has '
        f'{found or "nothing"})'
        for section, lines in _PASTE.items() for key, wanted in lines.items()
        if (found := parser.get(section, key, fallback=None)) != wanted and
        # How requests come to us may be longer with the operator.
        not (found and found.split()[-1] == wanted.split()[-1])]
