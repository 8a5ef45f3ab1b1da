"""One measurement in a process of its own: `python -m branching.child '{"what": ..., "system": ...}'`; JSON objects on stdout, one a line.

A process each, since doltlite takes the place of the process's SQLite, memory that one system leaves would be counted for the next, and a system that
ends its process ends no other's figures.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from branching.data import Scale
from branching.loops import loop
from branching.micro import Crowd, Effort, over_depth
from branching.servers import Clones, Pool
from branching.systems import Doltlite, FileCopies, NotAvailable, Savepoints, Sessions, System
from branching.workload import SHAPES, WORKLOADS

SYSTEMS: dict[str, type[System]] = {system.name: system for system in (Sessions, FileCopies, Doltlite, Pool, Clones, Savepoints)}


@dataclass(frozen=True, slots=True)
class Job:
    """What a process measures. loop, shape, limit_s: of "loop". points: the depths, or the one number of branches. rounds: over depth; over the number
    of branches, a round is made for each line that arrives on stdin. place: of its files, where several of one system run at a time."""

    what: Literal["loop", "depth", "branches"]
    system: str
    scale: Scale
    work: str
    place: str = ""
    loop: str = ""
    shape: str = "reduced"
    limit_s: float = 7200.0
    points: tuple[int, ...] = ()
    rounds: int = 1
    effort: Effort = field(default_factory=Effort)

    @staticmethod
    def read(text: str) -> Job:
        fields: dict[str, Any] = json.loads(text)
        effort, points = Effort(**fields.pop("effort", {})), tuple(fields.pop("points", ()))
        return Job(**{**fields, "scale": Scale(**fields["scale"])}, effort=effort, points=points)


def measure(job: Job) -> None:
    system = SYSTEMS[job.system](Path(job.work), job.scale, job.place)
    try:
        if job.what == "loop":
            say(loop(system, WORKLOADS[job.loop], SHAPES[job.shape][job.loop], job.scale, job.limit_s))
        elif job.what == "depth":
            say(over_depth(system, list(job.points), job.rounds, job.effort))
        else:
            crowd = Crowd(system, job.points[0], job.effort)
            say({"bytes": crowd.bytes})
            for _ in sys.stdin:
                say(crowd.round())
            crowd.close()
    finally:
        system.close()


def say(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)


def main() -> None:
    try:
        measure(Job.read(sys.argv[1]))
    except NotAvailable as error:
        say({"unavailable": str(error)})


if __name__ == "__main__":
    main()
