# SPDX-License-Identifier: Apache-2.0

"""What errors tell programs."""

from oslotest import base

from blazar_core.common import errors
from blazar_nova.schemas import error_answers

Reason = errors.ConflictReason


class ErrorAnswersTest(base.BaseTestCase):

    def test_each_kind_of_conflict_has_its_reason(self):
        for exc, name, reason in (
                (errors.Conflict('.'), 'CONFLICT', 'state'),
                (errors.Conflict('.', Reason.IN_USE), 'CONFLICT', 'in_use'),
                (errors.JustChanged('.'), 'CONFLICT', 'changed'),
                (errors.ServerOnTwoHosts('.'), 'CONFLICT', 'in_progress'),
                (errors.ReservationFull('.', 0, 9), 'CONFLICT', 'full'),
                (errors.HostsNotEmpty('id', 1, [], {'one': ['vm']}),
                 'CONFLICT', 'in_use'),
                (errors.InvalidTransition('.'), 'CONFLICT', 'state'),
                (errors.ConcurrentUpdate('.'), 'BOOKS_BUSY', 'busy')):
            answer = error_answers.answer(exc)
            self.assertEqual((409, name, reason), (
                answer.status_int, answer.json['error_name'],
                answer.json['reason']))
        for exc in (errors.NotFound('.'), errors.LimitExceeded('.')):
            self.assertNotIn('reason', error_answers.answer(exc).json)

    def test_answers_say_when_to_repeat_a_request(self):
        for exc, seconds in (
                (errors.ConcurrentUpdate('.'), 5),
                (errors.JustChanged('.'), 1),
                (errors.DatabaseUnavailable(), 10),
                (errors.OutcomeUnknown(), 10),
                (errors.ClockSkewed('10 s late'), 60),
                (errors.CloudUnavailable('.'), 60)):
            self.assertEqual(str(seconds), error_answers.answer(
                exc).headers['Retry-After'], exc)
        for exc in (errors.Conflict('.'), errors.NotFound('.'),
                    error_answers.Fault('URL_NOT_FOUND', '.')):
            self.assertNotIn('Retry-After', error_answers.answer(exc).headers)
