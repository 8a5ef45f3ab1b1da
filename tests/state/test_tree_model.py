"""Random forks, checkpoints, restores, prunes and closes against a model that copies everything, on both page stores."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule, run_state_machine_as_test
from state_support import make_shop, rows

from savepoint.errors import UserError
from savepoint.state import InUse, NoRoom, Session, Snapshot, StateError, TreeNode, open_backend
from savepoint.state.sqlite import vfs

Rows = dict[int, str]
ROOT = "the image"


@dataclass
class State:
    """What the model knows of a session or snapshot. parent: the name of the snapshot it came from; ROOT: the image."""

    rows: Rows
    parent: str
    live: bool = True
    held: bool = True
    kept: bool = False
    below: set[str] = field(default_factory=set)


class Trees(RuleBasedStateMachine):
    """Sessions and snapshots by name; the model's contents are plain copies, its tree is a dictionary of parents."""

    kind = "c"
    sessions = Bundle("sessions")
    snapshots = Bundle("snapshots")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.backend = open_backend("sqlite", store=Path(self.folder.name) / "store")
        self.base = self.backend.import_base(make_shop(Path(self.folder.name) / "shop.sqlite", 100))
        self.tree = self.backend.tree(self.base)
        self.names = count()
        self.first: Rows = {i: f"name{i}" for i in range(10)}
        self.live_sessions: dict[str, Session] = {}
        self.handles: dict[str, Snapshot] = {}
        self.model: dict[str, State] = {}
        self.most: int | None = None

    def name(self, of: str) -> str:
        return f"{of}{next(self.names)}"

    def above(self, name: str) -> str:
        """The nearest ancestor that still has contents."""
        parent = self.model[name].parent
        while parent != ROOT and not self.model[parent].live:
            parent = self.model[parent].parent
        return parent

    def inside(self, name: str, of: str) -> bool:
        while name != ROOT and name != of:
            name = self.model[name].parent
        return name == of

    def snapshots_live(self) -> int:
        return sum(state.live for name, state in self.model.items() if name.startswith("s"))

    def enter(self, session: Session, contents: Rows, parent: str) -> str:
        name = self.name("w")
        self.live_sessions[name] = session
        self.model[name] = State(dict(contents), parent)
        return name

    # ------------------------------------------------------------------ what is done

    @initialize(target=sessions)
    def begin(self) -> str:
        return self.enter(self.backend.lease(self.base, owner="model"), self.first, ROOT)

    @rule(target=sessions)
    def lease(self) -> str:
        return self.begin()

    @rule(name=sessions, row=st.integers(0, 40), text=st.text("abc", min_size=1, max_size=3))
    def write(self, name: str, row: int, text: str) -> None:
        if name in self.live_sessions:
            rows(self.live_sessions[name], f"INSERT OR REPLACE INTO customer(id, name) VALUES({row}, '{text}')")
            self.model[name].rows[row] = text

    @rule(name=sessions)
    def delete(self, name: str) -> None:
        if name in self.live_sessions:
            rows(self.live_sessions[name], "DELETE FROM customer WHERE id % 2")
            self.model[name].rows = {row: text for row, text in self.model[name].rows.items() if row % 2 == 0}

    @rule(target=snapshots, name=sessions, keep=st.booleans())
    def checkpoint(self, name: str, keep: bool) -> str:
        if name not in self.live_sessions:
            return ROOT
        made = self.name("s")
        if self.most is not None and self.snapshots_live() >= self.most:
            with pytest.raises(NoRoom):
                self.live_sessions[name].checkpoint(made, keep=keep)
            return ROOT
        self.handles[made] = self.live_sessions[name].checkpoint(made, keep=keep)
        self.model[made] = State(dict(self.model[name].rows), self.model[name].parent, kept=keep)
        self.model[name].parent = made
        return made

    @rule(name=sessions, to=snapshots)
    def restore(self, name: str, to: str) -> None:
        if name not in self.live_sessions or to not in self.handles:
            return
        if not self.model[to].live:
            with pytest.raises(StateError, match="was pruned"):
                self.live_sessions[name].restore(self.handles[to])
            return
        self.live_sessions[name].restore(self.handles[to])
        self.model[name].rows, self.model[name].parent = dict(self.model[to].rows), to

    @rule(target=sessions, at=snapshots)
    def checkout(self, at: str) -> str:
        if at not in self.handles:
            return ROOT
        if not self.model[at].live:
            with pytest.raises(StateError, match="was pruned"):
                self.backend.lease(self.handles[at], owner="late")
            return ROOT
        return self.enter(self.backend.lease(self.handles[at], owner="model"), self.model[at].rows, at)

    @rule(target=sessions, name=sessions, n=st.integers(1, 3))
    def fork(self, name: str, n: int) -> str:
        if name not in self.live_sessions:
            return ROOT
        state = self.model[name]
        return [self.enter(fork, state.rows, state.parent) for fork in self.live_sessions[name].fork(n)][0]

    @rule(name=sessions)
    def reset(self, name: str) -> None:
        if name in self.live_sessions:
            assert self.live_sessions[name].reset().holds
            self.model[name].rows, self.model[name].parent = dict(self.first), ROOT

    @rule(name=consumes(sessions), leak=st.booleans())
    def close(self, name: str, leak: bool) -> None:
        session = self.live_sessions.pop(name, None)
        if session is not None:
            self.model[name].live = False
            if not leak:
                session.close()

    @rule(name=snapshots)
    def drop(self, name: str) -> None:
        if self.handles.pop(name, None) is not None:
            self.model[name].held = False
            self.model[name].live = self.model[name].live and self.model[name].kept

    @rule(at=snapshots, sessions=st.sampled_from(["refuse", "spare", "close"]))
    def prune(self, at: str, sessions: str) -> None:
        if at not in self.model or not self.model[at].live:
            return
        below = [name for name, state in self.model.items() if state.live and self.inside(name, at)]
        users = [name for name in below if name in self.live_sessions]
        place = self.handles[at] if at in self.handles else self.tree.snapshot(at)
        if users and sessions == "refuse":
            with pytest.raises(InUse):
                self.tree.prune(place)
            return
        pruned = self.tree.prune(place, sessions=sessions)  # type: ignore[arg-type]
        assert pruned.snapshots == len(below) - len(users) and len(pruned.spared) == (len(users) if sessions == "spare" else 0)
        over = self.model[at].parent
        for name in below:
            if name in users and sessions == "spare":
                self.model[name].parent = over
                continue
            self.model[name].live = False
            if name in users:
                assert self.live_sessions.pop(name).closed

    @rule(most=st.none() | st.integers(1, 6))
    def limit(self, most: int | None) -> None:
        self.tree.limit(snapshots=most if most is not None else 1000)
        self.most = most

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def contents_are_those_of_the_copies(self) -> None:
        for name, session in self.live_sessions.items():
            assert dict(rows(session, "SELECT id, name FROM customer")) == self.model[name].rows

    @invariant()
    def the_tree_is_that_of_the_model(self) -> None:
        nodes = {node.id: node for node in self.tree.nodes(digests=False)}

        def over(node: TreeNode) -> str:
            parent = nodes[node.parent] if node.parent is not None else None
            while parent is not None and parent.kind == "fork":
                parent = nodes[parent.parent] if parent.parent is not None else None
            return parent.label if parent is not None and parent.kind == "snapshot" else ROOT

        found = {node.label: over(node) for node in nodes.values() if node.kind == "snapshot"}
        assert found == {name: self.above(name) for name, state in self.model.items() if state.live and name.startswith("s")}
        standing = sorted(over(node) for node in nodes.values() if node.kind == "session")
        assert standing == sorted(self.above(name) for name in self.live_sessions)
        forks = [node.id for node in nodes.values() if node.kind == "fork"]
        assert all(sum(node.parent == fork for node in nodes.values()) > 1 for fork in forks)

    def teardown(self) -> None:
        for session in self.live_sessions.values():
            session.close()
        self.live_sessions.clear()
        self.tree.prune()
        assert [node.kind for node in self.tree.nodes()] == ["image"]
        assert self.backend.pages.live()["pages"] == 0
        self.backend.close()
        self.folder.cleanup()


@pytest.mark.parametrize("examples", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_trees_are_what_a_model_that_copies_everything_says(kind: str, examples: int):
    try:
        vfs.page_store()
    except UserError as error:
        pytest.skip(str(error))
    limits = settings(max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Trees, settings=limits)
