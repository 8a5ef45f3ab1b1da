"""What the documentation shows works as shown, and what it links to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAVEPOINT_STORE", str(tmp_path / "default"))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "tutorial.md", "exec"), names)  # noqa: S102 - the page's own code
    out = capsys.readouterr().out
    assert len(blocks) == 4 and "reset proven" in out and "sql_error no such column: cty" in out and "denied" in out


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


def test_the_reference_is_that_of_this_code():
    names: dict[str, object] = {"__name__": "reference", "__file__": str(ROOT / "docs" / "reference.py")}
    exec(compile((ROOT / "docs" / "reference.py").read_text(encoding="utf-8"), "reference.py", "exec"), names)  # noqa: S102
    assert names["reference"]() == (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), "run `make docs`"  # type: ignore[operator]
