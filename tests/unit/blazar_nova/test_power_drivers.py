# SPDX-License-Identifier: Apache-2.0

"""Power drivers, with BMCs that answer, hang, fail and lie."""

import datetime
import errno
import ipaddress
import os
import ssl
import stat
import textwrap
import time

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization
from cryptography import x509
from cryptography.x509 import oid
import fixtures

from blazar_core.common import errors
from blazar_nova.listener import power_hosts
from tests import redfish
from tests.unit import base


class PowerTestCase(base.TestCase):

    timeout = 5

    def setUp(self):
        super().setUp()
        self.folder = self.useFixture(fixtures.TempDir()).path
        self.log = self.useFixture(fixtures.FakeLogger(level='DEBUG'))

    def write(self, name, text, mode=0o600):
        path = os.path.join(self.folder, name)
        with open(path, 'w') as file:
            file.write(textwrap.dedent(text))
        os.chmod(path, mode)
        return path

    def hosts(self, text):
        return power_hosts.PowerHosts(
            self.write('hosts', text), self.timeout)

    def owned(self, path, owner):
        """Return a fixture in which a file belongs to the user of an id."""
        fstat = os.fstat

        def owned(number):
            found = fstat(number)
            return os.stat_result((*found[:4], owner, *found[5:10])) if (
                os.path.samestat(found, os.stat(path))) else found

        return fixtures.MonkeyPatch('os.fstat', owned)

    def refused(self, text):
        return str(self.assertRaises(
            errors.ConfigurationError, self.hosts, text))


class TestRedfish(PowerTestCase):
    """Without a password, which needs encryption."""

    def setUp(self):
        super().setUp()
        self.emulator = self.useFixture(redfish.Emulator('one'))
        self.switches = self.hosts(f'''
            [one.example.org]
            driver = redfish
            address = {self.emulator.url}
            ''')
        self.one = 'one.example.org', 'one'

    def test_a_host_is_shut_down_and_switched_on(self):
        self.assertTrue(self.switches.is_on(*self.one))
        self.switches.off(*self.one, force=False)
        self.assertFalse(self.switches.is_on(*self.one))
        self.switches.on(*self.one)
        self.assertTrue(self.switches.is_on(*self.one))
        self.assertEqual([('one', 'GracefulShutdown'), ('one', 'On')],
                         self.emulator.requested)

    def test_host_that_does_not_shut_down_is_forced_off(self):
        self.emulator.stubborn.add('one')
        self.switches.off(*self.one, force=False)
        self.assertTrue(self.switches.is_on(*self.one))
        self.switches.off(*self.one, force=True)
        self.assertFalse(self.switches.is_on(*self.one))
        self.assertEqual(('one', 'ForceOff'), self.emulator.requested[-1])

    def test_identity_of_bmc_is_compared_with_host(self):
        self.assertEqual('', self.switches.mismatch(*self.one))
        other = self.hosts(f'''
            [two]
            driver = redfish
            address = {self.emulator.url}
            ''')
        self.assertIn('The BMC of host two says that its host is',
                      other.mismatch('two', 'two'))
        uuid, = self.emulator.names
        right = self.hosts(f'''
            [two]
            driver = redfish
            address = {self.emulator.url}
            identity = {uuid.upper()}
            ''')
        self.assertEqual('', right.mismatch('two', 'two'))
        # An expected name replaces that of the host.
        wrong = self.hosts(f'''
            [one]
            driver = redfish
            address = {self.emulator.url}
            identity = 00000000-0000-0000-0000-000000000000
            ''')
        self.assertNotEqual('', wrong.mismatch('one', 'one'))

    def test_hanging_bmc_is_unavailable_after_timeout(self):
        self.emulator.mode = 'hang'
        switches = power_hosts.PowerHosts(
            os.path.join(self.folder, 'hosts'), 1)
        began = time.monotonic()
        self.assertRaises(
            errors.PowerUnavailable, switches.is_on, *self.one)
        self.assertLess(time.monotonic() - began, 4)

    def test_failing_bmc_is_unavailable(self):
        self.emulator.mode = '500'
        for work in (self.switches.is_on, self.switches.on):
            self.assertRaises(errors.PowerUnavailable, work, *self.one)

    def test_invalid_response_is_a_power_error(self):
        self.emulator.mode = 'garbage'
        for work in (self.switches.is_on, self.switches.on,
                     self.switches.mismatch):
            self.assertRaises(errors.PowerError, work, *self.one)

    def test_unreachable_bmc_is_unavailable(self):
        switches = self.hosts('''
            [one]
            driver = redfish
            address = http://127.0.0.1:1
            ''')
        self.assertRaises(
            errors.PowerUnavailable, switches.is_on, 'one', 'one')

    def test_bmc_with_several_systems_requires_option_system(self):
        emulator = self.useFixture(redfish.Emulator('one', 'two'))
        text = f'''
            [one]
            driver = redfish
            address = {emulator.url}
            '''
        exc = self.assertRaises(errors.PowerError, self.hosts(text).is_on,
                                'one', 'one')
        self.assertIn('its BMC has 2 systems', str(exc))
        uuid = next(one for one, name in emulator.names.items()
                    if name == 'two')
        switches = self.hosts(
            text + f'system = /redfish/v1/Systems/{uuid}\n'.rjust(12))
        switches.off('one', 'one', force=True)
        self.assertEqual([('two', 'ForceOff')], emulator.requested)

    def test_invalid_options_are_refused(self):
        for text, said in (
                ('', 'there is no driver ""'),
                ('driver = ipmi', 'Write one of command, redfish'),
                ('driver = redfish', '"address" is not the URL'),
                ('driver = redfish\naddress = ftp://bmc', 'not the URL'),
                ('driver = redfish\naddress = https://u:p@bmc',
                 'not the URL'),
                ('driver = redfish\naddress = https://bmc\nverify = no',
                 'unknown key "verify"'),
                ('driver = redfish\naddress = https://bmc\npassword = x',
                 'a password must not be in'),
                ('driver = redfish\naddress = https://bmc\nusername = x',
                 '"username" needs a password_file'),
                ('driver = redfish\naddress = https://bmc\nauth = digest',
                 '"auth" must be one of session, basic'),
                ('driver = redfish\naddress = http://bmc\nusername = x\n'
                 'password_file = /x', 'would be sent unencrypted')):
            self.assertIn(said, self.refused(f'[one]\n{text}\n'))
        self.assertIn('cannot be read', self.refused('one\n'))
        self.assertIn('cannot be read', str(self.assertRaises(
            errors.ConfigurationError, power_hosts.PowerHosts, '/none', 1)))


