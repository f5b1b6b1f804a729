"""Two hosts with a cable between them, without SLURM: for tests of torchrun and its ranks when the network fails."""

import subprocess
from collections.abc import Sequence
from contextlib import ExitStack

from tests.cluster.namespaces import Host, why_not

__all__ = ["TwoHosts", "why_not"]

ADDRESSES = {"host-a": "10.78.0.1", "host-b": "10.78.0.2"}


class TwoHosts:
    """Hosts "a" and "b", named host-a and host-b. At the end, all their processes are killed."""

    def __enter__(self) -> "TwoHosts":
        with ExitStack() as stack:
            self.hosts = {name: stack.enter_context(Host(f"host-{name}", ADDRESSES)) for name in "ab"}
            self.hosts["a"].connect("eth0", self.hosts["b"])
            self.hosts["a"].set_address("eth0")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()

    def popen(self, host: str, command: Sequence[str], **options) -> subprocess.Popen:
        """`subprocess.Popen(command, **options)` on a host, in a new session."""
        return self.hosts[host].popen(command, **options)

    def disconnect(self, host: str) -> None:
        """Pull the cable out of a host. Its open connections get no error and no data."""
        self.hosts[host].ip("link", "set", "eth0", "down")

    def reconnect(self, host: str) -> None:
        self.hosts[host].ip("link", "set", "eth0", "up")
