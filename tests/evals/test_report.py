"""The report: complete, self-contained, escaped, and there for runs that broke off."""

from __future__ import annotations

import base64
import errno
import gzip
import io
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import Mock

import fake_run
import pytest
from rich.console import Console

from savepoint.errors import UserError
from savepoint.evals import charts
from savepoint.evals.charts import figures, plotly_source
from savepoint.evals.report import render_table, write_report
from savepoint.evals.run_record import load_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&lt;\"'"


class Page(HTMLParser):
    """A page as a browser reads it: tags with attributes, its text, and the text of each script."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text, self._inside = "", ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        self.text += "" if tag in ("span", "b") else " "
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def change(folder: Path, edit) -> None:
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    edit(summary)
    path.write_text(json.dumps(summary))


def test_the_report_is_one_small_file_that_needs_no_network(finished):
    path = write_report(finished)
    assert path == finished / "report.html"
    assert path.stat().st_size < 3_000_000
    page = Page(path.read_text(encoding="utf-8"))
    assert not [attrs for _, attrs in page.tags if "src" in attrs or attrs.get("href", "#")[0] != "#"]
    assert not any(tag == "link" for tag, _ in page.tags)
    assert "@import" not in path.read_text() and "url(" not in path.read_text()


def test_the_charting_library_comes_out_whole_and_is_the_same_every_time(finished, monkeypatch):
    page = page_of(finished)
    packed = next(script for script, attrs in zip(page.scripts, (a for t, a in page.tags if t == "script"), strict=True) if attrs.get("id") == "plotly")
    assert gzip.decompress(base64.b64decode(packed)).decode().startswith("/**\n* plotly.js v")
    assert packed.strip() == plotly_source()
    monkeypatch.setattr("time.time", lambda: 1.0)
    assert packed.strip() == plotly_source()


def test_the_headline_is_success_before_and_after_rl_and_the_demonstrators(finished):
    summary, words = load_run(finished).summary, page_of(finished).words
    before, after = (summary["stages"][i]["after"]["agentic"] for i in (1, 3))
    teacher = summary["demonstrator"]["agentic"]
    for label, rate in (("after tool-use imitation", before), ("after agentic RL", after), ("The demonstrator's own", teacher)):
        card = rf"{label} {100 * rate['success']:.1f} % ((the policy: )?[+−±][\d.]+ points )?95 % interval {100 * rate['low']:.1f}"
        assert re.search(card, words)
    assert f"{100 * (after['success'] - before['success']):+.1f} points" in words
    assert "live database shop" in words


def test_every_figure_of_the_charts_is_in_a_table_too(finished):
    run, words = load_run(finished), page_of(finished).words
    for stage in run.stages:
        for mode in ("single_turn", "agentic"):
            rate = stage["after"][mode]
            assert f"{100 * rate['success']:.1f} % {100 * rate['low']:.1f} – {100 * rate['high']:.1f} %" in words
            assert all(f"{count:,}" in words for count in rate["outcomes"].values())
        assert all(f"{seconds:,.1f}" in words for seconds in stage["time"].values())
    for record in run.steps_of(4):
        assert f"{record['reward_mean']:.3f} {record['success']:.1%}" in words
        assert f"{record['turns_mean']:.2f} {record['length_mean']:.1f}" in words
    assert f"{run.steps_of(2)[-1]['own_loss']:.4f}" in words


def test_the_gain_is_told_apart_into_habit_and_looking_with_what_was_counted(finished):
    run, words = load_run(finished), page_of(finished).words
    gain = run.summary["gain"]
    assert f"Un-learning a habit {100 * gain['habit']:+.1f} points" in words
    assert f"Learning to look {100 * gain['looking']:+.1f} points" in words
    looked = [run.evaluations[k].success()["by"]["renamed"]["looked"] for k in (2, 4)]
    assert f"ran a query first in {100 * looked[0]:.1f} % of these episodes after tool-use imitation, in {100 * looked[1]:.1f} % after agentic RL" in words
    assert "hands the query back unchanged (" in words
    assert round(100 * (gain["habit"] + gain["looking"] - gain["agentic"]), 6) == 0


def test_a_gain_that_is_none_is_not_divided_into_shares(finished):
    change(finished, lambda s: s["gain"].update(agentic=-0.01, habit=-0.03, looking=0.02))
    words = page_of(finished).words
    assert "−3.0 points of the change" in words
    assert "of the gain" not in words


def test_transcripts_stand_side_by_side_with_sql_observations_and_rewards(finished):
    words = page_of(finished).words
    assert "A renamed schema: failed by guessing the new name, then solved by reading it from the live database" in words
    assert "An ordinary bug: failed by handing the query back unchanged, then repaired it" in words
    assert re.search(r"After agentic RL correct 1 execute_sql look reward 0 SELECT \* FROM \w+ LIMIT 0 0 rows: ", words)
    assert re.search(r"2 submit_solution \w+ is now \w+ reward 1", words)


def test_data_of_databases_and_models_cannot_become_markup(finished):
    def edit(summary: dict) -> None:
        summary["recipe"] = HOSTILE
        summary["database"].update(name=HOSTILE, tables={HOSTILE: [HOSTILE]}, left_out={HOSTILE: HOSTILE})
        summary["settings"]["policy"]["model"] = HOSTILE
        summary["environment"]["vfs"] = HOSTILE
        summary["targets"][0]["figure"] = HOSTILE
        for stage in summary["stages"]:
            stage["name"] = HOSTILE
            stage["after"]["agentic"]["outcomes"][HOSTILE] = 3
            stage["after"]["agentic"]["by_category"][HOSTILE] = {"success": 0.5, "n": 3}

    change(finished, edit)
    before = Page((write_report(fake_run.write_run(finished.parent / "clean", tasks=6))).read_text())
    for path in (finished / "traces").glob("*-agentic.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for trajectory in lines:
            trajectory["task"] += HOSTILE
            for turn in trajectory["turns"]:
                turn["text"] += HOSTILE
                turn["observation"] = turn["observation"] and HOSTILE
                if turn["tool_call"]:
                    turn["tool_call"] = json.loads(json.dumps(turn["tool_call"]).replace("SELECT", f"SELECT '{json.dumps(HOSTILE)[1:-1]}',"))
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(finished)
    assert len(page.scripts) == len(before.scripts) == 3
    assert not any(tag == "img" or "onerror" in attrs for tag, attrs in page.tags)
    assert page.text.count(HOSTILE) > 20
    json.loads(page.scripts[0])


def test_what_charts_show_cannot_end_its_script(finished, monkeypatch):
    monkeypatch.setattr(charts, "figures", lambda run: {"success": {"data": [{"name": HOSTILE}]}})
    page = page_of(finished)
    assert len(page.scripts) == 3
    assert json.loads(page.scripts[0])["success"]["data"][0]["name"] == HOSTILE


@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_an_interrupted_run_is_reported_as_far_as_it_came(tmp_path, done):
    words = page_of(fake_run.write_run(tmp_path / "run", done=done, tasks=8)).words
    assert "This run was interrupted." in words
    assert ("up to the evaluation" in words) == (done > 0)
    assert "The demonstrator's own" in words
    if done == 2:
        assert "No stage of reinforcement learning has been evaluated yet" in words


def test_a_stage_under_way_has_no_after_and_is_reported(finished):
    change(finished, lambda s: (s["stages"][3].update(after=None, steps=12), s.update(gain=None, interrupted=True)))
    words = page_of(finished).words
    assert "up to the evaluation after reasoning RL" in words
    assert "4 agentic RL GRPO agentic 12" in words


@pytest.mark.parametrize("missing", ["traces", "metrics.jsonl"])
def test_a_run_without_traces_or_metrics_still_has_a_report(finished, missing):
    (finished / missing).rename(finished.parent / "elsewhere")
    words = page_of(finished).words
    assert "Agentic success after agentic RL" in words
    assert ("What the agent did, before and after" in words) == (missing != "traces")
    assert ("Learning curves" in words) == (missing != "metrics.jsonl")


def test_a_torn_last_line_of_the_metrics_is_left_out_and_a_broken_one_before_it_is_named(finished):
    path = finished / "metrics.jsonl"
    path.write_text(path.read_text() + '{"stage": "agentic')
    write_report(finished)
    path.write_text(path.read_text() + "\n{}\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:\d+: not JSON"):
        write_report(finished)


def test_steps_that_diverged_leave_gaps_and_valid_json(finished):
    path = finished / "metrics.jsonl"
    path.write_text(path.read_text().replace('"own_loss": ', '"own_loss": NaN, "was": ', 5))
    page = page_of(finished)
    json.loads(page.scripts[0], parse_constant=lambda name: pytest.fail(name))


def test_folders_without_a_readable_summary_are_refused_by_name(tmp_path, finished):
    with pytest.raises(UserError, match=r"summary\.json: no such file"):
        write_report(tmp_path)
    (finished / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"summary\.json: cannot be read"):
        write_report(finished)


def test_a_report_that_cannot_be_made_leaves_the_one_before(finished):
    path = write_report(finished)
    kept = path.read_bytes()
    (finished / "summary.json").write_text("[]")
    with pytest.raises(UserError, match="holds no JSON object"):
        write_report(finished)
    assert path.read_bytes() == kept
    assert [p.name for p in finished.iterdir() if "report" in p.name] == ["report.html"]


def test_a_disk_that_is_full_is_one_clear_line_and_leaves_the_report_before(finished, monkeypatch):
    path = write_report(finished)
    kept = path.read_bytes()
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(UserError, match=r"report\.html: cannot be written: No space left on device"):
        write_report(finished)
    assert path.read_bytes() == kept
    assert not list(finished.glob(".report*"))


def test_a_report_that_is_open_is_replaced_not_rewritten(finished):
    path = write_report(finished)
    with path.open("rb") as reader:
        write_report(finished)
        assert reader.read().rstrip().endswith(b"</html>")
        assert os.fstat(reader.fileno()).st_ino != path.stat().st_ino


def test_intervals_in_the_chart_are_each_evaluations_own(finished):
    run = load_run(finished)
    traces = [trace for trace in figures(run)["success"]["data"] if trace["name"] == "agentic"]
    rates = [e.success() for e in run.evaluations]
    assert list(traces[0]["error_y"]["array"]) == pytest.approx([rate["high"] - rate["success"] for rate in rates])
    assert list(traces[0]["error_y"]["arrayminus"]) == pytest.approx([rate["success"] - rate["low"] for rate in rates])


def test_charts_stay_small_however_long_a_run_is(finished):
    path = finished / "metrics.jsonl"
    step = json.loads(path.read_text().splitlines()[0])
    path.write_text("".join(json.dumps(step | {"step": k}) + "\n" for k in range(1, 20_001)))
    assert len(json.dumps(figures(load_run(finished))["loss"])) < 20_000


def test_the_final_table_names_stages_gain_and_targets(finished):
    summary = load_run(finished).summary
    console = Console(file=io.StringIO(), width=140)
    render_table(summary, console)
    out = console.file.getvalue().replace("\u00a0", " ")
    assert re.search(r"4 agentic RL +[\d.]+ → [\d.]+ % +[\d.]+ → [\d.]+ % +30 +7,680 +\d:\d\d", out)
    assert f"agentic {100 * summary['demonstrator']['success']:.1f} %" in out
    assert re.search(r"tool-use imitation to agentic RL: \+[\d.]+ points = \+[\d.]+ points un-learning a habit, \+[\d.]+ points learning to look", out)
    assert "✓ agentic success, gain from stage 2 to stage 4: 0.325 (target 0.2)" in out
    assert "✗ peak memory, GiB: 2.31 (target 2)" in out


def test_the_final_table_of_a_run_that_did_nothing_is_empty_but_there():
    console = Console(file=io.StringIO(), width=100)
    render_table({"stages": [], "demonstrator": {}, "gain": None}, console)
    assert console.file.getvalue().startswith("stage")
