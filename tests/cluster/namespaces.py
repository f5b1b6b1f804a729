"""Emulated hosts: Linux namespaces of this machine, each of which looks like a separate machine to its processes.

A host has its own network, hostname, processes, /dev/shm, /run and /etc/hosts, and no DNS. All hosts use the files of
the machine, as on a cluster with one file system. The network and the /etc of the machine do not change.
"""

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tests.helpers.limits import PATIENCE

PATH = f"{os.path.dirname(sys.executable)}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_UNSHARE = ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child"]

# Flags of setns(2).
_PID = 0x20000000
_MOUNT_UTS_IPC_NET = 0x00020000 | 0x04000000 | 0x08000000 | 0x40000000

# Run as process 1 of the host. Without "hosts: files" every reverse look-up would wait for a DNS server's time-out.
# A process 1 that ignores SIGCHLD leaves no zombies. It exits when the other end of its standard input is closed, which
# ends all processes of the host: a test process that is killed leaves none of them.
_BOOT = """
set -e
read -r pid_outside rest < /proc/self/stat
mount -t proc proc /proc
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
echo "$2" > /run/hosts
echo "hosts: files" > /run/nsswitch.conf
mount --bind /run/hosts /etc/hosts
mount --bind /run/nsswitch.conf /etc/nsswitch.conf
hostname "$1"
ip link set lo up
echo "$pid_outside"
exec env --ignore-signal=CHLD cat > /dev/null 2>&1
"""


class Host:
    """An emulated host: `with Host(name, {"other-host": "10.0.0.2"}) as host`. At the end, its processes are killed."""

    def __init__(self, name: str, addresses: Mapping[str, str]):
        self.name = name
        self._addresses = addresses
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> "Host":
        names = "\n".join(["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self._addresses.items())])
        self._unshare = subprocess.Popen(
            [*_UNSHARE, "sh", "-c", _BOOT, "boot", self.name, names],
            env={"PATH": PATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for pytest
        )
        answer = self._unshare.stdout.readline()
        if not answer.strip().isdigit():
            raise OSError(f"cannot create the namespaces of a host: {answer}{self._unshare.communicate()[0]}")
        self.pid = int(answer)
        self._pidfd = os.pidfd_open(self.pid)
        return self

    def __exit__(self, *error) -> None:
        self.kill()
        os.close(self._pidfd)

    def kill(self) -> None:
        """Kill every process on the host, wait for their exit, and so delete the host's network."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        for process in self._processes:  # process 1 exits only when all others have been waited for
            process.wait()
        self._unshare.communicate()

    def popen(self, command: Sequence[str], **options) -> subprocess.Popen:
        """`subprocess.Popen` on the host. Signals reach the command itself, and the exit code is the command's."""
        cwd = os.path.abspath(options.pop("cwd", "."))

        def enter():
            _setns(self._pidfd, _MOUNT_UTS_IPC_NET)
            os.chdir(cwd)  # joining a mount namespace changes the folder to /

        self._processes = [process for process in self._processes if process.poll() is None]
        own_pidfd = os.pidfd_open(os.getpid())
        _setns(self._pidfd, _PID)  # applies to children, not to this process
        try:
            process = subprocess.Popen(
                command,
                **{"stdin": subprocess.DEVNULL, "text": True, **options},
                start_new_session=True,
                preexec_fn=enter,
            )
        finally:
            _setns(own_pidfd, _PID)
            os.close(own_pidfd)
        self._processes.append(process)
        return process

    def run(self, *command: str, timeout: float = 60, **options) -> subprocess.CompletedProcess[str]:
        """The exit code and output of a command on the host."""
        process = self.popen(command, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options})
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def ip(self, *arguments: str) -> None:
        """Run `ip ARGUMENTS` in the host's network, but with the machine's process ids, which can name other hosts."""
        command = ["nsenter", "--target", str(self.pid), "--net", "ip", *arguments]
        done = subprocess.run(command, env={"PATH": PATH}, capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode:
            raise OSError(f"on {self.name}: {' '.join(command[4:])}: {done.stderr}")

    def connect(self, device: str, other: "Host") -> None:
        """Lay a cable from `device` of this host to eth0 of another host, and set the address of eth0."""
        self.ip("link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", str(other.pid))
        self.ip("link", "set", device, "up")
        other.set_address("eth0")

    def set_address(self, device: str) -> None:
        self.ip("address", "add", f"{self._addresses[self.name]}/24", "dev", device)
        self.ip("link", "set", device, "up")


def _setns(pidfd: int, namespaces: int) -> None:
    """Join namespaces of the process of `pidfd`. Python has os.setns only since 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(pidfd, namespaces):
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


@functools.cache
def why_not() -> str:
    """The reason why this machine cannot emulate hosts, or an empty string."""
    if not hasattr(os, "pidfd_open") or os.geteuid() != 0:
        return "emulated hosts need Linux and root"
    missing = [command for command in ("unshare", "nsenter", "ip", "hostname") if not shutil.which(command, path=PATH)]
    if missing:
        return f"emulated hosts need {', '.join(missing)} (packages util-linux, iproute2, hostname)"
    addresses = {"one": "10.0.0.1", "two": "10.0.0.2"}
    try:
        with Host("one", addresses) as one, Host("two", addresses) as two:
            one.ip("link", "add", "bridge", "type", "bridge")
            one.connect("eth0", two)
            done = two.run("true", env={"PATH": PATH})
    except (OSError, subprocess.SubprocessError) as error:
        return f"no emulated hosts here: {error}"
    return "" if done.returncode == 0 else f"no emulated hosts here: {done.stderr}"
