"""Commands that fork from a server which has already loaded torch; loading takes seconds per process.

`install` writes `megatron-lite` and `python` into a bin folder. They send their arguments, folder, environment and
open streams to the server, whose child becomes the command. Launchers among these children fork their ranks.
"""

import concurrent.futures.thread
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from unittest import mock

from tests.helpers.command import ROOT, environment

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
    for name in ("megatron-lite", "python"):
        command = folder / name
        command.write_text(CLIENT.format(python=sys.executable, address=str(address)))
        command.chmod(0o755)


@contextmanager
def server(address: Path) -> Iterator[None]:
    """Run the server while the context is open."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.warm_commands", str(address)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert b"ready\n" in process.stdout, "the server of commands has not started"
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)  # also a command that a failed test has left
        process.wait()
        process.stdout.close()


def _serve(address: str) -> None:
    import torch._dynamo  # noqa: F401  (optimizers import it late)
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    import megatron_lite.convert.driver
    import megatron_lite.generate.run
    import megatron_lite.launch.agent
    import megatron_lite.training.pretrain  # noqa: F401

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    # The agent forks ranks from a pool's thread. A rank would join that thread, which is itself, when it exits.
    os.register_at_fork(after_in_child=concurrent.futures.thread._threads_queues.clear)  # type: ignore[attr-defined]
    forked = partialmethod(LocalElasticAgent.__init__, start_method="fork")
    with mock.patch.object(LocalElasticAgent, "__init__", forked):
        children: list[int] = []
        while True:
            connection, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                listener.close()
                _become(connection)
            connection.close()
            children = [child for child in [*children, pid] if os.waitpid(child, os.WNOHANG)[0] == 0]


def _become(connection: socket.socket) -> None:
    """Run the requested command in this process, send its exit code and exit."""
    size, streams, _, _ = socket.recv_fds(connection, 8, 3)
    remaining, request = int.from_bytes(size, "big"), b""
    while len(request) < remaining:
        request += connection.recv(remaining - len(request))
    (name, *words), folder, variables = json.loads(request)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    connection.setblocking(True)
    code = 1
    try:
        code = _run(name, words)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        connection.sendall(bytes([code]))
        os._exit(code)


def _run(name: str, words: list[str]) -> int:
    """The exit code of `megatron-lite WORDS` or `python FILE WORDS`."""
    import traceback

    try:
        if name == "megatron-lite":
            from megatron_lite.cli import main

            sys.argv = [name, *words]
            main()
        else:
            sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _serve(sys.argv[1])
