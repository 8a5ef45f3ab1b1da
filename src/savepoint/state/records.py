"""What a tree of states is made of: a record for each state, and the limits of subtrees. `forest` puts them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from savepoint.state.session import Snapshot

Kind = Literal["image", "snapshot", "session", "fork"]
Sessions = Literal["refuse", "spare", "close"]


class Node:
    """One state. bytes: of pages that it shows otherwise than its parent, and, at most, those that it took over from records now gone.
    handle: the snapshot or session, weakly. kept: the snapshot, while the tree itself holds it. above: of a fork, a record over it, as far up as is
    known to be without contents in between."""

    __slots__ = (
        "__weakref__", "above", "bytes", "charged", "children", "digest", "ends_at", "handle", "id", "kept", "kept_until", "kind", "label", "owner", "pages",
        "parent", "pinned", "removed", "scope",
    )  # fmt: skip

    def __init__(self, kind: Kind, label: str = "", owner: str = "", pages: int = 0, bytes_: int = 0) -> None:
        self.kind: Kind = kind
        self.label, self.owner, self.pages, self.bytes = label, owner, pages, bytes_
        self.id = self.charged = self.pinned = 0
        self.parent: Node | None = None
        self.above: Node | None = None
        self.children: dict[int, Node] = {}
        self.handle: Callable[[], Any] = nothing
        self.kept: Snapshot | None = None
        self.scope: Scope | None = None
        self.kept_until: float | None = None
        self.ends_at: float | None = None
        self.digest: str | None = None
        self.removed = False


class Scope:
    """The limits of a subtree and what is used of them. outer: those of a subtree around it."""

    __slots__ = ("bytes", "label", "most", "outer", "sessions", "snapshots")

    def __init__(self, label: str, outer: Scope | None) -> None:
        self.label, self.outer = label, outer
        self.most: dict[str, int | None] = {}
        self.snapshots = self.sessions = self.bytes = 0


def scopes(scope: Scope | None) -> Iterator[Scope]:
    while scope is not None:
        yield scope
        scope = scope.outer


def nothing() -> None:
    return None
