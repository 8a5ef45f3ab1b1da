"""Queries, questions and bugs: every query runs, every question means one query, every bug is of the kind that it says."""

from __future__ import annotations

import random
import re
import sqlite3
from collections import defaultdict
from pathlib import Path

import pytest

from savepoint.envs.sql import databases
from savepoint.envs.sql.bugs import BUGS, break_query, misspell
from savepoint.envs.sql.part import Part, PartTable, pick
from savepoint.envs.sql.queries import FORMS
from savepoint.envs.sql.query import Condition, Join, Query, Ref
from savepoint.envs.sql.renames import Rename
from savepoint.envs.sql.schema import read_schema
from savepoint.envs.sql.wording import issue_text, question, request_text, spoken


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    path: Path = databases.build("shop", tmp_path_factory.mktemp("shop") / "shop.sqlite")
    with sqlite3.connect(path) as db:
        yield db
    db.close()


@pytest.fixture(scope="module")
def part(shop) -> Part:
    return pick(read_schema(lambda sql: shop.execute(sql).fetchall()), 50, 400, simple=False)


def draw(part: Part, form: str, n: int) -> list[Query]:
    rng = random.Random(form)
    drawn = [FORMS[form](part, rng) for _ in range(n)]
    assert all(query is not None for query in drawn)
    return [query for query in drawn if query]


C = "customers"
CITY = Query("list", C, (Ref(C, "city"),), where=Condition(Ref(C, "age"), ">", 30))
TOTAL = Query("aggregate", C, (), ("SUM", Ref(C, "points")), Condition(Ref(C, "city"), "=", "Rome"))
GROUP = Query("group", C, (Ref(C, "city"),), ("AVG", Ref(C, "points")), None, Ref(C, "city"))
TOP = Query("top", C, (Ref(C, "name"), Ref(C, "points")), order=(Ref(C, "points"), True), limit=3)
DISTINCT = Query("distinct", C, (Ref(C, "city"),), distinct=True)
COUNT = Query("count", C, (Ref(C, "city"),), ("COUNT", None), None, Ref(C, "city"))
DATED = Query("count", "reviews", (), ("COUNT", None), Condition(Ref("reviews", "written_on"), ">=", "2024-01-01", is_date=True))
ON = Join(Ref("orders", "customer_id"), Ref(C, "id"))
JOINED = Query("join_list", "orders", (Ref(C, "name"), Ref("orders", "quantity")), where=Condition(Ref("orders", "year"), "=", 2020), join=ON)
JOIN_GROUP = Query("join_group", "orders", (Ref(C, "city"),), ("MAX", Ref("orders", "quantity")), None, Ref(C, "city"), join=ON)


@pytest.mark.parametrize(
    ("query", "sql", "brief"),
    [
        (CITY, "SELECT city FROM customers WHERE age > 30", "list city of customers where age is over 30"),
        (TOTAL, "SELECT SUM(points) FROM customers WHERE city = 'Rome'", "total points of customers where city is Rome"),
        (GROUP, "SELECT city, AVG(points) FROM customers GROUP BY city", "average points of customers per city"),
        (TOP, "SELECT name, points FROM customers ORDER BY points DESC LIMIT 3", "name and points of the 3 customers with largest points"),
        (DISTINCT, "SELECT DISTINCT city FROM customers", "list different city of customers"),
        (COUNT, "SELECT city, COUNT(*) FROM customers GROUP BY city", "number of customers per city"),
        (DATED, "SELECT COUNT(*) FROM reviews WHERE written_on >= '2024-01-01'", "number of reviews where written_on is since 2024-01-01"),
        (
            JOINED,
            "SELECT customers.name, orders.quantity FROM orders JOIN customers ON orders.customer_id = customers.id WHERE orders.year = 2020",
            "name of customers and quantity of its orders where year is exactly 2020",
        ),
        (
            JOIN_GROUP,
            "SELECT customers.city, MAX(orders.quantity) FROM orders JOIN customers ON orders.customer_id = customers.id GROUP BY customers.city",
            "highest quantity of orders per city of customers",
        ),
    ],
)
def test_each_form_has_its_sql_and_its_question(query, sql, brief):
    assert (query.sql(), question(query)) == (sql, brief)


