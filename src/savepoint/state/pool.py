"""The backend whose SQL runs in worker processes: `open_backend("sqlite", workers=N, threads=T)`.

A session stays with the worker that it was leased on. A worker that dies is replaced, and takes along what was shipped of its sessions.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil

from savepoint.errors import UserError
from savepoint.state import wire
from savepoint.state.client import WorkerDied, WorkerProcess
from savepoint.state.errors import StateError
from savepoint.state.image import BaseImage, ImageCache, file_identity
from savepoint.state.leases import RESERVE_BYTES, BackendStats, Lease, LeaseBook, WorkerStats
from savepoint.state.placed import SERVICE_S
from savepoint.state.remote import RemoteSession
from savepoint.state.sandbox import LEVELS, SandboxReport, reaches
from savepoint.state.session import Quota
from savepoint.state.sqlite.clock import DEFAULT_CLOCK, clock_ms
from savepoint.state.sqlite.store import Progress, Store, default_store
from savepoint.state.steps import Steps, finish

# What a worker needs to run at all: an interpreter, apsw, the page store.
WORKER_BYTES = 48 << 20
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


class WorkerBackend:
    """Images and sessions over worker processes; otherwise like `SqliteBackend`.

    workers: processes. threads: calls at a time in each. ship: "call" ships a session's delta after every call that changed it, so that the death
    of its worker costs nothing; "never" saves the copy. budget_bytes: admission (`LeaseBook`), and, shared among the workers, what their pages and
    temporary files may take of memory. spill_bytes: pages beyond that go to a file in the store, for each worker, which has no name and is gone with it.
    require_sandbox: the least level, of sandbox.LEVELS.
    """

    def __init__(
        self, store: str | Path | None = None, *, workers: int, threads: int = 4, ship: Literal["call", "never"] = "call", budget_bytes: int | None = None,
        spill_bytes: int = 16 << 30, require_sandbox: str = "none", sandboxed: bool = True, lease_wait_s: float = 60.0,
    ) -> None:  # fmt: skip
        available = psutil.virtual_memory().available
        if workers < 1 or threads < 1:
            raise UserError(f"workers={workers}, threads={threads}: at least one of each")
        if workers * WORKER_BYTES > available:
            raise UserError(f"workers={workers}: each needs {WORKER_BYTES / 1e6:.0f} MB at least, and {available / 1e6:.0f} MB are available")
        if ship not in ("call", "never"):
            raise UserError(f"ship={ship!r}: use 'call' or 'never'")
        reaches("none", require_sandbox)
        self.store = Store(Path(store) if store is not None else default_store())
        self.threads, self.ship, self.sandboxed, self.require_sandbox, self.lease_wait_s = threads, ship == "call", sandboxed, require_sandbox, lease_wait_s
        self.budget_bytes = budget_bytes if budget_bytes is not None else available // 2
        self.worker_bytes = self.budget_bytes // workers + (1 << 30)
        self.spill_bytes = spill_bytes
        self.book = LeaseBook(self.budget_bytes)
        self.closed = False
        self._slots = [Slot(self) for _ in range(workers)]
        self._images = ImageCache()
        self._numbers = itertools.count(1)
        self._sessions: weakref.WeakSet[RemoteSession] = weakref.WeakSet()
        self._lock = threading.RLock()

    # ------------------------------------------------------------------ images

    def import_base(self, path: str | Path, *, progress: Progress | None = None) -> BaseImage:
        """As `SqliteBackend.import_base`."""
        file, digest = self.store.add(Path(path), progress)
        self._live()
        return self._images.get((digest, ()), lambda: finish(self._open_steps(file, digest)))

    def derive(self, base: BaseImage, setup: Sequence[str]) -> BaseImage:
        """As `SqliteBackend.derive`. The set-up runs in one worker; the others get its delta."""
        self._live()
        return self._images.get((base.digest, tuple(setup)), lambda: finish(self._derive_steps(base, tuple(setup))), keep=True)

    def release(self, image: BaseImage) -> None:
        """Give an image's pages back now. Sessions on it go on; no new one can be leased."""
        self._images.drop(image)
        image.release()

    def _open_steps(self, file: Path, digest: str) -> Steps[BaseImage]:
        slot = self._least_loaded()
        yield from slot.ready()
        number, identity = self.number(), file_identity(file)
        parts = ImageParts(number, None, b"")
        image = BaseImage(digest, file, 0, 0, (), digest, 0, 0, parts, identity)
        yield from slot.have(image)
        size, page_size, columns = (yield from slot.ask("describe", number))
        self._forget_later(parts)
        return BaseImage(digest, file, size, page_size, (), digest, columns, 0, parts, identity)

    def _derive_steps(self, base: BaseImage, setup: tuple[str, ...]) -> Steps[BaseImage]:
        slot = self._least_loaded()
        yield from slot.ready()
        under = yield from slot.have(base)
        number = self.number()
        digest, size, columns, delta_bytes, delta = yield from slot.ask("derive", number, under, setup)
        root = base.pages().base or base
        parts = ImageParts(number, root, delta)
        self._forget_later(parts)
        return BaseImage(digest, base.path, size, base.page_size, (*base.setup, *setup), base.base_digest, columns, delta_bytes, parts, base.identity)

    def _forget_later(self, parts: ImageParts) -> None:
        for slot in self._slots:
            weakref.finalize(parts, _forget, weakref.ref(slot), parts.number).atexit = False

    # ------------------------------------------------------------------ leases

    def lease(
        self, image: BaseImage, *, owner: str, quota: Quota | None = None, ttl_s: float | None = 3600.0, seed: int = 0, clock: str = DEFAULT_CLOCK,
        wait_s: float | None = None,
    ) -> RemoteSession:  # fmt: skip
        """As `SqliteBackend.lease`. The first call on the session opens it in its worker."""
        return finish(self.lease_steps(image, owner=owner, quota=quota, ttl_s=ttl_s, seed=seed, clock=clock, wait_s=wait_s))

    def lease_steps(
        self, image: BaseImage, *, owner: str, quota: Quota | None = None, ttl_s: float | None = 3600.0, seed: int = 0, clock: str = DEFAULT_CLOCK,
        wait_s: float | None = None,
    ) -> Steps[RemoteSession]:  # fmt: skip
        if ttl_s is not None and not ttl_s > 0:
            raise ValueError(f"ttl_s={ttl_s}: must be positive, or None")
        clock_ms(clock)
        self._live()
        image.pages()
        lease = yield from self.admit_steps(owner, ttl_s, wait_s)
        session = RemoteSession(self, self._least_loaded(), lease, image, {"quota": quota or Quota(), "seed": seed, "clock": clock})
        self.arm(session)
        return session

    def admit_steps(self, owner: str, ttl_s: float | None, wait_s: float | None = None) -> Steps[Lease]:
        future = self.book.admit(owner, ttl_s, RESERVE_BYTES, self.lease_wait_s if wait_s is None else wait_s)
        try:
            lease: Lease = yield future
        except BaseException:
            if not future.cancel() and future.exception() is None:
                self.book.end(future.result(), "was never taken")
            raise
        return lease

    def arm(self, session: RemoteSession) -> None:
        """The session's lease begins to run, and the backend closes it should it end first."""
        self._sessions.add(session)
        expire = weakref.WeakMethod(session._expire)
        self.book.arm(session._lease, lambda: (method := expire()) and method())

    def abandon(self, lease: Lease, slot: Slot, asked: list[int]) -> None:
        """A session that nobody holds any more: called by its finalizer."""
        if self.book.end(lease, "was abandoned", expired=True):
            slot.count(-1)
            slot.discard(asked[0], "close", asked[1])

    def number(self) -> int:
        return next(self._numbers)

    def stats(self) -> BackendStats:
        workers = tuple(WorkerStats(slot.pid, slot.sessions, slot.calls, max(0, slot.epoch - 1), str(slot.report)) for slot in self._slots)
        return BackendStats(self.book.stats(), workers)

    def manifest(self) -> dict[str, Any]:
        """What a run's manifest says of its state backend; the sandbox level is the least that any worker reached."""
        reports = [slot.report for slot in self._slots if slot.epoch] or [SandboxReport("none", {}, {"worker": "none was started"})]
        least = min(reports, key=lambda report: LEVELS.index(report.level))
        return {"backend": "sqlite", "workers": len(self._slots), "threads": self.threads, "sandbox_level": least.level, "sandbox": str(least)}

    def close(self) -> None:
        """End every session and every worker process."""
        with self._lock:
            self.closed = True
        self.book.close()
        for session in list(self._sessions):
            session.close()
        for slot in self._slots:
            slot.close()

    def __enter__(self) -> WorkerBackend:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def start_worker(self, on_death: Callable[[WorkerProcess], None]) -> WorkerProcess:
        """A new process with this backend's limits. UserError when the store cannot hold its spill file."""
        try:
            self.store.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.store.folder}: cannot be written: {error.strerror}") from None
        return WorkerProcess(self.threads, self.worker_bytes, str(self.store.folder), self.spill_bytes, self.sandboxed, on_death)

    def _live(self) -> None:
        if self.closed:
            raise StateError("the backend is closed")

    def _least_loaded(self) -> Slot:
        return min(self._slots, key=Slot.load)


def _forget(slot: weakref.ref[Slot], number: int) -> None:
    alive = slot()
    if alive is not None:
        alive.discard(alive.epoch, "drop_image", number)


def sandbox_level() -> SandboxReport:
    """What a worker's sandbox reaches on this machine, tried out in a worker. StateError when none starts."""
    with tempfile.TemporaryDirectory() as folder:
        process = WorkerProcess(1, 1 << 30, folder, 1 << 20, True, lambda died: None)
        try:
            (_, _, level, measures, missing), _ = process.hello.result()
        except WorkerDied as death:
            raise StateError(death.reason) from None
        finally:
            process.close()
    return SandboxReport(level, measures, missing)
