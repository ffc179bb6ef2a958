"""Threads between stages, a bounded number of items apart: overlap and back-pressure in one place.

`Prefetch` runs the iterator before it in a thread, `Follow` the function behind it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
_END = object()


class Prefetch(Generic[T]):
    """Iterates like ``source``, which runs in its own thread at most ``depth`` items ahead.

    An exception of the source is raised where its next item would have been. Leaving the ``with`` block stops the
    thread after the item it is at, also when not everything was taken.
    """

    def __init__(self, source: Iterator[T], depth: int = 1) -> None:
        self._source = source
        self._queue: queue.Queue[object] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="prefetch")

    def __enter__(self) -> Prefetch[T]:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._queue.get(timeout=0.05)  # make room: it may be waiting to hand over what nobody wants any more
        self._thread.join()

    def __iter__(self) -> Iterator[T]:
        while True:
            item = self._queue.get()
            if item is _END:
                if self._error is not None:
                    raise self._error
                return
            yield item  # type: ignore[misc]

    @property
    def is_waiting(self) -> bool:
        """Whether there is something to be taken without a wait."""
        return not self._queue.empty()

    def _run(self) -> None:
        try:
            for item in self._source:
                if self._closed.is_set():
                    break
                self._queue.put(item)
        except BaseException as error:  # handed to the consumer, which raises it
            self._error = error
        finally:
            close = getattr(self._source, "close", None)
            if close is not None:
                close()
            self._queue.put(_END)


class Follow(Generic[T]):
    """Calls ``take`` with one item after the other in a thread of its own, which may be ``depth`` items behind.

    ``take`` must not raise. Leaving the ``with`` block waits until everything was taken.
    """

    def __init__(self, take: Callable[[T], None], depth: int = 1) -> None:
        self._take = take
        self._queue: queue.Queue[object] = queue.Queue(maxsize=depth)
        self._thread = threading.Thread(target=self._run, daemon=True, name="follow")

    def __enter__(self) -> Follow[T]:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.put(_END)
        self._thread.join()

    def put(self, item: T) -> None:
        """Hand an item over; waits while the thread is ``depth`` items behind."""
        self._queue.put(item)

    def _run(self) -> None:
        while (item := self._queue.get()) is not _END:
            self._take(item)  # type: ignore[arg-type]
