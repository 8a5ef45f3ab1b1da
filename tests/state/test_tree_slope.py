"""Deep and wide trees at flat cost. Work is counted, never timed: records touched, SQLite's instructions, pages read, nodes of the page table, bytes."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest
from state_support import rows

from savepoint.state import BaseImage, Quota, Session, SqliteBackend

DEPTH, WIDTH = 4096, 10_000
PROBES = {1, 16, 256, 1024, DEPTH}
POINT = "SELECT amount FROM orders WHERE id = 1234"
RANGE = "SELECT sum(amount) FROM orders WHERE id BETWEEN 1000 AND 1099"
QUOTA = Quota(delta_bytes=1 << 30)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def table_nodes(backend: SqliteBackend) -> int:
    """Nodes of the page tables; the Python store has none."""
    return int(backend.pages.quick.cow_live(4)) if backend.pages.kind == "c" else 0  # type: ignore[attr-defined]


def change(session: Session, number: int) -> Any:
    """One row in one of forty places: what a branch changes is alike at every depth."""
    result = session.execute(f"UPDATE orders SET amount = {number} WHERE id = {number % 40 * 70}")
    assert result.status == "ok", result
    return result


def work(backend: SqliteBackend, begin: Callable[[], Session]) -> tuple[int, ...]:
    """What a branch costs: records touched by making and closing it, pages read and instructions of its first queries and of an update."""
    before = backend.forest.touched
    session = begin()
    try:
        steps = [session.execute(sql, deadline_s=60).vm_steps for sql in ("SELECT count(*) FROM customer", POINT, RANGE)]
        update = change(session, 3)
        connection = session._lease.connection
        assert connection is not None
        reads = connection.raw.status(apsw.SQLITE_DBSTATUS_CACHE_MISS)[0]
    finally:
        session.close()
    backend.forest.above(session._node)  # has the close taken out
    return backend.forest.touched - before, reads, *steps, update.vm_steps


def forked(session: Session) -> Session:
    (fork,) = session.fork()
    return fork


def test_a_branch_costs_the_same_work_at_every_depth(backend: SqliteBackend, base: BaseImage):
    session = backend.lease(base, owner="deep", quota=QUOTA)
    for number in range(40):
        change(session, number + 1)
    found, owners = {}, set()
    for level in range(1, DEPTH + 1):
        child = forked(session)
        session.close()
        session = child
        change(session, level)
        snapshot = session.checkpoint(str(level), keep=True)
        if level in PROBES:
            found[level] = work(backend, lambda s=session: forked(s)), work(backend, lambda s=snapshot: backend.lease(s, owner="x"))
            owners.add(session.owner)
    assert len(set(found.values())) == 1, found
    assert owners == {"deep/fork-0"}
    nodes = backend.tree(base).nodes(digests=False)
    assert len(nodes) == DEPTH + 2 and nodes[-1].depth == DEPTH + 1


def test_a_deep_tree_costs_what_its_states_changed_and_is_given_back(backend: SqliteBackend, base: BaseImage):
    before, tables, memory = backend.pages.live()["pages"], table_nodes(backend), resident()
    with backend.lease(base, owner="deep", quota=QUOTA) as session:
        for level in range(1, DEPTH + 1):
            change(session, level)
            session.checkpoint(str(level), keep=True)
        pages = backend.pages.live()["pages"] - before
        assert pages <= 2 * DEPTH and table_nodes(backend) - tables <= 3 * DEPTH
        assert resident() - memory < DEPTH * (2 * base.page_size + 16_000)
        assert sum(node.delta_bytes for node in backend.tree(base).nodes(digests=False)) >= pages * base.page_size
        assert backend.tree(base).prune(sessions="spare").snapshots == DEPTH
        session.reset()
    assert (backend.pages.live()["pages"], table_nodes(backend)) == (before, tables)


def test_a_branch_costs_the_same_work_at_every_width(backend: SqliteBackend, base: BaseImage):
    before, memory = backend.pages.live()["pages"], resident()
    found = {}
    with backend.lease(base, owner="wide", quota=QUOTA) as root, backend.lease(base, owner="branch", quota=QUOTA) as branch:
        change(root, 1)
        start = root.checkpoint("start", keep=True)
        for number in range(1, WIDTH + 1):
            branch.restore(start)
            change(branch, number % 39 + 2)
            branch.checkpoint(str(number), keep=True)
            if number in {1, 100, 1000, WIDTH}:
                found[number] = work(backend, lambda: forked(root)), work(backend, lambda: backend.lease(start, owner="x"))
        assert len(set(found.values())) == 1, found
        assert len(backend.tree(start).nodes(digests=False)) == WIDTH + 3
        assert backend.pages.live()["pages"] - before <= 2 * WIDTH + 10 and resident() - memory < WIDTH * (2 * base.page_size + 12_000)
        assert backend.tree(start).prune(sessions="spare").snapshots == WIDTH + 1
    assert backend.pages.live()["pages"] == before


def test_ten_thousand_open_connections_cost_a_new_one_no_walk_through_the_librarys_list(backend: SqliteBackend, base: BaseImage):
    """The newest is always found right behind the gate, which is right behind the head."""
    if backend.pages.kind != "c":
        pytest.skip("the Python store registers its VFSs with the library, which walks its list")
    sessions = [backend.lease(base, owner=str(i)) for i in range(50)]
    for number, session in enumerate(sessions):
        rows(session, POINT)
        names = apsw.vfs_names()
        gate = names.index("savepoint-gate")
        assert names[gate + 1] == session._lease.volume.name and len([name for name in names if name.startswith("savepoint-")]) >= number + 2
    for session in (*sessions[10:20], *reversed(sessions[:10]), *sessions[20:]):
        session.close()
        assert session._lease.volume.name not in apsw.vfs_names()


def test_a_checkpoint_below_a_long_line_of_forks_finds_the_state_above_at_once(backend: SqliteBackend, base: BaseImage):
    """Forks whose contents nobody kept, each with a live session beside, whether they were forks from the start or snapshots once."""
    found = []
    for levels in (10, 400):
        with backend.lease(base, owner="line", quota=QUOTA) as session:
            line, dropped = [forked(session)], []
            for level in range(levels):
                change(line[-1], level + 1)
                line[-1].park()
                line.append(forked(line[-1]))
                dropped.append(line[-1].checkpoint())
                line.append(forked(line[-1]))
            del dropped[:]
            work(backend, lambda: forked(session))
            work(backend, lambda s=line[-1]: [s.checkpoint(), forked(s)][1])
            before = backend.forest.touched
            line[-1].checkpoint()
            backend.forest.above(line[-1]._node)
            found.append(backend.forest.touched - before)
            for one in line:
                one.close()
    assert found[0] == found[1] < 10


@pytest.mark.parametrize("order", ["oldest first", "newest first", "leaked"])
def test_a_long_line_of_live_forks_is_taken_out_at_the_same_cost_for_each(backend: SqliteBackend, base: BaseImage, order: str):
    line = [backend.lease(base, owner="line", quota=QUOTA)]
    lines = 1000
    for level in range(lines):
        change(line[-1], level + 1)
        line[-1].park()
        line.append(forked(line[-1]))
    tree = backend.tree(base)
    assert max(node.depth for node in tree.nodes(digests=False)) == lines + 1
    before = backend.forest.touched
    if order == "leaked":
        line.clear()
        gc.collect()
    else:
        for session in line if order == "oldest first" else reversed(line):
            session.close()
            backend.forest.root(base)
    assert [node.kind for node in tree.nodes(digests=False)] == ["image"]
    assert backend.forest.touched - before < 4 * lines
