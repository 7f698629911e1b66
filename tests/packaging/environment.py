# SPDX-License-Identifier: Apache-2.0

"""Virtual environments as operators create them, of pinned packages."""

import os
import subprocess
import sys
import tarfile

import fixtures

TOP = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))))
#: The name of the distribution of this project.
OURS = 'nova-leases'
_PINNED = ('constraints.txt', 'tests/packaging/blazar-constraints.txt')


class Packages(fixtures.Fixture):
    """The packages of a release.

    :param tree: the source tree; by default this one
    :ivar sdist: the path of the source distribution
    :ivar wheel: the path of the wheel, which is built from that
    """

    def __init__(self, tree=TOP):
        super().__init__()
        self._tree = tree

    def _setUp(self):
        folder = self.useFixture(fixtures.TempDir()).path
        self.sdist = _build('sdist', folder, self._tree)
        with tarfile.open(self.sdist) as archive:
            # Python before 3.11.4 has no filters.
            archive.extraction_filter = getattr(tarfile, 'data_filter', None)
            archive.extractall(folder)
        self.wheel = _build('wheel', folder,
                            self.sdist.removesuffix('.tar.gz'))


def _build(kind, folder, source):
    # The last line of the backend is the name, after its log.
    printed = run(sys.executable, '-c', 'import sys, pbr.build\n'
                  f'name = pbr.build.build_{kind}(sys.argv[1])\n'
                  'print("\\n" + name)', folder, cwd=source)
    return os.path.join(folder, printed.split()[-1])


class Environment(fixtures.Fixture):
    """A virtual environment with packages.

    :param packages: the arguments of pip install
    :param pins: the files of constraints, relative to the top folder
    :ivar folder: an empty one, in which its commands run
    """

    def __init__(self, *packages, pins=_PINNED):
        super().__init__()
        self._packages = packages
        self._pins = pins

    def _setUp(self):
        self.folder = self.useFixture(fixtures.TempDir()).path
        venv = self.useFixture(fixtures.TempDir()).path
        run(sys.executable, '-m', 'venv', venv, cwd=self.folder)
        self._bin = os.path.join(venv, 'bin')
        self.install(*self._packages)

    def install(self, *packages):
        pins = (word for name in self._pins
                for word in ('-c', os.path.join(TOP, name)))
        self.do('pip', 'install', *pins, *packages)

    def program(self, name):
        """Return the path of a command of the environment."""
        return os.path.join(self._bin, name)

    def do(self, name, *words):
        """Run a command of the environment; return its output."""
        return run(self.program(name), *words, cwd=self.folder)

    def python(self, code, *words):
        """Run code in the environment; return its output."""
        return self.do('python', '-c', code, *words)

    def imports(self, names):
        """Import modules, in that order, in one process."""
        self.python('import sys, importlib\n'
                    'for name in sys.argv[1:]:\n'
                    '    importlib.import_module(name)', *names)


def run(*command, cwd):
    """Run a command that has to succeed; return its output."""
    done = subprocess.run(
        command, cwd=cwd, stdin=subprocess.DEVNULL, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, 'OS_NOVA_DISABLE_EVENTLET_PATCHING': '1',
             'PIP_DISABLE_PIP_VERSION_CHECK': '1', 'PYTHONPATH': ''})
    if done.returncode:
        raise AssertionError(
            f'{command} ended with {done.returncode}:\n'
            f'{done.stdout[-2000:]}\n{done.stderr[-4000:]}')
    return done.stdout
