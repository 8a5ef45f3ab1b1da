"""What finished runs reached, against what such a run is for: `python benchmarks/quickstart.py RUN [RUN ...] [--gain 0.20] [--json]`.

Reads `summary.json` of each run folder, writes `benchmarks/results/quickstart.json`, exits 1 when a row does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any


def rows_of(run: Path, gain: float) -> list[dict[str, Any]]:
    """The figures of one run. Bounds: RL adds at least `gain` to agentic success and lifts it above the demonstrator; 15 minutes, 2 GB."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    after = [stage["after"] for stage in summary["stages"]]
    name = f"{summary['database']['name']}, seed {summary['seed']}"
    agentic = [a["agentic"]["success"] for a in after]
    single = [a["single_turn"]["success"] for a in after]
    demonstrator = summary["demonstrator"]["success"]
    split = summary["gain"]
    return [
        _row(f"{name}: agentic success after the last stage, minus after imitation", agentic[3] - agentic[1], "success", at_least=gain),
        _row(f"{name}: agentic success after the last stage, minus the demonstrator's", agentic[3] - demonstrator, "success", at_least=0.0),
        _row(f"{name}: single-turn success after reasoning RL, minus after reasoning imitation", single[2] - single[0], "success", at_least=0.0),
        _row(f"{name}: part of the gain from un-learning a habit (bugs)", split["habit"], "success"),
        _row(f"{name}: part of the gain on renamed columns", split["looking"], "success"),
        _row(f"{name}: wall-clock time", summary["seconds"] / 60, "minutes", at_most=15.0),
        _row(f"{name}: processor time", summary["cpu_seconds"] / 60, "minutes"),
        _row(f"{name}: peak memory", summary["peak_memory_bytes"] / 1e9, "GB", at_most=2.0),
    ]


def _row(figure: str, value: float, unit: str, *, at_least: float | None = None, at_most: float | None = None) -> dict[str, Any]:
    holds = (at_least is None or value > at_least or (at_least > 0 and value == at_least)) and (at_most is None or value <= at_most)
    bound = f">= {at_least}" if at_least else "> 0" if at_least is not None else f"<= {at_most}" if at_most is not None else None
    return {"figure": figure, "value": round(value, 4), "unit": unit, "against": None, "ratio": None, "bound": bound, "holds": holds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--gain", type=float, default=0.20)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "quickstart.json")
    arguments = parser.parse_args()
    rows = [row for run in arguments.runs for row in rows_of(run, arguments.gain)]
    result = {"name": "quickstart", "machine": {"platform": platform.platform(), "cores": os.cpu_count()}, "rows": rows}
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        json.dump(result, sys.stdout, indent=1)
    else:
        for row in rows:
            print(f"{'ok ' if row['holds'] else 'NO '} {row['figure']}: {row['value']} {row['unit']}" + (f" (bound {row['bound']})" if row["bound"] else ""))
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
