# SPDX-License-Identifier: Apache-2.0

"""A service of the operator's that is asked about leases.

It speaks as the one that Blazar asks (``external_service_*``): it gets a POST
with the lease in JSON, and answers 204 for yes and 403 for no, then with a
``message`` for the user. A service that does not answer has not said yes.

Where it commits leases as well (``external_service_commits``), leases have an
id and what they reserve of each resource class.
"""

import collections
import typing as ty
import urllib.parse

from oslo_log import log as logging
import requests

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import opts
from blazar_core.leases import limits

__all__ = ['Budget', 'External']

LOG = logging.getLogger(__name__)

#: The amounts of a reservation, by the resource classes that they are of.
_AMOUNTS = {'vcpus': ('VCPU', 'PCPU'), 'memory_mb': ('MEMORY_MB',),
            'disk_gb': ('DISK_GB',)}
_DENIED = 'The operator of this cloud does not allow this lease.'


class External:
    """The service of ``[blazar_enforcement] external_service_*``, if any.

    :ivar commits: whether it commits leases
    :param place: says the ``auth_url`` and ``region_name`` of this cloud, for
        a service that wants to ask it something
    :raises ConfigurationError: when a URL is none
    """

    def __init__(self, conf: ty.Any,
                 place: ty.Callable[[], dict[str, str | None]]) -> None:
        opts.register_opts(conf)
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

    def check(self, asked: limits.Asked) -> None:
        """Ask whether a lease may be made, or changed.

        :raises LimitExceeded: when it may not; says what the service said
        :raises CloudUnavailable: when the service gives no answer
        """
        body = {'lease': self._lease(asked.described)}
        if asked.lease_id is not None:
            if self.commits:
                body['lease']['id'] = asked.lease_id
            body['current_lease'] = self._lease(asked.current or {})
        self._ask(self._create if asked.lease_id is None else self._update,
                  asked.user_id, asked.project_id, body)

    def on_end(self, described: ty.Mapping[str, ty.Any]) -> None:
        """Tell that a lease is over; that it could not be told is logged.

        :param described: the lease as the API describes it
        """
        try:
            self._ask(self._end, described['user_id'],
                      described['project_id'],
                      {'lease': self._lease(described)})
        except (errors.LimitExceeded, errors.CloudUnavailable) as exc:
            LOG.warning('Lease %s: notifying the external service of its end '
                        'failed: %s',
                        described['id'], exc)

    def commit(self, described: ty.Mapping[str, ty.Any]) -> None:
        """Commit a new lease; once for each lease.

        :param described: the lease as the API describes it
        :raises LimitExceeded: when the service refuses; has its sentence
        :raises CloudUnavailable: when it is not known whether it is committed
        """
        self._ask(self._commit_create, described['user_id'],
                  described['project_id'], {'lease': self._lease(described)})

    def charge(self, described: ty.Mapping[str, ty.Any]) -> None:
        """Commit a lease as it is now, whatever was committed of it.

        :raises LimitExceeded: when the service refuses; has its sentence
        :raises CloudUnavailable: when it is not known whether it is committed
        """
        lease = self._lease(described)
        if not self._ask(self._commit_update, described['user_id'],
                         described['project_id'],
                         {'lease': lease, 'current_lease': lease}):
            self.commit(described)

    def refund(self, described: ty.Mapping[str, ty.Any]) -> None:
        """Notify the service of a lease that has ended or was not made.

        One that it does not know was not committed.

        :raises LimitExceeded: when the service refuses; has its sentence
        :raises CloudUnavailable: when it does not answer
        """
        self._ask(self._end, described['user_id'], described['project_id'],
                  {'lease': self._lease(described)})

    def _lease(self, described: ty.Mapping[str, ty.Any],
               ) -> dict[str, ty.Any]:
        """A lease as Blazar sends it."""
        return {**described, 'reservations': [
            _reservation(one) for one in described.get('reservations', ())],
            **(_requests(described) if self.commits else {})}

    def _ask(self, url: str | None, user_id: str, project_id: str,
             body: dict[str, ty.Any]) -> bool:
        """
        :returns: False: the service does not know the lease
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
            # What it says is for the operator: it may be anything.
            LOG.warning('The external service answered %s at %s instead of '
                        '204 (yes) or 403 (no): %.1000s',
                        answer.status_code, url, answer.text)
            raise _silent()
        return True


class Budget:
    """The service that commits leases, as the core has it.

    :param words: describes a lease as the API does
    """

    def __init__(self, outside: External, words: ty.Callable[
            [dict[str, ty.Any]], dict[str, ty.Any]]) -> None:
        self._outside = outside
        self._words = words

    def commit(self, lease: dict[str, ty.Any]) -> None:
        self._outside.commit(self._words(lease))

    def charge(self, lease: dict[str, ty.Any]) -> None:
        self._outside.charge(self._words(lease))

    def refund(self, lease: dict[str, ty.Any]) -> None:
        self._outside.refund(self._words(lease))


def _url(group: ty.Any, method: str) -> str | None:
    """Where a method is called; None: it is not.

    :raises ConfigurationError: when that is no URL
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
    """Where a method is called that commits; None: it is not.

    :raises ConfigurationError: when it is set, and commits are off
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
    """What a lease reserves, by resource class."""
    total: collections.Counter[str] = collections.Counter()
    for one in described.get('reservations', ()):
        for resource_class, amount in (one.get('resources') or {}).items():
            total[resource_class] += one['amount'] * amount
    return {'resource_requests': {
        name: amount for name, amount in total.items() if amount}}


def _reservation(described: ty.Mapping[str, ty.Any]) -> dict[str, ty.Any]:
    """A reservation as Blazar sends it: as a user has written it, with its
    hosts.

    Before it is made there are none, and later Nova may move its servers:
    the list is there for services that read it, and may be empty. A
    reservation that comes from a boot or an adopted server has what its
    servers take.
    """
    said = {'allocations': [], **described}
    resources = described.get('resources') or {}
    if model.HOST in resources or described['resource_type'] not in (
            'virtual:instance', 'flavor:instance'):
        return said
    if 'source_flavor_id' in said:
        # That of the reservation is no flavor of the cloud yet.
        said['flavor_id'] = said['source_flavor_id']
    for key, classes in _AMOUNTS.items():
        if resources and key not in said:
            said[key] = sum(resources.get(rc, 0) for rc in classes)
    # Blazar passes on what its client writes, which is text.
    said['affinity'] = str(said.get('affinity'))
    return said


def _message(url: str, answer: requests.Response) -> str:
    """What the service wants the user to be told."""
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
