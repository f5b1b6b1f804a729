"""Programs `megatron-lite` and `python` for scripts of a shell, which fork from the server of warm.py.

`install` writes both into a bin folder. They send their arguments, folder, environment and open streams to a thread of
this process, in which the server's child becomes the command.
"""

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from tests.helpers import warm

# -I -S: without site-packages the client starts in a fiftieth of a second.
CLIENT = """\
#!{python} -IS
import json, os, socket, sys
name, *words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
if name == "python" and not (words and words[0].endswith(".py")):
    os.execv({python!r}, [{python!r}, *words])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([[name, *words], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
server.sendall(request)
code = server.recv(1)
sys.exit(code[0] if code else 1)
"""


def install(folder: Path, address: Path) -> None:
    """Write the commands of the server at `address` into `folder`."""
    for name in (warm.LITE, warm.PYTHON):
        command = folder / name
        command.write_text(CLIENT.format(python=sys.executable, address=str(address)))
        command.chmod(0o755)


@contextmanager
def server(address: Path) -> Iterator[None]:
    """Answer at `address` while the context is open."""
    warm.start_server()
    pids: set[int] = set()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        threading.Thread(target=_serve, args=(listener, pids), daemon=True).start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for pid in pids:  # commands that a failed test has left
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)


def _serve(listener: socket.socket, pids: set[int]) -> None:
    with suppress(OSError):  # `server` has ended
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_answer, args=(connection, pids), daemon=True).start()


def _answer(connection: socket.socket, pids: set[int]) -> None:
    """Start the requested command, and send its exit code when it has ended."""
    with connection:
        size, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
        remaining, request = int.from_bytes(size, "big"), b""
        while len(request) < remaining:
            request += connection.recv(remaining - len(request))
        (name, *words), folder, variables = json.loads(request)
        streams = [Connection(descriptor) for descriptor in descriptors]
        process = warm.start(name, words, folder, variables, streams)
        for stream in streams:
            stream.close()
        pids.add(process.pid or 0)
        process.join()
        pids.discard(process.pid or 0)
        code = process.exitcode or 0
        connection.sendall(bytes([code if code >= 0 else 128 - code]))
