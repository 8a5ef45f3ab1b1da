"""The page on state shows what works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "state.md"


def test_the_example_runs_as_shown(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("SAVEPOINT_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(shared / "data" / "sql" / "db")
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(block, "state.md", "exec"), {})  # noqa: S102 - the page's own code
    shown = re.search(r"# (reset proven: \d+ changed pages dropped, 0 left)", block)
    assert shown
    assert capsys.readouterr().out.splitlines()[-1].startswith(shown.group(1))
