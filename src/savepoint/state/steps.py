"""One way of doing things for blocking callers and for asyncio: a method is a generator that yields the futures it waits for.

    def _execute(self, sql):                      # the one implementation
        yield self._turn.acquire()
        return (yield self._worker.call(...))

    finish(session._execute(sql))                 # in a thread: waits
    await finish_async(session._execute(sql))     # on an event loop: never blocks it
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
Steps = Generator[Future[Any], Any, T]


def finish(steps: Steps[T]) -> T:
    """Run to the end in this thread. What is raised while it waits (KeyboardInterrupt, say) is raised inside, at the place that waits."""
    try:
        waiting = next(steps)
        while True:
            try:
                value = waiting.result()
            except BaseException as error:
                waiting = steps.throw(error)
            else:
                waiting = steps.send(value)
    except StopIteration as done:
        return done.value


async def finish_async(steps: Steps[T]) -> T:
    """Run to the end on the running event loop. A cancellation is raised inside, at the place that waits."""
    try:
        waiting = next(steps)
        while True:
            try:
                value = waiting.result() if waiting.done() else await _awaitable(waiting)
            except BaseException as error:
                waiting = steps.throw(error)
            else:
                waiting = steps.send(value)
    except StopIteration as done:
        return done.value


def _awaitable(waiting: Future[Any]) -> asyncio.Future[Any]:
    """Some futures know a better way to be awaited than through their callbacks (`client.Answer`)."""
    on_loop = getattr(waiting, "on_loop", None)
    return on_loop() if on_loop is not None else asyncio.wrap_future(waiting)


class Turnstile:
    """Lets one through at a time, in the order of their coming, whether they are threads or coroutines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy = False
        self._waiting: deque[Future[None]] = deque()

    def acquire(self) -> Future[None]:
        """A future that is done when it is one's turn. Whoever gives up before that must call `release` all the same, once it is done."""
        future: Future[None] = Future()
        with self._lock:
            if self._busy:
                self._waiting.append(future)
                return future
            self._busy = True
        future.set_result(None)
        return future

    def try_acquire(self) -> bool:
        with self._lock:
            if self._busy:
                return False
            self._busy = True
            return True

    def release(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._busy = False
                    return
                future = self._waiting.popleft()
            if future.set_running_or_notify_cancel():  # a waiter that was cancelled is passed over
                future.set_result(None)
                return
