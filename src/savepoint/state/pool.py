"""The backend whose SQL runs in worker processes: `open_backend("sqlite", workers=N, threads=T)`.

A session stays with the worker that it was leased on. A worker that dies is replaced, and takes along what was shipped of its sessions.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil

from savepoint.errors import UserError
from savepoint.state.client import WorkerDied, WorkerProcess
from savepoint.state.errors import Lost, StateError
from savepoint.state.forest import Forest
from savepoint.state.image import BaseImage, ImageCache, file_identity
from savepoint.state.leases import RESERVE_BYTES, BackendStats, Lease, LeaseBook, WorkerStats
from savepoint.state.placed import RemoteSnapshot
from savepoint.state.records import Node
from savepoint.state.remote import RemoteSession
from savepoint.state.sandbox import LEVELS, SandboxReport, reaches
from savepoint.state.session import Quota, Snapshot
from savepoint.state.slots import ImageParts, Slot
from savepoint.state.sqlite.clock import DEFAULT_CLOCK, clock_ms
from savepoint.state.sqlite.store import Progress, Store, default_store
from savepoint.state.steps import Steps, finish
from savepoint.state.tree import StateTree

# What a worker needs to run at all: an interpreter, apsw, the page store.
WORKER_BYTES = 48 << 20


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
        self.forest = Forest(hold=self.book.hold)
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
        self, image: BaseImage | Snapshot, *, owner: str, quota: Quota | None = None, ttl_s: float | None = 3600.0, seed: int = 0,
        clock: str = DEFAULT_CLOCK, wait_s: float | None = None,
    ) -> RemoteSession:  # fmt: skip
        """As `SqliteBackend.lease`. On an image, the first call on the session opens it in its worker; on a snapshot it is opened now, where that is."""
        return finish(self.lease_steps(image, owner=owner, quota=quota, ttl_s=ttl_s, seed=seed, clock=clock, wait_s=wait_s))

    def lease_steps(
        self, image: BaseImage | Snapshot, *, owner: str, quota: Quota | None = None, ttl_s: float | None = 3600.0, seed: int = 0,
        clock: str = DEFAULT_CLOCK, wait_s: float | None = None,
    ) -> Steps[RemoteSession]:  # fmt: skip
        if ttl_s is not None and not ttl_s > 0:
            raise ValueError(f"ttl_s={ttl_s}: must be positive, or None")
        clock_ms(clock)
        self._live()
        snapshot = image if isinstance(image, Snapshot) else None
        start = image.image if isinstance(image, Snapshot) else image
        start.pages()
        slot = self._least_loaded() if snapshot is None else self._slot_of(snapshot)
        lease = yield from self.admit_steps(owner, ttl_s, wait_s)
        options = {"quota": quota or Quota(), "seed": seed, "clock": clock}
        session = self.new_session(slot, lease, start, options, self.forest.place(snapshot, start) if snapshot is not None else None)
        self.arm(session)
        if snapshot is not None:
            try:
                yield from session.restore_steps(snapshot)
            except BaseException:
                session.close()
                raise
        return session

    def new_session(
        self, slot: Slot, lease: Lease, image: BaseImage, options: dict[str, Any], parent: Node | None, label: str = "", origin_owner: str | None = None
    ) -> RemoteSession:
        """The handle of a session that its first call will open. NoRoom, and the lease is over, where the tree has no place for it under `parent`."""
        try:
            return RemoteSession(self, slot, lease, image, options, parent=parent, label=label, origin_owner=origin_owner)
        except BaseException:
            self.book.end(lease, "could not be opened")
            raise

    def tree(self, root: BaseImage | Snapshot) -> StateTree:
        """As `SqliteBackend.tree`."""
        self._live()
        return StateTree(self.forest, root, self._digests_steps)

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

    def abandon(self, lease: Lease, slot: Slot, asked: list[int], node: Node) -> None:
        """A session that nobody holds any more: called by its finalizer."""
        self.forest.discard(node)
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
        self.forest.close()
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

    def _slot_of(self, snapshot: Snapshot) -> Slot:
        """Where a snapshot's bytes are, or, if they are only in the trainer, where there is room."""
        kept: RemoteSnapshot = snapshot.held()
        if snapshot.lost is not None:
            raise Lost(snapshot.lost)
        return kept.slot if kept.there else self._least_loaded()

    def _digests_steps(self, snapshots: list[Snapshot]) -> Steps[list[str | None]]:
        """The page digests of snapshots: one call for each worker that holds some; those of dead workers from what was shipped. None where there are none."""
        found: dict[int, str | None] = {}
        here: dict[Slot, list[tuple[int, int]]] = {}
        for place, snapshot in enumerate(snapshots):
            kept: RemoteSnapshot | None = snapshot.contents
            if kept is not None and kept.there:
                here.setdefault(kept.slot, []).append((place, kept.number))
        for slot, asked in here.items():
            digests = yield from slot.ask("digests", tuple(number for _, number in asked))
            found.update(zip((place for place, _ in asked), digests, strict=True))
        for place, snapshot in enumerate(snapshots):
            if found.get(place) is None and not snapshot.pruned and snapshot.lost is None:
                session = yield from self.lease_steps(snapshot, owner="digest of a snapshot")
                with session:
                    found[place] = yield from session.service_steps("digest", "page")
        return [found.get(place) for place in range(len(snapshots))]

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