@pytest.mark.parametrize("form", FORMS)
def test_every_query_that_is_drawn_runs(shop, part, form):
    for query in draw(part, form, 60):
        shop.execute(query.sql()).fetchone()


@pytest.mark.parametrize("wording", ["brief", "plain"])
def test_a_question_means_one_query(part, wording):
    meant = defaultdict(set)
    for form in FORMS:
        for query in draw(part, form, 400):
            meant[question(query, wording)].add(query.sql())
    assert [(text, sqls) for text, sqls in meant.items() if len(sqls) > 1] == []


def part_of(script: str, **rows: list[tuple]) -> Part:
    with sqlite3.connect(":memory:") as db:
        db.executescript(script)
        for table, values in rows.items():
            db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values[0]))})", values)
        part = pick(read_schema(lambda sql: db.execute(sql).fetchall()), simple=False)
    db.close()
    return part


@pytest.mark.parametrize("form", ["join_list", "join_group"])
def test_a_condition_on_joined_tables_names_a_column_of_one_only(form):
    part = part_of(
        "CREATE TABLE towns (id INTEGER PRIMARY KEY, name, size); CREATE TABLE shops (town_id REFERENCES towns, size, year)",
        towns=[(i, f"town of {'abcdefgh'[i % 8]}", i * 100) for i in range(20)], shops=[(i % 20, i, 2000 + i % 9) for i in range(90)],
    )  # fmt: skip
    conditions = [query.where for query in draw(part, form, 200) if query.where]
    assert {condition.ref.column for condition in conditions} == {"town_id", "year"}, "`where size is over 9` could mean either size"


def test_two_references_between_the_same_tables_are_not_joined_along():
    part = part_of(
        "CREATE TABLE colour (id INTEGER PRIMARY KEY, name TEXT); CREATE TABLE hero (eye_id REFERENCES colour, hair_id REFERENCES colour, n)",
        colour=[(i, f"very {word}") for i, word in enumerate(("red", "blue", "green"))], hero=[(i % 3, i % 2, i) for i in range(50)],
    )  # fmt: skip
    assert len(part.references) == 2 and FORMS["join_list"](part, random.Random(0)) is None


def test_names_are_spoken_as_people_say_them():
    assert [spoken(name) for name in ("UnitPrice", "unit_price", "CustomerID", "BillingCity2", "größe")] == [
        "unit price", "unit price", "customer id", "billing city 2", "größe",
    ]  # fmt: skip


def test_plain_texts_say_what_is_wanted_in_full():
    rng = random.Random(0)
    wanted = "the name and the points of the 3 rows of customers with the largest points, largest first"
    assert question(TOP, "plain") == wanted and request_text(TOP, "plain") == f"Give me {wanted}."
    for trouble in ("migrated", "error", "wrong"):
        assert wanted in issue_text(TOP, "plain", trouble, rng)
    assert issue_text(TOP, "brief", "error", rng) == question(TOP)


def test_a_renamed_column_is_renamed_everywhere_and_a_namesake_is_not():
    rename = Rename("customers", "city", "town")
    assert rename.sql == "ALTER TABLE customers RENAME COLUMN city TO town"
    assert JOIN_GROUP.renamed(rename).sql() == JOIN_GROUP.sql().replace("customers.city", "customers.town")
    assert CITY.renamed(Rename("stores", "city", "town")) == CITY


def test_a_renamed_table_is_renamed_everywhere():
    rename = Rename("customers", None, "clients")
    assert rename.sql == "ALTER TABLE customers RENAME TO clients"
    assert JOINED.renamed(rename).sql() == JOINED.sql().replace("customers", "clients")
    assert CITY.renamed(rename).sql() == CITY.sql().replace("customers", "clients")


def test_names_that_need_quotes_are_quoted():
    query = Query("list", "Order Details", (Ref("Order Details", "Unit Price"),), where=Condition(Ref("Order Details", "order"), "=", "it's"))
    assert query.sql() == "SELECT \"Unit Price\" FROM \"Order Details\" WHERE \"order\" = 'it''s'"


