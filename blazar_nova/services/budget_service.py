# SPDX-License-Identifier: Apache-2.0

"""The operator's external service that allows or denies leases.

The protocol is that of Blazar's ``external_service_*`` options: a POST with
the lease in JSON, answered with 204 (allowed) or 403 (denied, with a
``message`` for the user). No lease is allowed while the service does not
answer.

If the service also commits leases (``external_service_commits``), it gets the
id of each lease and the amounts that it reserves by resource class.
"""

import collections
import typing as ty
import urllib.parse

from oslo_log import log as logging
import requests

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.leases import limits
from blazar_core.leases import views
from blazar_nova.compat import nova_conf

LOG = logging.getLogger(__name__)

#: Resource classes that add up to each amount of a reservation.
_AMOUNTS = {'vcpus': ('VCPU', 'PCPU'), 'memory_mb': ('MEMORY_MB',),
            'disk_gb': ('DISK_GB',)}
_DENIED = 'The operator of this cloud does not allow this lease.'


class External:
    """Client of the service of ``[blazar_enforcement] external_service_*``.

    :ivar commits: whether the service commits leases
    :param place: returns the ``auth_url`` and ``region_name`` of this cloud,
        which are sent with each request
    :param describe: returns a lease as the API describes it
    :raises ConfigurationError: if an endpoint is not a URL
    """

    def __init__(self, conf: ty.Any,
                 place: ty.Callable[[], dict[str, str | None]],
                 describe: ty.Callable[[views.Lease], views.Lease]) -> None:
        nova_conf.register_opts(conf)
        group = conf.blazar_enforcement
        self._create = _url(group, 'check-create')
        self._update = _url(group, 'check-update')
        self._end = _url(group, 'on-end')
        self.commits = bool(group.external_service_commits)
        self._commit_create, self._commit_update = (
            _commit_url(group, f'commit-{what}') for what in (
                'create', 'update'))
        token = group.external_service_token
        self._headers = {'X-Auth-Token': token} if token else {}
        if token and group.external_service_bearer:
            self._headers['Authorization'] = f'Bearer {token}'
        self._timeout = group.external_service_timeout
        self._place = place
        self._describe = describe

    def check(self, asked: limits.Asked) -> None:
        """Ask whether a lease may be created or changed.

        :raises LimitExceeded: if it may not, with the service's message
        :raises CloudUnavailable: if the service does not answer
        """
        body = {'lease': self._lease(asked.described)}
        if asked.lease_id is not None:
            if self.commits:
                body['lease']['id'] = asked.lease_id
            body['current_lease'] = self._lease(asked.current or {})
        self._ask(self._create if asked.lease_id is None else self._update,
                  asked.user_id, asked.project_id, body)

    def on_end(self, lease: views.Lease) -> None:
        """Notify the service of the end of a lease; failures are logged."""
        try:
            self.refund(lease)
        except (errors.LimitExceeded, errors.CloudUnavailable) as exc:
            LOG.warning('Lease %s: notifying the external service of its end '
                        'failed: %s', lease['id'], exc)

    def commit(self, lease: views.Lease) -> None:
        """Commit a new lease, once for each lease.

        :raises LimitExceeded: if the service refuses, with its message
        :raises CloudUnavailable: if the result is unknown
        """
        self._send(self._commit_create, lease)

    def charge(self, lease: views.Lease) -> None:
        """Commit the current state of a lease, whatever was committed before.

        :raises LimitExceeded: if the service refuses, with its message
        :raises CloudUnavailable: if the result is unknown
        """
        if not self._send(self._commit_update, lease, 'current_lease'):
            self.commit(lease)

    def refund(self, lease: views.Lease) -> None:
        """Notify the service of a lease that has ended or was not created.

        A lease that the service does not know was not committed.

        :raises LimitExceeded: if the service refuses, with its message
        :raises CloudUnavailable: if the service does not answer
        """
        self._send(self._end, lease)

    def _send(self, url: str | None, lease: views.Lease, *more: str) -> bool:
        """Send a lease, under further keys too; see :meth:`_ask`."""
        described = self._lease(self._describe(lease))
        return self._ask(url, lease['user_id'], lease['project_id'],
                         dict.fromkeys(('lease', *more), described))

    def _lease(self, described: ty.Mapping[str, ty.Any],
               ) -> dict[str, ty.Any]:
        """Return a lease as Blazar sends it."""
        return {**described, 'reservations': [
            _reservation(one) for one in described.get('reservations', ())],
            **(_requests(described) if self.commits else {})}

    def _ask(self, url: str | None, user_id: str, project_id: str,
             body: dict[str, ty.Any]) -> bool:
        """Send a request.

        :returns: False if the service does not know the lease
        :raises LimitExceeded: if the service refuses, with its message
        :raises CloudUnavailable: if it does not answer, or with another
            status
        """
        if url is None:
            return True
        context = {'user_id': user_id, 'project_id': project_id,
                   **self._place()}
        try:
            # A redirect would be followed by a GET that shows the token.
            answer = requests.post(
                url, json={'context': context, **body},
                headers=self._headers, timeout=self._timeout,
                allow_redirects=False)
        except requests.RequestException as exc:
            LOG.warning('The external service does not answer at %s: %s',
                        url, exc)
            raise _silent() from exc
        if answer.status_code == 403:
            raise errors.LimitExceeded(_message(url, answer))
        if answer.status_code == 404 and self.commits and url in (
                self._commit_update, self._end):
            return False
        if answer.status_code != 204:
            # The text is for the operator only: it may be anything.
            LOG.warning('The external service answered %s at %s instead of '
                        '204 (yes) or 403 (no): %.1000s',
                        answer.status_code, url, answer.text)
            raise _silent()
        return True


