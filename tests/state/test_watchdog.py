"""The watchdog: punctual, silent after disarming, asleep in between."""

from __future__ import annotations

import threading
import time

from savepoint.state.watchdog import Watchdog


def test_alarms_ring_when_due_whatever_their_order():
    dog, rung = Watchdog(), []
    start = time.monotonic()
    for delay in (0.15, 0.05, 0.1, 30.0):
        dog.arm(start + delay, lambda delay=delay: rung.append((delay, time.monotonic() - start)))
    time.sleep(0.3)
    first = {}
    for delay, at in rung:
        first.setdefault(delay, at)
    assert sorted(first) == [0.05, 0.1, 0.15] and all(0 <= at - delay < 0.05 for delay, at in first.items())


def test_an_alarm_rings_until_it_is_disarmed_and_then_never():
    dog, rung = Watchdog(), []
    alarm = dog.arm(time.monotonic() + 0.01, lambda: rung.append(1))
    time.sleep(0.15)
    dog.disarm(alarm)
    count = len(rung)
    assert count >= 3
    time.sleep(0.05)
    assert len(rung) == count


def test_disarming_in_time_prevents_it():
    dog, rung = Watchdog(), []
    for _ in range(200):
        dog.disarm(dog.arm(time.monotonic() + 0.02, lambda: rung.append(1)))
    time.sleep(0.06)
    assert rung == []


def test_an_alarm_that_is_disarmed_while_another_rings_does_not_ring():
    dog, rung, entered, release = Watchdog(), [], threading.Event(), threading.Event()
    due = time.monotonic() + 0.05

    def slow() -> None:
        entered.set()
        release.wait(2)

    slow_ones = [dog.arm(due, slow) for _ in range(2)]
    others = [dog.arm(due, lambda number=number: rung.append(number)) for number in range(20)]
    assert entered.wait(1)
    for alarm in others:
        dog.disarm(alarm)
    count = len(rung)
    release.set()
    for alarm in slow_ones:
        dog.disarm(alarm)
    time.sleep(0.05)
    assert len(rung) == count < 20


def test_what_rings_may_disarm_itself():
    dog, rung = Watchdog(), []
    done = threading.Event()

    def ring() -> None:
        rung.append(1)
        dog.disarm(alarm)
        done.set()

    alarm = dog.arm(time.monotonic() + 0.01, ring)
    assert done.wait(1)
    time.sleep(0.05)
    assert rung == [1]


def test_disarmed_alarms_do_not_pile_up_nor_cost_the_armed_ones_anything():
    dog, far = Watchdog(), time.monotonic() + 3600
    armed = [dog.arm(far - number, lambda: None) for number in range(1000)]
    for _ in range(20_000):
        dog.disarm(dog.arm(far, lambda: None))
        assert len(dog._alarms) <= 2001
    assert sum(alarm.ring is not None for _, _, alarm in dog._alarms) == len(armed)
