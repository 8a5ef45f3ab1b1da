"""Starts the measurements, each in a process of its own (`child.py`), one after the other and in turns, and makes rows of what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from branching.data import Scale
from branching.micro import Effort
from branching.report import Row, loop_row, micro_row

MICRO_PARTS = ("depth", "branches")
LIMIT_S = {"reduced": 600.0, "tiny": 60.0, "full": 7200.0}


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a system's micro benchmarks go: the depths, the numbers of branches, and how much of each operation a round does. Where a branch is
    a whole copy, or takes as long as one, it is not far."""

    depths: tuple[int, ...]
    branches: tuple[int, ...]
    effort: Effort = field(default_factory=Effort)
    rounds: int | None = None


REACHES = {
    "ours": Reach((1, 4, 16, 64, 256, 1024, 4096), (1, 100, 1000, 10_000)),
    "file copies": Reach((1, 4, 16, 64), (1, 64), Effort(branches=1), 5),
    "doltlite": Reach((1, 4, 16, 64, 256), (1, 100, 300), Effort(branches=3), 5),
    "our PostgreSQL pool": Reach((1, 4, 16), (1, 16), Effort(branches=1, points=300, ranges=100, updates=200), 3),
    "PostgreSQL clones": Reach((1, 4, 16), (1, 16), Effort(branches=1, points=300, ranges=100, updates=200), 3),
    "savepoints": Reach((1, 4, 16, 64, 256, 1024, 4096), ()),
}
SYSTEM_NAMES = tuple(REACHES)


class Runner:
    def __init__(self, scale: Scale, work: Path, systems: list[str]) -> None:
        self.scale, self.work, self.systems = scale, work.resolve(), systems

    def loops(self, loops: list[str], shape: str, rounds: int) -> list[Row]:
        """Each loop `rounds` times on each system, in turns; simulation, which takes minutes, once."""
        rows = []
        for loop in loops:
            turns = 1 if loop == "simulation" else rounds
            runs: dict[str, list[dict[str, Any]]] = {system: [] for system in self.systems}
            for number in range(turns):
                for system in self.systems:
                    if number and "unavailable" in runs[system][0]:
                        continue
                    self._tell(f"{loop}, {shape}, {system}, run {number + 1} of {turns}")
                    runs[system].append(self._once("loop", system, loop=loop, shape=shape, limit_s=LIMIT_S[shape]))
            rows += [loop_row(loop, shape, self.scale.name, system, found) for system, found in runs.items()]
        return rows

    def micro(self, part: str, rounds: int, reaches: dict[str, Reach] = REACHES) -> list[Row]:
        """Over depth in one process; over the number of branches in one for each number, asked in turns."""
        rows = []
        for system in self.systems:
            reach = reaches[system]
            points, turns = (reach.depths if part == "depth" else reach.branches), reach.rounds or rounds
            if not points:
                continue
            self._tell(f"{part} to {points[-1]:,}, {system}")
            effort = asdict(reach.effort)
            over = self._line if part == "depth" else self._crowds
            rows.append(micro_row(part, self.scale.name, system, over(system, points, turns, effort)))
        return rows

    def _line(self, system: str, points: tuple[int, ...], rounds: int, effort: dict[str, int]) -> dict[str, Any]:
        return self._once("depth", system, points=points, rounds=rounds, effort=effort)

    def _crowds(self, system: str, points: tuple[int, ...], rounds: int, effort: dict[str, int]) -> dict[str, Any]:
        with ExitStack() as stack:
            crowds = [stack.enter_context(self._child("branches", system, points=(n,), effort=effort, place=str(n))) for n in points]
            first = [_read(crowd) for crowd in crowds]
            if "unavailable" in first[0]:
                return first[0]
            found = []
            for _ in range(rounds):
                found.append([_ask(crowd) for crowd in crowds])
            return {"points": list(points), "rounds": found, "bytes": first[-1]["bytes"]}

    def _once(self, what: str, system: str, **options: Any) -> dict[str, Any]:
        with self._child(what, system, **options) as child:
            return _read(child)

    @contextmanager
    def _child(self, what: str, system: str, *, place: str = "", **options: Any) -> Iterator[subprocess.Popen[str]]:
        """place: a folder of its own, for one that runs beside others of its system."""
        job = {"what": what, "system": system, "scale": asdict(self.scale), "work": str(self.work), "place": place, **options}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])}
        quiet = "ignore:XDG_RUNTIME_DIR"  # said by the package of the embedded server on every machine without a session
        command = [sys.executable, "-W", quiet, "-m", "branching.child", json.dumps(job)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            yield child
        finally:
            child.communicate()  # no more lines: it gives back what it holds, and ends

    def _tell(self, what: str) -> None:
        print(what, file=sys.stderr, flush=True)


def _read(child: subprocess.Popen[str]) -> dict[str, Any]:
    line = child.stdout.readline() if child.stdout else ""
    if not line:
        raise SystemExit(f"a measurement ended without an answer (status {child.wait()}); what it said stands above")
    found: dict[str, Any] = json.loads(line)
    return found


def _ask(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()
    return _read(child)
