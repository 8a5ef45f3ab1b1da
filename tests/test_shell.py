"""The shell: states at hand, from a pipe as well, and the file never written."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from savepoint.shell import run_shell


def talk(database: Path, *lines: str, json_mode: bool = False) -> tuple[int, str]:
    out = io.StringIO()
    status = run_shell(str(database), store=database.parent / "store", json_mode=json_mode, lines=io.StringIO("\n".join(lines) + "\n"), out=out)
    return status, out.getvalue()


@pytest.fixture
def database(people: Path) -> Path:
    return people / "people.sqlite"


def test_what_was_destroyed_comes_back_and_the_reset_is_proven(database: Path):
    before = database.read_bytes()
    count = "SELECT count(*) AS n FROM people;"
    destroy = ["DROP TABLE notes;", "DELETE FROM people;", count]
    status, out = talk(database, ".checkpoint good", *destroy, ".restore good", count, "DELETE FROM people;", ".reset", count)
    lines = [line for line in out.splitlines() if not line.startswith("(")]
    assert status == 0 and [line.strip() for line in lines if line.strip().isdecimal()] == ["0", "60", "60"]
    assert any("reset proven" in line and "0 left" in line for line in lines) and database.read_bytes() == before


def test_forks_are_sessions_of_their_own(database: Path):
    fork = ["DELETE FROM people WHERE id > 9;", ".fork other", ".use other", "DELETE FROM people;", ".sessions"]
    status, out = talk(database, *fork, ".use main", "SELECT count(*) AS n FROM people;", ".delta")
    assert status == 0 and "* other" in out and "\n9" in out and "pages" in out


def test_statements_span_lines_and_triggers_stay_whole(database: Path):
    trigger = ["CREATE TRIGGER t AFTER INSERT ON notes BEGIN", "  DELETE FROM people;", "END;"]
    status, out = talk(database, *trigger, "INSERT INTO notes VALUES (1, 'a;b');", "SELECT", " count(*) FROM people;")
    assert status == 0 and "\n0" in out


def test_failures_are_told_and_counted(database: Path):
    status, out = talk(database, "SELECT nobody FROM people;", ".restore never", ".dance", "ATTACH 'x' AS y;")
    assert status == 1 and "sql_error: no such column: nobody" in out and "no checkpoint 'never'" in out and "no command .dance" in out and "denied" in out


def test_json_answers_are_one_object_a_line(database: Path):
    _, out = talk(database, "SELECT 1 AS a, x'ff' AS b;", ".digest", json_mode=True)
    first, second = map(json.loads, out.splitlines())
    assert first["columns"] == ["a", "b"] and first["rows"] == [[1, "ff"]] and len(second["text"]) == 32


def test_an_export_is_a_database_and_replaces_nothing(database: Path, tmp_path: Path):
    target = tmp_path / "out.sqlite"
    status, _ = talk(database, "DELETE FROM people WHERE id > 3;", f".export {target}", f".export {target}")
    assert status == 1
    _, out = talk(target, "SELECT count(*) FROM people;", "PRAGMA integrity_check;")
    assert "\n3" in out and "ok" in out
