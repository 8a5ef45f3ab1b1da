"""Places for worker processes: which images each process has, how it is called, and when it is replaced."""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from savepoint.errors import UserError
from savepoint.state import wire
from savepoint.state.client import WorkerDied, WorkerProcess
from savepoint.state.errors import StateError
from savepoint.state.image import BaseImage
from savepoint.state.placed import SERVICE_S
from savepoint.state.sandbox import SandboxReport, reaches
from savepoint.state.steps import Steps

if TYPE_CHECKING:
    from savepoint.state.pool import WorkerBackend

_FAILED_STARTS = 3  # in a row, after which a place gives up


class ImageParts:
    """What the trainer keeps of an image so that any worker can have it: for a base its file, for a derived one its delta."""

    def __init__(self, number: int, base: BaseImage | None, delta: bytes) -> None:
        self.number, self.base, self.delta = number, base, delta


class Slot:
    """A place for a worker process: the one that lives, and the count of those that did (`epoch`)."""

    def __init__(self, backend: WorkerBackend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._images: dict[int, Future[Any]] = {}
        self._garbage: deque[tuple[int, bytes]] = deque()
        self._failures = self.calls = 0
        self.epoch, self.sessions = 0, 0
        self._last_death = ""
        self.report = SandboxReport("none", {}, {})

    @property
    def alive(self) -> bool:
        process = self._process
        return process is not None and not process.dead

    @property
    def last_death(self) -> str:
        process = self._process
        return (process.dead if process is not None else "") or self._last_death

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self.alive else None

    def ready(self) -> Steps[int]:
        """Have a living worker here; its epoch. StateError when none can be started, or none with the sandbox that is required."""
        while True:
            process, epoch = self._started()
            try:
                (pid, kind, level, measures, missing), _ = yield process.hello
            except WorkerDied as death:
                self._failures += 1
                if self._failures >= _FAILED_STARTS:
                    raise StateError(f"worker processes cannot be started: {death.reason}") from None
                continue
            self._failures = 0
            self.report = SandboxReport(level, measures, missing)
            if not reaches(level, self._backend.require_sandbox):
                raise UserError(f"require_sandbox={self._backend.require_sandbox}: here a worker's sandbox reaches {self.report}")
            return epoch

    def have(self, image: BaseImage) -> Steps[int]:
        """Have an image in the worker; its number there."""
        parts: ImageParts = image.pages()
        epoch = self.epoch
        with self._lock:
            sent = self._images.get(parts.number)
        if sent is None or (sent.done() and sent.exception() is not None):
            if parts.base is None:
                descriptor = os.open(image.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    sent = self.call(epoch, "base", parts.number, image.digest, str(image.path), descriptor=descriptor, kill_after_s=SERVICE_S)
                except BaseException:
                    os.close(descriptor)
                    raise
                sent.add_done_callback(lambda _: os.close(descriptor))
            else:
                base = yield from self.have(parts.base)
                meta = (tuple(image.setup), image.digest, image.columns, parts.delta)
                sent = self.call(epoch, "image", parts.number, base, *meta, kill_after_s=SERVICE_S)
            with self._lock:
                if epoch == self.epoch:
                    self._images[parts.number] = sent
        yield sent
        return parts.number

    def call(self, epoch: int, name: str, *arguments: Any, kill_after_s: float, alone: bool = False, descriptor: int | None = None) -> Future[Any]:
        process = self._process
        if process is None or epoch != self.epoch:
            gone: Future[Any] = Future()
            gone.set_exception(WorkerDied(self.last_death, sent=False))
            return gone
        while self._garbage:
            of, body = self._garbage.popleft()
            if of == epoch:
                process.tell(body)
        self.calls += 1
        return process.call(wire.encode((name, *arguments)), kill_after_s=kill_after_s, alone=alone, descriptor=descriptor)

    def ask(self, name: str, *arguments: Any) -> Steps[Any]:
        """A call on the worker itself; StateError when it dies of it."""
        try:
            answer, _ = yield self.call(self.epoch, name, *arguments, kill_after_s=SERVICE_S)
        except WorkerDied as death:
            raise StateError(f"{name}: {death.reason}") from None
        return answer

    def tell(self, epoch: int, name: str, *arguments: Any) -> None:
        process = self._process
        if process is not None and epoch == self.epoch:
            process.tell(wire.encode((name, *arguments)))

    def discard(self, epoch: int, name: str, *arguments: Any) -> None:
        """`tell`, later: callable from a finalizer, which may run in the middle of a send."""
        self._garbage.append((epoch, wire.encode((name, *arguments))))

    def count(self, step: int) -> None:
        """A session more, or fewer, lives here."""
        with self._lock:
            self.sessions += step

    def load(self) -> tuple[int, int]:
        process = self._process
        return self.sessions, process.load() if process is not None else 0

    def close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def _started(self) -> tuple[WorkerProcess, int]:
        with self._lock:
            if self._backend.closed:
                raise StateError("the backend is closed")
            if self._process is None or self._process.dead:
                self.epoch += 1
                self._images = {}
                self._process = self._backend.start_worker(self._on_death)
            return self._process, self.epoch

    def _on_death(self, process: WorkerProcess) -> None:
        self._last_death = process.dead
