"""A map over several processes that keeps the order and detects a dead process.

Every process has its own pipe and gets every n-th item. There is no shared queue, whose lock a killed process would
keep (`concurrent.futures` then waits for ever if items are larger than a pipe's buffer). A process and its pipe end
together.
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

IN_FLIGHT = 4  # items per process: enough to keep each busy, few enough to save memory


def map_in_order(
    make_function: Callable[[], Callable[[Item], Result]], items: Iterable[Item], workers: int
) -> Generator[tuple[Item, Result], None, None]:
    """Each item with `function(item)`, in the order of `items`; `make_function` is called once in each process.

    An exception of the function is raised here, in its place in the order.
    """
    # A fork would copy the locks of other threads.
    context = get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    waiting: deque[tuple[Item, Connection]] = deque()
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, make_function), daemon=True)
            process.start()
            theirs.close()  # otherwise the pipe would not end with the other process
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
            "a worker process died; if it ran out of memory, use fewer --workers. "
            "(A script that starts workers needs `if __name__ == '__main__':`.)"
        ) from error


def _work(pipe: Connection, make_function: Callable[[], Callable]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one ends the others
    function = make_function()
    items: queue.SimpleQueue = queue.SimpleQueue()
    # The sender must not wait for this process, which may wait for the sender.
    threading.Thread(target=_drain, args=(pipe, items), daemon=True).start()
    for item in iter(items.get, None):
        try:
            answer = function(item)
        except Exception as error:
            answer = error
        with contextlib.suppress(BrokenPipeError):
            pipe.send(answer)


def _drain(pipe: Connection, items: queue.SimpleQueue) -> None:
    # The pipe ends with the process at its other end.
    with contextlib.suppress(EOFError, OSError):
        while True:
            items.put(pipe.recv())
    items.put(None)
