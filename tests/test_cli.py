"""The command: exit codes, one line for bad input, JSON and nothing else, and a help page that says what it does."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from savepoint.cli import main
from savepoint.envs.sql import databases

SMOKE = ["--set", "profile=smoke", "--set", "threads=1", "--set", "tensorboard=false"]


def savepoint(*arguments: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "savepoint", *map(str, arguments)], capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(autouse=True)
def _store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAVEPOINT_STORE", str(tmp_path / "store"))


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "db").mkdir()
    databases.build("shop", tmp_path / "db" / "shop.sqlite")
    return tmp_path / "db" / "shop.sqlite"


def bad_databases(folder: Path) -> dict[str, Path]:
    """Files that are no usable database, by what is wrong with them."""
    databases.build("shop", folder / "good.sqlite")
    good = (folder / "good.sqlite").read_bytes()
    corrupt = good[:8192] + os.urandom(65536) + good[8192 + 65536 :]
    contents = {"empty": b"", "truncated": good[: len(good) // 2], "not a database": b"hello " * 1000, "corrupt": corrupt}
    paths = {"missing": folder / "missing.sqlite", "a folder": folder}
    for name, content in contents.items():
        paths[name] = folder / f"{name.replace(' ', '-')}.sqlite"
        paths[name].write_bytes(content)
    with sqlite3.connect(folder / "bare.sqlite") as db:
        db.execute("CREATE TABLE bare (a)")
    db.close()
    return {**paths, "no usable table": folder / "bare.sqlite"}


@pytest.mark.parametrize("what", ["missing", "a folder", "empty", "truncated", "not a database", "corrupt", "no usable table"])
def test_a_file_that_is_no_usable_database_is_one_line(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = bad_databases(tmp_path)[what]
    before = path.read_bytes() if path.is_file() else None
    for arguments in (
        ["synth", str(path), "-n", "3", "--out", str(tmp_path / "tasks.jsonl")],
        ["run", "quickstart", *SMOKE, "--set", f"tasks.database={path}", "--out", str(tmp_path / "run"), "--json"],
    ):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if line]
        assert len(lines) == 1 and str(path) in lines[0] and out == "", err
    assert not (tmp_path / "tasks.jsonl").exists() and (path.read_bytes() if path.is_file() else None) == before
    assert not (tmp_path / "run" / "recipe.json").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run"], "name a recipe"),
        (["run", "--resume", "--out", "nowhere"], "nowhere: holds no run to go on with"),
        (["run", "quickstart", "--set", "speed=3"], "unknown key 'speed'"),
        (["run", "no_such_recipe"], "no_such_recipe: no such file"),
        (["plan", "quickstart", "--set", "stages.4.steps=many"], "stages.4.steps: input should be a valid integer"),
        (["synth", "shop", "-n", "0", "--out", "x.jsonl"], "at least 1"),
        (["synth", "shop", "--bugs", "typo", "--out", "x.jsonl"], "unknown kind 'typo'"),
        (["synth", "shop", "--forms", "haiku", "--out", "x.jsonl"], "unknown form 'haiku'"),
        (["eval", "nowhere", "--tasks", "x.jsonl", "--databases", "."], "x.jsonl: no such file"),
        (["shell", "nowhere.sqlite"], "nowhere.sqlite"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert says in err and len([line for line in err.splitlines() if line]) == 1 and out == ""


def test_unknown_verbs_and_options_are_status_2(capsys: pytest.CaptureFixture[str]):
    for arguments in (["train"], ["plan", "quickstart", "--fast"], []):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
    capsys.readouterr()


@pytest.mark.parametrize("verb", ["run", "plan", "eval", "synth", "shell", "doctor"])
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])
    assert end.value.code == 0 and "--json" in capsys.readouterr().out


def test_the_help_of_run_lists_every_setting_with_its_meaning():
    text = savepoint("run", "--help").stdout
    for key in ("tasks.max_tables = 5", "stages.<grpo>.group_size = 8", "environment.max_turns = 4", "demonstrator.hasty = 0.45"):
        assert key in text
    assert "tables of a larger schema that tasks use" in text


def test_plan_prints_the_stages_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "quickstart", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [(s["name"], s["steps"]) for s in plan["stages"]][3] == ("agentic RL", 30) and plan["seconds"] > 60 and plan["memory_bytes"] < 2 << 30
    memory = plan["memory"]
    parts = sum(value for name, value in memory["learner"].items() if name not in ("tokens", "peak"))
    assert memory["total"] == plan["memory_bytes"] and memory["learner"]["peak"] <= parts and memory["largest_tokens"] > memory["learner"]["tokens"]
    assert main(["plan", "quickstart"]) == 0
    assert "agentic RL" in capsys.readouterr().out and list(tmp_path.iterdir()) == []


def test_doctor_says_what_works(capsys: pytest.CaptureFixture[str]):
    status = main(["doctor", "--json"])
    findings = {f["what"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert status == 0 and {"apsw", "vfs", "store", "torch"} <= findings.keys() and findings["vfs"]["detail"]
    assert main(["doctor"]) == 0
    assert "vfs" in capsys.readouterr().out


def test_synth_writes_the_same_file_for_the_same_seed_and_replaces_none(shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    for out in (one, two):
        assert main(["synth", str(shop), "-n", "25", "--out", str(out), "--seed", "4", "--json"]) == 0
    assert one.read_bytes() == two.read_bytes()
    capsys.readouterr()
    assert main(["synth", str(shop), "-n", "5", "--out", str(one)]) == 2
    assert str(one) in capsys.readouterr().err and one.read_bytes() == two.read_bytes()


def test_synth_holds_tasks_out_and_says_what_it_made(shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, held = tmp_path / "train.jsonl", tmp_path / "held.jsonl"
    command = ["synth", str(shop), "-n", "20", "--out", str(out), "--heldout", str(held), "--heldout-share", "0.3", "--bugs", "lost_partition,lost_wildcard"]
    assert main([*command, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert set(made["kinds"]) == {"lost_partition", "lost_wildcard"} and made["heldout_written"] == len(held.read_text().splitlines()) > 0
    assert main([*command, "--force"]) == 0
    assert "tasks of other shapes in" in capsys.readouterr().out
    assert main(["synth", str(shop), "--level", "quick", "--bugs", "lost_partition", "--out", str(tmp_path / "x")]) == 2
    assert "needs level deep" in capsys.readouterr().err


def test_the_smoke_run_ends_with_a_report_and_its_policy_can_be_evaluated(shop: Path, tmp_path: Path):
    done = savepoint("run", "quickstart", *SMOKE, "--set", f"tasks.database={shop}", "--out", tmp_path / "run", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout)
    report = Path(summary["report"])
    assert report == tmp_path / "run" / "report.html" and 10_000 < report.stat().st_size < 6_000_000
    assert len(summary["stages"]) == 4
    made = savepoint("synth", shop, "-n", 12, "--out", tmp_path / "t.jsonl", "--wording", "brief", "--forms", "list,top")
    assert made.returncode == 0, made.stderr
    policy = tmp_path / "run" / "checkpoints" / "stage4"
    evaluated = savepoint("eval", policy, "--tasks", tmp_path / "t.jsonl", "--databases", shop.parent, "--samples", 2, "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    result = json.loads(evaluated.stdout)
    assert result["n"] == 24 and set(result["pass_at"]) == {"1", "2"} and 0 <= result["success"] <= 1


@pytest.mark.parametrize("after", ["acting", "stage"])
def test_ctrl_c_saves_and_says_how_to_go_on(after: str, shop: Path, tmp_path: Path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "savepoint", "run", "quickstart", *SMOKE, "--set", f"tasks.database={shop}", "--out", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    sign = folder / ("recipe.json" if after == "acting" else "metrics.jsonl")
    deadline = time.monotonic() + 120
    while not sign.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err[-2000:]
    assert f"savepoint run --out {folder} --resume" in err and "Traceback" not in err
    if after == "stage":
        assert (folder / "checkpoints" / "latest" / "state.json").exists()
