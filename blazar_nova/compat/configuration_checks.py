# SPDX-License-Identifier: Apache-2.0

"""Is Nova configured for us, and are we wired into it?

What Nova itself must have is a table (:mod:`blazar_nova.compat.seams`). Each
check returns sentences, one for each thing that is not as it must be;
each sentence says what was expected and, where it is an operator's to mend,
which line to write. A process with such a sentence does not start.
"""

import configparser
import os
import typing as ty

from nova.api.openstack import common
from nova.api.openstack import wsgi_app
from nova.compute import vm_states
import oslo_messaging

from blazar_core.common import errors
from blazar_nova.compat import build_calls
from blazar_nova.compat import nova_router
from blazar_nova.compat import reserved_state

__all__ = ['api_paste', 'filter_order', 'notifications', 'nova_api', 'refuse',
           'router', 'scheduler', 'volumes']

FILTER = 'LeaseFilter'
FILTER_CLASS = 'blazar_nova.scheduler.filters.LeaseFilter'
WEIGHER = 'blazar_nova.scheduler.weights.LeaseWeigher'

#: What api-paste.ini must say, by section.
_PASTE = {
    'app:osapi_compute_app_v21': {
        'paste.app_factory': 'blazar_nova.api.app:factory'},
    'composite:osapi_compute': {
        '/reservation': 'blazar_versions', '/reservation/v1': 'blazar_v1'},
    'pipeline:blazar_versions': {
        'pipeline': 'cors http_proxy_to_wsgi blazar_versions_app'},
    'app:blazar_versions_app': {
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


def nova_api() -> list[str]:
    """The state RESERVED, as :func:`reserved_state.install` left it."""
    problems = []
    if reserved_state.install() == 0:
        problems.append('the lists of server states in Nova\'s response '
                        'schemas were not found where they were expected.')
    if common.status_from_state(
            reserved_state.VM_STATE) != reserved_state.STATUS:
        problems.append('nova.api.openstack.common does not show the state '
                        'reserved as RESERVED.')
    if reserved_state.VM_STATE in vars(vm_states).values():
        problems.append('Nova has a state named reserved of its own.')
    return problems


def router(app: ty.Any) -> list[str]:
    """Every controller that builds servers asks us first, and every request
    that is routed comes to us.
    """
    return [*(f'{name} builds servers without asking for leases.' for name in
              build_calls.unwired(app)), *nova_router.problems(app)]


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
