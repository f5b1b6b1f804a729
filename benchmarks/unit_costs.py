"""Unit costs of the control plane on this machine: `python benchmarks/control_plane.py --units`."""

import subprocess
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

PROCESSES, ROUNDS, RANKS = 3, 3000, 32
PATIENCE = timedelta(seconds=60)


def client(port: int, rounds: int) -> float:
    """Seconds of a request to the store, as ranks make them."""
    store = dist.TCPStore("127.0.0.1", port, None, False, PATIENCE)
    started = time.perf_counter()
    for _ in range(rounds):
        store.set("key", "x" * 100)
        store.get("key")
        store.check(["key"])
        store.add("number", 1)
    return (time.perf_counter() - started) / (4 * rounds)


def connected(ranks: int) -> float:
    """Seconds of a connection in a Gloo group whose ranks are threads."""
    store = dist.HashStore()
    groups: list[dist.ProcessGroup] = []

    def connect(rank: int) -> None:
        groups.append(dist.ProcessGroupGloo(store, rank, ranks, PATIENCE))  # pyright: ignore

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(ranks)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - started) / (ranks * (ranks - 1) / 2)


def lines() -> list[str]:
    server = dist.TCPStore("127.0.0.1", 0, None, True, PATIENCE, wait_for_workers=False)
    trip, started = client(server.port, ROUNDS), time.process_time()
    command = [sys.executable, __file__, str(server.port)]
    for process in [subprocess.Popen(command) for _ in range(PROCESSES)]:
        process.wait()
    served = (time.process_time() - started) / (PROCESSES * ROUNDS * 4)
    command = [sys.executable, "-c", "import megatron_lite.launch.pretrain, torch._dynamo"]
    started = time.perf_counter()
    subprocess.run(command, check=True)
    return [
        f"request to the store     {1e6 * trip:.0f} us over loopback",
        f"request that it serves   {1e6 * served:.0f} us of processor time",
        f"connection of Gloo       {1e6 * connected(RANKS):.0f} us, {RANKS} ranks in one process",
        f"process                  {time.perf_counter() - started:.1f} s to import torch and the package",
    ]


if __name__ == "__main__":
    client(int(sys.argv[1]), ROUNDS) if len(sys.argv) > 1 else print("\n".join(lines()))
