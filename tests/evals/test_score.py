"""`savepoint score`: the JSON of the contract, exit statuses, reports, and results that depend on nothing but the input."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from savepoint.cli import main
from savepoint.envs.sql.grade import Limits
from savepoint.envs.sql.verdict import OUTCOMES, Verdict
from savepoint.errors import UserError
from savepoint.evals.bench import Bench, GradingOptions, run_all
from savepoint.evals.score import ScoreItem, score, summarise
from savepoint.evals.score_report import html, markdown
from tests_support import debugging

RIGHT = "SELECT city FROM people WHERE age > 40"
ANSWERS: dict[str, Any] = {
    "right": [RIGHT],
    "twice": [RIGHT + " UNION ALL SELECT 'Rome'"],
    "broken": ["SELEC"],
    "blank": [" ; "],
    "null": None,
    "drops": ["DROP TABLE people"],
    "outside": ["ATTACH 'x' AS x"],
    "bytes": ["SELECT x'ff00', CAST(x'ff' AS TEXT)"],
    "slow": ["WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT max(x) FROM c"],
}
CODES = ["correct", "wrong_result", "sql_error", "no_answer", "no_answer", "wrong_state", "denied", "wrong_result", "timeout", "no_answer", "invalid_instance"]


@pytest.fixture
def files(people: Path, tmp_path: Path) -> dict[str, Any]:
    """A task file, predictions for most of it, and the arguments that say so."""
    tasks = [debugging(instance_id=name, difficulty="simple").record() for name in (*ANSWERS, "absent")]
    tasks.append(debugging(instance_id="emptygold", sol_sql=["SELECT 1 WHERE 0"], category=None).record())
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)), encoding="utf-8")
    lines = [json.dumps({"instance_id": name, "pred_sqls": sql}) for name, sql in {**ANSWERS, "emptygold": ["SELECT 1"]}.items()]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return {
        "folder": tmp_path,
        "lines": lines,
        "options": GradingOptions((people,), tmp_path / "store", Limits(deadline_s=1.0)),
        "argv": [
            "score",
            str(tmp_path / "tasks.jsonl"),
            str(tmp_path / "answers.jsonl"),
            "--databases",
            str(people),
            "--store",
            str(tmp_path / "store"),
            "--timeout",
            "1",
        ],
    }


def run(files: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return score(files["folder"] / "tasks.jsonl", files["folder"] / "answers.jsonl", files["options"], **changes)


def timeless(result: Any) -> Any:
    if isinstance(result, dict):
        return {key: timeless(value) for key, value in result.items() if key not in ("seconds", "elapsed")}
    return [timeless(value) for value in result] if isinstance(result, list) else result


def test_the_command_prints_the_contract(files, capsys):
    assert main([*files["argv"], "--json", "--metric", "bird_ex", "--metric", "soft_f1"]) == 0
    result = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert list(result) == [
        "command",
        "totals",
        "success",
        "by_task",
        "by_category",
        "by_difficulty",
        "metrics",
        "missing",
        "unknown",
        "warnings",
        "sqlite",
        "elapsed",
        "instances",
    ]
    assert list(result["totals"]) == ["instances", "scored", *OUTCOMES]
    assert [r["outcome"] for r in result["instances"]] == CODES
    assert (result["totals"]["instances"], result["totals"]["scored"], result["missing"], result["unknown"]) == (11, 10, ["absent"], [])
    assert list(result["instances"][0]) == ["instance_id", "db_id", "task", "category", "difficulty", "outcome", "check", "detail", "metrics", "seconds"]
    assert result["success"] == pytest.approx({"k": 1, "n": 10, "rate": 0.1, "low": 0.01787621, "high": 0.40415003}, abs=1e-6)
    assert result["by_task"] == {"debugging": result["success"]} and result["by_category"]["misspelled_column"]["n"] == 10
    assert result["metrics"]["bird_ex"] == {"mean": 0.2, "n": 10}  # BIRD's sets take the row that is there twice
    assert "\\xff" in result["instances"][7]["detail"] or "columns" in result["instances"][7]["detail"]


def test_workers_and_the_order_of_lines_change_nothing(files):
    one = run(files, metrics=("bird_ex", "critic_soft_ex"))
    random.Random(3).shuffle(files["lines"])
    (files["folder"] / "answers.jsonl").write_text("\n".join(files["lines"]), encoding="utf-8")
    many = run(files, workers=4, metrics=("bird_ex", "critic_soft_ex"))
    assert timeless(one) == timeless(many)


def test_for_people_the_reasons_are_shown_and_reports_written(files, capsys):
    out = files["folder"] / "report"
    assert main([*files["argv"], "--out", str(out), "--metric", "bird_ex"]) == 0
    text = capsys.readouterr().out
    assert "10.0 %" in text and "twice" in text and "sql_error 1" in text
    page, plain = (out / "report.html").read_text(encoding="utf-8"), (out / "report.md").read_text(encoding="utf-8")
    assert "http://" not in page and "https://" not in page and "prefers-reduced-motion" in page and 'aria-label="Every answer"' in page
    assert all(name in page and name in plain for name in ANSWERS) and "Where the outcome and a published metric differ" in plain


def test_a_stopped_scoring_goes_on_and_other_answers_are_graded_anew(files, monkeypatch):
    out = files["folder"] / "out"
    first = run(files, out=out)
    with pytest.raises(UserError, match="--resume"):
        run(files, out=out)
    with (out / "results.jsonl").open("a") as file:
        file.write('{"key": "cut off by a ki')
    graded: list[str] = []
    again = run(files, out=out, resume=True, each=lambda done, total, record: graded.append(record["instance_id"]))
    assert graded == [] and timeless(again["instances"]) == timeless(first["instances"])
    changed = [json.dumps({"instance_id": "broken", "pred_sqls": [RIGHT]}) if '"broken"' in line else line for line in files["lines"]]
    (files["folder"] / "answers.jsonl").write_text("\n".join(changed), encoding="utf-8")
    third = run(files, out=out, resume=True, each=lambda done, total, record: graded.append(record["instance_id"]))
    assert graded == ["broken"] and third["instances"][2]["outcome"] == "correct"
    measured = run(files, out=out, resume=True, metrics=("bird_ex",))  # other metrics are another question
    assert measured["metrics"]["bird_ex"]["n"] == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f["argv"].__setitem__(4, "/nowhere"), "/nowhere: no such folder of databases"),
        (
            lambda f: (
                (f["folder"] / "tasks.jsonl").write_text('{"instance_id": "a", "db_id": "x", "query": "q", "sol_sql": "SELECT 1"}')
                and f["argv"].append("--ignore-unknown")
            ),
            "no database 'x': looked for",
        ),
        (lambda f: (f["folder"] / "tasks.jsonl").write_text("{oops"), "tasks.jsonl:1: not valid JSON"),
        (lambda f: (f["folder"] / "answers.jsonl").write_text('{"instance_id": "stranger", "sql": "x"}'), "answers.jsonl:1: no task has the id 'stranger'"),
        (lambda f: f["argv"].extend(["--metric", "beauty"]), "--metric beauty: must be one of"),
        (lambda f: f["argv"].extend(["--now", "noon"]), "--now must be an ISO time"),
        (lambda f: f["argv"].extend(["--timeout", "0"]), "must be more than 0"),
        (lambda f: f["argv"].append("--resume"), "--resume needs --out"),
    ],
)
def test_bad_input_is_one_line_and_status_two_and_nothing_is_graded(files, capsys, change, message):
    change(files)
    assert main([*files["argv"], "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and len(err.strip().splitlines()) == 1 and "Traceback" not in err


def test_unknown_predictions_can_be_left_out(files):
    with (files["folder"] / "answers.jsonl").open("a") as file:
        file.write('\n{"instance_id": "stranger", "sql": "SELECT 1"}')
    assert run(files, ignore_unknown=True)["unknown"] == ["stranger"]


def test_databases_in_a_read_only_folder_are_only_read(files, people: Path):
    before = sorted((p.name, p.stat().st_mtime_ns, p.read_bytes()) for p in people.iterdir())
    people.chmod(0o555)
    try:
        assert run(files)["totals"]["correct"] == 1
    finally:
        people.chmod(0o755)
    assert sorted((p.name, p.stat().st_mtime_ns, p.read_bytes()) for p in people.iterdir()) == before


def test_nothing_scored_has_no_rate():
    summary = summarise([], ["bird_ex"])
    assert summary["success"] == {"k": 0, "n": 0, "rate": None, "low": None, "high": None} and summary["metrics"] == {"bird_ex": {"mean": None, "n": 0}}


def test_whatever_stands_in_an_answer_the_reports_show_it_as_text():
    nasty = "<script>alert(1)</script> | `x` \\xff"
    record = {
        "instance_id": nasty,
        "db_id": "d",
        "task": "debugging",
        "category": nasty,
        "difficulty": None,
        "outcome": "wrong_result",
        "check": 2,
        "detail": nasty,
        "metrics": {"bird_ex": 1.0},
        "seconds": 0.1,
    }
    result = {**summarise([record], ["bird_ex"]), "missing": [nasty], "unknown": [], "warnings": [nasty], "sqlite": "3", "elapsed": 1.0, "instances": [record]}
    page = html(result, nasty, nasty)
    assert "<script>alert" not in page and page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 5
    assert "<script>" not in markdown(result, nasty, nasty)


def die(bench: Bench, item: ScoreItem) -> dict[str, Any]:
    """Work that kills its process: always, or the first time only."""
    mark = Path(item.statements[1])
    if item.statements[0] == "always" or not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"outcome": "correct", "seconds": 0}


def test_a_worker_that_dies_is_replaced_and_an_instance_that_kills_twice_is_ours(files):
    folder = files["folder"]
    items = [ScoreItem(debugging(instance_id=name), (how, str(folder / name))) for name, how in (("a", "once"), ("b", "always"))]
    done: list[int] = []
    records = run_all(
        die, items, files["options"], workers=2, lost=lambda item, why: {"outcome": Verdict("infra", why).outcome}, each=lambda i, r: done.append(i)
    )
    assert [r["outcome"] for r in records] == ["correct", "infra"] and sorted(done) == [0, 1]


def test_an_instance_that_could_not_be_graded_makes_the_status_one(files, monkeypatch, capsys):
    record = {
        "instance_id": "a",
        "db_id": "people",
        "task": "debugging",
        "category": None,
        "difficulty": None,
        "outcome": "infra",
        "check": None,
        "detail": "",
        "metrics": {},
        "seconds": 0,
    }
    monkeypatch.setattr("savepoint.evals.score.run_all", lambda work, items, *a, **o: [record for _ in items])
    assert main([*files["argv"], "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["success"]["rate"] is None
