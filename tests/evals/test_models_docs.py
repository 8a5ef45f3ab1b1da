"""The page on evaluating models: its commands are commands, its settings are settings."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from savepoint.cli import build_parser
from savepoint.config import describe
from savepoint.evals.command import EvalSettings

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def test_every_command_on_the_page_parses():
    lines = [line for block in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines() if line.startswith("savepoint ")]
    assert len(lines) == 4
    for line in lines:
        assert build_parser().parse_args(shlex.split(line)[1:]).tasks == Path("tasks.jsonl")


def test_every_setting_on_the_page_exists():
    known = {key for key, _, _ in describe(EvalSettings)}
    named = set(re.findall(r"\b((?:endpoint|environment|state)\.[a-z_]+)", PAGE)) - {"environment.KEY"}
    assert len(named) > 10 and named <= known
