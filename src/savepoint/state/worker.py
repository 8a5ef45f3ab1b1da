"""The process in which an agent's SQL runs: `python -m savepoint.state.worker DESCRIPTOR`, started by `client.WorkerProcess`.

It holds images, sessions and snapshots under the numbers that the trainer gave them, and answers calls on one socket. The trainer sends at most
`threads` calls at a time, and there is one thread more than that: somebody can always read, so an interrupt arrives and the end of the trainer
is seen.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from savepoint.state import sandbox, wire
from savepoint.state.errors import StaleLease, StateError
from savepoint.state.image import BaseImage
from savepoint.state.session import ExecResult, SessionStats, Snapshot
from savepoint.state.sqlite.backend import SqliteBackend, snapshot_digest
from savepoint.state.sqlite.diff import TableDiff
from savepoint.state.sqlite.pack import pack
from savepoint.state.sqlite.session import Session
from savepoint.state.wire import Channel, WireError

# Results of so few rows travel in the answer itself.
_INLINE_ROWS = 64
# A call that runs for so long has another thread read meanwhile; until then, calls that arrive wait behind it.
_HAND_OVER_S = 0.002
_QUIET, _DOZE_S = 200, 0.25  # rounds without a call after which the watch lies down; how often it looks up then
# What may be asked of a session by name, beyond what has an operation of its own.
SESSION_CALLS = frozenset("digest stats temporary park".split())


# The session's figures, whether a transaction is open, what would be lost with the process (None: nothing), whether that includes committed
# changes, whether the part is the whole since the image, the part that is shipped.
Trail = tuple[SessionStats, bool, str | None, bool, bool, bytes | None]
_INTERPRETER_BYTES = 512 << 20  # of a worker's memory that pages and temporary files may not take
_ALWAYS_KEPT = 64 << 10  # bytes of increments that are never worth a sum


class Kept:
    """A session, and what of it has been shipped to the trainer: increments, from the image on; at times their sum, so that they do not pile up."""

    def __init__(self, session: Session, ship: bool) -> None:
        """The trainer knows the contents as they are: the image, and the parts that it sent or has."""
        self.session, self.ship = session, ship
        self._image = session.origin()
        self._last = session.freeze()
        self._shipped = session.version
        self._sent = 0  # bytes of increments since the last whole
        self._lock = threading.Lock()
        self._ended = False

    def current(self, known: Snapshot) -> None:
        """The trainer knows the contents as they are now, by `known`."""
        self._last, self._shipped, self._sent = known, self.session.version, 0

    def trail(self) -> Trail:
        """What an answer says of the session besides its value; ships what changed, where that can be."""
        session, part, whole = self.session, None, False
        stats = session.stats()
        if self.ship and not session.in_transaction and session.version != self._shipped:
            now = session.freeze()
            whole = self._sent > 2 * stats.delta_bytes + _ALWAYS_KEPT
            part = session.delta(self._image if whole else self._last)
            self._sent = 0 if whole else self._sent + len(part)
            self._last, self._shipped = now, session.version
        unshipped = session.committed_since(self._shipped)  # inside a transaction: before it began
        fragile = session.unmovable() or ("changes that were not shipped" if unshipped else None)
        return stats, session.in_transaction, fragile, unshipped, whole, part

    @contextlib.contextmanager
    def used(self) -> Iterator[Session]:
        """For the time of a call. StaleLease when the session has ended meanwhile; if it ends during the call, it is closed afterwards."""
        try:
            with self._lock:
                if self._ended:
                    raise StaleLease("the session has ended")
                yield self.session
        finally:
            if self._ended:  # looked at once the lock is free again: `end` has either closed it or left it to this line
                self.session.close()

    def end(self) -> None:
        """Close it, now or when the call under way has stopped. Waits for nothing: the one who reads calls it."""
        self._ended = True
        if self._lock.acquire(blocking=False):
            try:
                self.session.close()
            finally:
                self._lock.release()
        else:
            self.session.interrupt()


class Worker:
    """The operations, each a method whose name begins with `do_`. Numbers of sessions, images and snapshots come from the trainer."""

    def __init__(self, channel: Channel, backend: SqliteBackend) -> None:
        self.channel, self.backend = channel, backend
        self.images: dict[int, BaseImage] = {}
        self.sessions: dict[int, Kept] = {}
        self._table = threading.Lock()  # of the next two
        self.early: set[int] = set()  # sessions that were closed before they were opened: their caller had given up
        self.snapshots: dict[int, tuple[Snapshot, int]] = {}  # and the size of its pages

    # ------------------------------------------------------------------ images

    def do_base(self, call: int, image: int, digest: str, place: str) -> None:
        self.images[image] = self.backend.open_descriptor(self.channel.descriptors.popleft(), digest, Path(place))

    def do_describe(self, call: int, image: int) -> tuple[int, int, int]:
        described = self.images[image]
        return described.size, described.page_size, described.columns

    def do_derive(self, call: int, image: int, base: int, setup: tuple[str, ...]) -> tuple[str, int, int, int, bytes]:
        made = self.images[image] = self.backend.derive(self.images[base], setup)
        return made.digest, made.size, made.columns, made.delta_bytes, self.backend.pack_image(made)

    def do_image(self, call: int, image: int, base: int, setup: tuple[str, ...], digest: str, columns: int, state: bytes) -> None:
        self.images[image] = self.backend.unpack_image(self.images[base], setup, digest, columns, state)

    def do_drop_image(self, call: int, image: int) -> None:
        dropped = self.images.pop(image, None)
        if dropped is not None:
            self.backend.release(dropped)

    # ------------------------------------------------------------------ sessions

    def do_first(self, call: int, opening: tuple[int, int, str, dict[str, Any], bool, tuple[bytes, ...]], name: str, arguments: tuple[Any, ...]) -> Any:
        """Open a session and make the first call on it."""
        session, image, owner, options, ship, parts = opening
        opened = self.backend.lease(self.images[image], owner=owner, ttl_s=None, **options)
        try:
            opened.apply(*parts)
        except BaseException:
            opened.close()
            raise
        self._hold(session, Kept(opened, ship))
        return getattr(self, f"do_{name}")(call, session, *arguments)

    def do_execute(self, call: int, session: int, sql: str, deadline_s: float, max_rows: int, max_bytes: int, readonly: bool) -> tuple[ExecResult, Trail]:
        held = self._held(session)
        with held.used() as running:
            result = running.execute(sql, deadline_s=deadline_s, max_rows=max_rows, max_bytes=max_bytes, readonly=readonly)
            if len(result.rows) > _INLINE_ROWS:
                wire.send_rows(lambda kind, body: self.channel.send(call, kind, body), result.rows)
                result = replace(result, rows=())
            return result, held.trail()

    def do_execute_all(
        self, call: int, session: int, scripts: Sequence[str], deadline_s: float, max_rows: int, max_bytes: int, readonly: bool
    ) -> tuple[list[tuple[ExecResult, int]], Trail]:
        """Results without their rows, and how many rows each has; the rows of all go before, in order."""
        held = self._held(session)
        with held.used() as running:
            results = running.execute_all(scripts, deadline_s=deadline_s, max_rows=max_rows, max_bytes=max_bytes, readonly=readonly)
            wire.send_rows(lambda kind, body: self.channel.send(call, kind, body), tuple(chain.from_iterable(result.rows for result in results)))
            return [(replace(result, rows=()), len(result.rows)) for result in results], held.trail()

    def do_session(self, call: int, session: int, name: str, arguments: tuple[Any, ...]) -> tuple[Any, Trail]:
        if name not in SESSION_CALLS:
            raise StateError(f"no such call: {name}")
        held = self._held(session)
        with held.used() as running:
            return getattr(running, name)(*arguments), held.trail()

    def do_reset(self, call: int, session: int) -> tuple[Any, Trail]:
        held = self._held(session)
        with held.used() as running:
            proof = running.reset()
            held.current(running.origin())
            return proof, held.trail()

    def do_checkpoint(self, call: int, session: int, snapshot: int, label: str, since: int | None) -> tuple[tuple[Any, ...], Trail]:
        """The snapshot's figures, the last one: pages in which it differs from the snapshot `since`, or from the image."""
        held = self._held(session)
        with held.used() as running:
            taken = running.freeze(label)
            earlier = self.snapshots.get(since) if since is not None else None
            changed = taken.pages if earlier is None else taken.contents.differs(earlier[0].contents)
            self.snapshots[snapshot] = taken, running.image.page_size
            return (taken.base_digest, taken.size, taken.pages, taken.settings, changed), held.trail()

    def do_restore(self, call: int, session: int, snapshot: int, known: bool) -> tuple[None, Trail]:
        held = self._held(session)
        with held.used() as running:
            kept = self._kept(snapshot)[0]
            running.restore(kept)
            if known:
                held.current(kept)
            return None, held.trail()

    def do_adopt(self, call: int, session: int, parts: tuple[bytes, ...]) -> tuple[None, Trail]:
        held = self._held(session)
        with held.used() as running:
            running.reset()
            running.apply(*parts)
            held.current(running.freeze())
            return None, held.trail()

    def do_fork(self, call: int, session: int, numbers: tuple[int, ...]) -> tuple[None, Trail]:
        held = self._held(session)
        with held.used() as running:
            trail = held.trail()  # ships what is new, so that the forks begin with what the trainer knows
            for number, fork in zip(numbers, running.fork(len(numbers)), strict=True):
                self._hold(number, Kept(fork, held.ship))
            return None, trail

    def do_adopt_snapshot(self, call: int, session: int, snapshot: int, parts: tuple[bytes, ...], settings: dict[str, str]) -> tuple[None, Trail]:
        held = self._held(session)
        with held.used() as running:
            scratch = self.backend.lease(running.image, owner="snapshot", quota=running.quota, ttl_s=None)
            with scratch:
                scratch.apply(*parts)
                self.snapshots[snapshot] = replace(scratch.freeze(), settings=settings), running.image.page_size
            return None, held.trail()

    def do_apply(self, call: int, session: int, deltas: tuple[bytes, ...]) -> tuple[None, Trail]:
        held = self._held(session)
        with held.used() as running:
            running.apply(*deltas)
            return None, held.trail()

    def do_delta(self, call: int, session: int, since: int | None) -> tuple[bytes, Trail]:
        held = self._held(session)
        with held.used() as running:
            return running.delta(self._snapshot(since)), held.trail()

    def do_diff(self, call: int, session: int, before: int | None, after: int | None, samples: int) -> tuple[tuple[TableDiff, ...], Trail]:
        held = self._held(session)
        with held.used() as running:
            return running.diff(self._snapshot(before), self._snapshot(after), samples=samples), held.trail()

    def do_pack(self, call: int, snapshot: int) -> bytes:
        taken, page_size = self._kept(snapshot)
        return pack(taken.contents, page_size, taken.base_digest, taken.settings)

    def do_digests(self, call: int, snapshots: tuple[int, ...]) -> tuple[str | None, ...]:
        found = [self.snapshots.get(number) for number in snapshots]
        return tuple(None if kept is None else snapshot_digest(kept[0]) for kept in found)

    def do_drop_snapshot(self, call: int, snapshot: int) -> None:
        self.snapshots.pop(snapshot, None)

    def do_close(self, call: int, session: int) -> None:
        with self._table:
            held = self.sessions.pop(session, None)
            if held is None:
                self.early.add(session)
        if held is not None:
            held.end()

    def do_interrupt(self, call: int, session: int) -> None:
        held = self.sessions.get(session)
        if held is not None:
            held.session.interrupt()

    def do_live(self, call: int) -> dict[str, int]:
        return {**self.backend.pages.live(), "sessions": len(self.sessions), "snapshots": len(self.snapshots)}

    def _hold(self, number: int, held: Kept) -> Kept:
        with self._table:
            early = number in self.early
            self.early.discard(number)
            replaced = self.sessions.pop(number, None)
            if not early:
                self.sessions[number] = held
        for ended in (replaced, held if early else None):
            if ended is not None:
                ended.end()
        return held

    def _snapshot(self, number: int | None) -> Snapshot | None:
        return None if number is None else self._kept(number)[0]

    def _kept(self, snapshot: int) -> tuple[Snapshot, int]:
        kept = self.snapshots.get(snapshot)
        if kept is None:
            raise StateError("the snapshot was pruned")
        return kept

    def _held(self, session: int) -> Kept:
        held = self.sessions.get(session)
        if held is None:
            raise StaleLease("the session has ended")
        return held


