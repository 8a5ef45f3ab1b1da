"""When two results are the same answer."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from savepoint.envs.sql.compare import Group, Rules, cells_equal, difference, group_difference, orders_rows, rows_equal, show, unpaired

cells = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text(max_size=3), st.binary(max_size=2))
results = st.lists(st.tuples(cells, cells), max_size=8)
near = st.lists(st.tuples(st.integers(0, 12).map(lambda i: i * 6e-10), st.sampled_from("ab")), max_size=5)


@given(results, st.randoms())
def test_any_order_of_the_same_rows_is_the_same_multiset(rows, random):
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert difference(shuffled, rows) is None


@given(results, cells)
def test_a_changed_cell_is_found(rows, cell):
    if not rows or cells_equal(rows[0][0], cell):
        return
    changed = [(cell, rows[0][1]), *rows[1:]]
    surplus = [row for row in rows[1:] if cells_equal(row[0], cell)]
    if not surplus:
        assert difference(changed, rows) is not None
    assert difference(changed, rows, ordered=True) is not None


@settings(max_examples=300)
@given(near, near)
def test_within_the_tolerance_rows_are_equal_when_some_pairing_makes_them_so(rows, wanted):
    possible = len(rows) == len(wanted) and any(all(map(rows_equal, rows, order)) for order in permutations(wanted))
    assert (difference(rows, wanted) is None) == possible


def test_a_row_gives_its_exact_partner_up_where_only_that_helps():
    assert unpaired([(0.0,), (-0.9e-9,)], [(0.0,), (0.9e-9,)]) is None


def test_thousands_of_rows_within_the_tolerance_of_each_other_are_paired():
    rows = [(1 + i * 1e-13, "x") for i in range(3000)]
    assert difference([(a + 3e-12, b) for a, b in rows], rows) is None


def test_duplicates_count_unless_the_instance_says_they_do_not():
    assert difference([(1,), (1,), (2,)], [(1,), (2,), (2,)]) is not None
    assert difference([(1,), (1,), (2,)], [(1,), (2,), (2,)], duplicates=False) is None
    assert difference([(1,)], [(1,), (2,)], duplicates=False) is not None and difference([(1,), (2,)], [(1,)], duplicates=False) is not None


def test_order_matters_only_where_it_is_asked_for():
    assert difference([(1,), (2,)], [(2,), (1,)]) is None
    assert "row 1" in (difference([(1,), (2,)], [(2,), (1,)], ordered=True) or "")


def test_integers_are_compared_exactly_and_reals_within_a_tolerance():
    assert cells_equal(1, 1.0) and cells_equal(-0.0, 0)
    assert cells_equal(0.1 + 0.2, 0.3) and not cells_equal(0.004, 0.001)
    assert not cells_equal(2**60, 2**60 + 1)
    assert cells_equal(0.004, 0.001, decimal=2) and not cells_equal(3, 4, decimal=0)


def test_infinity_equals_itself_only():
    inf = float("inf")
    assert cells_equal(inf, inf) and not cells_equal(inf, -inf) and not cells_equal(inf, 1.7976931348623157e308) and not cells_equal(10**400, inf)


def test_types_are_kept_apart():
    assert not cells_equal(1, "1") and not cells_equal("a", b"a") and not cells_equal(None, 0) and cells_equal(None, None)
    assert not cells_equal("a", "A") and not cells_equal("a", "a ") and not cells_equal("\u00e9", "e\u0301")


def test_rows_within_the_tolerance_are_paired_one_to_one():
    gold = [(1.0, "a"), (1.0 + 8e-10, "a")]
    assert difference([(1.0 + 8e-10 + 7e-10, "a"), (1.0 + 4e-10, "a")], gold) is None
    assert difference([(1.0 + 1.7e-9, "a"), (1.0 + 1.5e-9, "a")], gold) is not None


def test_columns_of_different_rows_are_never_mixed():
    assert difference([(1, "b"), (2, "a")], [(1, "a"), (2, "b")]) is not None


GROUPS = (Group(((1,), (2,)), 2), Group(((3,), (4,), (5,)), 1))


@pytest.mark.parametrize(
    ("rows", "ordered", "same"),
    [
        ([(1,), (2,), (3,)], True, True),
        ([(2,), (1,), (5,)], True, True),
        ([(5,), (1,), (2,)], True, False),
        ([(5,), (1,), (2,)], False, True),
        ([(1,), (3,), (4,)], False, False),
        ([(1,), (2,)], False, False),
        ([(1,), (2,), (6,)], False, False),
        ([(1,), (1,), (3,)], True, False),
    ],
)
def test_rows_of_a_group_come_in_any_order_and_a_cut_group_gives_any_of_its_rows(rows, ordered, same):
    assert (group_difference(rows, GROUPS, Rules(ordered)) is None) is same


def test_of_two_cut_groups_each_gives_its_share():
    groups = (Group(((1,), (2,)), 1), Group(((3,), (4,)), 1))
    assert group_difference([(2,), (3,)], groups, Rules(False)) is None and group_difference([(1,), (2,)], groups, Rules(False)) is not None


def test_where_duplicates_do_not_count_groups_hold_as_sets():
    rules = Rules(True, duplicates=False)
    assert group_difference([(2,), (1,), (1,), (4,)], GROUPS, rules) is None
    assert group_difference([(4,), (1,), (2,)], GROUPS, rules) is not None and group_difference([(1,), (4,)], GROUPS, rules) is not None
    assert group_difference([(1,), (2,), (3,), (4,)], GROUPS, rules) is not None


def test_a_top_level_order_by_is_seen_at_the_top_level():
    assert orders_rows("SELECT a FROM t ORDER BY a") and orders_rows("WITH x AS (SELECT 1) SELECT * FROM x ORDER BY 1 LIMIT 2")
    assert not orders_rows("SELECT a FROM (SELECT a FROM t ORDER BY a)")
    assert not orders_rows("SELECT row_number() OVER (ORDER BY a), group_concat(a ORDER BY b) FROM t")
    assert not orders_rows("SELECT 'ORDER BY' FROM t -- ORDER BY a")
    assert not orders_rows("WITH x AS (SELECT a FROM t ORDER BY a) SELECT * FROM x")
    assert not orders_rows("this is no SQL ORDER BY")


def test_a_shown_row_is_short_and_can_be_printed():
    text = show((None, "x" * 10_000, b"\xff" * 10_000, "\udcff", *range(500)))
    assert len(text) < 500 and text.startswith("(NULL, 'xxx") and text.encode("utf-8")