def _url(group: ty.Any, method: str) -> str | None:
    """Return the URL of a method; None: the method is not called.

    :raises ConfigurationError: if the option is not a URL
    """
    base = 'external_service_base_endpoint'
    own = f'external_service_{method.replace("-", "_")}_endpoint'
    for option in (own, base):
        if not group[option]:
            continue
        parts = urllib.parse.urlsplit(group[option])
        if parts.scheme not in ('http', 'https') or not parts.netloc:
            raise errors.ConfigurationError(
                f'[blazar_enforcement] {option} is not a URL: '
                f'{group[option]}. Use one such as http://controller:8088/')
        return ty.cast(str, group[option]) if option == own else (
            urllib.parse.urljoin(group[option], method))
    return None


def _commit_url(group: ty.Any, method: str) -> str | None:
    """Return the URL of a method that commits; None: it is not called.

    :raises ConfigurationError: if it is set although commits are off
    """
    if group.external_service_commits:
        return _url(group, method)
    own = f'external_service_{method.replace("-", "_")}_endpoint'
    if group[own]:
        raise errors.ConfigurationError(
            f'[blazar_enforcement] {own} is set, but nothing is committed. '
            'Set external_service_commits = True, or leave it out.')
    return None


def _requests(described: ty.Mapping[str, ty.Any]) -> dict[str, ty.Any]:
    """Return the amounts that a lease reserves, by resource class."""
    total: collections.Counter[str] = collections.Counter()
    for one in described.get('reservations', ()):
        for resource_class, amount in (one.get('resources') or {}).items():
            total[resource_class] += one['amount'] * amount
    return {'resource_requests': {
        name: amount for name, amount in total.items() if amount}}


def _reservation(described: ty.Mapping[str, ty.Any]) -> dict[str, ty.Any]:
    """Return a reservation as Blazar sends it: as the user has written it.

    ``allocations`` is there for services that read it, and may be empty: a
    new lease has no hosts, and Nova may move its servers later. A reservation
    of a boot or of added servers has the amounts of its servers.
    """
    said = {'allocations': [], **described}
    resources = described.get('resources') or {}
    if model.HOST in resources or described['resource_type'] not in (
            'virtual:instance', 'flavor:instance'):
        return said
    if 'source_flavor_id' in said:
        # The flavor of the reservation does not exist in Nova yet.
        said['flavor_id'] = said['source_flavor_id']
    for key, classes in _AMOUNTS.items():
        if resources and key not in said:
            said[key] = sum(resources.get(rc, 0) for rc in classes)
        # Blazar forwards what its client sends, which is a string.
    said['affinity'] = str(said.get('affinity'))
    return said


def _message(url: str, answer: requests.Response) -> str:
    """Return the service's message for the user."""
    try:
        message = answer.json()['message']
        if isinstance(message, str) and message:
            return message
    except (ValueError, KeyError, TypeError):
        pass
    LOG.warning('The external service refused at %s without a message: '
                '%.1000s', url, answer.text)
    return _DENIED


def _silent() -> errors.CloudUnavailable:
    return errors.CloudUnavailable(
        'The external service that checks leases does not answer; try again '
        'in a minute.')
