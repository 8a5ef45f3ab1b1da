"""The page on grading: a newcomer who types what it says sees what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from savepoint.cli import main
from savepoint.envs.sql.checks import _KINDS
from savepoint.envs.sql.published import METRICS
from savepoint.envs.sql.verdict import OUTCOMES

PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")


def test_the_first_five_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    monkeypatch.setenv("SAVEPOINT_STORE", str(tmp_path / "store"))
    section = PAGE.split("## In five minutes")[1].split("\n## ")[0]
    for language, block in re.findall(r"```(\w*)\n(.*?)```", section, re.DOTALL):
        if language == "python":
            exec(compile(block, "evaluation.md", "exec"), {})  # noqa: S102 - the page's own code
            continue
        for line in block.splitlines():
            assert main(shlex.split(line)[1:]) == 0
    out = capsys.readouterr().out
    promised = re.search(r"prints `(.*?)`", section)
    assert promised is not None and promised.group(1) in out and "40 of 40 instances are valid" in out
    assert (tmp_path / "demo" / "report" / "report.html").exists()


def test_every_code_check_metric_problem_and_lint_is_on_the_page():
    source = (Path(__file__).parents[2] / "src" / "savepoint" / "evals" / "validate.py").read_text(encoding="utf-8")
    problems = {
        "no_gold",
        "preprocess_error",
        "gold_error",
        "gold_timeout",
        "gold_too_big",
        "gold_empty",
        "gold_varies",
        "gold_fails",
        "issue_passes",
        "cleanup_error",
        "forms_disagree",
        "dialect",
        "infra",
    }
    lints = {"tie_at_limit", "limit_without_order", "order_dependent", "null_first", "text_numbers", "uses_clock"}
    assert all(f'"{name}"' in source for name in problems | lints)
    for name in (*OUTCOMES, *_KINDS, *METRICS, *problems, *lints):
        assert f"`{name}`" in PAGE, name
