"""One thread that keeps the time of all sessions: it interrupts late statements and closes leases whose time is up.

Arming and disarming cost a microsecond, because the thread sleeps until the earliest time it knows and is woken only for an earlier one.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

_ALWAYS_KEPT = 256  # entries that are never worth a search for disarmed ones
RETRY_S = 0.01  # an interrupt that falls between two statements is lost; it is repeated until the call disarms it


class Alarm:
    """`ring` is called in the watchdog's thread from time `at` (time.monotonic) on, again and again until the alarm is disarmed."""

    __slots__ = ("at", "lock", "ring")

    def __init__(self, at: float, ring: Callable[[], object]) -> None:
        self.at, self.lock = at, threading.RLock()  # re-entrant: what an alarm rings may disarm it
        self.ring: Callable[[], object] | None = ring


class Watchdog:
    """Alarms for a process. The thread is a daemon and starts with the first alarm.

    The alarms are a heap, from which disarmed ones are taken when they come to its top, or when they are the greater part of it: so the cost of one
    does not depend on how many there are.
    """

    def __init__(self) -> None:
        self._alarms: list[tuple[float, int, Alarm]] = []
        self._numbers = itertools.count()  # so that alarms themselves are never compared
        self._most = _ALWAYS_KEPT  # entries at which disarmed ones are taken out
        self._changed = threading.Condition()
        self._wakes_at: float | None = None
        self._thread: threading.Thread | None = None

    def arm(self, at: float, ring: Callable[[], object]) -> Alarm:
        alarm = Alarm(at, ring)
        with self._changed:
            self._push(at, alarm)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="savepoint-watchdog", daemon=True)
                self._thread.start()
            elif self._wakes_at is None or at < self._wakes_at:
                self._wakes_at = at
                self._changed.notify()
        return alarm

    def disarm(self, alarm: Alarm) -> None:
        """After this returns the alarm does not ring, not even one that was about to. Leaves the heap alone: a finalizer may call it at any point."""
        with alarm.lock:
            alarm.ring = None

    def _push(self, at: float, alarm: Alarm) -> None:
        if len(self._alarms) >= self._most:
            self._alarms = [entry for entry in self._alarms if entry[2].ring is not None]
            heapq.heapify(self._alarms)
            self._most = max(_ALWAYS_KEPT, 2 * len(self._alarms))
        heapq.heappush(self._alarms, (at, next(self._numbers), alarm))

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._alarms and self._alarms[0][2].ring is None:
                    heapq.heappop(self._alarms)
                self._wakes_at = self._alarms[0][0] if self._alarms else None
                self._changed.wait(None if self._wakes_at is None else max(0.0, self._wakes_at - time.monotonic()))
                now = time.monotonic()
                late = []
                while self._alarms and self._alarms[0][0] <= now:
                    late.append(heapq.heappop(self._alarms)[2])
            for alarm in late:
                with alarm.lock:
                    if alarm.ring is not None:
                        alarm.ring()
            again = time.monotonic() + RETRY_S
            with self._changed:
                for alarm in late:
                    if alarm.ring is not None:
                        self._push(again, alarm)


watchdog = Watchdog()
