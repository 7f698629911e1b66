# SPDX-License-Identifier: Apache-2.0

"""Encryption of secrets at rest.

The call of a boot that is stored until its lease starts contains the admin
password and injected files, so it is encrypted in the database (Fernet:
AES-128-CBC with an HMAC-SHA256 and a time stamp). So are the credentials for
acting as the user.
"""

import typing as ty

from cryptography import fernet

from blazar_core.common import errors


def new_key() -> str:
    """Return a new key for ``[blazar] encryption_keys``."""
    return fernet.Fernet.generate_key().decode()


class Encryption:
    """Encrypts with the first key, decrypts with any.

    :raises ConfigurationError: when there is no key or one is malformed
    """

    def __init__(self, keys: ty.Sequence[str]) -> None:
        if not keys:
            raise errors.ConfigurationError(
                '[blazar] encryption_keys is not set. Write a key that '
                '"blazar-nova-manage key create" prints, the same one in '
                'every nova.conf: encryption_keys = KEY')
        try:
            self._fernet = fernet.MultiFernet(
                [fernet.Fernet(key.strip()) for key in keys])
        except ValueError as exc:
            raise errors.ConfigurationError(
                '[blazar] encryption_keys has an invalid Fernet key. Use a '
                'key that "blazar-nova-manage key create" prints.') from exc

    def encrypt(self, text: str) -> str:
        """Encrypt and sign a text."""
        return self._fernet.encrypt(text.encode()).decode()

    def decrypt(self, encrypted: str) -> str:
        """Verify and decrypt a text.

        :raises DecryptionError: when none of the keys fits
        """
        try:
            return self._fernet.decrypt(encrypted.encode()).decode()
        except fernet.InvalidToken as exc:
            raise errors.DecryptionError(_NO_KEY_FITS) from exc

    def reencrypt(self, encrypted: str) -> str:
        """Encrypt a text again, with the first key.

        :raises DecryptionError: when none of the keys fits
        """
        try:
            return self._fernet.rotate(encrypted.encode()).decode()
        except fernet.InvalidToken as exc:
            raise errors.DecryptionError(_NO_KEY_FITS) from exc


_NO_KEY_FITS = (
    'No key in [blazar] encryption_keys of this process decrypts the data of '
    'the lease. The operator has to add the key with which it was encrypted '
    'to every nova.conf, and restart the process.')
