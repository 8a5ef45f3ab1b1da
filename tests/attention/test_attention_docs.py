"""The page on attention shows what works, and the figures that were measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")


def test_the_examples_run_as_shown():
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "attention.md", "exec"), names)  # noqa: S102 - the page's own code
    assert names["out"].shape == (1, 8, 300, 64) and names["lse"].shape == (1, 8, 300)


def test_the_table_shows_the_committed_figures_and_every_bound_holds():
    rows = json.loads((ROOT / "benchmarks" / "results" / "attention.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 17 and all(row["holds"] for row in rows)
    for row in rows:
        if row["unit"] in ("MB", "s"):
            digits = 1 if row["unit"] == "MB" else 2
            assert f"{row['value']:.{digits}f} {row['unit']}" in PAGE and f"{row['against']:,.{digits}f} {row['unit']}" in PAGE, row["figure"]
