"""Trees whose states are in worker processes: where nodes are, what the death of a worker costs them, and that pruning reaches their pages."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from state_support import rows

from savepoint.state import InUse, Lost, NoRoom, RemoteSession, StaleLease, StateError, WorkerBackend
from savepoint.state.aio import AsyncBackend
from savepoint.state.steps import finish

COUNT = "SELECT count(*) FROM customer"


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[WorkerBackend]:
    with WorkerBackend(tmp_path / "store", workers=2, threads=2) as backend:
        yield backend


@pytest.fixture
def session(pool: WorkerBackend, shop: Path) -> RemoteSession:
    return pool.lease(pool.import_base(shop), owner="test")


def add(session: RemoteSession, number: int) -> None:
    rows(session, f"INSERT INTO customer(id, name) VALUES({100_000 + number}, 'new')")


def shape(pool: WorkerBackend, session: RemoteSession) -> list[tuple[int, str, str]]:
    return [(node.depth, node.kind, node.label) for node in pool.tree(session.image).nodes(digests=False)]


def kill(pool: WorkerBackend) -> None:
    for worker in pool.stats().workers:
        if worker.pid is not None:
            os.kill(worker.pid, signal.SIGKILL)


def live(pool: WorkerBackend) -> dict[str, int]:
    found = [finish(slot.ask("live")) for slot in pool._slots if slot.alive]
    return {name: sum(one[name] for one in found) for name in found[0]}


def test_the_tree_is_the_same_as_in_one_process(pool: WorkerBackend, session: RemoteSession):
    a = session.checkpoint("a")
    add(session, 1)
    b = session.checkpoint("b")
    add(session, 2)
    forks = session.fork(2, label="try")
    assert shape(pool, session) == [
        (0, "image", ""), (1, "snapshot", "a"), (2, "snapshot", "b"), (3, "fork", ""), (4, "session", ""), (4, "session", "try-0"), (4, "session", "try-1"),
    ]  # fmt: skip
    forks[0].restore(a)
    session.reset()
    assert shape(pool, session) == [
        (0, "image", ""), (1, "snapshot", "a"), (2, "snapshot", "b"), (3, "session", "try-1"), (2, "session", "try-0"), (1, "session", ""),
    ]  # fmt: skip
    nodes = {node.label: node for node in pool.tree(session.image).nodes() if node.kind == "snapshot"}
    assert nodes["b"].delta_bytes == b.pages * 4096 > 0 == nodes["a"].delta_bytes
    session.restore(b)
    assert session.digest() == nodes["b"].digest != nodes["a"].digest == session.image.digest


def test_sessions_on_a_node_go_to_the_worker_that_holds_it(pool: WorkerBackend, session: RemoteSession):
    add(session, 1)
    snapshot = session.checkpoint("x", keep=True)
    others = [pool.lease(snapshot, owner=f"o{i}") for i in range(4)]
    assert {other._slot for other in others} == {session._slot} == {fork._slot for fork in session.fork(3)}
    assert all(rows(other, COUNT) == ((301,),) for other in others) and others[0].generation == 1


def test_the_nodes_of_a_dead_worker_come_back_from_what_was_shipped(pool: WorkerBackend, session: RemoteSession):
    add(session, 1)
    session.checkpoint("x", keep=True)
    tree = pool.tree(session.image)
    session.close()
    kill(pool)
    with pool.lease(tree.snapshot("x"), owner="after") as after:
        assert rows(after, COUNT) == ((301,),)
        nodes = {node.label: node for node in tree.nodes() if node.kind == "snapshot"}
        assert nodes["x"].lost is None and nodes["x"].digest == after.digest()


def test_the_nodes_of_a_dead_worker_that_held_them_alone_are_lost_and_say_so(tmp_path: Path, shop: Path):
    with WorkerBackend(tmp_path / "store", workers=1, ship="never") as pool:
        session = pool.lease(pool.import_base(shop), owner="test")
        add(session, 1)
        snapshot = session.checkpoint("x")
        kill(pool)
        result = session.execute(COUNT)
        assert result.status == "infra" and "died" in str(result.error)
        nodes = {node.kind: node for node in pool.tree(session.image).nodes()}
        assert "its worker held it alone, and died" in str(nodes["snapshot"].lost) and nodes["snapshot"].digest is None
        assert "changes that were not shipped" in str(nodes["session"].lost)
        for use in (lambda: session.restore(snapshot), lambda: pool.lease(snapshot, owner="late"), lambda: session.fork()):
            with pytest.raises(Lost, match="died"):
                use()
        assert pool.stats().leases.live == 1 and session.reset().holds
        assert pool.tree(session.image).prune(snapshot).snapshots == 1


def test_pruning_frees_the_pages_in_the_worker_at_once(pool: WorkerBackend, session: RemoteSession):
    rows(session, "UPDATE orders SET note = note || '!'")
    snapshot = session.checkpoint("x", keep=True)
    tree = pool.tree(session.image)
    with pytest.raises(InUse, match="snapshot 'x' is in use by 1 session: 'test'"):
        tree.prune(snapshot)
    session.reset()
    held = live(pool)
    assert tree.prune(snapshot).bytes == snapshot.pages * 4096
    freed = live(pool)
    assert held["pages"] - freed["pages"] >= snapshot.pages and freed["snapshots"] == held["snapshots"] - 1
    with pytest.raises(StateError, match="was pruned"):
        session.restore(snapshot)


def test_a_subtree_that_is_closed_ends_its_sessions_in_the_worker(pool: WorkerBackend, session: RemoteSession):
    snapshot = session.checkpoint("x", keep=True)
    forks = session.fork(3)
    pool.tree(snapshot).prune(sessions="close")
    assert live(pool)["sessions"] == 0 and shape(pool, session) == [(0, "image", "")]
    with pytest.raises(StaleLease):
        forks[0].execute("SELECT 1")


def test_limits_and_times_hold_across_workers(pool: WorkerBackend, session: RemoteSession, monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(pool.forest, "clock", lambda: now[0])
    snapshot = session.checkpoint("x", keep=True)
    tree = pool.tree(snapshot)
    tree.limit(sessions=3, ttl_s=10)
    forks = session.fork(2)
    with pytest.raises(NoRoom, match="sessions=3"):
        session.fork(1)
    with pytest.raises(NoRoom, match="sessions=3"):
        pool.lease(snapshot, owner="late")
    assert pool.stats().leases.live == 3
    now[0] = 10.0
    assert shape(pool, session) == [(0, "image", "")] and snapshot.pruned
    with pytest.raises(StaleLease, match="the time of its subtree is over"):
        forks[0].execute("SELECT 1")


def test_a_session_that_is_handed_over_keeps_its_place_under_its_new_owner(pool: WorkerBackend, session: RemoteSession):
    snapshot = session.checkpoint("x")
    heir = session.hand_over("heir")
    del session
    (node,) = (node for node in pool.tree(snapshot).nodes() if node.kind == "session")
    assert node.owner == "heir" and rows(heir, COUNT) == ((300,),)
    heir.close()
    assert [node.kind for node in pool.tree(snapshot).nodes()] == ["snapshot"]


def test_a_deep_branch_holds_each_shipped_part_once(pool: WorkerBackend, session: RemoteSession):
    depth, deepest = 120, session
    line = []
    for level in range(depth):
        add(deepest, level)
        line.append(deepest.checkpoint(str(level)))
    sizes = [sys.getsizeof(kept.contents.shipped) for kept in line]
    assert len(set(sizes)) == 1
    kill(pool)
    assert rows(session, COUNT) == ((300 + depth,),)
    session.restore(line[9])
    assert rows(session, COUNT) == ((310,),)


def test_coroutines_have_the_same_tree(pool: WorkerBackend, session: RemoteSession):
    async def explore() -> list[tuple[str, bool]]:
        backend = AsyncBackend(pool)
        async with await backend.lease(session.image, owner="async") as one:
            await one.execute("DELETE FROM customer WHERE id < 10")
            kept = await one.checkpoint("x", keep=True, ttl_s=60)
            left, right = await one.fork(2, label="try")
            async with await backend.lease(kept, owner="again") as again:
                assert (await again.execute(COUNT)).rows == ((290,),)
            left.close()
            right.close()
        tree = backend.tree(kept)
        found = [(node.kind, node.digest is not None) for node in await tree.nodes()]
        assert tree.prune().snapshots == 1
        return found

    assert asyncio.run(explore()) == [("snapshot", True)]
