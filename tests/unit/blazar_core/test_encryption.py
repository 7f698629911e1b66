# SPDX-License-Identifier: Apache-2.0

from cryptography import fernet
from oslotest import base

from blazar_core.common import errors
from blazar_core.db import encryption

SECRET = 'admin_pass=hunter2 ünïcode \U0001f511'


class TestEncryption(base.BaseTestCase):

    def setUp(self):
        super().setUp()
        self.old, self.new = encryption.new_key(), encryption.new_key()

    def test_encrypted_text_can_be_decrypted(self):
        one = encryption.Encryption([self.old])
        self.assertEqual(SECRET, one.decrypt(one.encrypt(SECRET)))

    def test_ciphertext_hides_text_and_is_never_the_same(self):
        one = encryption.Encryption([self.old])
        first, second = one.encrypt(SECRET), one.encrypt(SECRET)
        self.assertNotIn('hunter2', first)
        self.assertNotEqual(first, second)

    def test_keys_are_different_and_of_the_right_kind(self):
        self.assertNotEqual(self.old, self.new)
        fernet.Fernet(self.old)

    def test_the_first_key_encrypts(self):
        encrypted = encryption.Encryption([self.new, self.old]).encrypt(SECRET)
        self.assertEqual(
            SECRET, encryption.Encryption([self.new]).decrypt(encrypted))
        self.assertRaises(errors.DecryptionError, encryption.Encryption(
            [self.old]).decrypt, encrypted)

    def test_every_key_decrypts(self):
        encrypted = encryption.Encryption([self.old]).encrypt(SECRET)
        self.assertEqual(SECRET, encryption.Encryption(
            [self.new, self.old]).decrypt(encrypted))

    def test_reencrypted_text_does_not_need_old_key(self):
        encrypted = encryption.Encryption([self.old]).encrypt(SECRET)
        again = encryption.Encryption(
            [self.new, self.old]).reencrypt(encrypted)
        self.assertEqual(
            SECRET, encryption.Encryption([self.new]).decrypt(again))

    def test_decryption_with_wrong_key_fails_with_remedy(self):
        encrypted = encryption.Encryption([self.old]).encrypt(SECRET)
        for act in ('decrypt', 'reencrypt'):
            shut = self.assertRaises(errors.DecryptionError, getattr(
                encryption.Encryption([self.new]), act), encrypted)
            self.assertIn('encryption_keys', str(shut))
            self.assertNotIn(self.new, str(shut))

    def test_tampered_text_is_not_decrypted(self):
        one = encryption.Encryption([self.old])
        encrypted = one.encrypt(SECRET)
        middle = len(encrypted) // 2
        other = 'A' if encrypted[middle] != 'A' else 'B'
        for bad in (encrypted[:middle] + other + encrypted[middle + 1:],
                    encrypted[:-4], '', 'not encrypted at all'):
            self.assertRaises(errors.DecryptionError, one.decrypt, bad)

    def test_missing_key_is_reported_with_remedy(self):
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
        encrypted = encryption.Encryption([f' {self.old} ']).encrypt(SECRET)
        self.assertEqual(
            SECRET, encryption.Encryption([self.old]).decrypt(encrypted))
