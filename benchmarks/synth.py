"""What `savepoint synth` makes in what time: `python benchmarks/synth.py [--database chinook.sqlite] [-n 1000] [--json]`.

Makes deep tasks over a database (by default chinook of the shared data, $SAVEPOINT_SHARED), validates each with the probes of `savepoint validate`, writes
`benchmarks/results/synth.json`, exits 1 when a row does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from savepoint.envs.sql.synth import KINDS, synth_command
from savepoint.envs.sql.tasks import read_tasks
from savepoint.evals.bench import GradingOptions
from savepoint.evals.validate import validate

WANTED_KINDS = 20
BOUND_S = 180.0


def measure(database: Path, n: int, seed: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of the benchmark, and what was made: kinds, categories, difficulties, reasons of rejection."""
    with tempfile.TemporaryDirectory() as folder:
        out, store = Path(folder) / "tasks.jsonl", Path(folder) / "store"
        started, cpu = time.perf_counter(), time.process_time()
        made = synth_command(database, n, out, seed=seed, store=store)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        tasks = read_tasks(out)
        checked = validate(out, GradingOptions((database.parent,), store=store), workers=2)
        invalid = Counter(problem for instance in checked["instances"] for problem in instance["problems"])
    rejected = sum(made["rejected"].values())
    rows = [
        _row("time to make the tasks", seconds, "s", at_most=BOUND_S * n / 1000),
        _row("processor time to make the tasks", cpu, "s"),
        _row("tasks made", made["written"], "tasks", at_least=n),
        _row("kinds of bug among them", len(made["kinds"]), f"of {len(KINDS)} kinds", at_least=WANTED_KINDS),
        _row("categories among them", len(made["categories"]), "of 4 categories", at_least=4),
        _row("shapes of gold", made["shapes"], "shapes"),
        _row("different texts", len({task.query for task in tasks}), "texts", at_least=0.95 * n),
        _row("drafts rejected for a task made", rejected / max(1, made["written"]), "drafts"),
        _row("tasks with a problem under `savepoint validate`", sum(invalid.values()), "problems", at_most=0.0),
    ]
    details = {key: made[key] for key in ("kinds", "categories", "difficulties", "impossible", "rejected")}
    return rows, details | {"problems": dict(invalid)}


def _row(figure: str, value: float, unit: str, *, at_least: float | None = None, at_most: float | None = None) -> dict[str, Any]:
    holds = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    bound = f">= {at_least:g}" if at_least is not None else f"<= {at_most:g}" if at_most is not None else None
    return {"figure": figure, "value": round(value, 3), "unit": unit, "against": None, "ratio": None, "bound": bound, "holds": holds}


def main() -> int:
    shared = Path(os.environ.get("SAVEPOINT_SHARED", "../shared"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", type=Path, default=shared / "data/sql/db/chinook.sqlite")
    parser.add_argument("-n", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "synth.json")
    arguments = parser.parse_args()
    rows, details = measure(arguments.database, arguments.n, arguments.seed)
    machine = {"platform": platform.platform(), "cores": os.cpu_count()}
    result = {"name": "synth", "database": arguments.database.stem, "machine": machine, "rows": rows, "made": details}
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        json.dump(result, sys.stdout, indent=1)
    else:
        for row in rows:
            print(f"{'ok ' if row['holds'] else 'NO '} {row['figure']}: {row['value']} {row['unit']}" + (f" (bound {row['bound']})" if row["bound"] else ""))
        for title, counts in details.items():
            print(f"{title}: {', '.join(f'{name} {count}' for name, count in counts.items()) if isinstance(counts, dict) else ', '.join(counts) or 'none'}")
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