class TestHostsFile(PowerTestCase):

    def test_changed_file_is_read_again(self):
        switches = self.hosts('[one]\ndriver = command\ncommand = true\n')
        self.assertTrue(switches.known('one', 'x'))
        self.assertTrue(switches.known('x', 'one'))
        self.assertFalse(switches.known('two', 'two'))
        self.write('hosts', '[two]\ndriver = command\ncommand = true\n'
                            '[three]\ndriver = command\ncommand = true\n')
        self.assertTrue(switches.known('two', 'two'))
        self.assertFalse(switches.known('one', 'one'))
        self.assertRaises(errors.PowerError, switches.on, 'one', 'one')

    def test_invalid_file_is_ignored_and_logged_once(self):
        switches = self.hosts('[one]\ndriver = command\ncommand = true\n')
        self.write('hosts', '[one]\ndriver = nothing at all\n')
        for _look in range(3):
            self.assertTrue(switches.known('one', 'one'))
        self.assertEqual(1, self.log.output.count('there is no driver'))
        path = os.path.join(self.folder, 'hosts')
        for number in 1, 2:
            os.rename(path, f'{path}.off')
            for _look in range(3):
                self.assertTrue(switches.known('one', 'one'))
            self.assertEqual(number, self.log.output.count('No such file'))
            os.rename(f'{path}.off', path)
            self.assertTrue(switches.known('one', 'one'))
            self.assertEqual(
                number + 1, self.log.output.count('there is no driver'))

    def test_unreadable_file_is_read_as_soon_as_possible(self):
        """Although it has not changed."""
        switches = self.hosts('[one]\ndriver = command\ncommand = true\n')
        path = self.write('hosts', '[two]\ndriver = command\ncommand = x\n')

        def fails(name, *more, **named):
            if name == path:
                raise OSError(errno.EMFILE, 'Too many open files')
            return open(name, *more, **named)

        with fixtures.MonkeyPatch('builtins.open', fails):
            for _look in range(3):
                self.assertTrue(switches.known('one', 'one'))
        self.assertEqual(1, self.log.output.count('Too many open files'))
        for _look in range(3):
            self.assertTrue(switches.known('two', 'two'))
        self.assertEqual(1, self.log.output.count('was read again'))

    def test_file_writable_by_others_is_refused(self):
        """It may name any command, and any BMC."""
        one = '[one]\ndriver = command\ncommand = true\n'
        path = os.path.join(self.folder, 'hosts')
        for mode in 0o664, 0o620, 0o646, 0o602:
            self.write('hosts', one, mode)
            said = str(self.assertRaises(errors.ConfigurationError,
                                         power_hosts.PowerHosts, path, 1))
            self.assertIn(f'other users can write {path}. Check', said)
            self.assertIn('what it says', said)
            self.assertLess(said.index('Check'), said.index('chmod 0644'))
        for mode in 0o644, 0o640, 0o400:
            os.chmod(path, mode)
            self.assertTrue(power_hosts.PowerHosts(path, 1).known('one', ''))

    def test_file_of_another_user_is_refused(self):
        path, me = self.write('hosts', ''), os.geteuid()
        for owner in 0, me:
            with self.owned(path, owner):
                self.hosts('')
        with self.owned(path, me + 1):
            said = self.refused('')
            self.assertIn(f'with the id {me + 1}. Check', said)
            self.assertLess(said.index('Check'), said.index('chown root'))

    def test_changed_file_writable_by_others_is_ignored(self):
        switches = self.hosts('[one]\ndriver = command\ncommand = true\n')
        path = self.write('hosts', '[two]\ndriver = command\ncommand = x\n',
                          0o666)
        for _look in range(2):
            self.assertTrue(switches.known('one', 'one'))
        self.assertEqual(1, self.log.output.count('other users can write'))
        os.chmod(path, 0o640)
        self.assertTrue(switches.known('two', 'two'))


