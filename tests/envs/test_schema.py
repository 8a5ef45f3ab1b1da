"""Schemas: roles are judged by values, references are declared or certain, and the part that is picked can be learned."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from savepoint.envs.sql.part import Part, pick
from savepoint.envs.sql.renames import candidates
from savepoint.envs.sql.schema import Column, QueryFailed, Schema, Table, literal, quote, read_schema
from savepoint.errors import UserError


def runner(db: sqlite3.Connection) -> Callable[[str], Sequence[tuple]]:
    def run(sql: str) -> Sequence[tuple]:
        try:
            return db.execute(sql).fetchall()
        except sqlite3.Error as error:
            raise QueryFailed(str(error)) from None

    return run


@pytest.fixture
def db():
    with sqlite3.connect(":memory:") as connection:
        yield connection
    connection.close()


def schema_of(db: sqlite3.Connection, script: str, **rows: list[tuple]) -> Schema:
    db.executescript(script)
    for table, values in rows.items():
        db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values[0]))})", values)
    return read_schema(runner(db))


def column(schema: Schema, table: str, name: str) -> Column:
    return next(c for t in schema.tables if t.name == table for c in t.columns if c.name == name)


def test_roles_are_judged_by_values_not_by_declared_types(db):
    rng = random.Random(0)
    rows = [
        (
            i, f"Person Number {i}", rng.choice(["Rome", "Oslo", "New York"]), rng.randint(0, 5000), str(rng.randint(1, 99)),
            f"2024-0{rng.randint(1, 9)}-11 08:00:00", rng.choice([2019, 2020, 2021, 2022, 2023]), rng.choice([b"\x00", b"\x01"]), 1,
            f"p{i}@example.org", rng.randint(1, 9),
        )
        for i in range(100)
    ]  # fmt: skip
    schema = schema_of(db, "CREATE TABLE people (a INTEGER PRIMARY KEY, b, c, d STRING, e TEXT, f, g, h BLOB, i, j, k_id)", people=rows)
    roles = {c.name: c.role for c in schema.tables[0].columns}
    assert roles == {
        "a": "id", "b": "name", "c": "word", "d": "number", "e": "other", "f": "date", "g": "number", "h": "other", "i": "other", "j": "other", "k_id": "key",
    }  # fmt: skip
    assert set(column(schema, "people", "c").figures) == {"Rome", "Oslo"}, "conditions are asked with words of one word only"
    year = column(schema, "people", "g")
    assert year.exact and not year.additive and year.figures == (2019, 2020, 2021, 2022, 2023)


def test_figures_are_short_and_lie_within_the_column(db):
    rows = [(random.Random(i).uniform(3.17, 9713.4),) for i in range(500)]
    figures = column(schema_of(db, "CREATE TABLE t (price REAL)", t=rows), "t", "price").figures
    assert 5 <= len(figures) <= 19 and all(3 < figure < 9714 for figure in figures)
    assert all(len(literal(figure)) <= 4 for figure in figures)


@given(st.lists(st.one_of(st.integers(-(2**62), 2**62), st.floats(allow_nan=False)), min_size=4, max_size=40, unique=True))
def test_any_numbers_at_all_have_figures_that_sql_reads_back(values):
    with sqlite3.connect(":memory:") as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.executemany("INSERT INTO t VALUES (?)", [(value,) for value in values])
        judged = column(read_schema(runner(connection)), "t", "x")
        for figure in judged.figures:
            assert connection.execute(f"SELECT {literal(figure)}").fetchone()[0] == figure
    connection.close()


@pytest.mark.parametrize("values", [(0.0, 5e-324, 1e-323, 1.5e-323, 2e-323), (-1.7e308, 0.0, 1.0, 2.0, 1.7e308), (1e308, 1.1e308, 1.2e308, 1.3e308, 1.79e308)])
def test_numbers_at_the_edge_of_the_range_do_no_harm(db, values):
    figures = column(schema_of(db, "CREATE TABLE t (x)", t=[(value,) for value in values]), "t", "x").figures
    assert all(min(values) <= figure <= max(values) for figure in figures)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12))
def test_any_identifier_is_quoted_so_that_it_means_itself(name):
    with sqlite3.connect(":memory:") as connection:
        connection.execute(f"CREATE TABLE t ({quote(name)} INTEGER)")
        assert [row[1] for row in connection.execute("PRAGMA table_info(t)")] == [name]
    connection.close()


@pytest.mark.parametrize("name", ["order", "Order Details", 'a"b', "2nd", "naïve", "group"])
def test_names_that_need_quotes_get_them(name):
    assert quote(name) == '"' + name.replace('"', '""') + '"'


def test_plain_names_stay_bare():
    assert [quote(name) for name in ("city", "UnitPrice", "x_1")] == ["city", "UnitPrice", "x_1"]


def test_references_are_found_in_the_spelling_of_what_they_mean(db):
    schema = schema_of(db, "CREATE TABLE Artist (ArtistId INTEGER PRIMARY KEY, n); CREATE TABLE album (a_id INTEGER PRIMARY KEY, ARTISTID REFERENCES artist);")
    assert [(r.table, r.column, r.to_table, r.to_column) for r in schema.references] == [("album", "ARTISTID", "Artist", "ArtistId")]


def test_undeclared_references_need_the_name_and_every_value(db):
    script = "CREATE TABLE cities (id INTEGER PRIMARY KEY, n); CREATE TABLE a (city_id); CREATE TABLE b (city_id); CREATE TABLE c (town_id);"
    cities = [(i, "x") for i in range(5)]
    schema = schema_of(db, script, cities=cities, a=[(1,), (None,), (4,)], b=[(1,), (9,)], c=[(1,)])
    assert [(r.table, r.column, r.to_table, r.to_column) for r in schema.references] == [("a", "city_id", "cities", "id")]


def test_views_and_virtual_tables_are_not_asked_about(db):
    schema = schema_of(db, "CREATE TABLE t (a); CREATE VIRTUAL TABLE f USING fts5(body); CREATE VIEW v AS SELECT a FROM t;")
    assert [table.name for table in schema.tables] == ["t"] and set(schema.views) == {"v", "f"}


def test_a_table_whose_rows_cannot_be_read_is_named(db):
    db.executescript("CREATE TABLE good (w, n); CREATE TABLE bad (w, n)")
    db.executemany("INSERT INTO good VALUES (?, ?)", [(("red", "blue")[i % 2], i) for i in range(50)])
    read = runner(db)

    def run(sql: str) -> Sequence[tuple]:
        if sql == "SELECT count(*) FROM bad":
            raise QueryFailed("database disk image is malformed")
        return read(sql)

    schema = read_schema(run)
    assert schema.unread == ("bad",) and pick(schema).left_out == {"bad": "cannot be read"}


def test_a_large_table_is_sampled_over_its_whole_length(db):
    rows = [(i, i // 1000, "early" if i < 15000 else "late") for i in range(30000)]
    schema = schema_of(db, "CREATE TABLE t (id INTEGER PRIMARY KEY, k, w)", t=rows)
    assert set(column(schema, "t", "w").figures) == {"early", "late"} and schema.tables[0].rows == 30000


def table(name: str, *roles: str, rows: int = 100, wide: int = 0) -> Table:
    """A table with columns of these roles, and `wide` more that nobody asks about."""
    columns = [
        Column(name, f"{role}{i}", role, (1, 2) if role in ("number", "word") else ("2024-01-01",) if role == "date" else (), additive=True)  # type: ignore[arg-type]
        for i, role in enumerate(roles)
    ]
    columns += [Column(name, f"other{i}", "other") for i in range(wide)]
    return Table(name, tuple(columns), rows)


def picked(part: Part) -> dict[str, int]:
    return {t.name: len(t.columns) for t in part.tables}


def test_narrow_tables_with_words_and_numbers_are_preferred():
    narrow, wide, names = table("narrow", "word", "number"), table("wide", "word", "number", wide=9), table("names", "name", "word", "word")
    huge = table("huge", "word", "number", rows=1_000_000)
    part = pick(Schema((wide, names, huge, narrow), ()), max_tables=2)
    assert picked(part) == {"narrow": 2, "wide": 2}
    assert set(part.left_out) == {"names", "huge"}


def test_tables_that_are_hard_to_learn_are_taken_only_until_there_are_three():
    poor = [table(f"poor{i}", "name", "word") for i in range(4)]
    assert len(pick(Schema((table("rich", "word", "number"), *poor), ())).tables) == 3
    rich = [table(f"rich{i}", "word", "number") for i in range(4)]
    assert len(pick(Schema((*rich, *poor), ())).tables) == 4


@given(st.integers(1, 6), st.integers(2, 30))
def test_a_part_keeps_within_what_was_asked_for(max_tables, max_columns):
    schema = Schema(tuple(table(f"t{i}", "word", "number", "number", "name", "number", "word", "number") for i in range(8)), ())
    part = pick(schema, max_tables, max_columns)
    assert 1 <= len(part.tables) <= max_tables and part.columns <= max_columns
    assert all(2 <= len(t.columns) <= 5 for t in part.tables)
    assert {t.name for t in part.tables} | set(part.left_out) == {t.name for t in schema.tables}


def test_dates_are_for_large_policies_only():
    schema = Schema((table("t", "word", "number", "date"),), ())
    assert not pick(schema).tables[0].having("date") and pick(schema, simple=False).tables[0].having("date")


def test_a_column_that_is_mostly_null_is_for_large_policies_only():
    full = table("t", "word", "number", "number")
    sparse = replace(full, columns=(*full.columns[:2], replace(full.columns[2], filled=0.1)))
    assert picked(pick(Schema((sparse,), ()))) == {"t": 2} and picked(pick(Schema((sparse,), ()), simple=False)) == {"t": 3}


def test_a_part_says_what_it_is_and_what_it_leaves_out():
    text = pick(Schema((table("sales", "word", "number"), table("tiny", "word", "number", rows=3)), ())).describe()
    assert text == "questions use 1 table and 2 columns:\n  sales (word0, number1)\nleft out (fewer than 8 rows): tiny"


def test_a_schema_without_a_usable_table_is_refused_with_the_reason():
    with pytest.raises(UserError, match=r"no table that questions can be asked about \(tiny: fewer than 8 rows\)"):
        pick(Schema((table("tiny", "word", "number", rows=3),), ()))
    with pytest.raises(UserError, match="no table that questions can be asked about$"):
        pick(Schema((), ()))


def test_new_names_are_four_distinct_and_none_is_in_use():
    schema = Schema((Table("customers", tuple(Column("customers", n, "word") for n in ("city", "town", "UnitPrice", "first name", "zz_code")), 9),), ())
    offered = candidates(schema)
    assert offered["customers", "city"] == ("place", "location", "site", "new_city")
    assert offered["customers", "UnitPrice"] == ("UnitCost", "UnitFee", "UnitCharge", "UnitRate")
    assert offered["customers", "zz_code"] == ("new_zz_code", "zz_code_v2", "main_zz_code", "zz_code_code")
    assert offered["customers", None] == ("clients", "buyers", "patrons", "shoppers")
    assert ("customers", "first name") not in offered
    assert all(not {name.lower() for name in names} & {"city", "town"} for names in offered.values())
    flat = [name.lower() for names in offered.values() for name in names]
    assert len(set(flat)) == len(flat) and all(len(names) == 4 for names in offered.values())


def test_a_name_in_two_tables_gets_the_same_candidates():
    tables = [Table(name, (Column(name, "city", "word"),), 9) for name in ("stores", "people")]
    offered = candidates(Schema(tuple(tables), ()))
    assert offered["stores", "city"] == offered["people", "city"] == ("town", "place", "location", "site")


def test_two_names_never_share_a_candidate_whatever_their_case():
    tables = (Table("a", (Column("a", "Price", "number"), Column("a", "Cost", "number")), 9), Table("b", (Column("b", "price", "number"),), 9))
    offered = candidates(Schema(tables, ()))
    assert not {name.lower() for name in offered["a", "Price"]} & {name.lower() for name in offered["b", "price"]}
