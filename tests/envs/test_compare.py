"""When two results are the same answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from savepoint.envs.sql.compare import cells_equal, difference, orders_rows

cells = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text(max_size=3), st.binary(max_size=2))
results = st.lists(st.tuples(cells, cells), max_size=8)


@given(results, st.randoms())
def test_any_order_of_the_same_rows_is_the_same_multiset(rows, random):
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert difference(shuffled, rows, ordered=False) is None


@given(results, cells)
def test_a_changed_cell_is_found(rows, cell):
    if not rows or cells_equal(rows[0][0], cell):
        return
    changed = [(cell, rows[0][1]), *rows[1:]]
    surplus = [row for row in rows[1:] if cells_equal(row[0], cell)]
    if not surplus:
        assert difference(changed, rows, ordered=False) is not None
    assert difference(changed, rows, ordered=True) is not None


def test_duplicates_count():
    assert difference([(1,), (1,), (2,)], [(1,), (2,), (2,)], ordered=False) is not None


def test_order_matters_only_where_it_is_asked_for():
    assert difference([(1,), (2,)], [(2,), (1,)], ordered=False) is None
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


def test_rows_within_the_tolerance_are_paired_one_to_one():
    gold = [(1.0, "a"), (1.0 + 8e-10, "a")]
    assert difference([(1.0 + 8e-10 + 7e-10, "a"), (1.0 + 4e-10, "a")], gold, ordered=False) is None
    assert difference([(1.0 + 1.7e-9, "a"), (1.0 + 1.5e-9, "a")], gold, ordered=False) is not None


def test_a_top_level_order_by_is_seen_in_the_syntax_tree():
    assert orders_rows("SELECT a FROM t ORDER BY a") and orders_rows("WITH x AS (SELECT 1) SELECT * FROM x ORDER BY 1 LIMIT 2")
    assert not orders_rows("SELECT a FROM (SELECT a FROM t ORDER BY a)")
    assert not orders_rows("SELECT row_number() OVER (ORDER BY a) FROM t")
    assert not orders_rows("SELECT 'ORDER BY' FROM t -- ORDER BY a")
    assert not orders_rows("this is no SQL ORDER BY")