class TestCommand(PowerTestCase):

    timeout = 2

    def command(self, script):
        path = self.write('command', f'#!/bin/sh\n{script}\n', stat.S_IRWXU)
        return self.hosts(f'''
            [one]
            driver = command
            command = {path} --cluster "a b"
            ''')

    def test_command_gets_action_and_host(self):
        switches = self.command(
            f'echo "$#: $@" >> {self.folder}/done; echo ON')
        self.assertTrue(switches.is_on('one', 'x'))
        switches.on('one', 'x')
        switches.off('one', 'x', force=False)
        switches.off('one', 'x', force=True)
        with open(f'{self.folder}/done') as file:
            self.assertEqual([
                f'4: --cluster a b {what} one\n'
                for what in ('state', 'on', 'off', 'force-off')], [*file])

    def test_printed_names_are_compared_with_host(self):
        self.assertEqual('', self.command(
            'printf "x\\none.example.org\\n"').mismatch(
                'one.example.org', 'one'))
        self.assertIn('host is without a name', self.command(
            'exit 0').mismatch('one', 'one'))

    def test_failed_command_is_reported_with_its_output(self):
        for script, said in (('echo broken; exit 3', '(3): broken'),
                             ('echo maybe', 'printed "maybe"'),
                             ('kill -9 $$', 'or was killed')):
            exc = self.assertRaises(
                errors.PowerError, self.command(script).is_on, 'one', 'one')
            self.assertIn(said, str(exc))
        self.assertRaises(errors.PowerError, self.hosts(
            '[one]\ndriver = command\ncommand = /nowhere/command\n').on,
            'one', 'one')

    def test_hanging_command_is_killed_with_its_children(self):
        switches = self.command(
            f'sleep 100 & echo $! > {self.folder}/child; wait')
        self.assertRaises(
            errors.PowerUnavailable, switches.is_on, 'one', 'one')
        with open(f'{self.folder}/child') as file:
            child = int(file.read())
        self.wait_for(lambda: not _runs(child), 'its child to be killed')

    def test_invalid_options_are_refused(self):
        for text, said in (('', '"command" is missing'),
                           ('command = "a', 'cannot be read'),
                           ('command = a\naddress = b', 'unknown key')):
            self.assertIn(said, self.refused(
                f'[one]\ndriver = command\n{text}\n'))


