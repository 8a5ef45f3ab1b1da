"""Where a remote session is: in which worker, since when, and what of it the trainer holds should that worker die.

Everything that waits is written as steps (`steps.py`): for threads and coroutines alike.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from savepoint.state.client import WorkerDied
from savepoint.state.errors import Lost, StateError
from savepoint.state.history import History
from savepoint.state.image import BaseImage
from savepoint.state.leases import Lease
from savepoint.state.records import Node
from savepoint.state.session import SessionStats
from savepoint.state.steps import Steps, Turnstile

if TYPE_CHECKING:
    from savepoint.state.pool import WorkerBackend
    from savepoint.state.slots import Slot

# Calls that run no SQL of the agent, but may have gigabytes to go through.
SERVICE_S = 600.0
_PLACE_TRIES = 3  # workers that may die while a session opens, before it is given up


class Shipped:
    """A session's contents as the trainer holds them: parts to apply in order; none of them: the image as it is.

    A list through its ends, so that the states along a deep branch share what came before.
    """

    __slots__ = ("_before", "_part")

    def __init__(self, before: Shipped | None = None, part: bytes | None = None) -> None:
        self._before, self._part = before, part

    @property
    def parts(self) -> tuple[bytes, ...]:
        found: list[bytes] = []
        here: Shipped | None = self
        while here is not None:
            if here._part is not None:
                found.append(here._part)
            here = here._before
        return tuple(reversed(found))

    def plus(self, whole: bool, part: bytes) -> Shipped:
        return Shipped(None if whole else self, part)


class RemoteSnapshot:
    """The worker's part of a `Snapshot`: where it lives, and its contents if the trainer holds them."""

    def __init__(self, slot: Slot, epoch: int, number: int, shipped: Shipped | None) -> None:
        self.slot, self.epoch, self.number, self.shipped = slot, epoch, number, shipped
        self._dropped = weakref.finalize(self, slot.discard, epoch, "drop_snapshot", number)
        self._dropped.atexit = False

    @property
    def there(self) -> bool:
        """Whether the process that was given it lives."""
        return self.epoch == self.slot.epoch and self.slot.alive

    @property
    def lost(self) -> str | None:
        return None if self.there or self.shipped is not None else f"its worker held it alone, and died: {self.slot.last_death}"

    def release(self) -> None:
        """Have the worker drop it now, rather than with the next call."""
        if self._dropped.detach() is not None:
            self.slot.tell(self.epoch, "drop_snapshot", self.number)


