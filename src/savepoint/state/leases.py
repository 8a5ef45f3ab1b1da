"""Who holds what, until when: owners, deadlines, fencing tokens, and admission by a memory budget.

A lease reserves what a typical trajectory needs and pays for more as it grows; a parked one pays for its pages alone. When the budget is used
up, new leases wait in the order of their coming, and are refused with the figures when their time is over.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from savepoint.state.errors import NoRoom, StaleLease
from savepoint.state.watchdog import Alarm, watchdog

# What a live lease is charged at least: connection, page cache and tables (0.2 MB measured) and a delta of ordinary size.
RESERVE_BYTES = 2 << 20
PARKED_BYTES = 16 << 10


class Lease:
    """One lease: who, until when, and which handle is the valid one."""

    __slots__ = ("alarm", "charged", "ends_at", "ended", "expire", "how", "id", "owner", "parked", "token", "ttl_s")

    def __init__(self, owner: str, ttl_s: float | None, charged: int) -> None:
        self.id, self.owner, self.ttl_s = secrets.token_hex(8), owner, ttl_s
        self.token, self.charged = 0, charged
        self.parked, self.ended, self.how = False, "", ""  # how: it is to end, where not by its time
        self.ends_at: float | None = None
        self.alarm: Alarm | None = None
        self.expire: Callable[[], object] | None = None

    def check(self, token: int) -> None:
        """StaleLease when the handle with this token may no longer touch the session."""
        if self.ended:
            raise StaleLease(f"the session of {self.owner!r} {self.ended}")
        if token != self.token:
            raise StaleLease(f"the session of {self.owner!r} was taken over by another holder")


@dataclass(frozen=True, slots=True)
class LeaseStats:
    """live, parked: leases now. waiting: callers that wait for room. charged_bytes: of budget_bytes (None: no budget). granted: so far.
    refused: for want of room. expired: ended by their deadline or because nobody held them."""

    live: int
    parked: int
    waiting: int
    charged_bytes: int
    budget_bytes: int | None
    granted: int
    refused: int
    expired: int


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """pid: None while the place is empty. sessions: leased on it. calls: answered or under way. restarts: processes that have died here."""

    pid: int | None
    sessions: int
    calls: int
    restarts: int
    sandbox: str


@dataclass(frozen=True, slots=True)
class BackendStats:
    leases: LeaseStats
    workers: tuple[WorkerStats, ...]


class LeaseBook:
    """All leases of one backend. Thread-safe; nothing in it waits."""

    def __init__(self, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        self._lock = threading.RLock()
        self._leases: dict[str, Lease] = {}
        self._waiting: deque[tuple[Future[Lease], str, float | None, int]] = deque()
        self._charged = self._granted = self._refused = self._expired = 0

    def admit(self, owner: str, ttl_s: float | None, bytes_: int, wait_s: float) -> Future[Lease]:
        """A future of the lease: done at once while there is room, else when there is. NoRoom after `wait_s` seconds, or at once where it never fits."""
        future: Future[Lease] = Future()
        with self._lock:
            if self.budget_bytes is not None and bytes_ > self.budget_bytes:
                self._refused += 1
                future.set_exception(NoRoom(f"a lease for {owner!r} needs {_mb(bytes_)}; the whole memory budget is {_mb(self.budget_bytes)}"))
                return future
            if not self._waiting and self._fits(bytes_):
                future.set_result(self._grant(owner, ttl_s, bytes_))
                return future
            self._waiting.append((future, owner, ttl_s, bytes_))
        alarm = watchdog.arm(time.monotonic() + wait_s, lambda: self._refuse(future, owner, wait_s))
        future.add_done_callback(lambda _: watchdog.disarm(alarm))
        return future

    def arm(self, lease: Lease, expire: Callable[[], object]) -> None:
        """From now on `expire`, and nothing else, is called when the lease's time is up, again and again until the lease has ended."""
        if lease.alarm is not None:
            watchdog.disarm(lease.alarm)
            lease.alarm = None
        lease.expire = expire
        if lease.ttl_s is not None:
            lease.ends_at = time.monotonic() + lease.ttl_s
            lease.alarm = watchdog.arm(lease.ends_at, expire)

    def renew(self, lease: Lease, ttl_s: float | None) -> None:
        """The lease ends `ttl_s` seconds from now."""
        lease.ttl_s = ttl_s
        if lease.expire is not None:
            self.arm(lease, lease.expire)

    def charge(self, lease: Lease, held_bytes: int, *, parked: bool) -> None:
        """What the lease holds now. The budget is never a reason to stop one that is running: its own quota is."""
        due = held_bytes + PARKED_BYTES if parked else max(RESERVE_BYTES, held_bytes)
        if due == lease.charged and parked == lease.parked:
            return
        with self._lock:
            if lease.id in self._leases:
                self._charged += due - lease.charged
                lease.charged, lease.parked = due, parked
        self._admit_waiting()

    def hold(self, step: int) -> None:
        """So many bytes more, or fewer, are held by trees of states rather than by a lease."""
        with self._lock:
            self._charged += step
        self._admit_waiting()

    def end(self, lease: Lease, how: str, *, expired: bool = False) -> bool:
        """The lease is over; `how` completes "the session of 'x' ...". False when it was already."""
        with self._lock:
            if self._leases.pop(lease.id, None) is None:
                return False
            lease.ended = how
            self._charged -= lease.charged
            self._expired += expired
        if lease.alarm is not None:
            watchdog.disarm(lease.alarm)
        self._admit_waiting()
        return True

    def close(self) -> None:
        """Refuse whoever waits."""
        with self._lock:
            waiting, self._waiting = list(self._waiting), deque()
        for future, owner, _, _ in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(NoRoom(f"the backend was closed while {owner!r} waited for a lease"))

    def stats(self) -> LeaseStats:
        with self._lock:
            parked = sum(lease.parked for lease in self._leases.values())
            waiting = sum(not future.done() for future, *_ in self._waiting)
            return LeaseStats(
                len(self._leases) - parked, parked, waiting, self._charged, self.budget_bytes, self._granted, self._refused, self._expired
            )  # fmt: skip

    # ------------------------------------------------------------------ inside

    def _fits(self, bytes_: int) -> bool:
        return self.budget_bytes is None or self._charged + bytes_ <= self.budget_bytes

    def _grant(self, owner: str, ttl_s: float | None, bytes_: int) -> Lease:
        lease = Lease(owner, ttl_s, bytes_)
        self._leases[lease.id] = lease
        self._charged += bytes_
        self._granted += 1
        return lease

    def _admit_waiting(self) -> None:
        """Strictly in order: a large lease at the head is not passed by small ones for ever."""
        ready: list[tuple[Future[Lease], Lease]] = []
        with self._lock:
            while self._waiting:
                future, owner, ttl_s, bytes_ = self._waiting[0]
                if future.done():
                    self._waiting.popleft()
                    continue
                if not self._fits(bytes_):
                    break
                self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    ready.append((future, self._grant(owner, ttl_s, bytes_)))
        for future, lease in ready:
            future.set_result(lease)

    def _refuse(self, future: Future[Lease], owner: str, wait_s: float) -> None:
        with self._lock:
            kept = [entry for entry in self._waiting if entry[0] is not future]
            if len(kept) == len(self._waiting):
                return
            self._waiting = deque(kept)
            self._refused += 1
            taken = f"{len(self._leases)} leases hold {_mb(self._charged)} of {_mb(self.budget_bytes or 0)}"
            words = f"no room for a lease of {owner!r}: {taken}; waited {wait_s:g} s"
        if future.set_running_or_notify_cancel():
            future.set_exception(NoRoom(words))
        self._admit_waiting()


def _mb(bytes_: int) -> str:
    return f"{bytes_ / 1e6:.1f} MB"
