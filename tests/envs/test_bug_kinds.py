"""Kinds of bug on parsed SQL: each does what its name says, and nothing where it has no place."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from savepoint.envs.sql import databases
from savepoint.envs.sql.bugs import CATEGORIES, KINDS, Ground
from savepoint.envs.sql.bugs.draft import parse, write
from savepoint.envs.sql.deep import difficulty
from savepoint.envs.sql.neighbours import neighbours
from savepoint.envs.sql.part import pick
from savepoint.envs.sql.schema import read_schema
from savepoint.envs.sql.verify import Images
from savepoint.state import open_backend


@pytest.fixture(scope="module")
def ground(tmp_path_factory) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp("ground")
    with open_backend("sqlite", store=folder / "store") as backend:
        images = Images(backend, backend.import_base(databases.build("shop", folder / "shop.sqlite")), owner="test")
        schema = read_schema(images.rows)
        yield Ground(pick(schema, 50, 400, simple=False), schema, images.rows)
        images.close()


WINDOW = "SELECT k, SUM(x) OVER (PARTITION BY g ORDER BY d, k ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) FROM t"
WHOLE = "SELECT k, LAST_VALUE(x) OVER (PARTITION BY g ORDER BY k ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING) FROM t"
CHECKED = "CREATE TABLE r (a INTEGER CHECK (a >= 1 AND a <= 5), b TEXT, UNIQUE (a, b))"
PART = "WITH part AS (SELECT k, g, x FROM t)"
RANKED = f"{PART} SELECT k, g, x FROM (SELECT o.k, o.g, o.x, RANK() OVER (PARTITION BY o.g ORDER BY o.x DESC) AS place FROM part AS o) WHERE place = 1"


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("integer_division", "SELECT 100.0 * SUM(a) / COUNT(*) FROM t", {"SELECT 100 * SUM(a) / COUNT(*) FROM t", "SELECT SUM(a) / COUNT(*) * 100 FROM t"}),
        ("integer_division", "SELECT SUM(a) * 1.0 / COUNT(*) FROM t", {"SELECT SUM(a) / COUNT(*) FROM t"}),
        ("where_for_having", "SELECT g FROM t GROUP BY g HAVING SUM(x) > 5", {"SELECT g FROM t WHERE x > 5 GROUP BY g"}),
        ("where_for_having", "SELECT g FROM t WHERE y < 1 GROUP BY g HAVING AVG(x) > 5", {"SELECT g FROM t WHERE y < 1 AND x > 5 GROUP BY g"}),
        ("having_for_where", "SELECT g, COUNT(*) FROM t WHERE x > 5 GROUP BY g", {"SELECT g, COUNT(*) FROM t GROUP BY g HAVING x > 5"}),
        ("count_of_nullable", "SELECT COUNT(*), COUNT(h) FROM t", {"SELECT COUNT(h), COUNT(h) FROM t"}),
        ("lost_parentheses", "SELECT 1 FROM t WHERE (a = 1 OR a = 2) AND b > 3", {"SELECT 1 FROM t WHERE a = 1 OR a = 2 AND b > 3"}),
        ("unequal_loses_nulls", "SELECT 1 FROM t WHERE a IS NOT 'x'", {"SELECT 1 FROM t WHERE a <> 'x'"}),
        ("equals_null", "SELECT 1 FROM t WHERE a IS NULL", {"SELECT 1 FROM t WHERE a = NULL"}),
        ("equals_null", "SELECT 1 FROM t WHERE NOT a IS NULL", {"SELECT 1 FROM t WHERE a <> NULL"}),
        ("outer_to_inner", "SELECT 1 FROM p LEFT JOIN c ON c.k = p.k AND c.x > 3", {"SELECT 1 FROM p LEFT JOIN c ON c.k = p.k WHERE c.x > 3"}),
        ("double_counting", "SELECT COUNT(*) FROM p WHERE EXISTS(SELECT 1 FROM c WHERE c.k = p.k AND c.x > 3)",
         {"SELECT COUNT(*) FROM p JOIN c ON c.k = p.k WHERE c.x > 3"}),
        ("not_in_null", "SELECT 1 FROM p WHERE NOT EXISTS(SELECT 1 FROM c WHERE c.k = p.k)", {"SELECT 1 FROM p WHERE NOT p.k IN (SELECT c.k FROM c)"}),
        ("wrong_correlation", "SELECT o.k FROM t AS o WHERE o.x > (SELECT AVG(i.x) FROM t AS i WHERE i.g = o.g)",
         {f"SELECT o.k FROM t AS o WHERE o.x > (SELECT AVG(i.x) FROM t AS i WHERE i.g = {other})" for other in ("i.g", "o.k")}),
        ("union_for_union_all", "SELECT COUNT(*) FROM (SELECT a FROM t UNION ALL SELECT b FROM u)",
         {"SELECT COUNT(*) FROM (SELECT a FROM t UNION SELECT b FROM u)"}),
        ("union_all_for_union", "SELECT a FROM t UNION SELECT b FROM u", {"SELECT a FROM t UNION ALL SELECT b FROM u"}),
        ("lost_partition", WINDOW, {WINDOW.replace("PARTITION BY g ", "")}),
        ("frame_default", WHOLE, {WHOLE.replace(" ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING", "")}),
        ("running_total_ties", WINDOW, {WINDOW.replace("d, k ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW", "d")}),
        ("limit_without_order", "SELECT a FROM t ORDER BY b LIMIT 3", {"SELECT a FROM t LIMIT 3"}),
        ("text_against_number", "SELECT 1 FROM t WHERE STRFTIME('%m', d) = '02'", {"SELECT 1 FROM t WHERE STRFTIME('%m', d) = 2"}),
        ("text_against_number", "SELECT g FROM t GROUP BY g HAVING SUM(x) > 5", {"SELECT g FROM t GROUP BY g HAVING SUM(x) > '5'"}),
        ("last_day_lost", "SELECT 1 FROM t WHERE d >= '2024-02-01' AND d < '2024-03-01'", {"SELECT 1 FROM t WHERE d BETWEEN '2024-02-01' AND '2024-02-29'"}),
        ("minute_for_month", "SELECT STRFTIME('%Y-%m', d) FROM t", {"SELECT STRFTIME('%Y-%M', d) FROM t"}),
        ("subtracted_texts", "SELECT JULIANDAY(b) - JULIANDAY('2024-01-01') FROM t", {"SELECT b - '2024-01-01' FROM t"}),
        ("case_sensitive_match", "SELECT 1 FROM t WHERE a LIKE '%rock%'", {"SELECT 1 FROM t WHERE a GLOB '*rock*'"}),
        ("lost_wildcard", "SELECT 1 FROM t WHERE a LIKE '%rock%'", {"SELECT 1 FROM t WHERE a LIKE 'rock'", "SELECT 1 FROM t WHERE a LIKE '*rock*'"}),
        ("lost_rounding", "SELECT ROUND(AVG(x), 2) FROM t", {"SELECT ROUND(AVG(x)) FROM t", "SELECT CAST(AVG(x) AS INTEGER) FROM t"}),
        ("missing_label", "SELECT COALESCE(a, 'none') FROM t GROUP BY COALESCE(a, 'none')", {"SELECT a FROM t GROUP BY a"}),
        ("bands_in_wrong_order", "SELECT CASE WHEN x >= 9 THEN 'A' WHEN x >= 5 THEN 'B' ELSE 'C' END FROM t",
         {"SELECT CASE WHEN x >= 5 THEN 'B' WHEN x >= 9 THEN 'A' ELSE 'C' END FROM t"}),
        ("zero_is_counted", "SELECT COUNT(CASE WHEN a = 1 THEN 1 END) FROM t", {"SELECT COUNT(CASE WHEN a = 1 THEN 1 ELSE 0 END) FROM t"}),
        ("lost_padding", "SELECT PRINTF('A-%05d', k) FROM t", {"SELECT PRINTF('A-%5d', k) FROM t", "SELECT PRINTF('A-%d', k) FROM t"}),
        ("list_separator", "SELECT GROUP_CONCAT(a, '; ' ORDER BY a) FROM t", {"SELECT GROUP_CONCAT(a, ',' ORDER BY a) FROM t"}),
        ("list_order", "SELECT GROUP_CONCAT(a, '; ' ORDER BY a) FROM t", {"SELECT GROUP_CONCAT(a, '; ') FROM t"}),
        ("update_without_where", "UPDATE t SET x = 1 WHERE k = 2", {"UPDATE t SET x = 1"}),
        ("case_without_else", "UPDATE t SET w = CASE w WHEN 'a' THEN 'b' ELSE w END", {"UPDATE t SET w = CASE w WHEN 'a' THEN 'b' END"}),
        ("missing_commit", "BEGIN TRANSACTION; DELETE FROM t; COMMIT", {"BEGIN TRANSACTION; DELETE FROM t"}),
        ("emptied_first", "INSERT INTO u SELECT * FROM t; DELETE FROM t", {"DELETE FROM t; INSERT INTO u SELECT * FROM t"}),
        ("missing_transaction", "BEGIN TRANSACTION; DELETE FROM t; DELETE FROM u; COMMIT", {"DELETE FROM t; DELETE FROM u"}),
        ("replaced_row", "INSERT INTO n (r, c) VALUES (1, 2) ON CONFLICT(r) DO UPDATE SET c = c + 1", {"INSERT OR REPLACE INTO n (r, c) VALUES (1, 2)"}),
        ("children_left", "DELETE FROM c WHERE k = 1; DELETE FROM p WHERE k = 1", {"DELETE FROM p WHERE k = 1"}),
        ("too_few_columns", "DELETE FROM t WHERE NOT k IN (SELECT MIN(k) FROM t GROUP BY a, b)",
         {"DELETE FROM t WHERE NOT k IN (SELECT MIN(k) FROM t GROUP BY a)"}),
        ("overwritten_total", "UPDATE s SET total = total + NEW.x WHERE ref = NEW.k", {"UPDATE s SET total = NEW.x WHERE ref = NEW.k"}),
        ("every_total", "UPDATE s SET total = total + NEW.x WHERE ref = NEW.k", {"UPDATE s SET total = total + NEW.x"}),
        ("check_accepts_all", CHECKED, {CHECKED.replace(" AND ", " OR ")}),
        ("narrow_key", CHECKED, {CHECKED.replace("UNIQUE (a, b)", "UNIQUE (a)")}),
        ("query_per_row", f"{PART} SELECT o.k, SUM(o.x) OVER (PARTITION BY o.g) FROM part AS o",
         {f"{PART} SELECT o.k, (SELECT SUM(i.x) FROM part AS i WHERE i.g = o.g) FROM part AS o"}),
        ("rank_by_counting", f"{PART} SELECT o.k, RANK() OVER (PARTITION BY o.g ORDER BY o.x) FROM part AS o",
         {f"{PART} SELECT o.k, (SELECT COUNT(*) + 1 FROM part AS i WHERE i.g = o.g AND i.x < o.x) FROM part AS o"}),
        ("quadratic_running_total", f"{PART} SELECT SUM(o.x) OVER (ORDER BY o.k ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) FROM part AS o",
         {f"{PART} SELECT (SELECT SUM(i.x) FROM part AS i WHERE i.k <= o.k) FROM part AS o"}),
        ("compared_with_all", RANKED,
         {f"{PART} SELECT o.k, o.g, o.x FROM part AS o WHERE NOT EXISTS(SELECT 1 FROM part AS i WHERE i.g = o.g AND i.x > o.x)",
          f"{PART} SELECT o.k, o.g, o.x FROM part AS o WHERE (SELECT COUNT(*) FROM part AS i WHERE i.g = o.g AND i.x > o.x) = 0"}),
        ("hidden_from_index", "SELECT k FROM t WHERE a = 5", {"SELECT k FROM t WHERE a + 0 = 5", "SELECT k FROM t WHERE COALESCE(a, -1) = 5"}),
        ("hidden_from_index", "SELECT k FROM t WHERE a >= '2024-01-01' AND a < '2025-01-01'",
         {"SELECT k FROM t WHERE STRFTIME('%Y', a) = '2024'", "SELECT k FROM t WHERE SUBSTRING(a, 1, 4) = '2024'",
          "SELECT k FROM t WHERE CAST(STRFTIME('%Y', a) AS INTEGER) = 2024"}),
    ],
)  # fmt: skip
def test_a_fault_is_what_its_name_says(kind, right, wrong):
    whole = right if "'; '" in right else None
    script = (parse(whole),) if whole else tuple(parse(sql) for sql in right.split("; "))
    made = [KINDS[kind].fault(script, random.Random(seed)) for seed in range(30)]
    assert {"; ".join(map(write, broken)) for broken in made if broken is not None} == wrong
    assert all(broken is not None for broken in made)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_without_a_place_gives_nothing(kind):
    assert KINDS[kind].fault((parse("SELECT a FROM t"),), random.Random(0)) is None


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_of_a_kind_can_be_broken_and_described_and_is_itself_left_alone(kind, ground):
    broken = 0
    for form in KINDS[kind].forms:
        for seed in range(60):
            draft = form(ground, random.Random(f"{kind} {seed}"))
            if draft is None:
                continue
            script = draft.script()
            before = draft.text(script)
            made = KINDS[kind].fault(script, random.Random(seed))
            assert draft.text(script) == before, "a fault is pure"
            assert all(symptom.format(**draft.words) for symptom in KINDS[kind].symptoms)
            assert draft.wanted and not draft.wanted.endswith(".") and "{" not in draft.wanted
            broken += made is not None and draft.text(made) != before
    assert broken >= 5


def test_there_are_fifty_kinds_in_all_four_categories():
    assert len(KINDS) >= 48 and {kind.category for kind in KINDS.values()} == set(CATEGORIES)
    assert all((kind.most_work is not None) == (kind.category == "Efficiency") for kind in KINDS.values())


def test_the_same_random_numbers_give_the_same_draft(ground):
    for kind in KINDS.values():
        for form in kind.forms:
            assert form(ground, random.Random(5)) == form(ground, random.Random(5))


def test_neighbours_lack_a_condition_or_turn_duplicates_about():
    query = parse("SELECT a FROM t WHERE b > 1 AND c = 2")
    assert {write(tree) for tree in neighbours(query)} == {
        "SELECT a FROM t WHERE c = 2", "SELECT a FROM t WHERE b > 1", "SELECT DISTINCT a FROM t WHERE b > 1 AND c = 2",
    }  # fmt: skip
    assert "SELECT a FROM t UNION ALL SELECT b FROM u" in {write(tree) for tree in neighbours(parse("SELECT a FROM t UNION SELECT b FROM u"))}


@pytest.mark.parametrize(
    ("gold", "kind", "level"),
    [
        (("SELECT a FROM t",), "lost_rounding", "simple"),
        (("SELECT a FROM t",), "misspelled_column", "simple"),
        (("SELECT a FROM t WHERE a IS NULL",), "equals_null", "simple"),
        (("SELECT a, RANK() OVER (ORDER BY b) FROM t",), "lost_partition", "moderate"),
        (("SELECT a, COUNT(*) FROM t WHERE b > 1 GROUP BY a",), "having_for_where", "moderate"),
        (("SELECT k FROM (SELECT k, RANK() OVER (ORDER BY x) AS p FROM t JOIN u ON u.k = t.k) WHERE p = 1",), "compared_with_all", "challenging"),
    ],
)
def test_difficulty_grows_with_what_the_gold_is_built_of_and_how_hidden_the_fault_is(gold, kind, level):
    assert difficulty(gold, kind) == level
