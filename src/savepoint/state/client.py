"""A worker process as the trainer sees it: start, call, watch, kill."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from savepoint.state import wire
from savepoint.state.errors import StateError
from savepoint.state.watchdog import Alarm, watchdog
from savepoint.state.wire import Channel, WireError

START_S = 60.0  # on a machine under load an interpreter takes its time
# What a worker inherits of the environment: where its code is and how it speaks. Keys and tokens stay with the trainer.
_INHERITED = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "SAVEPOINT_VFS", "XDG_CACHE_HOME", "HOME")
_LAST_WORDS_BYTES = 2000
_DYING_S = 1.0


class WorkerDied(Exception):
    """The process ended while a call was under way, or before it was sent. overran: it was killed because this very call went over its deadline.

    alone: nothing else was running in the process. reason: in words.
    """

    def __init__(self, reason: str, *, sent: bool, overran: bool = False, alone: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.sent, self.overran, self.alone = reason, sent, overran, alone


class Answer(Future[Any]):
    """The future of a call. Whoever waits for it reads the connection himself, if nobody else does: a thread in `result`, an event loop as it does
    with its own sockets. That saves a hand-over between threads, a fifth of a call. For other callbacks a background thread reads."""

    def __init__(self, process: WorkerProcess) -> None:
        super().__init__()
        self._process = process
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Any:
        if timeout is None and not self.done():
            self._process.pump(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if timeout is None and not self.done():
            self._process.pump(self)
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        super().add_done_callback(fn)
        if not self.done():
            self._process.pump_for(self)

    def on_loop(self) -> asyncio.Future[Any]:
        """The same as a future of the running event loop, which reads the connection meanwhile."""
        loop = asyncio.get_running_loop()
        told: asyncio.Future[Any] = loop.create_future()
        Future.add_done_callback(self, lambda _: _tell(loop, told, self))
        if not self.done():
            self._process.read_on(loop, self)
        return told


@dataclass(eq=False, slots=True)
class _Call:
    number: int
    body: bytes
    future: Answer
    kill_after_s: float | None
    alone: bool
    descriptor: int | None = None
    rows: list[Any] = field(default_factory=list)
    alarm: Alarm | None = None
    overran: bool = False


@dataclass(frozen=True, slots=True)
class Hello:
    """What a worker said of itself when it was ready."""

    pid: int
    vfs: str
    level: str
    measures: dict[str, bool]
    missing: dict[str, str]


class WorkerProcess:
    """A process and the calls on it. `threads` run at a time, the others wait their turn here, in order.

    on_death is called once, after every call under way has been told.
    """

    def __init__(
        self, threads: int, memory_bytes: int, spill_folder: str, spill_bytes: int, sandboxed: bool, on_death: Callable[[WorkerProcess], None]
    ) -> None:
        self._threads, self._on_death = threads, on_death
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: deque[_Call] = deque()
        self._running: dict[int, _Call] = {}
        self.calls = 0
        self.dead = ""
        self._buried = False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        ours, theirs = socket.socketpair()
        try:
            environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
            environment |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                [sys.executable, "-m", "savepoint.state.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._stderr, env=environment, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            ours.close()
            self._stderr.close()
            raise StateError(f"a worker process cannot be started: {error.strerror or error}") from None
        finally:
            theirs.close()
        self._channel = Channel(ours)
        self._baton = threading.Lock()  # whoever holds it reads the connection
        self._readers: deque[threading.Lock] = deque()  # of those who would read if nobody did; released to let one try
        self._others: deque[Answer] = deque()  # answers for which the background thread reads
        self._background: threading.Thread | None = None
        self._awaited: dict[asyncio.AbstractEventLoop, set[Answer]] = {}  # answers for which an event loop reads
        self.hello: Future[Any] = self.call(wire.encode((threads, memory_bytes, spill_folder, spill_bytes, sandboxed)), kill_after_s=START_S)

    @property
    def pid(self) -> int:
        return self.process.pid

    def call(self, body: bytes, *, kill_after_s: float | None = None, alone: bool = False, descriptor: int | None = None) -> Future[Any]:
        """Send a call. The future gives (answer, rows), or raises what the call raised, or WorkerDied.

        kill_after_s: seconds from the moment it is sent after which the process is killed for it. alone: it runs while nothing else does.
        """
        call = _Call(next(self._numbers), body, Answer(self), kill_after_s, alone, descriptor)
        with self._lock:
            if self.dead:
                call.future.set_exception(WorkerDied(self.dead, sent=False))
                return call.future
            self._waiting.append(call)
            ready = self._next()
        self._send(ready)
        return call.future

    def tell(self, body: bytes) -> None:
        """Send a call whose answer nobody waits for, past all that wait."""
        with contextlib.suppress(WireError):
            self._channel.send(0, wire.CALL, body)

    def kill(self, reason: str) -> None:
        """End the process now. Its calls fail with `reason`."""
        with self._lock:
            self.dead = self.dead or reason
        with contextlib.suppress(OSError):
            self.process.kill()

    def close(self) -> None:
        """End the process and wait until it is gone."""
        self.kill("the backend was closed")
        self._channel.close()
        self._bury("the backend was closed")

    def load(self) -> int:
        """Calls running or waiting."""
        return len(self._running) + len(self._waiting)

    # ------------------------------------------------------------------ inside

    def _next(self) -> list[_Call]:
        """The calls that may be sent now; the lock is held. One that must be alone waits for the others to end, and nothing passes it."""
        ready: list[_Call] = []
        while self._waiting and len(self._running) < self._threads:
            if self._running and (self._waiting[0].alone or any(call.alone for call in self._running.values())):
                break
            call = self._waiting.popleft()
            self._running[call.number] = call
            ready.append(call)
        return ready

    def _send(self, ready: list[_Call]) -> None:
        for call in ready:
            self.calls += 1
            if call.kill_after_s is not None:
                call.alarm = watchdog.arm(time.monotonic() + call.kill_after_s, lambda call=call: self._overrun(call))  # type: ignore[misc]
            # A broken connection is seen by the reader too, which tells this call and all others.
            with contextlib.suppress(WireError):
                self._channel.send(call.number, wire.CALL, call.body, call.descriptor)

    def _overrun(self, call: _Call) -> None:
        if not call.overran:
            call.overran = True
            self.kill(f"killed: a call was still running {call.kill_after_s:g} s after it began")

    def pump(self, future: Answer) -> None:
        """Read the connection, or wait while another thread does, until this answer is there."""
        woken = threading.Lock()
        woken.acquire()
        told = False
        try:
            while not future.done():
                if self._baton.acquire(blocking=False):
                    try:
                        while not future.done():
                            self._read_one()
                    finally:
                        self._baton.release()
                    continue
                if not told:
                    Future.add_done_callback(future, lambda _: _release(woken))
                    told = True
                self._readers.append(woken)
                # Whoever reads may have stopped before he could see this entry; then there is nothing to wait for.
                if self._baton.locked():
                    woken.acquire()
                with contextlib.suppress(ValueError):
                    self._readers.remove(woken)
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Let the next one who would read try, if one waits."""
        with contextlib.suppress(IndexError):
            _release(self._readers.popleft())

    def pump_for(self, future: Answer) -> None:
        """Have the background thread read until this answer is there."""
        with self._lock:
            self._others.append(future)
            if self._background is None:
                self._background = threading.Thread(target=self._pump_others, name=f"savepoint-worker-{self.pid}", daemon=True)
                self._background.start()

    def read_on(self, loop: asyncio.AbstractEventLoop, future: Answer) -> None:
        """Have a running event loop read until this answer is there."""
        awaited = self._awaited.setdefault(loop, set())
        awaited.add(future)
        if len(awaited) > 1:
            return
        try:
            # The loop goes by numbers: one that a dead worker's socket had may be registered still, and would be taken for this one.
            loop.remove_reader(self._channel.socket)
            loop.add_reader(self._channel.socket, self._readable, loop)
        except (NotImplementedError, ValueError, OSError):  # a loop that watches no sockets, or a connection that has just ended
            self._leave(loop)

    def _leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop reads no more; for what it still waits for, the background thread does."""
        with contextlib.suppress(ValueError, OSError):
            loop.remove_reader(self._channel.socket)
        for future in self._awaited.pop(loop, ()):
            if not future.done():
                self.pump_for(future)

    def _readable(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called by the loop when there is something to read: what there is, and no more than a little at a time."""
        if not self._baton.acquire(blocking=False):
            self._leave(loop)  # a thread reads already, and for everybody
            return
        ended = False
        try:
            for message in self._channel.receive_some():
                self._take(*message)
        except WireError:
            ended = True
        finally:
            self._baton.release()
            self._pass_on()
        awaited = self._awaited.get(loop, set())
        awaited -= {future for future in awaited if future.done()}
        if ended or not awaited:
            self._leave(loop)  # an end is looked into by the thread: it takes a moment

    def _pump_others(self) -> None:
        """Ends when there is nothing to read for: a thread costs less to start than to keep in step."""
        while True:
            with self._lock:
                if not self._others:
                    self._background = None
                    return
                future = self._others.popleft()
            self.pump(future)

    def _read_one(self) -> None:
        """One message. When the connection is broken or makes no sense, every call is told."""
        try:
            self._take(*self._channel.receive())
        except WireError as error:
            self._bury(str(error))

    def _take(self, number: int, kind: int, body: bytearray) -> None:
        try:
            call = self._running.get(number)
            if call is None:
                return
            if kind == wire.ROWS:
                call.rows.extend(wire.decode(body))
                return
            answer = wire.decode(body) if kind == wire.ANSWER else None
            failure = wire.decode_error(body) if kind != wire.ANSWER else None
        except Exception as error:  # a worker that answers nonsense is as good as dead, and its callers must not wait
            self.process.kill()
            self._bury(f"an answer that cannot be read: {type(error).__name__}: {error}")
            return
        with self._lock:
            self._running.pop(number, None)
            ready = self._next()
        self._send(ready)
        if call.alarm is not None:
            watchdog.disarm(call.alarm)
        if failure is not None:
            call.future.set_exception(failure)
        else:
            call.future.set_result((answer, call.rows))

    def _bury(self, words: str) -> None:
        try:
            code = self.process.wait(_DYING_S)  # a connection that ends is the process ending; how, it says itself
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        with self._lock:
            if self._buried:
                return
            self._buried = True
            self.dead = self.dead or self._cause_of_death(code, words)
            running, waiting = list(self._running.values()), list(self._waiting)
            self._running.clear()
            self._waiting.clear()
        self._channel.close()
        self._stderr.close()
        for call in running + waiting:
            if call.alarm is not None:
                watchdog.disarm(call.alarm)
            sent = call in running
            call.future.set_exception(WorkerDied(self.dead, sent=sent, overran=call.overran, alone=sent and len(running) == 1))
        self._on_death(self)

    def _cause_of_death(self, code: int, words: str) -> str:
        if code == -signal.SIGKILL:
            how = "it was killed by SIGKILL, as the kernel does when memory runs out"
        elif code < 0:
            how = f"it was ended by {signal.Signals(-code).name}"
        elif code > 0:
            self._stderr.seek(max(0, os.fstat(self._stderr.fileno()).st_size - _LAST_WORDS_BYTES))
            said = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
            how = f"it ended with status {code}" + (f": {said[-1]}" if said else "")
        else:
            how = f"it ended: {words}"
        return f"the worker process died: {how}"


def _tell(loop: asyncio.AbstractEventLoop, told: asyncio.Future[Any], answer: Answer) -> None:
    """Hand an answer to the event loop that waits for it, from whatever thread; a loop that is closed no longer does."""

    def hand() -> None:
        if told.done():
            return
        error = answer.exception()
        if error is not None:
            told.set_exception(error)
        else:
            told.set_result(answer.result())

    try:
        here = asyncio.get_running_loop() is loop
    except RuntimeError:
        here = False
    if here:
        hand()
    else:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(hand)


def _release(lock: threading.Lock) -> None:
    """Release a lock that two may want to release."""
    with contextlib.suppress(RuntimeError):
        lock.release()