class TestPasswords(PowerTestCase):
    """By HTTPS, with a certificate of the test's own."""

    def setUp(self):
        super().setUp()
        certificate = _certificate()
        self.ca = self.write('ca.pem', '')
        with open(self.ca, 'wb') as file:
            file.write(certificate[0])
        key = self.write('key.pem', certificate[1].decode())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.ca, key)
        self.emulator = self.useFixture(redfish.Emulator(
            'one', password='open sesame', ssl_context=context))
        self.secret = self.write('secret', 'open sesame\n')

    def switches(self, **more):
        lines = '\n'.join(f'{key} = {value}' for key, value in {
            'driver': 'redfish', 'address': self.emulator.url,
            'username': 'blazar', 'password_file': self.secret,
            'ca_file': self.ca, **more}.items() if value)
        return self.hosts(f'[DEFAULT]\n{lines}\n[one]\n')

    def test_session_is_used_and_closed(self):
        switches = self.switches()
        switches.off('one', 'one', force=False)
        self.assertFalse(switches.is_on('one', 'one'))
        self.assertEqual(set(), self.emulator.sessions)
        self.assertEqual({'session'}, {*self.emulator.seen_auth})

    def test_basic_authentication_is_used_if_configured(self):
        switches = self.switches(auth='basic')
        self.assertTrue(switches.is_on('one', 'one'))
        self.assertEqual({'Basic'}, {*self.emulator.seen_auth})

    def test_changed_password_is_read_again(self):
        switches = self.switches()
        self.write('secret', 'wrong')
        exc = self.assertRaises(
            errors.PowerError, switches.is_on, 'one', 'one')
        self.assertNotIsInstance(exc, errors.PowerUnavailable)
        self.write('secret', 'open sesame')
        self.assertTrue(switches.is_on('one', 'one'))

    def test_unknown_certificate_is_refused(self):
        exc = self.assertRaises(
            errors.PowerUnavailable,
            self.switches(ca_file=None).is_on, 'one', 'one')
        self.assertIn('certificate verify failed', str(exc))
        self.assertEqual([], self.emulator.seen_auth)

    def refused_request(self):
        self.emulator.seen_auth.clear()
        exc = self.assertRaises(
            errors.PowerError, self.switches().is_on, 'one', 'one')
        self.assertEqual([], self.emulator.seen_auth)
        return str(exc)

    def test_password_file_accessible_by_others_is_refused(self):
        for mode in 0o400, 0o600, 0o440, 0o640:
            os.chmod(self.secret, mode)
            self.assertTrue(self.switches().is_on('one', 'one'), oct(mode))
        for mode in 0o644, 0o604, 0o602, 0o601, 0o660, 0o620:
            os.chmod(self.secret, mode)
            said = self.refused_request()
            self.assertLess(said.index('Change the password first'),
                            said.index('chmod 0640'))

    def test_password_file_of_another_user_is_refused(self):
        """Only root and the user of the process may have written it."""
        me = os.geteuid()
        for owner in 0, me:
            with self.owned(self.secret, owner):
                self.assertTrue(self.switches().is_on('one', 'one'))
        with self.owned(self.secret, me + 1):
            said = self.refused_request()
            self.assertIn(f'with the id {me + 1}. Change', said)
            self.assertLess(said.index('Change'), said.index('chown root'))

    def test_nothing_is_sent_without_password_file(self):
        os.remove(self.secret)
        self.assertIn('its password cannot be read', self.refused_request())

    def test_no_password_reaches_the_log_or_an_error(self):
        switches = self.switches()
        self.assertTrue(switches.is_on('one', 'one'))
        self.assertTrue(self.switches(auth='basic').is_on('one', 'one'))
        said = [self.log.output, repr(switches._entries)]
        for mode in ('500', 'garbage'):
            self.emulator.mode = mode
            said.append(repr(self.assertRaises(
                errors.PowerError, switches.is_on, 'one', 'one')))
        self.write('secret', 'open barley')
        self.emulator.mode = ''
        said.append(repr(self.assertRaises(
            errors.PowerError, switches.is_on, 'one', 'one')))
        said.append(self.log.output)
        for text in said:
            self.assertNotIn('sesame', text)
            self.assertNotIn('barley', text)


def _certificate():
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(oid.NameOID.COMMON_NAME, 'bmc')])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(
        name).public_key(key.public_key()).serial_number(
            1).not_valid_before(now - datetime.timedelta(days=1)
                                ).not_valid_after(
            now + datetime.timedelta(days=1)).add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(
                    ipaddress.ip_address('127.0.0.1'))]), False).add_extension(
                        x509.BasicConstraints(True, None), True).sign(
                            key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM), key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption())


def _runs(pid):
    """Return whether a process exists, and is no zombie."""
    try:
        with open(f'/proc/{pid}/stat') as file:
            return file.read().rpartition(')')[2].split()[0] != 'Z'
    except FileNotFoundError:
        return False
