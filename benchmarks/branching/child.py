"""One measurement in a process of its own: `python -m branching.child loop SYSTEM LOOP SHAPE SCALE WORK [SECONDS]`; one JSON object on stdout.

A process each, since doltlite takes the place of the process's SQLite, memory that one system leaves would be counted for the next, and a system that
ends its process ends no other's figures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from branching.data import Scale
from branching.loops import loop
from branching.systems import Doltlite, FileCopies, NotAvailable, Savepoints, Sessions, System
from branching.workload import SHAPES, WORKLOADS

SYSTEMS: dict[str, type[System]] = {system.name: system for system in (Sessions, FileCopies, Doltlite, Savepoints)}


def run_loop(name: str, workload: str, shape: str, scale: Scale, work: Path, limit_s: float) -> dict[str, Any]:
    system = SYSTEMS[name](work, scale)
    try:
        return loop(system, WORKLOADS[workload], SHAPES[shape][workload], scale, limit_s)
    finally:
        system.close()


def main() -> None:
    _, what, name, workload, shape, scale, work, *rest = sys.argv
    del what
    try:
        result = run_loop(name, workload, shape, Scale(*map(int, scale.split(","))), Path(work), float(rest[0]) if rest else 7200.0)
    except NotAvailable as error:
        result = {"unavailable": str(error)}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
