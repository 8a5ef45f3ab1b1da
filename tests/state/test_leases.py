"""The lease book alone: admission in order, charging, fencing, deadlines."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from savepoint.state import NoRoom, StaleLease
from savepoint.state.leases import PARKED_BYTES, RESERVE_BYTES, Lease, LeaseBook


def admit(book: LeaseBook, owner: str, size: int = RESERVE_BYTES, wait_s: float = 60) -> Future[Lease]:
    return book.admit(owner, None, size, wait_s)


def test_admission_is_strictly_in_order():
    book = LeaseBook(10)
    first = admit(book, "first", 6).result(0)
    large, small = admit(book, "large", 8), admit(book, "small", 2)
    assert not large.done()
    assert not small.done()  # it would fit, and would pass the large one for ever
    book.end(first, "is closed")
    assert large.result(0).owner == "large"
    assert small.result(0).owner == "small"


def test_a_waiter_that_gives_up_makes_way():
    book = LeaseBook(10)
    first = admit(book, "first", 6).result(0)
    large, small = admit(book, "large", 8), admit(book, "small", 2)
    large.cancel()
    book.charge(first, 0, parked=True)
    book.end(first, "is closed")
    assert small.result(0).owner == "small"


def test_a_waiter_is_refused_with_the_figures_and_the_next_one_gets_its_chance():
    book = LeaseBook(10_000_000)
    admit(book, "first", 6_000_000).result(0)
    large, small = admit(book, "large", 8_000_000, wait_s=0.05), admit(book, "small", 2_000_000)
    with pytest.raises(NoRoom, match=r"no room for a lease of 'large': 1 leases hold 6.0 MB of 10.0 MB; waited 0.05 s"):
        large.result(5)
    assert small.result(5).owner == "small"
    assert (book.stats().refused, book.stats().waiting) == (1, 0)


def test_closing_refuses_whoever_waits():
    book = LeaseBook(10)
    admit(book, "first", 6)
    waiting = admit(book, "second", 6)
    book.close()
    with pytest.raises(NoRoom, match="was closed while 'second' waited"):
        waiting.result(0)


def test_a_parked_lease_is_charged_for_its_pages_alone():
    book = LeaseBook(RESERVE_BYTES + 2 * PARKED_BYTES)
    first = admit(book, "first").result(0)
    second = admit(book, "second")
    book.charge(first, 100, parked=True)
    assert second.result(0).owner == "second"
    assert (book.stats().live, book.stats().parked) == (1, 1)
    assert book.stats().charged_bytes == RESERVE_BYTES + PARKED_BYTES + 100


def test_a_stale_token_and_an_ended_lease_are_told_apart():
    book = LeaseBook(None)
    lease = admit(book, "x").result(0)
    lease.check(0)
    lease.token += 1
    with pytest.raises(StaleLease, match="taken over"):
        lease.check(0)
    book.end(lease, "is closed")
    with pytest.raises(StaleLease, match="the session of 'x' is closed"):
        lease.check(1)


def test_ending_twice_is_nothing():
    book = LeaseBook(None)
    lease = admit(book, "x").result(0)
    assert book.end(lease, "is closed")
    assert not book.end(lease, "is closed", expired=True)
    assert book.stats() == type(book.stats())(0, 0, 0, 0, None, 1, 0, 0)


def test_an_alarm_rings_until_the_lease_has_ended_and_renewal_moves_it():
    book, rung = LeaseBook(None), []
    lease = book.admit("x", 0.05, 1, 1).result(0)
    book.arm(lease, lambda: rung.append(time.monotonic()))
    book.renew(lease, 0.3)
    started = time.monotonic()
    while len(rung) < 2 and time.monotonic() < started + 10:
        time.sleep(0.01)
    assert rung[0] - started > 0.2
    book.end(lease, "is over")
    count = len(rung)
    time.sleep(0.05)
    assert len(rung) == count


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 20))))
def test_the_charge_is_what_the_leases_hold_and_admission_never_passes_the_budget(budget: int, steps: list[tuple[int, int, int]]):
    book = LeaseBook(budget)
    futures: list[Future[Lease]] = []
    for what, which, size in steps:
        granted = [future.result(0) for future in futures if future.done() and not future.cancelled() and future.exception() is None]
        held = [lease for lease in granted if not lease.ended]
        if what <= 1:
            futures.append(admit(book, str(len(futures)), size))
        elif what == 2 and held:
            book.end(held[which % len(held)], "is closed")
        elif what == 3 and futures:
            futures[which % len(futures)].cancel()
        granted = [future.result(0) for future in futures if future.done() and not future.cancelled() and future.exception() is None]
        held = [lease for lease in granted if not lease.ended]
        assert book.stats().charged_bytes == sum(lease.charged for lease in held) <= budget
    book.close()
