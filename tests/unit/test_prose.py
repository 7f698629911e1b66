# SPDX-License-Identifier: Apache-2.0

"""The script that counts phrases for which there is a term."""

import contextlib
import importlib.util
import io
import os
import pathlib

import fixtures
from oslotest import base

TOP = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


class TestWords(base.BaseTestCase):
    def setUp(self):
        super().setUp()
        spec = importlib.util.spec_from_file_location(
            'words', os.path.join(TOP, 'tools', 'words.py'))
        self.words = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.words)
        self.folder = pathlib.Path(self.useFixture(fixtures.TempDir()).path)

    def found(self, text, suffix='.rst'):
        path = self.folder / f'page{suffix}'
        path.write_text(text)
        return [*self.words.phrases(self.words.lines(path))]

    def run_it(self, *arguments):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = self.words.main([*arguments, str(self.folder)])
        return code, printed.getvalue()

    def test_phrases_are_found_with_line_numbers(self):
        self.assertEqual([(1, 'Nobody'), (3, 'any more')], self.found(
            'Nobody reads\n\nthis any\nmore.\n'))

    def test_literals_and_code_are_ignored(self):
        self.assertEqual([(9, 'away')], self.found(
            'The key ``room``::\n\n    he said\n\n'
            '.. code-block:: console\n\n    $ room\n\nIt is away.\n'))

    def test_similar_words_are_not_found(self):
        self.assertEqual([], self.found(
            'Besides the theme, such as this, a bedroom understands.\n'))

    def test_docstrings_and_messages_of_python_are_read(self):
        self.assertEqual([(1, 'room'), (4, 'for ever')], self.found(
            '"""What makes room for it.\n\n:param beside: the next one"""\n'
            'raise E("It would last for ever.")\n', '.py'))

    def test_script_fails_above_the_limit(self):
        self.found('Nobody.\n' + 'A line.\n' * 999)
        self.assertEqual(0, self.run_it('--limit', '1')[0])
        code, printed = self.run_it('--limit', '0.9')
        self.assertEqual(1, code)
        self.assertIn('page.rst:1: Nobody\n1 phrases in 1000 lines', printed)
