"""A map over many processes that keeps the order and notices when one of them dies.

Every process has its own pipe and gets every n-th item. So there is no shared queue whose lock a killed process can
take with it (`concurrent.futures` waits for ever then, when items are larger than a pipe's buffer), and the end of a
process is simply the end of its pipe.
"""

import contextlib
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from megatron_lite.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")

IN_FLIGHT = 4  # items a process: enough that none waits for another, few enough that memory stays small


def map_in_order(
    make_function: Callable[[], Callable[[Item], Result]], items: Iterable[Item], workers: int
) -> Generator[tuple[Item, Result], None, None]:
    """Each item with `function(item)`, in the order of `items`; `make_function` is called once in each process.

    An exception of the function is raised here, in its place in the order.
    """
    # Started afresh: a fork would copy the locks of whatever threads this process has.
    context = get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    waiting: deque[tuple[Item, Connection]] = deque()
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, make_function), daemon=True)
            process.start()
            theirs.close()  # else this process would hold open what should end with the other
            pipes.append(ours)
            processes.append(process)
        for number, item in enumerate(items):
            pipe = pipes[number % workers]
            _talk(pipe.send, item)
            waiting.append((item, pipe))
            if len(waiting) > workers * IN_FLIGHT:
                yield _receive(*waiting.popleft())
        while waiting:
            yield _receive(*waiting.popleft())
    finally:
        for process in processes:
            process.terminate()
        for pipe, process in zip(pipes, processes, strict=True):
            process.join()
            pipe.close()


def _receive(item: Item, pipe: Connection) -> tuple[Item, Any]:
    answer = _talk(pipe.recv)
    if isinstance(answer, BaseException):
        raise answer
    return item, answer


def _talk(call: Callable, *args: object):
    try:
        return call(*args)
    except (OSError, EOFError) as error:
        raise DataError(
            "a worker process died; if the system stopped it for want of memory, use fewer --workers. "
            "(A script that starts workers needs an `if __name__ == '__main__':` around what it does.)"
        ) from error


def _work(pipe: Connection, make_function: Callable[[], Callable]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one ends the others
    function = make_function()
    items: queue.SimpleQueue = queue.SimpleQueue()
    # The sender must never wait for this process to finish an item: it may be what this process waits for.
    threading.Thread(target=_drain, args=(pipe, items), daemon=True).start()
    for item in iter(items.get, None):
        try:
            answer = function(item)
        except Exception as error:
            answer = error
        with contextlib.suppress(BrokenPipeError):
            pipe.send(answer)


def _drain(pipe: Connection, items: queue.SimpleQueue) -> None:
    # The pipe ends when the process that reads and writes does, killed or not.
    with contextlib.suppress(EOFError, OSError):
        while True:
            items.put(pipe.recv())
    items.put(None)
