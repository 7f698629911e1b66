# SPDX-License-Identifier: Apache-2.0

"""nova-api under uWSGI behind nginx, as in clouds."""

import os
import typing as ty

from tests.integration import base
from tests.integration import test_around
from tests.integration import test_clocks
from tests import stack
from tests.stack import servers


class UwsgiTest(test_around.AroundTest, test_clocks.WrongTest,
                test_clocks.MomentTest):
    """A small stack of its own: the shared one uses waitress."""

    _stack: ty.ClassVar[stack.Stack]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        if os.environ.get('BLAZAR_STACK_API') == 'uwsgi':
            raise cls.skipException('all tests run under uWSGI')
        if servers.find_nginx() is None:
            raise cls.skipException('nginx-light is not installed')
        cls._stack = stack.Stack(base.folder() + '-uwsgi')
        cls._stack.down()
        cls.addClassCleanup(cls._stack.down)
        base.start(cls._stack, hosts=1, api='uwsgi')

    @classmethod
    def stack(cls) -> stack.Stack:
        return cls._stack