@pytest.mark.parametrize(
    ("kind", "query", "pattern"),
    [
        ("wrong_column", GROUP, r"SELECT city, AVG\(age\) FROM customers GROUP BY city"),
        ("wrong_column", CITY, r"SELECT (name|points) FROM customers WHERE age > 30"),
        ("wrong_table", CITY, r"SELECT city FROM (?!customers\b)\w+ WHERE age > 30"),
        ("wrong_aggregate", GROUP, r"SELECT city, (SUM|MIN|MAX)\(points\) FROM customers GROUP BY city"),
        ("missing_group_by", GROUP, r"SELECT city, AVG\(points\) FROM customers"),
        ("missing_group_by", COUNT, r"SELECT city, COUNT\(\*\) FROM customers"),
        ("wrong_comparison", CITY, r"SELECT city FROM customers WHERE age < 30"),
        ("wrong_comparison", DATED, r"SELECT COUNT\(\*\) FROM reviews WHERE written_on < '2024-01-01'"),
        ("wrong_join_key", JOINED, r"SELECT .* JOIN customers ON orders\.id = customers\.id WHERE orders\.year = 2020"),
        ("wrong_direction", TOP, r"SELECT name, points FROM customers ORDER BY points ASC LIMIT 3"),
        ("lost_distinct", DISTINCT, r"SELECT city FROM customers"),
        ("lost_condition", CITY, r"SELECT city FROM customers"),
    ],
)
def test_each_kind_of_bug_breaks_what_it_says(part, kind, query, pattern):
    broken = BUGS[kind].apply(query, part, random.Random(3))
    assert broken is not None and re.fullmatch(pattern, broken.sql())


@pytest.mark.parametrize(
    ("kind", "query"),
    [("wrong_table", JOINED), ("wrong_aggregate", CITY), ("wrong_aggregate", COUNT), ("missing_group_by", TOTAL), ("wrong_comparison", TOTAL),
     ("wrong_join_key", CITY), ("wrong_direction", CITY), ("lost_distinct", CITY), ("lost_condition", GROUP)],
)  # fmt: skip
def test_a_kind_that_does_not_apply_says_so(part, kind, query):
    assert BUGS[kind].apply(query, part, random.Random(0)) is None


def test_a_misspelled_column_is_no_column_and_its_group_is_misspelled_too(shop, part):
    known = {name for table in part.tables for name in table.all_columns}
    for seed in range(100):
        for query in (CITY, TOTAL, GROUP, JOINED):
            broken = BUGS["misspelled_column"].apply(query, part, random.Random(seed))
            assert broken is not None and not {ref.column for ref in broken.refs} <= known
            with pytest.raises(sqlite3.OperationalError, match="no such column"):
                shop.execute(broken.sql())


def test_a_misspelled_group_is_misspelled_as_its_column_is(part):
    broken = BUGS["misspelled_column"].apply(GROUP, part, random.Random(0))
    assert broken is not None and broken.group == broken.select[0] != GROUP.group


def test_a_misspelling_that_is_another_column_is_not_used():
    near = PartTable("t", (), 100, ("ab", "a", "aab", "abb"), None)
    query = Query("list", "t", (Ref("t", "ab"),))
    assert all(BUGS["misspelled_column"].apply(query, Part((near,), (), {}), random.Random(seed)) is None for seed in range(20))


def test_a_misspelling_keeps_the_first_letter():
    assert all(misspell("city", random.Random(seed)) in {"cty", "ciy", "cit", "ccity", "ciity", "citty"} for seed in range(60))
    assert misspell("x", random.Random(0)) == "xx"


def test_kinds_are_drawn_by_weight_among_those_that_apply(part):
    rng = random.Random(0)
    kinds = [break_query(GROUP, part, ("missing_group_by", "wrong_aggregate", "lost_distinct"), rng) for _ in range(600)]
    share = sum(made is not None and made[0] == "missing_group_by" for made in kinds) / 600
    assert 0.6 < share < 0.73, "weight 2 against 1"
    assert break_query(GROUP, part, ("lost_distinct",), rng) is None
