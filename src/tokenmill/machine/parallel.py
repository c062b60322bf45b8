"""Many small reads at once, on threads that no exit waits for: a mount that hangs must not keep a process alive."""

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(items: Iterable[Item], work: Callable[[Item], Result], threads: int) -> list[Result]:
    """The results in the items' order. The OSError that `work` may raise is raised here; it raises nothing else."""
    waiting: queue.SimpleQueue[tuple[int, Item]] = queue.SimpleQueue()
    for entry in enumerate(items):
        waiting.put(entry)
    count = waiting.qsize()
    results: dict[int, Result] = {}
    trouble: list[OSError] = []

    def serve() -> None:
        while not trouble:
            try:
                place, item = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                results[place] = work(item)
            except OSError as error:
                trouble.append(error)

    crew = [threading.Thread(target=serve, daemon=True) for _ in range(min(threads, count))]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    if trouble:
        raise trouble[0]
    return [results[place] for place in range(count)]
