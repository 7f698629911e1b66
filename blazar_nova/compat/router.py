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

"""Nova's API application, and answers in its manner."""

import typing as ty

from nova.api.openstack import compute
from nova.api.openstack import wsgi
from nova import exception
import webob.exc

__all__ = ['build', 'error', 'fault', 'microversion']


def build(global_config: ty.Any, **local_config: ty.Any) -> ty.Any:
    """What Nova's own line in api-paste.ini would build."""
    return compute.APIRouterV21.factory(global_config, **local_config)


#: A code that Nova takes for one that a boot may be answered with.
_EXPECTED = 409


def error(code: int, sentence: str) -> Exception:
    """What may be raised anywhere within Nova's ``create()``.

    Nova makes a 500 of all errors that it does not expect of a boot. It asks
    for the ``code``; what it answers is the status, and that stays.
    """
    raised = webob.exc.status_map[code](explanation=sentence)
    raised.code = _EXPECTED
    return ty.cast(Exception, raised)


def fault(environ: dict[str, ty.Any], code: int, sentence: str) -> ty.Any:
    """An error as Nova answers one, headers and all.

    :returns: a WSGI application; None when the request asks for a
        microversion that there is none of, which Nova itself answers
    """
    if microversion(environ) is None:
        return None
    return wsgi.Fault(webob.exc.status_map[code](explanation=sentence))


def microversion(environ: dict[str, ty.Any]) -> tuple[int, int] | None:
    """The microversion that a request asks for; None: there is none such."""
    request = wsgi.Request(environ)
    try:
        request.set_api_version_request()
    except (exception.InvalidGlobalAPIVersion,
            exception.InvalidAPIVersionString):
        return None
    asked = request.api_version_request
    return asked.ver_major, asked.ver_minor
