# SPDX-License-Identifier: Apache-2.0

"""The sentences of refusals."""

import datetime

from oslotest import base

from blazar_core.common import model
from blazar_core.common import refusals
from tests.unit import base as unit_base

NOW = unit_base.NOW


class TestRefusal(base.BaseTestCase):

    def test_reasons_are_stable(self):
        self.assertEqual(
            {'no_room', 'no_host', 'too_big', 'too_long', 'host_away'},
            {reason.value for reason in refusals.Reason})

    def test_every_reason_has_its_sentence(self):
        sentences = {refusals.Refusal(reason, 3, 1, None).sentence()
                     for reason in refusals.Reason}
        self.assertEqual(len(refusals.Reason), len(sentences))
        for sentence in sentences:
            self.assertRegex(sentence, r'(next_start: none\. fits_now: 1 of 3'
                                       r'|latest_end: none)\.$')

    def test_refusal_of_whole_hosts_states_their_number(self):
        for fits, wanted, sentence in (
                (2, 3, 'Only 2 of the 3 requested hosts fit now; no start '
                       'would provide 3.'),
                (1, 3, 'Only 1 of the 3 requested hosts fits now; no start '
                       'would provide 3.'),
                (0, 3, 'None of the 3 requested hosts fits now; no start '
                       'would provide 3.'),
                (0, 1, 'The requested host fits neither now nor at any '
                       'start.')):
            refused = refusals.Refusal(
                refusals.Reason.TOO_BIG, wanted, fits, None, whole=True)
            self.assertEqual(
                f'{sentence} next_start: none. fits_now: {fits} of {wanted}.',
                refused.sentence())

    def test_detail_takes_precedence_over_number_of_hosts(self):
        refused = refusals.Refusal(
            refusals.Reason.TOO_BIG, 3, 2, None, detail='No host has that.',
            whole=True)
        self.assertIn('No host has that.', refused.sentence())
        self.assertNotIn('requested', refused.sentence())
        self.assertNotIn('requested hosts', refusals.Refusal(
            refusals.Reason.NO_ROOM, 3, 2, NOW, whole=True).sentence())

    def test_refusal_of_other_resources_names_them(self):
        for resource, what in ((model.FLOATING_IP, 'floating IPs'),
                               (model.SEGMENT, 'network segments'),
                               (model.VOLUME_GB, 'storage for volumes')):
            self.assertEqual(resource, refusals.resource_of({resource: 1}))
            for reason in refusals.Reason:
                sentence = refusals.Refusal(
                    reason, 3, 0, None, resource=resource).sentence()
                self.assertNotIn('host', sentence)
                if reason is not refusals.Reason.NO_HOST:
                    self.assertIn(what, sentence)
        self.assertIsNone(refusals.resource_of(
            [model.FLOATING_IP, model.SEGMENT]))

    def test_refusal_of_server_resources_speaks_of_hosts(self):
        resource = refusals.resource_of({'VCPU': 1})
        for reason in refusals.Reason:
            self.assertEqual(*(refusals.Refusal(
                reason, 3, 0, None, resource=one).sentence()
                for one in (None, resource)))

    def test_whole_flag_does_not_affect_equality(self):
        self.assertEqual(*(refusals.Refusal(
            refusals.Reason.TOO_BIG, 3, 2, None, whole=whole)
            for whole in (False, True)))

    def test_sentence_uses_given_parameter_names(self):
        refused = refusals.Refusal(refusals.Reason.NO_ROOM, 3, 1, NOW)
        self.assertIn('(write "start": "', refused.sentence())
        self.assertIn('(write "start_date": "', refused.sentence(
            'start_date', 'end_date'))
        refused = refusals.Refusal(
            refusals.Reason.TOO_LONG, 3, 0, None, latest_end=NOW)
        self.assertIn('latest_end: 2027-01-15T08:00:00.000000 (write "end": '
                      '"2027-01-15 08:00").', refused.sentence())
        self.assertIn('(write "end_date": "', refused.sentence(
            'start_date', 'end_date'))

    def test_sentence_names_next_start(self):
        sentence = refusals.Refusal(
            refusals.Reason.NO_ROOM, 3, 1, NOW + 7).sentence()
        self.assertIn('next_start: 2027-01-15T08:00:07.000000', sentence)
        self.assertIn('fits_now: 1 of 3.', sentence)

    def test_suggested_start_equals_next_start(self):
        for start in (NOW, NOW + 7):
            sentence = refusals.Refusal(
                refusals.Reason.NO_ROOM, 3, 1, start).sentence()
            written = sentence.split('"start": "')[1].split('"')[0]
            self.assertEqual(start, int(datetime.datetime.fromisoformat(
                written + '+00:00').timestamp()))
