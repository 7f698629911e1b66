# SPDX-License-Identifier: Apache-2.0

"""What a refusal says."""

import datetime

from oslotest import base

from blazar_core.common import refusals
from tests.unit import base as unit_base

NOW = unit_base.NOW


class TestRefusal(base.BaseTestCase):

    def test_the_reasons_are_a_promise(self):
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

    def test_it_speaks_the_words_of_who_is_asked(self):
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

    def test_it_names_the_start_that_would_do(self):
        sentence = refusals.Refusal(
            refusals.Reason.NO_ROOM, 3, 1, NOW + 7).sentence()
        self.assertIn('next_start: 2027-01-15T08:00:07.000000', sentence)
        self.assertIn('fits_now: 1 of 3.', sentence)

    def test_what_it_says_to_write_is_that_start(self):
        for start in (NOW, NOW + 7):
            sentence = refusals.Refusal(
                refusals.Reason.NO_ROOM, 3, 1, start).sentence()
            written = sentence.split('"start": "')[1].split('"')[0]
            self.assertEqual(start, int(datetime.datetime.fromisoformat(
                written + '+00:00').timestamp()))
