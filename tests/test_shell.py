"""The shell: states at hand, from a pipe as well, and the file never written."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import sqlite3
import subprocess
import sys
import time
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


def shown(out: str) -> list[str]:
    """The lines without their times."""
    return [line for line in out.splitlines() if not line.endswith(" ms)")]


def test_the_tree_shows_where_checkpoints_and_sessions_come_from(database: Path):
    size = f"{database.stat().st_size:,}"
    status, out = talk(
        database, ".checkpoint all", "DELETE FROM people WHERE id > 9;", ".checkpoint few", ".fork other", ".checkout other", "DELETE FROM people;",
        ".checkpoint none", ".restore all", ".tree",
    )  # fmt: skip
    lines = shown(out)
    digests = [line.rsplit(" ", 1)[1] for line in lines if "digest" in line]
    assert status == 0 and len({digest for digest in digests if len(digest) == 12}) == 3
    assert lines[-6:] == [
        f"people.sqlite  {size} bytes",
        f"└── all  checkpoint, 0 pages changed, digest {digests[0]}",
        f"    ├── few  checkpoint, 2 pages changed, digest {digests[1]}",
        "    │   ├── main  session, 2 pages differ from the file",
        f"    │   └── none  checkpoint, 2 pages changed, digest {digests[2]}",
        "    └── * other  session, 0 pages differ from the file",
    ]


def test_a_large_tree_is_shown_in_parts_that_can_be_read_and_the_rest_counted(database: Path):
    deep = [line for number in range(40) for line in (".checkpoint", "INSERT INTO notes VALUES (1, 'x');")]
    wide = [line for number in range(60) for line in (f".checkpoint w{number}", ".restore 1")]
    status, out = talk(database, *deep, ".restore 1", *wide, ".tree")
    lines = shown(out)
    start = lines.index(next(line for line in lines if line.startswith("people.sqlite")))
    tree = lines[start:]
    left = [int(line.split("... ")[1].split()[0]) for line in tree if "..." in line]
    assert status == 0 and len(tree) <= 210 and max(map(len, tree)) < 200
    assert sum("checkpoint," in line for line in tree) + sum("session," in line for line in tree) + sum(left) == 40 + 60 + 1


def test_checkout_goes_to_a_session_or_a_checkpoint_and_never_loses_changes_silently(database: Path):
    count = "SELECT count(*) AS n FROM people;"
    status, out = talk(
        database, ".checkpoint all", ".fork other", ".checkout other", "DELETE FROM people WHERE id > 9;", ".checkout all", count, ".restore all", count,
        "DELETE FROM people WHERE id > 9;", ".checkpoint few", ".checkout all", count, ".checkout nowhere",
    )  # fmt: skip
    lines = shown(out)
    assert status == 1 and "session other has changes since its last checkpoint: .checkpoint keeps them, .restore all drops them" in lines
    assert [line.strip() for line in lines if line.strip().isdecimal()] == ["9", "60", "60"]
    assert "session other at checkpoint all" in lines and "no checkpoint or session 'nowhere': there is all, few" in lines


def test_prune_frees_what_no_session_uses_and_names_those_that_do(database: Path):
    status, out = talk(
        database, ".checkpoint a", "DELETE FROM people WHERE id > 9;", ".checkpoint b", "DELETE FROM notes;", ".checkpoint c", ".prune b", ".restore a",
        ".fork other", ".prune b", ".restore c", ".prune main", ".prune other", ".prune other", ".tree",
    )  # fmt: skip
    lines = shown(out)
    assert status == 1 and "snapshot 'b' is in use by 1 session: 'main'; nothing was pruned" in lines
    assert any(line.startswith("2 checkpoints pruned, ") and line.endswith(" bytes") for line in lines)
    assert "no checkpoint 'c': there is a" in lines and "session main is the one at hand: .use another one first" in lines
    assert "session other is closed" in lines and "no checkpoint or session 'other': there is a" in lines
    assert [line.lstrip("└─ ").split("  ")[0] for line in lines[-3:]] == ["people.sqlite", "a", "* main"]


def test_diff_shows_tables_counts_and_sample_rows_between_any_two_states(database: Path):
    status, out = talk(
        database, ".diff", ".checkpoint a", "UPDATE people SET name = 'x', age = NULL WHERE id = 7;", "DELETE FROM people WHERE id > 55;", ".diff a",
        ".fork other", "CREATE TABLE more(a, b);", "INSERT INTO more VALUES (1, x'ff');", ".diff other main", ".diff a other", ".diff file a", ".diff a nobody",
    )  # fmt: skip
    text = "\n".join(shown(out))
    old = sqlite3.connect(database).execute("SELECT id, name, city, age, height FROM people WHERE id = 7").fetchone()
    before, after = ", ".join("NULL" if value is None else str(value) for value in old), f"7, x, {old[2]}, NULL, {old[4]}"
    assert status == 1 and "nothing differs between file and now" in text and "nothing differs between file and a" in text
    head = "table   what     added  removed  changed\npeople  changed      0        5        1\n\n"
    assert f"{head}- people: {before}\n+ people: {after}\n- people: 56, " in text
    assert "\n  people: 2 more rows\n" in text and text.count("people  changed      0        5        1") == 2
    assert "more   created      1        0        0\n\n+ more: 1, x'ff'" in text and "no checkpoint or session 'nobody': there is a" in text


def test_the_tree_and_a_diff_are_data_in_json_mode(database: Path):
    _, out = talk(database, ".checkpoint a", "DELETE FROM people WHERE id = 3;", ".tree", ".diff a", json_mode=True)
    answers = [json.loads(line) for line in out.splitlines()]
    nodes = answers[2]["nodes"]
    assert [(node["kind"], node["label"], node["parent"]) for node in nodes[:2]] == [("image", "", None), ("snapshot", "a", nodes[0]["id"])]
    assert nodes[2]["kind"] == "session" and nodes[2]["pages"] == 2
    assert answers[3]["tables"] == [{"table": "people", "kind": "changed", "added": 0, "removed": 1, "changed": 0}]


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


def test_each_statement_of_a_line_answers_up_to_the_first_that_fails(database: Path):
    status, out = talk(database, "SELECT 1 AS one; SELECT 2 AS two; SELECT nobody; SELECT 4 AS four;")
    assert status == 1 and "one" in out and "two" in out and "no such column: nobody" in out and "four" not in out


def test_json_stays_json_whatever_the_values(database: Path):
    _, out = talk(database, "SELECT 9e999, -9e999, CAST(x'ff' AS TEXT), 9223372036854775807, NULL, 'a\nb';", "SELECT 1\0;", json_mode=True)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    first, second = (json.loads(line, parse_constant=refuse) for line in out.splitlines())
    assert first["rows"] == [["inf", "-inf", "\udcff", 9223372036854775807, None, "a\nb"]] and second["status"] == "sql_error"


def test_commands_say_what_they_miss(database: Path):
    _, out = talk(database, ".restore", ".use nobody", ".fork", ".fork main", ".export", ".digest deep", ".schema nobody", "BEGIN;", ".checkpoint", ".fork x")
    for words in (
        "no checkpoint ''", "no session 'nobody': there is main", ".fork needs a name", "session 'main' exists already", ".export needs a file",
        ".digest deep: page or logical", "no table 'nobody'", "checkpoint: a transaction is open", "fork: a transaction is open",
    ):  # fmt: skip
        assert words in out


def test_schema_and_tables_list_the_database(database: Path):
    view = "CREATE VIEW old AS SELECT * FROM people WHERE age > 60;"
    _, out = talk(database, view, ".tables", ".schema OLD", ".checkpoint", ".checkpoint", ".digest logical")
    assert "people" in out and "notes" in out and view in out
    assert "checkpoint 1: " in out and "checkpoint 2: " in out


def test_from_a_pipe_there_is_no_prompt_and_the_status_tells(database: Path, tmp_path: Path):
    command = [sys.executable, "-c", "import sys; from savepoint.shell import run_shell; sys.exit(run_shell(sys.argv[1], store=sys.argv[2]))"]
    for text, status in (("SELECT count(*) AS n FROM people;\n.reset\n", 0), ("SELECT nobody;\n", 1)):
        done = subprocess.run([*command, str(database), str(tmp_path / "store")], input=text, capture_output=True, text=True, timeout=60)
        assert done.returncode == status and "main>" not in done.stdout and done.stderr == ""
    done = subprocess.run([*command, str(database), str(tmp_path / "store")], input=".tables", capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[:2] == ["notes", "people"], "the last line needs no end"


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_on_a_terminal_ctrl_c_stops_the_statement_and_not_the_shell(database: Path, tmp_path: Path):
    code = "import sys; from savepoint.shell import run_shell; sys.exit(run_shell(sys.argv[1], store=sys.argv[2]))"
    controller, terminal = os.openpty()
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "TERM": "dumb"}
    command = [sys.executable, "-c", code, str(database), str(tmp_path / "store")]
    shell = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True)
    os.close(terminal)

    def read_until(words: str) -> str:
        text, end = "", time.monotonic() + 30
        while words not in text:
            assert time.monotonic() < end, text
            if select.select([controller], [], [], 0.2)[0]:
                text += os.read(controller, 4096).decode("utf-8", "replace")
        return text

    try:
        assert "The file is not written" in read_until("main> ")
        os.write(controller, b"WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)\n")
        read_until("...> ")
        os.write(controller, b"SELECT sum(x) FROM c;\n")
        time.sleep(0.5)
        started = time.monotonic()
        shell.send_signal(signal.SIGINT)
        assert "interrupted" in read_until("main> ") and time.monotonic() - started < 5
        os.write(controller, b"SELECT count(*) + 4000 AS n FROM people;\n")
        assert "4060" in read_until("ms)")
        os.write(controller, b".quit\n")
        assert shell.wait(30) == 0
        assert "count(*) + 4000" in (tmp_path / "cache" / "savepoint" / "shell_history").read_text()
    finally:
        shell.kill()
        os.close(controller)
