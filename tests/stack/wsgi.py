# SPDX-License-Identifier: Apache-2.0

"""Serve a WSGI application: python -P wsgi.py PORT MODULE THREADS SERVER

The server is waitress, or uWSGI with its own protocol. Several of these on the
same port share its requests: the kernel gives each new connection to one of
them. So there is no master that restarts a killed one, and a test decides
when it is started again.
"""

import importlib
import logging
import socket
import sys


def main() -> None:
    port, module, threads, server = sys.argv[1:]
    # Nova's application would parse the arguments.
    sys.argv[1:] = []
    serve = _serve_by_uwsgi if server == 'uwsgi' else _serve_by_waitress
    serve(port, module, threads)


def _serve_by_uwsgi(port: str, module: str, threads: str) -> None:
    """Serve in this process: a master would restart it."""
    import pyuwsgi
    pyuwsgi.run([
        '--socket', f'127.0.0.1:{port}', '--reuse-port', '--listen', '100',
        '--module', module, '--need-app', '--enable-threads', '--threads',
        threads, '--die-on-term', '--buffer-size', '65535',
        '--hook-post-app', 'print:Serving requests'])


def _serve_by_waitress(port: str, module: str, threads: str) -> None:
    import waitress
    application = importlib.import_module(module).application
    # "Task queue depth is 1" for every request that has to wait.
    logging.getLogger('waitress.queue').setLevel(logging.ERROR)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(('127.0.0.1', int(port)))
    server = waitress.create_server(
        application, sockets=[sock], threads=int(threads), ident=None,
        backlog=256)
    print('Serving requests', file=sys.stderr, flush=True)
    server.run()


if __name__ == '__main__':
    main()
