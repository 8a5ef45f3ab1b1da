"""One thread that keeps the time of all sessions: it interrupts late statements and closes leases whose time is up.

Arming and disarming cost a microsecond, because the thread sleeps until the earliest time it knows and is woken only for an earlier one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

RETRY_S = 0.01  # an interrupt that falls between two statements is lost; it is repeated until the call disarms it


class Alarm:
    """`ring` is called in the watchdog's thread from time `at` (time.monotonic) on, again and again until the alarm is disarmed."""

    __slots__ = ("at", "lock", "ring")

    def __init__(self, at: float, ring: Callable[[], object]) -> None:
        self.at, self.lock = at, threading.RLock()  # re-entrant: what an alarm rings may disarm it
        self.ring: Callable[[], object] | None = ring


class Watchdog:
    """Alarms for a process. The thread is a daemon and starts with the first alarm."""

    def __init__(self) -> None:
        self._alarms: set[Alarm] = set()
        self._changed = threading.Condition()
        self._wakes_at: float | None = None
        self._thread: threading.Thread | None = None

    def arm(self, at: float, ring: Callable[[], object]) -> Alarm:
        alarm = Alarm(at, ring)
        with self._changed:
            self._alarms.add(alarm)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="savepoint-watchdog", daemon=True)
                self._thread.start()
            elif self._wakes_at is None or at < self._wakes_at:
                self._wakes_at = at
                self._changed.notify()
        return alarm

    def disarm(self, alarm: Alarm) -> None:
        """After this returns the alarm does not ring, not even one that was about to."""
        with alarm.lock:
            alarm.ring = None
        with self._changed:
            self._alarms.discard(alarm)

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                # A copy: the garbage collector may close a leaked session, which disarms its alarm, in the middle of this line.
                self._wakes_at = min((alarm.at if alarm.at > now else now + RETRY_S for alarm in list(self._alarms)), default=None)
                self._changed.wait(None if self._wakes_at is None else self._wakes_at - now)
                now = time.monotonic()
                late = [alarm for alarm in list(self._alarms) if alarm.at <= now]
            for alarm in late:
                with alarm.lock:
                    if alarm.ring is not None:
                        alarm.ring()


watchdog = Watchdog()
