"""Trees of states beside what people use today: `python benchmarks/branches.py [--json] [--full] [--loops ...] [--micro ...] [--backends ...]`.

The five loops of BranchBench (arXiv 2604.17180) in a reduced or their published shape, and the price of each operation over depth and over the number
of branches: on our sessions, file copies, doltlite, PostgreSQL and savepoints, with one stream of rows, one text of statements, one seed. Durability
is off in all of them. CPU is that of every process that works for the system; peak bytes are memory that no file backs, and disk.

Without a selection, all loops in the reduced shape and both micro benchmarks are measured on every system that can run here. A selection measures
only that, and its rows take the place of the earlier ones in `benchmarks/results/branches.json`. Makes databases under `benchmarks/work/` (once).
Exits 1 when a row does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path

from branching.data import Scale
from branching.report import merge, show
from branching.run import MICRO_PARTS, SYSTEM_NAMES, Runner
from branching.tables import tables
from branching.workload import REDUCED

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "branches.json"


def selection(text: str, known: tuple[str, ...]) -> list[str]:
    names = [name.strip() for name in text.split(",")] if text else list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"{unknown[0]!r}: there are {', '.join(known)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tables", action="store_true", help="measure nothing: print the results as the tables of docs/branching.md")
    parser.add_argument("--full", action="store_true", help="the loops in their published shape")
    parser.add_argument("--loops", nargs="?", const="", help=f"only these loops, with commas between ({', '.join(REDUCED)}); all of them without a value")
    parser.add_argument("--micro", nargs="?", const="", help=f"only these micro benchmarks ({', '.join(MICRO_PARTS)}); both without a value")
    parser.add_argument("--backends", default="", help=f"only on these systems ({', '.join(SYSTEM_NAMES)})")
    parser.add_argument("--rounds", type=int, help="runs of a loop (3, of the full shape 1), or rounds of a micro benchmark (15)")
    parser.add_argument("--warehouses", type=int, default=1)
    parser.add_argument("--work", type=Path, default=HERE / "work" / "branching", help="where the databases lie")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.tables:
        print(tables(json.loads(arguments.out.read_text(encoding="utf-8"))["rows"]), end="")
        return 0
    everything = arguments.loops is None and arguments.micro is None
    runner = Runner(Scale(arguments.warehouses), arguments.work, selection(arguments.backends, SYSTEM_NAMES))
    measured = []
    if everything or arguments.loops is not None:
        loops = selection(arguments.loops or "", tuple(REDUCED))
        measured += runner.loops(loops, "full" if arguments.full else "reduced", arguments.rounds or (1 if arguments.full else 3))
    if everything or arguments.micro is not None:
        for part in selection(arguments.micro or "", MICRO_PARTS):
            measured += runner.micro(part, arguments.rounds or 15)
    earlier = json.loads(arguments.out.read_text(encoding="utf-8"))["rows"] if arguments.out.exists() else []
    rows = merge(earlier, measured)
    result = {"name": "branches", "machine": {"platform": platform.platform(), "cores": os.cpu_count()}, "rows": rows}
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        json.dump(result, sys.stdout, indent=1)
    else:
        print("\n".join(show(row) for row in rows))
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
