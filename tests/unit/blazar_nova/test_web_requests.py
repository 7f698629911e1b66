# SPDX-License-Identifier: Apache-2.0

"""The idempotency key of a request."""

import json
import types

from oslotest import base
import webob

from blazar_core.common import errors
from blazar_nova.schemas import web_requests

BODY = {'name': 'lease', 'end_date': '2027-01-01 00:00'}


class TestKey(base.BaseTestCase):

    def key(self, text='key', body=BODY, project='project', user='user'):
        request = webob.Request.blank('/', body=json.dumps(body).encode())
        request.environ['nova.context'] = types.SimpleNamespace(
            project_id=project, user_id=user)
        if text is not None:
            request.environ['HTTP_IDEMPOTENCY_KEY'] = text
        return web_requests.key(request)

    def test_request_without_header_has_no_key(self):
        self.assertIsNone(self.key(None))

    def test_repeated_request_has_same_key(self):
        self.assertEqual(self.key(), self.key())
        # In whatever order the body is written.
        self.assertEqual(
            self.key(), self.key(body=dict(reversed(BODY.items()))))
        self.assertNotEqual(self.key().asked, self.key(body={}).asked)

    def test_key_belongs_to_user_of_project(self):
        self.assertEqual(4, len({self.key().digest, *(
            self.key(**other).digest for other in (
                {'text': 'other'}, {'project': 'other'},
                {'user': 'other'}))}))

    def test_invalid_keys_are_refused(self):
        for text in ('', 'x' * 256, 'a\nb', 'ä', '\0'):
            self.assertRaises(errors.InvalidLeaseParams, self.key, text)
        self.key('x' * 255)
