"""The tree of states over an image: what exists, what each state costs, what to let go. `backend.tree(root)`, the same for every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from savepoint.state.errors import StateError
from savepoint.state.forest import Forest
from savepoint.state.image import BaseImage
from savepoint.state.records import Kind, Node, Sessions
from savepoint.state.session import Snapshot
from savepoint.state.steps import Steps, finish, finish_async

Digests = Callable[[list[Snapshot]], Steps[list[str | None]]]


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A state in a tree, as it was when the tree was asked.

    kind: "image" (the root), "snapshot" (frozen), "session" (live, always a leaf), or "fork": paths part there, and nobody kept the contents.
    parent: the id of the node it came from; None for the node that the tree was asked at. depth: levels below that node.
    pages: in which it differs from the image; of a session as of its last call, None while one is under way. delta_bytes: pages that it shows otherwise
    than its parent, in bytes; at most, where a state between the two is gone; of a session only what it took over so.
    digest: the page digest, of snapshots and of the image; None elsewhere, and where the contents are lost. kept: whether the tree itself holds it.
    expires_s: seconds until the tree lets it go, or ends the subtree below it. lost: why its contents are gone, by a fault of the infrastructure.
    """

    id: int
    parent: int | None
    depth: int
    kind: Kind
    label: str
    owner: str
    pages: int | None
    delta_bytes: int
    digest: str | None
    kept: bool
    expires_s: float | None
    lost: str | None
    record: Node = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a prune took out. bytes: what the tree had counted for it; what other states share stays. spared: owners of the sessions that went on."""

    snapshots: int
    bytes: int
    spared: tuple[str, ...]


Place = BaseImage | Snapshot | TreeNode


class StateTree:
    """The states under an image or a snapshot. Usable from any thread; only `nodes` with digests may wait, for a worker."""

    def __init__(self, forest: Forest, root: BaseImage | Snapshot, digests: Digests) -> None:
        self.root = root
        self._forest, self._digests = forest, digests
        self._node(root)

    def nodes(self, *, digests: bool = True) -> tuple[TreeNode, ...]:
        """Every state under the root, itself first, parents before children, in the order of their making. digests=False leaves those out that were
        not asked for before: each costs time in proportion to its changed pages, once."""
        return finish(self.nodes_steps(digests=digests))

    def nodes_steps(self, *, digests: bool = True) -> Steps[tuple[TreeNode, ...]]:
        root = self._node(self.root)
        found = self._forest.walk(root)
        if digests:
            asked = [(node, snapshot) for node, _ in found if node.digest is None and (snapshot := self._frozen(node)) is not None]
            known = (yield from self._digests([snapshot for _, snapshot in asked])) if asked else []
            for (node, _), digest in zip(asked, known, strict=True):
                node.digest = digest
        return tuple(self._seen(node, depth, root) for node, depth in found)

    def snapshot(self, label: str) -> Snapshot:
        """The snapshot of this label. StateError when there is none, or several."""
        found = [handle for node, _ in self._forest.walk(self._node(self.root)) if node.label == label and (handle := self._frozen(node)) is not None]
        if len(found) != 1:
            raise StateError(f"{len(found)} snapshots are labelled {label!r}")
        return found[0]

    def keep(self, at: Snapshot | TreeNode, ttl_s: float | None = None) -> None:
        """Hold a snapshot though nobody else does, for `ttl_s` seconds from now (None: until it is pruned or the backend closes)."""
        self._forest.keep(self._node(at), ttl_s)

    def prune(self, at: Place | None = None, *, sessions: Sessions = "refuse") -> Pruned:
        """Free the snapshots at and below `at` (None: the root), whoever still holds them: to use one is a StateError from now on.

        sessions: what about live ones in that subtree. "refuse": InUse names them, and nothing is freed. "spare": everything but what they use is freed;
        they go on, with all their contents, under the node above. "close": they are closed, calls under way stopped.
        """
        place = self.root if at is None else at
        if sessions not in ("refuse", "spare", "close"):
            raise ValueError(f"sessions must be 'refuse', 'spare' or 'close', not {sessions!r}")
        snapshots, bytes_, spared = self._forest.prune(self._node(place), _name(place), sessions)
        return Pruned(len(snapshots), bytes_, tuple(session.owner for session in spared if session is not None))

    def limit(
        self, at: Place | None = None, *, snapshots: int | None = None, sessions: int | None = None, delta_bytes: int | None = None, ttl_s: float | None = None
    ) -> None:
        """What the subtree at `at` (None: the root) may hold from now on; a limit of it or of a subtree around it that is reached refuses with NoRoom.

        snapshots, sessions: how many live at a time. delta_bytes: of snapshots, as `TreeNode.delta_bytes` counts them; what a session holds beyond is bounded
        by its own quota. ttl_s: the subtree is ended that many seconds from now, its sessions with it. Limits given earlier are replaced.
        """
        most = {"snapshots": snapshots, "sessions": sessions, "delta_bytes": delta_bytes}
        for name, value in most.items():
            if value is not None and value < 0:
                raise ValueError(f"{name}={value}: must not be negative")
        place = self.root if at is None else at
        self._forest.limit(self._node(place), _name(place), most, ttl_s)

    # ------------------------------------------------------------------ inside

    def _node(self, place: Place) -> Node:
        if isinstance(place, BaseImage):
            return self._forest.root(place)
        node: Node | None = place.record if isinstance(place, TreeNode) else place.node
        if node is None:
            raise StateError(f"{_name(place)} is in no tree")
        return node

    def _frozen(self, node: Node) -> Snapshot | None:
        handle: Snapshot | None = node.handle() if node.kind == "snapshot" else None
        return handle

    def _seen(self, node: Node, depth: int, root: Node) -> TreeNode:
        handle = node.handle()
        session = handle if node.kind == "session" else None
        pages = session.pages_now if session is not None else node.pages
        ends = [at for at in (node.kept_until, node.ends_at) if at is not None]
        parent = node.parent.id if node.parent is not None and node is not root else None
        digest = handle_digest(node, self.root)
        return TreeNode(
            node.id, parent, depth, node.kind, node.label, node.owner, pages, node.bytes, digest, node.kept is not None,
            min(ends) - self._forest.clock() if ends else None, handle.lost if handle is not None else None, node,
        )  # fmt: skip


def handle_digest(node: Node, root: BaseImage | Snapshot) -> str | None:
    """The digest of a node as far as it is known; an image has its own."""
    return root.digest if node.kind == "image" and isinstance(root, BaseImage) else node.digest


class AsyncTree:
    """`StateTree` for coroutines: only `nodes` waits."""

    def __init__(self, tree: StateTree) -> None:
        self.tree = tree
        self.snapshot, self.keep, self.prune, self.limit = tree.snapshot, tree.keep, tree.prune, tree.limit

    async def nodes(self, *, digests: bool = True) -> tuple[TreeNode, ...]:
        return await finish_async(self.tree.nodes_steps(digests=digests))


def _name(place: Place) -> str:
    if isinstance(place, BaseImage):
        return f"image {place.digest}"
    kind = place.kind if isinstance(place, TreeNode) else "snapshot"
    return f"{kind} {place.label!r}" if place.label else f"{kind} of {place.owner!r}" if isinstance(place, TreeNode) else "a snapshot without a label"