class Readers:
    """Threads that take turns at reading calls; the one who reads also runs what it has read.

    Handing the reading over for every call would cost more than the call (two switches of thread, both for the interpreter lock). So whoever
    reads goes on reading after a call, unless the call takes long: then another thread takes over meanwhile, and somebody reads again.
    """

    def __init__(self, channel: Channel, worker: Worker, threads: int) -> None:
        self._channel, self._worker = channel, worker
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._reader = 0  # the thread whose turn it is
        self._idle = set(range(threads))
        self._busy_since: float | None = None  # when the reader began to run a call
        self._threads = threads
        self._stir = threading.Event()
        self._dozing = False

    def run(self) -> None:
        """Answer calls until the trainer closes the connection; then end the process, whatever is still running."""
        for number in range(1, self._threads):
            threading.Thread(target=self._serve, args=(number,), daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()
        self._serve(0)

    def _serve(self, me: int) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._reader == me)
                self._idle.discard(me)
            while self._reader == me:
                try:
                    number, _, body = self._channel.receive()
                except WireError:
                    os._exit(0)  # the trainer is gone: nobody waits for what other threads still compute
                self._busy_since = time.monotonic()
                if self._dozing:
                    self._stir.set()
                with contextlib.suppress(WireError):
                    _answer(self._channel, self._worker, number, body)
                with self._lock:
                    if self._reader == me:
                        self._busy_since = None
                    else:
                        self._idle.add(me)

    def _watch(self) -> None:
        """Have another thread read when the one whose turn it is has been running a call for some time."""
        quiet = 0
        while True:
            time.sleep(_HAND_OVER_S)
            with self._lock:
                since = self._busy_since
                quiet = quiet + 1 if since is None else 0
                if since is not None and time.monotonic() - since > _HAND_OVER_S and self._idle:
                    self._reader, self._busy_since = min(self._idle), None
                    self._turn.notify_all()
            if quiet > _QUIET:
                self._stir.clear()
                self._dozing = True
                self._stir.wait(_DOZE_S)  # an end, should a call have begun just before this line
                self._dozing = False


