"""The schema in prompts: everything where there is room, and a fixed, stated order of cuts where there is not."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from savepoint.envs.messages import bytes_over_four
from savepoint.envs.sql.catalogue import ColumnEntry, TableEntry, read_catalogue
from savepoint.envs.sql.descriptions import read_descriptions
from savepoint.envs.sql.schema_text import SMALLEST, SchemaFormat, by_relevance, render_schema
from savepoint.envs.sql.world import World
from savepoint.errors import UserError
from savepoint.state import ExecResult, open_backend
from tests_support import debugging

DESCRIPTIONS = (
    "original_column_name,column_name,column_description,data_format,value_description\n"
    'age,age,how old the person is,integer,"0 means\nunknown"\ncity,city,,text,\n'
)


@pytest.fixture
def trading(tmp_path: Path) -> Path:
    """A folder with `trading`: two tables tied by a key, a view, an index, a blank in a name, and descriptions as BIRD writes them."""
    folder = tmp_path / "dbs" / "trading"
    (folder / "database_description").mkdir(parents=True)
    with sqlite3.connect(folder / "trading.sqlite") as db:
        db.executescript("""
            CREATE TABLE people (id INTEGER PRIMARY KEY, age INTEGER CHECK (age >= 0), city TEXT);
            CREATE TABLE "Order Details" (id INTEGER PRIMARY KEY, person INTEGER REFERENCES people(id), note TEXT);
            CREATE TABLE lonely (x);
            CREATE VIEW grown AS SELECT * FROM people WHERE age > 17;
            CREATE INDEX by_age ON people(age);
        """)
        db.executemany("INSERT INTO people VALUES (?, ?, ?)", [(1, 30, "Rome"), (2, None, "Oslo"), (3, 50, "x" * 300), (4, 9, "Bern")])
        db.execute("INSERT INTO 'Order Details' VALUES (1, 1, 'two' || char(10) || 'lines')")
    db.close()
    (folder / "database_description" / "People.csv").write_bytes(b"\xef\xbb\xbf" + DESCRIPTIONS.encode())
    return tmp_path / "dbs"


@pytest.fixture
def tables(trading: Path, tmp_path: Path) -> tuple[TableEntry, ...]:
    folder = trading / "trading"
    with open_backend("sqlite", store=tmp_path / "store") as backend, backend.lease(backend.import_base(folder / "trading.sqlite"), owner="test") as session:
        return read_catalogue(session, read_descriptions(folder / "database_description"), 3)


FULL = """CREATE TABLE people (id INTEGER PRIMARY KEY, age INTEGER CHECK (age >= 0), city TEXT);
-- age: how old the person is; values: 0 means unknown
-- first 3 rows: id, age, city
--   1, 30, Rome
--   2, NULL, Oslo
--   3, 50, xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx... 240 more characters
CREATE INDEX by_age ON people(age);
CREATE TABLE "Order Details" (id INTEGER PRIMARY KEY, person INTEGER REFERENCES people(id), note TEXT);
-- first row: id, person, note
--   1, 1, two\\nlines
CREATE TABLE lonely (x);
-- no rows
CREATE VIEW grown AS SELECT * FROM people WHERE age > 17;"""


def test_with_room_everything_is_shown(tables: tuple[TableEntry, ...]):
    assert render_schema(tables, SchemaFormat()) == FULL


CUTS = [
    "sample rows but one a table", "sample rows", "what values mean", "what columns mean", "indexes, triggers and definitions of views",
    "constraints", "types and keys",
]  # fmt: skip


def test_cuts_come_in_the_stated_order_and_each_is_said(tables: tuple[TableEntry, ...]):
    seen: list[str] = []
    for budget in range(bytes_over_four(FULL), SMALLEST - 1, -1):
        text = render_schema(tables, SchemaFormat(max_tokens=budget))
        assert bytes_over_four(text) <= budget
        said = text.rpartition("-- cut for length: ")[2].split("; ") if "-- cut for length" in text else []
        new = [word for word in said if word not in seen]
        seen += new
        # What is said to be cut is absent, and what is not said is there.
        assert ("--   1, 30" in text) == (not said or said == CUTS[:1])
        assert ("how old" in text) == ("what columns mean" not in said) and ("0 means" in text) == ("what values mean" not in said)
        assert ("by_age" in text) == (CUTS[4] not in said) and ("CHECK" in text) == ("constraints" not in said)
        assert ("INTEGER" in text) == ("types and keys" not in said)
    # Where the note that tells of a cut costs more than the cut saves, that step is passed over.
    assert seen == [word for word in CUTS if word in seen] and {"sample rows", "what columns mean", "constraints"} <= set(seen)


def test_keys_stay_when_constraints_are_cut(tables: tuple[TableEntry, ...]):
    texts = {render_schema(tables, SchemaFormat(max_tokens=budget)) for budget in range(SMALLEST, 130)}
    compact = next(text for text in texts if "constraints" in text and "types and keys" not in text)
    assert '"Order Details"(id INTEGER PRIMARY KEY, person INTEGER -> people.id, note TEXT)' in compact
    assert "view grown(id INTEGER, age INTEGER, city TEXT)" in compact


def many(count: int) -> list[TableEntry]:
    columns = (ColumnEntry("id", "INTEGER", True, None), ColumnEntry("owner", "INTEGER", False, "table7.id"))
    sql = "CREATE TABLE t (id INTEGER PRIMARY KEY, owner INTEGER)"
    return [TableEntry(f"table{i}", "table", sql, columns if i == 30 else columns[:1], (), ExecResult("ok")) for i in range(count)]


def test_tables_that_the_task_names_are_the_last_to_go():
    text = render_schema(many(60), SchemaFormat(max_tokens=180), "why is TABLE7 empty? SELECT id FROM table41")
    assert text.startswith("table7(id)\ntable41(id)\ntable30(id, owner)\ntable0(id)\n")  # named; tied to a named one; the catalogue's order
    assert text.splitlines()[-1] == "-- cut for length: constraints; types and keys; columns of 25 of 60 tables" and "table59" in text.splitlines()[-2]
    lesser = render_schema(many(600), SchemaFormat(max_tokens=200), "table7")
    assert lesser.startswith("and table7, table30, table0, ") and "columns of 600 of 600 tables; names of" in lesser


def test_a_name_with_a_blank_is_found_in_the_text(tables: tuple[TableEntry, ...]):
    assert by_relevance(tables, "the order details are wrong")[0].name == "Order Details"


@settings(max_examples=60, deadline=None)
@given(st.integers(SMALLEST, 400), st.lists(st.text(min_size=1, max_size=90), min_size=1, max_size=30), st.text(max_size=40))
def test_no_schema_is_over_its_budget_and_the_same_one_gives_the_same_text(budget: int, names: list[str], said: str):
    columns = tuple(ColumnEntry(name, "TEXT", False, None, description=name * 3) for name in names[:5])
    tables = [TableEntry(name, "table", f"CREATE TABLE t ({name})", columns, (), ExecResult("ok")) for name in names]
    text = render_schema(tables, SchemaFormat(max_tokens=budget), said)
    assert bytes_over_four(text) <= budget and text == render_schema(tables, SchemaFormat(max_tokens=budget), said)


def test_the_world_shows_descriptions_that_lie_beside_the_database(trading: Path, tmp_path: Path):
    with open_backend("sqlite", store=tmp_path / "store") as backend:
        world = World(trading, backend=backend)
        task = debugging(db_id="trading", issue_sql=["SELECT 1"])
        assert world.schema(task, SchemaFormat()) == FULL
        assert "how old" not in world.schema(task, SchemaFormat(max_tokens=64))


def test_descriptions_of_a_folder_of_many_databases_are_nobodys(people: Path, tmp_path: Path):
    (people / "database_description").mkdir()
    (people / "database_description" / "people.csv").write_text(DESCRIPTIONS)
    with open_backend("sqlite", store=tmp_path / "store") as backend:
        assert "how old" not in World(people, backend=backend).schema(debugging(), SchemaFormat())


def test_views_are_not_run_for_a_prompt(tables: tuple[TableEntry, ...]):
    assert [len(table.sample.rows) for table in tables] == [3, 1, 0, 0] and tables[-1].kind == "view"


def test_text_that_is_no_unicode_becomes_text_that_is():
    table = TableEntry("t\udc80", "table", "CREATE TABLE t (x)", (ColumnEntry("x", "", False, None, "\udcff"),), (), ExecResult("ok"))
    for budget in (SMALLEST, 2000):
        render_schema([table] * 30, SchemaFormat(max_tokens=budget)).encode()


def test_descriptions_in_another_encoding_are_read_and_a_wrong_header_is_named(tmp_path: Path):
    (tmp_path / "a.csv").write_bytes("original_column_name,column_description\nprice,in \N{POUND SIGN}\n,\nx\n".encode("cp1252"))
    assert read_descriptions(tmp_path)["a"]["price"].text == "in \N{POUND SIGN}" and set(read_descriptions(tmp_path)["a"]) == {"price", "x"}
    assert read_descriptions(tmp_path / "none") == {}
    (tmp_path / "b.csv").write_text("name,what\n")
    with pytest.raises(UserError, match=r"b\.csv:1: has no column original_column_name"):
        read_descriptions(tmp_path)


def test_a_format_refuses_nonsense():
    for wrong in ({"max_tokens": SMALLEST - 1}, {"sample_rows": -1}, {"max_cell": 0}):
        with pytest.raises(ValueError, match="schema:"):
            SchemaFormat(**wrong)


def test_published_descriptions_are_shown(shared: Path, tmp_path: Path):
    folder = tmp_path / "superhero"
    folder.mkdir()
    (folder / "superhero.sqlite").symlink_to(shared / "data/sql/db/superhero.sqlite")
    (folder / "database_description").symlink_to(shared / "data/sql/bird_superhero_description")
    with open_backend("sqlite", store=tmp_path / "store") as backend:
        text = World(tmp_path, backend=backend).schema(debugging(db_id="superhero", issue_sql=["SELECT 1"]), SchemaFormat(max_tokens=4000))
    assert "-- superhero_name: the name of the superhero" in text and "cut for length" not in text
