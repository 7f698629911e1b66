# SPDX-License-Identifier: Apache-2.0

"""Checks that Nova is configured for leases, and that we are wired into it.

What Nova's code must have is in a table (:mod:`blazar_nova.compat.seams`).
Each check returns a sentence for each problem: what was expected and, where an
operator can fix it, which line to write. A process with a problem does not
start.
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

FILTER = 'LeaseFilter'
FILTER_CLASS = 'blazar_nova.scheduler.filters.LeaseFilter'
WEIGHER = 'blazar_nova.scheduler.weights.LeaseWeigher'

#: The lines that api-paste.ini must have, by section.
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
    """Raise an error that names every problem, if there is any.

    :raises ConfigurationError: if there is a problem
    """
    if problems:
        raise errors.ConfigurationError(
            f'{process} does not start with leases: ' + ' '.join(problems))


def reserved_status(lists: int) -> list[str]:
    """Check that the API shows the state RESERVED.

    :param lists: in how many lists :func:`reserved_state.install` has added it
    """
    problems = []
    if lists == 0:
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
    """Check that every controller that builds servers is intercepted, and that
    every routed request passes the middleware.
    """
    return [*(f'{name} builds servers without asking for leases.' for name in
              build_calls.unwired(app)), *nova_router.problems(app)]


def notifications(conf: ty.Any) -> list[str]:
    """Check that Nova's notifications reach the listener."""
    problems = []
    if 'oslo_messaging_notifications' not in conf:
        # Registers its options, as Nova does when it starts.
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
    """Check that the scheduler has the filter and the weigher."""
    problems = []
    group = conf.filter_scheduler
    if FILTER_CLASS not in group.available_filters:
        # An operator who sets one value has to set the default as well.
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
    """Check that ours is the last filter: later ones may remove the hosts that
    it has chosen.
    """
    enabled = conf.filter_scheduler.enabled_filters
    if FILTER not in enabled or enabled[-1] == FILTER:
        return []
    return ['Write in nova.conf [filter_scheduler] the filter at the end: '
            'enabled_filters = ' + ','.join(
                [*(name for name in enabled if name != FILTER), FILTER])]


def volumes(conf: ty.Any) -> list[str]:
    """Check that volumes can be detached without a token of their owner."""
    if conf.cinder.auth_type or conf.cinder.auth_section:
        return []
    return ['Servers that cannot be deleted in the name of the owner of '
            'their lease leave their volumes attached.',
            'Write in nova.conf [cinder], on machines with nova-compute too, '
            'a user with auth_url, username, password ... and: '
            'auth_type = password']


def api_paste(conf: ty.Any) -> list[str]:
    """Check that the api-paste.ini of nova-api loads our application.

    nova-api finds the file by its environment; if this process has another
    environment, the file next to nova.conf is read.
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
        # An operator may have added filters to the pipeline.
        not (found and found.split()[-1] == wanted.split()[-1])]