class Placed:
    """A session's place: opened by its first call, found again by the next ones, moved to another worker when its own has died."""

    def __init__(
        self, backend: WorkerBackend, slot: Slot, lease: Lease, image: BaseImage, options: dict[str, Any], *, parent: Node | None = None, label: str = "",
        origin_owner: str | None = None, heir_of: Placed | None = None,
    ) -> None:  # fmt: skip
        """parent: where it begins in the tree (None: at the image). heir_of: the handle that this one takes the place of."""
        self.image, self.options = image, options
        self.generation = 0
        self.origin_owner = origin_owner or lease.owner
        self._node: Node = heir_of._node if heir_of is not None else backend.forest.enter(parent or backend.forest.root(image), self, lease.owner, label)
        self._stands = 0  # `SessionStats.changes` when it was the state that its node is under; -1: not known
        self._backend, self._slot, self._lease, self._token = backend, slot, lease, lease.token
        self._turn: Turnstile = heir_of._turn if heir_of is not None else Turnstile()
        self._epoch = -1  # of the worker that holds it; -1: none does
        # The worker that was last asked to hold it, and the number it was given there: shared with the finalizer.
        self._asked = [-1, backend.number()]
        self._shipped = Shipped()
        self._fragile: str | None = None  # what would be lost if the worker died now
        self._unshipped = False  # whether that includes committed changes
        self._in_transaction = False
        self._lost = ""  # why it cannot go on
        self._stats: SessionStats | None = None  # as of the last answer
        self._history = History()
        self._give_back = self._abandoned_when_dropped()
        slot.count(1)

    @property
    def owner(self) -> str:
        return self._lease.owner

    # ------------------------------------------------------------------ calls

    def interrupt(self) -> None:
        """Stop the call that another thread has under way; it answers "timeout". Nothing happens when there is none."""
        self._slot.tell(self._epoch, "interrupt", self._number)

    @property
    def _number(self) -> int:
        return self._asked[1]

    def _my_turn(self) -> Steps[contextlib.AbstractContextManager[None]]:
        """Wait until no other call is under way, and check the lease. The context gives the turn to the next one."""
        turn = self._turn.acquire()
        try:
            yield turn
        except BaseException:
            if not turn.cancel():
                turn.add_done_callback(lambda _: self._turn.release())
            raise
        try:
            self._lease.check(self._token)
        except BaseException:
            self._turn.release()
            raise
        self._passed_on = False
        return self._taken()

    @contextlib.contextmanager
    def _taken(self) -> Iterator[None]:
        try:
            yield
        finally:
            if not self._passed_on:
                self._turn.release()

    def _place(self) -> Steps[tuple[Any, ...] | None]:
        """None when the session is open in a living worker; else what opens it, from what was shipped, together with the next call: a lease costs
        no call of its own. StateError where it cannot be opened."""
        if self._epoch == self._slot.epoch and self._slot.alive:
            return None
        if self._epoch >= 0 and not self._lost:
            self._moved(self._slot.last_death)
        if self._lost:
            raise Lost(f"the session of {self.owner!r} cannot go on: {self._lost}")
        for _ in range(_PLACE_TRIES):
            try:
                epoch = yield from self._slot.ready()
                image = yield from self._slot.have(self.image)
            except WorkerDied as death:
                reason = death.reason
                continue
            # An opening that was broken off may still be on its way: each try has a number of its own, and the earlier one is closed.
            self._slot.tell(self._asked[0], "close", self._number)
            self._asked[:] = epoch, self._backend.number()
            self._lease.check(self._token)  # only now: a lease that ends later closes this number
            return self._number, image, self.owner, self.options, self._backend.ship, self._shipped.parts
        raise StateError(f"the session of {self.owner!r} cannot be opened: {reason}")

    def _ask(self, name: str, *arguments: Any, kill_after_s: float, alone: bool = False) -> Steps[Any]:
        """One call on this session where it lives; (its answer, rows). A wait that is broken off leaves the turn to the call, until it has ended."""
        opening = yield from self._place()
        epoch = self._asked[0]
        call = (name, self._number, *arguments) if opening is None else ("first", opening, name, arguments)
        future = self._slot.call(epoch, *call, kill_after_s=kill_after_s, alone=alone)
        try:
            answer = yield future
        except GeneratorExit:
            raise
        except BaseException:
            if not future.done():
                self._passed_on = True
                self.interrupt()
                future.add_done_callback(self._ended_later)
            raise
        self._epoch = epoch
        return answer

    def _ended_later(self, future: Future[Any]) -> None:
        """A call that nobody waits for has ended: take over what it says of the session, and let the next one in."""
        error = future.exception()
        if error is None:
            self._absorb(future.result()[0][1])
        elif isinstance(error, WorkerDied):
            self._moved(error.reason)
        self._turn.release()

    def _once(self, name: str, *arguments: Any) -> Steps[Any]:
        (value, trail), _ = yield from self._ask(name, *arguments, kill_after_s=SERVICE_S)
        self._absorb(trail)
        return value

    def _service(self, name: str, *arguments: Any) -> Steps[Any]:
        return (yield from self._repeated(name, lambda: self._once(name, *arguments)))

    def _repeated(self, name: str, attempt: Callable[[], Steps[Any]]) -> Steps[Any]:
        """What runs no SQL of the agent is tried again when the worker dies, as long as nothing was lost with it. StateError when it was."""
        for _ in range(_PLACE_TRIES):
            try:
                return (yield from attempt())
            except WorkerDied as death:
                reason = death.reason
                self._moved(reason)
            if self._lost:
                break
        raise Lost(f"{name}: {self._lost or reason}")

    def _absorb(self, trail: tuple[SessionStats, bool, str | None, bool, bool, bytes | None]) -> None:
        """What each answer says of the session: its figures, whether a transaction is open, what a death would lose, and its delta if that changed."""
        self._stats, self._in_transaction, self._fragile, self._unshipped, whole, part = trail
        if part is not None:
            self._shipped = self._shipped.plus(whole, part)
        self._backend.book.charge(self._lease, self._stats.held_bytes, parked=False)

    def _moved(self, reason: str) -> None:
        """The worker is gone. What was shipped opens in the next one; if something was not, the session is lost."""
        if self._epoch >= 0 and self._fragile is not None:
            self._lost = f"{reason}, and with it {self._fragile}"
        self._epoch, self._fragile, self._in_transaction, self._stands = -1, None, False, -1

    def _abandoned_when_dropped(self) -> Any:
        finalizer = weakref.finalize(self, self._backend.abandon, self._lease, self._slot, self._asked, self._node)
        finalizer.atexit = False
        return finalizer