def _answer(channel: Channel, worker: Worker, number: int, body: bytearray) -> None:
    try:
        name, *arguments = wire.decode(body)
        operation: Callable[..., Any] = getattr(worker, f"do_{name}")
        answer = wire.encode(operation(number, *arguments))
    except WireError:
        raise
    except Exception as error:  # every failure of a call travels to its caller, who knows the kinds
        kind, answer = wire.FAILURE, wire.encode_error(error)
    else:
        kind = wire.ANSWER
    if number:  # 0: nobody waits, and whoever reads must never be held up by writing
        channel.send(number, kind, answer)


def main(descriptor: int) -> None:
    """Load everything, give up every privilege, say which, and serve."""
    channel = Channel(socket.socket(fileno=descriptor))
    number, _, body = channel.receive()
    threads, memory_bytes, spill_folder, spill_bytes, sandboxed = wire.decode(body)
    backend = SqliteBackend()
    spill = tempfile.TemporaryFile(dir=spill_folder)  # noqa: SIM115 - as long as the process; it has no name, so nothing is left of it
    # A session's own quota ends it long before; this bounds all of them together, and leaves the interpreter and SQLite their part.
    backend.pages.budget(memory_bytes - _INTERPRETER_BYTES, spill.fileno(), spill_bytes)
    report = sandbox.SandboxReport("none", {}, {"sandbox": "not asked for"})
    if sandboxed:
        report = sandbox.enter(memory_bytes=memory_bytes, file_bytes=spill_bytes)
    channel.send(number, wire.ANSWER, wire.encode((os.getpid(), backend.pages.kind, report.level, report.measures, report.missing)))
    Readers(channel, Worker(channel, backend), threads + 1).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
