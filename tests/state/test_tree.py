"""The tree of states: its shape, what each state costs, and what pruning, limits and times take out of it, on both page stores."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import pytest
from state_support import rows

from savepoint.state import BaseImage, InUse, NoRoom, Session, Snapshot, SqliteBackend, StaleLease, StateError, StateTree, TreeNode

COUNT = "SELECT count(*) FROM customer"


def shape(tree: StateTree) -> list[tuple[int, str, str]]:
    """(depth, kind, label) of every node, as listed."""
    return [(node.depth, node.kind, node.label) for node in tree.nodes(digests=False)]


def add(session: Session, number: int) -> None:
    rows(session, f"INSERT INTO customer(id, name) VALUES({100_000 + number}, 'new')")


def update(session: Session, low: int, count: int = 400) -> None:
    rows(session, f"UPDATE orders SET note = note || '!' WHERE id >= {low} AND id < {low + count}")


@pytest.fixture
def tree(backend: SqliteBackend, base: BaseImage) -> StateTree:
    return backend.tree(base)


# ---------------------------------------------------------------------- shape


def test_a_checkpoint_is_a_node_between_where_the_session_was_and_the_session(session: Session, tree: StateTree):
    a = session.checkpoint("a")
    add(session, 1)
    b = session.checkpoint("b")
    root, first, second, live = tree.nodes()
    assert [node.kind for node in (root, first, second, live)] == ["image", "snapshot", "snapshot", "session"]
    assert (root.parent, first.parent, second.parent, live.parent) == (None, root.id, first.id, second.id)
    assert (second.label, second.owner, second.pages, live.owner) == ("b", "test", b.pages, "test") and a.pages == 0


def test_forks_of_an_unchanged_session_hang_on_the_state_it_stands_on(session: Session, tree: StateTree):
    kept = session.checkpoint("kept")
    forks = session.fork(2, label="try")
    assert shape(tree) == [(0, "image", ""), (1, "snapshot", "kept"), (2, "session", ""), (2, "session", "try-0"), (2, "session", "try-1")]
    assert [fork.owner for fork in forks] == ["test/try-0", "test/try-1"] and kept.label == "kept"


def test_forks_of_a_changed_session_part_from_it_in_a_fork(session: Session, tree: StateTree):
    add(session, 1)
    forks = session.fork(2)
    assert shape(tree) == [(0, "image", ""), (1, "fork", ""), (2, "session", ""), (2, "session", ""), (2, "session", "")]
    assert all(rows(fork, COUNT) == ((301,),) for fork in forks)


def test_a_fork_that_no_longer_parts_paths_is_gone(session: Session, tree: StateTree):
    add(session, 1)
    for fork in session.fork(2):
        fork.close()
    assert shape(tree) == [(0, "image", ""), (1, "session", "")]


def test_a_fork_whose_session_moves_away_or_whose_branch_is_pruned_is_gone(session: Session, tree: StateTree):
    start = session.checkpoint("start")
    add(session, 1)
    (fork,) = session.fork()
    session.restore(start)
    assert shape(tree) == [(0, "image", ""), (1, "snapshot", "start"), (2, "session", ""), (2, "session", "")]
    add(fork, 2)
    ends = fork.fork(2)
    for end in ends:
        add(end, 3)
    a, b = (end.checkpoint(label) for end, label in zip(ends, "ab", strict=True))
    for one in (fork, *ends):
        one.restore(start)
    assert [node.kind for node in tree.nodes()].count("fork") == 1
    tree.prune(a)
    assert "fork" not in [node.kind for node in tree.nodes()] and not b.pruned


def test_a_restore_moves_the_session_under_the_snapshot_and_a_reset_under_the_image(session: Session, tree: StateTree):
    a = session.checkpoint("a")
    b = session.checkpoint("b")
    session.restore(a)
    assert shape(tree) == [(0, "image", ""), (1, "snapshot", "a"), (2, "snapshot", "b"), (2, "session", "")]
    session.reset()
    assert shape(tree)[-1] == (1, "session", "") and b.label == "b"


def test_a_snapshot_that_nobody_holds_leaves_the_tree_and_its_children_move_up(session: Session, tree: StateTree):
    a = session.checkpoint("a")
    b = session.checkpoint("b")
    del a
    assert shape(tree) == [(0, "image", ""), (1, "snapshot", "b"), (2, "session", "")] and b.label == "b"


def test_a_kept_snapshot_outlives_its_session_and_every_handle(backend: SqliteBackend, base: BaseImage, tree: StateTree):
    with backend.lease(base, owner="explorer") as session:
        add(session, 1)
        session.checkpoint("found", keep=True)
    gc.collect()
    assert shape(tree) == [(0, "image", ""), (1, "snapshot", "found")]
    with backend.lease(tree.snapshot("found"), owner="later") as again:
        assert rows(again, COUNT) == ((301,),)
        assert shape(tree)[-1] == (2, "session", "")


def test_a_session_leased_on_a_snapshot_is_independent_of_it_and_its_settings_come_along(backend: SqliteBackend, session: Session):
    rows(session, "PRAGMA foreign_keys = ON")
    add(session, 1)
    snapshot = session.checkpoint("x")
    with backend.lease(snapshot, owner="a") as a, backend.lease(snapshot, owner="b") as b:
        add(a, 2)
        assert rows(a, COUNT) == ((302,),) and rows(b, COUNT) == ((301,),) and rows(b, "PRAGMA foreign_keys") == ((1,),)


def test_a_leaked_session_and_its_fork_points_leave_the_tree(backend: SqliteBackend, base: BaseImage, tree: StateTree):
    session = backend.lease(base, owner="leaky")
    add(session, 1)
    forks = session.fork(3)
    del session, forks
    gc.collect()
    assert shape(tree) == [(0, "image", "")]


def test_the_digest_of_a_node_is_that_of_a_session_on_it(session: Session, tree: StateTree):
    update(session, 0)
    kept = session.checkpoint("x")
    digest = session.digest()
    update(session, 0)
    nodes = {node.label: node for node in tree.nodes()}
    assert nodes["x"].digest == digest != session.digest() and tree.nodes()[0].digest == session.image.digest and kept.pages


def test_the_delta_of_a_node_is_what_it_shows_otherwise_than_its_parent(session: Session, tree: StateTree):
    update(session, 0)
    a = session.checkpoint("a")
    update(session, 2000, 1)
    b = session.checkpoint("b")
    sizes = {node.label: node.delta_bytes for node in tree.nodes()}
    assert sizes["a"] == a.pages * session.image.page_size and sizes["b"] == session.image.page_size and b.pages == a.pages + 1


def test_the_delta_of_a_dropped_parent_is_counted_on(session: Session, tree: StateTree):
    update(session, 0)
    a = session.checkpoint("a")
    kept = a.pages
    b = session.checkpoint("b")
    del a
    (node,) = (node for node in tree.nodes() if node.label == "b")
    assert node.delta_bytes == kept * session.image.page_size and b.pages == kept


def test_the_delta_below_a_fork_goes_by_the_nearest_state_that_is_still_there(session: Session, tree: StateTree):
    update(session, 0)
    top = session.checkpoint("top")
    middle = session.checkpoint("middle")
    update(session, 2000, 1)
    (fork,) = session.fork()
    first = fork.checkpoint("first")
    del middle
    second = fork.fork()[0].checkpoint("second")
    third = session.checkpoint("third")
    sizes = {node.label: node.delta_bytes // session.image.page_size for node in tree.nodes()}
    assert (sizes["first"], sizes["second"], sizes["third"]) == (1, 0, 1) and top.pages > 10
    assert first.pages == second.pages == third.pages == top.pages + 1


def test_a_copy_of_a_snapshot_is_as_good_although_the_tree_does_not_know_it(backend: SqliteBackend, session: Session, tree: StateTree):
    add(session, 1)
    copy = replace(session.checkpoint("x"), settings={})
    session.reset()
    session.restore(copy)
    with backend.lease(copy, owner="again") as again:
        assert rows(session, COUNT) == rows(again, COUNT) == ((301,),)
    assert shape(tree) == [(0, "image", ""), (1, "session", "")]


# ---------------------------------------------------------------------- prune


def grown(session: Session) -> tuple[Snapshot, Snapshot, Snapshot]:
    """root -> a -> (b, c), with some pages each; the session stands on the image again."""
    update(session, 0)
    a = session.checkpoint("a", keep=True)
    update(session, 800)
    b = session.checkpoint("b", keep=True)
    session.restore(a)
    update(session, 1600)
    c = session.checkpoint("c", keep=True)
    session.reset()
    return a, b, c


def test_pruning_frees_the_pages_of_the_subtree_whoever_holds_the_snapshots(backend: SqliteBackend, session: Session, tree: StateTree):
    before = backend.pages.usage()[0]
    a, b, c = grown(session)
    full = backend.pages.usage()[0]
    pruned = tree.prune(b)
    assert shape(tree) == [(0, "image", ""), (1, "snapshot", "a"), (2, "snapshot", "c"), (1, "session", "")]
    assert full - backend.pages.usage()[0] == pruned.bytes > 0 and pruned.snapshots == 1
    tree.prune(a)
    assert backend.pages.usage()[0] == before and shape(tree) == [(0, "image", ""), (1, "session", "")]
    for snapshot in (a, b, c):
        with pytest.raises(StateError, match="was pruned"):
            session.restore(snapshot)
        with pytest.raises(StateError, match="was pruned"):
            backend.lease(snapshot, owner="late")
    assert a.pruned


def test_a_subtree_in_use_is_refused_with_the_users_named_and_nothing_is_freed(backend: SqliteBackend, session: Session, tree: StateTree):
    a, b, _ = grown(session)
    user = backend.lease(b, owner="rollout-7")
    before = backend.pages.usage()[0]
    with pytest.raises(InUse, match=r"snapshot 'a' is in use by 1 session: 'rollout-7'; nothing was pruned"):
        tree.prune(a)
    assert backend.pages.usage()[0] == before and not a.pruned and rows(user, COUNT) == ((300,),)


def test_pruning_spares_sessions_with_all_their_contents_when_asked_to(backend: SqliteBackend, session: Session, tree: StateTree):
    a, b, _ = grown(session)
    with backend.lease(b, owner="rollout-7") as user:
        digest = user.digest()
        pruned = tree.prune(a, sessions="spare")
        assert pruned.spared == ("rollout-7",) and pruned.snapshots == 3
        assert user.digest() == digest and shape(tree) == [(0, "image", ""), (1, "session", ""), (1, "session", "")]
        again = user.checkpoint("again")
        assert [node.delta_bytes for node in tree.nodes() if node.label == "again"] == [again.pages * session.image.page_size]


def test_pruning_closes_sessions_when_asked_to(backend: SqliteBackend, session: Session, tree: StateTree):
    a, b, _ = grown(session)
    user = backend.lease(b, owner="rollout-7")
    assert tree.prune(a, sessions="close").spared == () and user.closed and not session.closed
    with pytest.raises(StaleLease):
        user.execute("SELECT 1")


def test_the_whole_tree_of_an_image_can_be_pruned_and_used_again(backend: SqliteBackend, session: Session, tree: StateTree):
    grown(session)
    session.close()
    assert tree.prune().snapshots == 3 and shape(tree) == [(0, "image", "")] and backend.pages.live()["pages"] == 0
    with backend.lease(session.image, owner="next") as after:
        add(after, 1)
        after.checkpoint("next", keep=True)
    assert shape(tree) == [(0, "image", ""), (1, "snapshot", "next")]


def test_a_closed_backend_keeps_nothing(backend: SqliteBackend, session: Session):
    grown(session)
    backend.close()
    assert backend.pages.live()["pages"] == 0


def test_a_tree_of_a_snapshot_is_the_subtree_below_it(backend: SqliteBackend, session: Session):
    a, b, _ = grown(session)
    assert shape(backend.tree(a)) == [(0, "snapshot", "a"), (1, "snapshot", "b"), (1, "snapshot", "c")]
    backend.tree(a).prune(b)
    assert shape(backend.tree(a)) == [(0, "snapshot", "a"), (1, "snapshot", "c")]


def test_a_label_names_one_snapshot_or_says_how_many_there_are(session: Session, tree: StateTree):
    first, second = session.checkpoint("x"), session.checkpoint("x")
    with pytest.raises(StateError, match="2 snapshots are labelled 'x'"):
        tree.snapshot("x")
    with pytest.raises(StateError, match="0 snapshots are labelled 'y'"):
        tree.snapshot("y")
    assert first is not second


# ---------------------------------------------------------------------- limits and times


def test_a_subtree_takes_no_more_snapshots_than_its_limit_and_the_refused_one_leaves_nothing(backend: SqliteBackend, session: Session, tree: StateTree):
    a = session.checkpoint("a")
    tree.limit(a, snapshots=2)
    b = session.checkpoint("b")
    held, before = backend.pages.live()["images"], shape(tree)
    with pytest.raises(NoRoom, match=r"the subtree at snapshot 'a' has no room: snapshots=2, 2 used, 1 more asked for"):
        session.checkpoint("c")
    assert backend.pages.live()["images"] == held and shape(tree) == before
    del b
    assert session.checkpoint("c").label == "c"


def test_a_subtree_takes_no_more_sessions_than_its_limit_and_a_refused_fork_opens_none(backend: SqliteBackend, session: Session, tree: StateTree):
    a = session.checkpoint("a")
    tree.limit(a, sessions=3)
    with pytest.raises(NoRoom, match="sessions=3"):
        session.fork(3)
    assert backend.stats().leases.live == 1
    other = backend.lease(session.image, owner="outside")
    forks = session.fork(2)
    with pytest.raises(NoRoom):
        other.restore(a)
    forks[0].close()
    other.restore(a)


def test_a_subtree_takes_no_more_bytes_than_its_limit(session: Session, tree: StateTree):
    a = session.checkpoint("a")
    tree.limit(a, delta_bytes=4 * session.image.page_size)
    update(session, 0, 1)
    b = session.checkpoint("b")
    update(session, 0, 400)
    with pytest.raises(NoRoom, match="delta_bytes"):
        session.checkpoint("c")
    assert tree.prune(b, sessions="spare").bytes == b.pages * session.image.page_size


def test_what_a_session_took_over_is_not_counted_twice_at_its_next_checkpoint(session: Session, tree: StateTree):
    start = session.checkpoint("start")
    update(session, 0)
    gone = session.checkpoint("gone")
    tree.limit(start, delta_bytes=gone.pages * session.image.page_size)
    kept = gone.pages
    del gone
    assert session.checkpoint("again").pages == kept and start.pages == 0


def test_a_session_may_move_within_a_subtree_that_is_full(session: Session, tree: StateTree):
    a = session.checkpoint("a")
    b = session.checkpoint("b")
    tree.limit(a, sessions=1)
    session.restore(a)
    session.restore(b)
    assert shape(tree)[-1] == (3, "session", "")


def test_limits_of_subtrees_nest(session: Session, tree: StateTree):
    a = session.checkpoint("a")
    b = session.checkpoint("b")
    tree.limit(b, snapshots=9)
    tree.limit(a, snapshots=3)
    c = session.checkpoint("c")
    with pytest.raises(NoRoom, match="snapshot 'a'"):
        session.checkpoint("d")
    tree.limit(b, snapshots=1)
    tree.limit(a, snapshots=9)
    with pytest.raises(NoRoom, match="snapshot 'b'"):
        session.checkpoint("d")
    session.restore(a)
    assert session.checkpoint("e").label == "e" and c.label == "c"


@pytest.fixture
def clock(backend: SqliteBackend, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(backend.forest, "clock", lambda: now[0])
    return now


def test_a_kept_snapshot_is_let_go_when_its_time_is_over_unless_somebody_holds_it(session: Session, tree: StateTree, clock: list[float]):
    session.checkpoint("short", keep=True, ttl_s=10)
    held = session.checkpoint("held", keep=True, ttl_s=10)
    tree.keep(tree.snapshot("short"), 20)
    assert [node.expires_s for node in tree.nodes() if node.kept] == [20, 10]
    clock[0] += 10
    assert [(node.label, node.kept) for node in tree.nodes() if node.kind == "snapshot"] == [("short", True), ("held", False)] and not held.pruned
    clock[0] += 10
    assert [node.label for node in tree.nodes() if node.kind == "snapshot"] == ["held"]


def test_a_subtree_ends_when_its_time_is_over_with_the_sessions_in_it(backend: SqliteBackend, session: Session, tree: StateTree, clock: list[float]):
    a, b, _ = grown(session)
    user = backend.lease(b, owner="rollout-7")
    tree.limit(a, ttl_s=10)
    clock[0] += 9.9
    assert len(shape(tree)) == 6
    clock[0] += 0.2
    assert shape(tree) == [(0, "image", ""), (1, "session", "")] and a.pruned and b.pruned
    with pytest.raises(StaleLease, match="the time of its subtree is over"):
        user.execute("SELECT 1")


def test_time_runs_out_although_nobody_asks(backend: SqliteBackend, session: Session):
    update(session, 0)
    session.checkpoint("short", keep=True, ttl_s=0.05)
    session.reset()
    deadline = time.monotonic() + 20
    while backend.pages.live()["pages"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert backend.pages.live()["pages"] == 0


def test_what_trees_keep_counts_against_the_memory_budget(backend: SqliteBackend, session: Session, tree: StateTree):
    before = backend.stats().leases.charged_bytes
    a, b, c = grown(session)
    assert backend.stats().leases.charged_bytes - before == sum(node.delta_bytes for node in tree.nodes() if node.kept) > 0
    tree.prune(a)
    assert backend.stats().leases.charged_bytes == before and b.pruned and c.pruned


# ---------------------------------------------------------------------- misuse


def test_misuse_is_one_clear_error(backend: SqliteBackend, session: Session, tree: StateTree):
    a = session.checkpoint("a")
    live: TreeNode = tree.nodes()[-1]
    with pytest.raises(InUse, match="is a session, in use by 'test'"):
        tree.prune(live)
    with pytest.raises(StateError, match="only a snapshot can be kept"):
        tree.keep(live)
    with pytest.raises(StateError, match="is in no tree"):
        backend.tree(session.freeze("loose"))
    with pytest.raises(ValueError, match="sessions must be"):
        tree.prune(a, sessions="kill")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must not be negative"):
        tree.limit(a, snapshots=-1)
    with pytest.raises(ValueError, match="ttl_s"):
        session.checkpoint("b", keep=True, ttl_s=0)
    tree.prune(a, sessions="spare")
    with pytest.raises(StateError, match="was pruned already"):
        tree.prune(a)
