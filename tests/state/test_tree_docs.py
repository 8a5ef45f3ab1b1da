"""The page on branching shows what works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "branching.md"


def test_the_search_over_states_prints_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("SAVEPOINT_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(r"```python\n(import heapq\n.*?)```\n\nIt prints\n\n```\n(.*?)```", text, re.DOTALL)
    assert found
    exec(compile(found.group(1), "branching.md", "exec"), {})  # noqa: S102 - the page's own code
    assert capsys.readouterr().out == found.group(2) and (tmp_path / "repaired.sqlite").exists()
