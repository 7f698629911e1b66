# SPDX-License-Identifier: Apache-2.0

"""The plug-in of the openstack client, with the client of the lease API.

The machine of a user has neither Nova nor the rest of this project, so nothing
here imports them; only dependencies of the openstack client are used.
"""

import re
import typing as ty
from urllib import parse

from keystoneauth1 import adapter
from osc_lib import exceptions
from oslo_utils import uuidutils

#: Not ``reservation``, which is python-blazarclient's: a plug-in of the same
#: name would replace it. With this name both can be installed, or either.
API_NAME = 'blazar_nova'
API_VERSION_OPTION = 'os_blazar_nova_api_version'
API_VERSIONS = {'1': 'blazar_nova.osc.plugin.Client'}
DEFAULT_API_VERSION = '1'

SERVICE_TYPE = 'reservation'

Json: ty.TypeAlias = dict[str, ty.Any]

#: The options for the keys of a lease that the API's messages contain.
_OPTIONS = {
    'start_date': '--start-date', 'end_date': '--end-date',
    'duration': '--duration', 'on_end': '--on-end',
    'grace_period': '--grace-period', 'auto_extend': '--auto-extend',
    'recurrence': '--recur', 'timezone': '--timezone', 'fits': '--fits',
    'offer_seconds': '--expires', 'lease_type': '--lease-type',
    'retries': '--retries', 'retry_interval': '--retry-interval',
    'timeout': '--timeout', 'tags': '--tags',
    'description': '--description', 'project_id': '--project',
    'costs': '--costs'}
#: A key, alone or with a string or number, as written in JSON.
_KEY = re.compile(
    f'"(?P<key>{"|".join(_OPTIONS)})"'
    '(?:: (?P<value>"[^"]*"|[0-9]+))?(?!: ?[{[])')

#: Bridges about 15 seconds without the API, as a wait may take days.
RETRIES: Json = {'connect_retries': 5, 'status_code_retries': 5}


def make_client(instance: ty.Any) -> 'Client':
    """Return the client for a client manager, which has the session."""
    return Client(
        session=instance.session,
        endpoint_override=instance.get_endpoint_for_service_type(
            SERVICE_TYPE, interface=instance.interface,
            region_name=instance.region_name))


def build_option_parser(parser: ty.Any) -> ty.Any:
    """Add no options: there is one version, and blazarclient has an option."""
    return parser


class Refused(exceptions.CommandError):
    """The lease API refused a request.

    :ivar answer: the error of the API
    """

    def __init__(self, message: str, answer: Json) -> None:
        super().__init__(message)
        self.answer = answer


class NotFound(Refused):
    """The lease API says that something does not exist."""


class Client(adapter.Adapter):
    """A client of the lease API."""

    def ask(self, method: str, path: str, key: str | None = None,
            **kwargs: ty.Any) -> Json:
        """Send a request; return the JSON object of the answer, or an empty
        one if the answer has no body.

        :param key: an idempotency key
        :raises CommandError: with the message of the server
        """
        response = self.request(
            path, method, raise_exc=False,
            headers={'Accept': 'application/json',
                     **({} if key is None else {'Idempotency-Key': key})},
            **kwargs)
        try:
            body = response.json()
        except ValueError:
            body = None
        if response.status_code >= 400:
            # Another 404 is of a proxy, or of Nova without leases.
            message = refusal(body)
            if message:
                raise (NotFound if response.status_code == 404 else Refused)(
                    message, ty.cast(Json, body))
            raise exceptions.CommandError(
                f'The server answered {response.status_code} '
                f'{response.reason} to {method} {response.url}')
        if response.status_code == 204:
            return {}
        if not isinstance(body, dict):
            raise exceptions.CommandError(
                f'The service at {response.url} is not the lease API. Its URL '
                f'in the service catalog ends in /{SERVICE_TYPE}/v1.')
        return body

    def lease(self, lease_id: str) -> Json:
        return ty.cast(Json, self.ask(
            'GET', f'/leases/{lease_id}', **RETRIES)['lease'])

    def pages(self, key: str, **params: str) -> tuple[list[Json], Json]:
        """Return all rows of a list, such as /leases, and its last page."""
        page = self.ask('GET', f'/{key}', params=params)
        found: list[Json] = page[key]
        while page.get(f'{key}_links'):
            # Behind a proxy, the rest of the link may lead elsewhere.
            page = self.ask('GET', f'/{key}?' + parse.urlsplit(
                page[f'{key}_links'][0]['href']).query)
            found += page[key]
        return found, page

    def leases(self, **params: str) -> list[Json]:
        """Return all leases that match the parameters."""
        return self.pages('leases', **params)[0]

    def find(self, name_or_id: str, status: str | None = None) -> str:
        """Return the ID of the lease of a name; an ID is returned unchanged.

        A name may be used again: ended leases are searched only if no other
        has it.

        :param status: a status that the lease must have
        :raises CommandError: if there is none, or more than one
        """
        if uuidutils.is_uuid_like(name_or_id):
            return name_or_id
        if status:
            found = self.leases(name=name_or_id, status=status)
        else:
            found = self.leases(name=name_or_id) or self.leases(
                name=name_or_id, status='TERMINATED')
        what = f'the name {name_or_id!r}' + (
            f' and the status {status}' if status else '')
        if not found:
            raise exceptions.CommandError(f'No lease has {what}.')
        if len(found) > 1:
            ids = ', '.join(lease['id'] for lease in found)
            raise exceptions.CommandError(
                f'More than one lease has {what}. Use an ID: {ids}')
        return ty.cast(str, found[0]['id'])


def refusal(body: ty.Any) -> str | None:
    """Return the message of an error, with the alternatives it contains."""
    message = body.get('error_message') if isinstance(body, dict) else None
    if not message:
        return None
    more = [f'{key}: {body[key]}' for key in ('next_start', 'fits_now')
            if body.get(key) is not None and key not in message]
    return in_options(
        f'{message} ({", ".join(more)})' if more else str(message))


def in_options(message: str) -> str:
    """Return a message of the API, with options of our commands for keys.

    Keys without an option, such as those of a reservation, are kept.
    """
    return _KEY.sub(
        lambda found: f'{_OPTIONS[found["key"]]}'
                      + (f' {found["value"]}' if found['value'] else ''),
        message.replace('?force=true', '--force'))
