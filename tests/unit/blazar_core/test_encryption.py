# SPDX-License-Identifier: Apache-2.0

from cryptography import fernet
from oslotest import base

from blazar_core.common import errors
from blazar_core.db import encryption

SECRET = 'admin_pass=hunter2 ünïcode \U0001f511'


class TestVault(base.BaseTestCase):

    def setUp(self):
        super().setUp()
        self.old, self.new = encryption.new_key(), encryption.new_key()

    def test_what_is_sealed_opens_again(self):
        one = encryption.Encryption([self.old])
        self.assertEqual(SECRET, one.open(one.seal(SECRET)))

    def test_what_is_sealed_shows_nothing_and_never_looks_the_same(self):
        one = encryption.Encryption([self.old])
        first, second = one.seal(SECRET), one.seal(SECRET)
        self.assertNotIn('hunter2', first)
        self.assertNotEqual(first, second)

    def test_keys_are_different_and_of_the_right_kind(self):
        self.assertNotEqual(self.old, self.new)
        fernet.Fernet(self.old)

    def test_the_first_key_seals(self):
        sealed = encryption.Encryption([self.new, self.old]).seal(SECRET)
        self.assertEqual(
            SECRET, encryption.Encryption([self.new]).open(sealed))
        self.assertRaises(errors.DecryptionError, encryption.Encryption(
            [self.old]).open, sealed)

    def test_every_key_opens(self):
        sealed = encryption.Encryption([self.old]).seal(SECRET)
        self.assertEqual(
            SECRET, encryption.Encryption([self.new, self.old]).open(sealed))

    def test_what_is_resealed_needs_the_old_key_no_more(self):
        sealed = encryption.Encryption([self.old]).seal(SECRET)
        again = encryption.Encryption([self.new, self.old]).reseal(sealed)
        self.assertEqual(SECRET, encryption.Encryption([self.new]).open(again))

    def test_with_a_wrong_key_it_stays_shut_and_says_what_to_do(self):
        sealed = encryption.Encryption([self.old]).seal(SECRET)
        for act in ('open', 'reseal'):
            shut = self.assertRaises(errors.DecryptionError, getattr(
                encryption.Encryption([self.new]), act), sealed)
            self.assertIn('encryption_keys', str(shut))
            self.assertNotIn(self.new, str(shut))

    def test_what_was_tampered_with_stays_shut(self):
        one = encryption.Encryption([self.old])
        sealed = one.seal(SECRET)
        middle = len(sealed) // 2
        other = 'A' if sealed[middle] != 'A' else 'B'
        for bad in (sealed[:middle] + other + sealed[middle + 1:],
                    sealed[:-4], '', 'not sealed at all'):
            self.assertRaises(errors.DecryptionError, one.open, bad)

    def test_without_a_key_it_says_what_to_write(self):
        refused = self.assertRaises(
            errors.ConfigurationError, encryption.Encryption, [])
        self.assertIn('blazar-nova-manage key create', str(refused))
        self.assertIn('encryption_keys =', str(refused))

    def test_a_malformed_key_is_refused_and_not_shown(self):
        for bad in ('hunter2', self.old[:-2], self.old[1:], ''):
            refused = self.assertRaises(errors.ConfigurationError,
                                        encryption.Encryption, [self.old, bad])
            self.assertIn('encryption_keys', str(refused))
            self.assertNotIn('hunter2', str(refused))

    def test_spaces_around_a_key_do_not_matter(self):
        sealed = encryption.Encryption([f' {self.old} ']).seal(SECRET)
        self.assertEqual(
            SECRET, encryption.Encryption([self.old]).open(sealed))
