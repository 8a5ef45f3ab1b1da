"""Where states come from: the records behind `backend.tree`, the same for every backend.

A record knows its parent and what its state costs; the contents belong to snapshots and sessions. Sessions are leaves. Under a session that is
checkpointed, forked while it differs from the state it stands on, or moved, a record takes its place, so the shape is that of the states.
A record whose contents are gone stays only while paths part there ("fork"): at most one for each that lives, however long the history.

Every operation costs the same at any depth and width; none recurses. Dropped handles are only noted (`discard`, callable from a finalizer) and
taken out by the next operation.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from savepoint.state.errors import InUse, NoRoom, StaleLease, StateError
from savepoint.state.records import Node, Scope, Sessions, nothing, scopes
from savepoint.state.watchdog import Alarm, watchdog

if TYPE_CHECKING:
    from savepoint.state.image import BaseImage
    from savepoint.state.session import Snapshot

_ENDED = "the session has ended"


class Forest:
    """The trees of a backend, one for each image. Thread-safe; nothing in it waits.

    clock: seconds, for times to live. hold: told how many bytes more (or fewer) are kept by the trees themselves.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, hold: Callable[[int], None] = lambda step: None) -> None:
        self.clock, self._hold = clock, hold
        self._lock = threading.RLock()
        self._roots: weakref.WeakKeyDictionary[BaseImage, Node] = weakref.WeakKeyDictionary()
        self._ids = itertools.count(1)
        self._dropped: deque[Node] = deque()
        self._due: list[tuple[float, int, weakref.ref[Node]]] = []
        self._armed_for: float | None = None
        self.touched = 0  # records looked at so far: what a test of flat cost counts

    # ------------------------------------------------------------------ what happens to states

    def root(self, image: BaseImage) -> Node:
        with self._lock:
            node = self._roots.get(image)
            if node is None:
                node = self._roots[image] = Node("image")
                node.id = next(self._ids)
            return node

    def place(self, snapshot: Snapshot, image: BaseImage) -> Node:
        """Where a snapshot is in the tree; `image` for one that is in none: it was only frozen, or is a copy of one that nobody holds."""
        node: Node | None = snapshot.node
        with self._settled():
            return node if node is not None and not node.removed else self.root(image)

    def enter(self, parent: Node, session: Any, owner: str, label: str = "") -> Node:
        """A session that begins at `parent`. NoRoom when a limit of its subtree has no room for it; StateError when `parent` was pruned."""
        node = Node("session", label, owner)
        with self._settled():
            if parent.removed:
                raise StateError(f"snapshot {parent.label!r} was pruned")
            self._admit(parent.scope, sessions=1)
            node.handle = weakref.ref(session)
            self._attach(node, parent)
        return node

    def add(self, session: Node, snapshot: Snapshot, *, keep: bool = False, ttl_s: float | None = None) -> None:
        """`snapshot` is the state of `session` now, which goes on under it. NoRoom when a limit of its subtree has no room for it."""
        node: Node = snapshot.node
        with self._settled():
            if session.parent is None:
                raise StaleLease(_ENDED)
            self._admit(session.parent.scope, snapshots=1, bytes_=node.bytes - session.bytes)
            node.handle = weakref.ref(snapshot, partial(self._let_go, node))
            self._attach(node, session.parent)
            self._place(session, node)
            self._bytes(session, -session.bytes)
            if keep:
                self._keep(node, snapshot, ttl_s)

    def fork_point(self, session: Node, *, changed: bool) -> Node:
        """Where the forks of `session` begin: the state that it stands on, or, if it has changed since, one in between. Held until `unpin`."""
        with self._settled():
            point = session.parent
            if point is None:
                raise StaleLease(_ENDED)
            if changed:
                point, over = Node("fork", owner=session.owner, bytes_=session.bytes), point
                self._bytes(session, -session.bytes)
                self._attach(point, over)
                self._place(session, point)
            point.pinned += 1
            return point

    def unpin(self, node: Node) -> None:
        with self._settled():
            node.pinned -= 1
            self._collapse(node)

    def admits(self, session: Node, target: Node) -> None:
        """StateError, NoRoom when `session` could not `move` there."""
        with self._settled():
            if session.parent is None:
                raise StaleLease(_ENDED)
            if target.removed:
                raise StateError(f"snapshot {target.label!r} was pruned")
            self._admit(target.scope, sessions=1, except_=set(scopes(session.scope)))

    def move(self, session: Node, target: Node) -> None:
        """`session` stands on `target` from now on. NoRoom when a limit around `target` has no room for it."""
        with self._settled():
            self.admits(session, target)
            before = session.parent
            self._bytes(session, -session.bytes)
            self._place(session, target)
            self._collapse(before)

    def hand_over(self, session: Node, heir: Any, owner: str) -> None:
        with self._settled():
            session.handle, session.owner = weakref.ref(heir), owner

    def discard(self, node: Node) -> None:
        """The session of a record is no more. Takes no lock: finalizers call it."""
        self._dropped.append(node)

    def above(self, session: Node) -> Snapshot | None:
        """The nearest snapshot that still has contents over a session; None: the image is it."""
        with self._settled():
            node = self._holder(session.parent) if session.parent is not None else None
            return node.handle() if node is not None else None

    # ------------------------------------------------------------------ what is asked of a tree

    def keep(self, node: Node, ttl_s: float | None) -> None:
        with self._settled():
            snapshot = node.handle()
            if node.kind != "snapshot" or snapshot is None:
                raise StateError(f"only a snapshot can be kept, not a {node.kind}")
            self._keep(node, snapshot, ttl_s)

    def limit(self, node: Node, label: str, most: dict[str, int | None], ttl_s: float | None) -> None:
        """Limits of the subtree at `node`, in place of those it had. What is over a limit already stays; nothing more comes in."""
        with self._settled():
            if node.removed:
                raise StateError(f"{label} was pruned")
            if any(value is not None for value in most.values()):
                self._scoped(node, label).most = most
            node.ends_at = None if ttl_s is None else self._at(node, ttl_s)

    def walk(self, node: Node) -> list[tuple[Node, int]]:
        """The records of a subtree with their depths below it, parents before children, in the order of their making."""
        with self._settled():
            return list(self._walk(node))

    def prune(self, node: Node, label: str, sessions: Sessions) -> tuple[list[Snapshot], int, list[Any]]:
        """Take the subtree at `node` out, an image's own record excepted; (its snapshots, bytes that it counted, sessions spared).

        "refuse": InUse while a session lives in it, and nothing is taken out. "close": its sessions are closed first.
        """
        while sessions == "close":
            living = [session for inner, _ in self.walk(node) if inner.kind == "session" and (session := inner.handle()) is not None]
            if not living:
                break
            for session in living:  # without the lock: a call under way has to stop first
                session.interrupt()
                session.close()
        with self._settled():
            if node.removed:
                raise StateError(f"{label} was pruned already")
            if node.kind == "session":
                raise InUse(f"{label} is a session, in use by {node.owner!r}: close it")
            users = [inner for inner, _ in self._walk(node) if inner.kind == "session"]
            if users and sessions == "refuse":
                names = ", ".join(repr(user.owner) for user in users[:3]) + (", ..." if len(users) > 3 else "")
                raise InUse(f"{label} is in use by {len(users)} session{'s' * (len(users) > 1)}: {names}; nothing was pruned")
            snapshots, bytes_ = self._cut(node)
            return snapshots, bytes_, [user.handle() for user in users]

    def close(self) -> None:
        with self._lock:
            for root in list(self._roots.values()):
                self._cut(root)
            self._roots.clear()

    # ------------------------------------------------------------------ inside

    def _settled(self) -> AbstractContextManager[Any]:
        """The lock, with what was dropped or is over taken out."""
        with self._lock:
            now = self.clock() if self._due else 0.0
            while self._due and self._due[0][0] <= now:
                at, _, ref = heapq.heappop(self._due)
                node = ref()
                if node is not None and not node.removed:
                    self._over(node, at)
            while self._dropped:
                self._drop(self._dropped.popleft())
        return self._lock

    def _over(self, node: Node, at: float) -> None:
        if node.kept_until == at:
            self._unkeep(node)
        if node.ends_at == at:
            users = [user.handle() for user, _ in self._walk(node) if user.kind == "session"]
            self._cut(node)
            for session in users:
                if session is not None:
                    session.expire("ended: the time of its subtree is over")

    def _let_go(self, node: Node, _: object) -> None:
        self._dropped.append(node)

    def _drop(self, node: Node) -> None:
        """The contents of a snapshot or session are gone: the record stays only where paths part."""
        if node.removed or node.kind not in ("snapshot", "session"):
            return
        if node.kind == "snapshot" and node.handle() is not None:
            return
        self._count(node, -1)
        node.kind, node.handle = "fork", nothing
        self._count(node, 1)
        self._collapse(node)

    def _collapse(self, node: Node | None) -> None:
        """Take out a fork that no longer is one, and those over it that this leaves without paths."""
        while node is not None and node.kind == "fork" and not node.pinned and len(node.children) < 2 and not node.removed:
            over = node.parent
            assert over is not None
            self._count(node, -1)
            children = list(node.children.values())
            for child in children:
                over.children[child.id] = child
                child.parent = over
                self._bytes(child, node.bytes)
            self._remove(node)
            node.above = over
            node = None if children else over

    def _remove(self, node: Node) -> None:
        self.touched += 1
        if node.parent is not None:
            node.parent.children.pop(node.id, None)
        node.removed, node.parent, node.children, node.handle = True, None, {}, nothing

    def _cut(self, node: Node) -> tuple[list[Snapshot], int]:
        """Take out a subtree; its sessions go on under the record over it."""
        snapshots: list[Snapshot] = []
        bytes_ = 0
        over = node if node.kind == "image" else node.parent
        assert over is not None
        for inner, _ in list(self._walk(node)):
            if inner.kind == "image":
                continue
            if inner.kind == "session":
                self._bytes(inner, -inner.bytes)
                self._place(inner, over)
                continue
            snapshot = inner.handle()
            if snapshot is not None:
                snapshots.append(snapshot)
            bytes_ += inner.bytes
            self._count(inner, -1)
            self._unkeep(inner, drop=False)
            self._remove(inner)
            inner.pinned = 0
        for snapshot in snapshots:
            snapshot.release()
        self._collapse(over)
        return snapshots, bytes_

    def _walk(self, node: Node) -> Iterator[tuple[Node, int]]:
        stack = [(node, 0)]
        while stack:
            here, depth = stack.pop()
            self.touched += 1
            yield here, depth
            stack.extend((child, depth + 1) for child in reversed(here.children.values()))

    def _holder(self, node: Node) -> Node:
        """The nearest record from `node` up that has contents. Shortens the ways that it went, so that they stay short."""
        gone: list[Node] = []
        while node.kind == "fork" or (node.kind == "snapshot" and node.handle() is None):
            self.touched += 1
            gone.append(node)
            over = node.above or node.parent
            if over is None:
                break
            node = over
        for one in gone:
            one.above = node
        return node

    def _attach(self, node: Node, parent: Node) -> None:
        self.touched += 1
        if not node.id:
            node.id = next(self._ids)
        node.parent = parent
        parent.children[node.id] = node
        node.scope = parent.scope
        self._count(node, 1)

    def _place(self, session: Node, parent: Node) -> None:
        if session.parent is not None:
            session.parent.children.pop(session.id, None)
        self._count(session, -1)
        self._attach(session, parent)

    # ---- limits and times

    def _count(self, node: Node, sign: int) -> None:
        for scope in scopes(node.scope):
            scope.snapshots += sign * (node.kind == "snapshot")
            scope.sessions += sign * (node.kind == "session")
            scope.bytes += sign * node.bytes

    def _bytes(self, node: Node, step: int) -> None:
        if step:
            node.bytes += step
            for scope in scopes(node.scope):
                scope.bytes += step

    def _admit(self, scope: Scope | None, *, snapshots: int = 0, sessions: int = 0, bytes_: int = 0, except_: set[Scope] | None = None) -> None:
        for one in scopes(scope):
            if except_ and one in except_:
                continue
            for name, used, more in (("snapshots", one.snapshots, snapshots), ("sessions", one.sessions, sessions), ("delta_bytes", one.bytes, bytes_)):
                most = one.most.get(name)
                if most is not None and more and used + more > most:
                    raise NoRoom(f"the subtree at {one.label} has no room: {name}={most}, {used} used, {more} more asked for")

    def _scoped(self, node: Node, label: str) -> Scope:
        """The scope whose subtree begins at `node`, made if there is none."""
        outer = node.parent.scope if node.parent is not None else None
        if node.scope is not None and node.scope is not outer:
            return node.scope
        scope = Scope(label, outer)
        inner: set[Scope] = set()
        for below, _ in self._walk(node):
            if below.scope is outer:
                below.scope = scope
            else:
                inner.update(one for one in scopes(below.scope) if one.outer is outer and one is not scope)
            scope.snapshots += below.kind == "snapshot"
            scope.sessions += below.kind == "session"
            scope.bytes += below.bytes
        for one in inner:
            one.outer = scope
        return scope

    def _keep(self, node: Node, snapshot: Snapshot, ttl_s: float | None) -> None:
        if node.kept is None:
            node.kept, node.charged = snapshot, node.bytes
            self._hold(node.charged)
        node.kept_until = None if ttl_s is None else self._at(node, ttl_s)

    def _unkeep(self, node: Node, *, drop: bool = True) -> None:
        if node.kept is not None:
            self._hold(-node.charged)
            node.kept, node.charged, node.kept_until = None, 0, None
            if drop:
                self._drop(node)

    def _at(self, node: Node, ttl_s: float) -> float:
        if not ttl_s > 0:
            raise ValueError(f"ttl_s={ttl_s}: must be positive, or None")
        at = self.clock() + ttl_s
        heapq.heappush(self._due, (at, next(self._ids), weakref.ref(node)))
        if self._armed_for is None or at < self._armed_for:
            self._arm(at)
        return at

    def _arm(self, at: float) -> None:
        """Have the watchdog look at `at`, if nothing else looks before. An alarm ends itself: to disarm another's under our lock could wait for ever."""
        self._armed_for = at
        alarms: list[Alarm] = []
        weak = weakref.ref(self)

        def ring() -> None:
            forest = weak()
            if forest is not None:
                with forest._settled():
                    if forest._armed_for == at:
                        forest._armed_for = None
                        if forest._due:
                            forest._arm(forest._due[0][0])
            watchdog.disarm(alarms[0])

        # The alarm is known to its ring before the watchdog can reach it: it rings at the earliest when this lock is free again.
        alarms.append(watchdog.arm(time.monotonic() + max(0.001, at - self.clock()), ring))
