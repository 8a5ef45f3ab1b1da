"""A loop: workers grow one tree of branches, and each branch is mutated and evaluated.

The published definition (arXiv 2604.17180): in each of its steps a worker draws a parent among the live, finished branches that have room, makes a
branch of it, connects, changes the schema, changes data, asks its queries; at evenly spaced steps every live leaf is compared; a finished branch is
pruned with a probability. Here the workers take turns in one thread, from one seed: so every system does exactly the same, answers can be compared
one by one, and CPU seconds are the sum of all work. How workers wait for each other is not measured.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, TypeVar

from branching.data import Row, Scale
from branching.systems import FIRST_QUERY, ROOT, NoTree, System
from branching.workload import Shape, Step, Workload

SEED = 42
T = TypeVar("T")


@dataclass(eq=False)
class Branch:
    """A node of the tree. `step`: what was done on it (None: the root)."""

    name: str
    depth: int
    parent: Branch | None = None
    step: Step | None = None
    children: int = 0
    finished: bool = False


class Clock:
    """Seconds on the clock of each operation, by kind."""

    def __init__(self) -> None:
        self._took: dict[str, list[float]] = {}

    def __call__(self, kind: str, action: Callable[..., T], *arguments: Any) -> T:
        started = time.perf_counter()
        result = action(*arguments)
        self._took.setdefault(kind, []).append(time.perf_counter() - started)
        return result

    def table(self) -> dict[str, dict[str, float]]:
        """kind -> how many, and p50 and p99 in ms."""
        return {kind: {"n": len(took), "p50_ms": _ms(median(took)), "p99_ms": _ms(_p99(took))} for kind, took in self._took.items()}


def _p99(took: list[float]) -> float:
    return quantiles(took, n=100)[-1] if len(took) > 1 else took[0]


def _ms(seconds: float) -> float:
    return float(f"{seconds * 1000:.4g}")


@dataclass
class Answers:
    """What the queries answered, in the order of asking: equal digests mean that every answer was equal. Rows have no order, and numbers nine digits,
    since systems add floating-point numbers up in different orders."""

    count: int = 0
    _digest: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=8))

    def take(self, rows: Iterable[Row]) -> None:
        self.count += 1
        self._digest.update(repr(sorted((tuple(map(_plain, row)) for row in rows), key=repr)).encode())

    def digest(self) -> str:
        return str(self._digest.hexdigest())


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else f"{float(value):.9g}"


class Loop:
    """One run of a loop on one system."""

    def __init__(self, system: System, workload: Workload, shape: Shape, scale: Scale, limit_s: float = 7200.0) -> None:
        self.system, self.workload, self.shape, self.scale, self.limit_s = system, workload, shape, scale, limit_s
        self.rng = random.Random(SEED)
        self.root = Branch(ROOT, 0, finished=True)
        self.live: dict[str, Branch] = {}
        self.clock, self.answers, self.probes = Clock(), Answers(), Answers()
        self.steps = self.compared = self.deepest = self.widest = 0
        self._untimed = 0.0
        self._base = self._peak = 0

    def run(self) -> dict[str, Any]:
        """Figures of the run. NoTree when the system cannot hold the branches that it needs. What is left of the tree is deleted."""
        shape = self.shape
        every = max(1, shape.steps // shape.comparisons) if shape.comparisons else shape.steps + 1
        self._base = self.system.bytes(trim=True)
        cpu, started = self.system.cpu(), time.perf_counter()
        try:
            for number in range(shape.steps):
                fresh = [branch for worker in range(shape.workers) if (branch := self._branch(worker, number, started)) is not None]
                if (number + 1) % every == 0:
                    self._compare()
                self._aside(self._look)
                self._prune(fresh)
            used, took = self.system.cpu() - cpu - self._untimed, time.perf_counter() - started
            self._check_leaves()
        finally:
            left = len(self.live)
            for name in list(self.live):
                self.system.delete(name)
        return {
            "steps": self.steps, "of": shape.workers * shape.steps, "cpu_s": round(used, 3), "wall_s": round(took, 2), "peak_bytes": self._peak - self._base,
            "deepest": self.deepest, "at_once": self.widest, "live_at_end": left, "leaves_compared": self.compared, "answers": self.answers.digest(),
            "asked": self.answers.count, "probes": self.probes.digest(), "probed": self.probes.count, "operations": self.clock.table(),
        }  # fmt: skip

    # ------------------------------------------------------------------ inside

    def _branch(self, worker: int, number: int, started: float) -> Branch | None:
        """A step. None when no node has room for a child, or time is up."""
        shape, system, clock = self.shape, self.system, self.clock
        nodes = [self.root, *self.live.values()]
        room = [n for n in nodes if n.finished and n.depth <= shape.depth and n.children < (shape.children if n.parent else shape.root_children)]
        if not room or time.perf_counter() - started > self.limit_s:
            return None
        parent = self.rng.choice(room)
        step = self.workload(worker, number, self.rng, self.scale)
        branch = Branch(f"b{worker}_{number}", parent.depth + 1, parent, step)
        clock("create", system.create, parent.name, branch.name)
        self.live[branch.name] = branch
        parent.children += 1
        connection = self._connect(branch)
        for kind, statements in (("ddl", step.ddl), ("dml", step.dml)):
            for sql in statements:
                clock(kind, system.run, connection, sql)
        for sql in step.queries:
            self._take(self.answers, clock("query", system.run, connection, sql))
        self._take(self.probes, clock("probe", system.run, connection, step.probe))
        clock("seal", system.seal, connection)
        clock("disconnect", system.disconnect, connection)
        self.steps += 1
        self.deepest, self.widest = max(self.deepest, branch.depth), max(self.widest, len(self.live))
        return branch

    def _connect(self, branch: Branch) -> Any:
        def connect() -> Any:
            connection = self.system.connect(branch.name)
            self.system.run(connection, FIRST_QUERY)
            return connection

        return self.clock("connect and first query", connect)

    def _compare(self) -> None:
        """One worker visits every live leaf."""
        for branch in self._leaves():
            connection = self._connect(branch)
            for sql in branch.step.compare if branch.step else ():
                self._take(self.answers, self.clock("compare", self.system.run, connection, sql))
            self.clock("disconnect", self.system.disconnect, connection)
            self.compared += 1

    def _prune(self, fresh: list[Branch]) -> None:
        for branch in fresh:
            if self.rng.random() < self.shape.prune:
                self.clock("delete", self.system.delete, branch.name)
                del self.live[branch.name]
                branch.parent.children -= 1  # type: ignore[union-attr]
            else:
                branch.finished = True

    def _check_leaves(self) -> None:
        """After the clock has stopped: every leaf still shows its own changes, and nobody else's."""
        for branch in self._leaves():
            connection = self.system.connect(branch.name)
            self.probes.take(self.system.run(connection, branch.step.probe if branch.step else FIRST_QUERY))
            self.system.disconnect(connection)

    def _leaves(self) -> list[Branch]:
        return [branch for branch in self.live.values() if not branch.children]

    def _take(self, answers: Answers, rows: list[Row]) -> None:
        self._aside(lambda: answers.take(rows))

    def _look(self) -> None:
        self._peak = max(self._peak, self.system.bytes())

    def _aside(self, action: Callable[[], None]) -> None:
        """What measuring costs itself is no cost of the system."""
        started = time.process_time()
        action()
        self._untimed += time.process_time() - started


def loop(system: System, workload: Workload, shape: Shape, scale: Scale, limit_s: float) -> dict[str, Any]:
    """`Loop.run`, or why there is none."""
    try:
        return Loop(system, workload, shape, scale, limit_s).run()
    except NoTree:
        return {"unavailable": "one line of descent only"}
