"""One operation at a time: what a branch costs to make, reach, read, change and drop, deep down a line of branches and among many of them.

Depth: one line of branches, each with some scattered changes of its own over those of all above it; a new branch of the node at each depth is
measured, in turns, and the slope is the cost at the deepest over that at the first, round by round. Savepoints have no nodes to go back to: there the
rounds are made on the way down. Count: one process for each number of live branches, connected all of them, asked in turns. Reads and updates are of
`orders`, which every level changes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from branching.data import DISTRICTS
from branching.loops import Clock
from branching.systems import FIRST_QUERY, ROOT, System

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much of each a round does. branches: made, reached and dropped; the other operations are on the first of them."""

    branches: int = 10
    points: int = 200
    ranges: int = 50
    updates: int = 100


class Bench:
    """Makes branches on a system and measures rounds of operations on a new branch of a given one."""

    def __init__(self, system: System, effort: Effort, seed: int = 1) -> None:
        self.system, self.effort = system, effort
        self.rng = random.Random(seed)
        self._made = 0

    def _order(self, span: int = 1) -> tuple[int, int, int]:
        """warehouse, district, and an order with `span` - 1 more behind it."""
        scale = self.system.scale
        return self.rng.randint(1, scale.warehouses), self.rng.randint(1, DISTRICTS), self.rng.randint(1, max(1, scale.customers - span + 1))

    def grow(self, parent: str, name: str) -> Any:
        """A branch with changes of its own: ten orders, five stock rows, two new lines. Returns its connection."""
        system, rng, scale = self.system, self.rng, self.system.scale
        system.create(parent, name)
        connection = system.connect(name)
        w, d, _ = self._order()
        orders = ", ".join(str(rng.randint(1, scale.customers)) for _ in range(10))
        stock = ", ".join(str(rng.randint(1, scale.items)) for _ in range(5))
        self._made += 1
        lines = ", ".join(f"({w}, {d}, {1_000_000 + self._made}, {k}, 1, 1)" for k in (1, 2))
        system.run(connection, f"UPDATE orders SET o_carrier_id = {rng.randint(1, 10)} WHERE o_w_id = {w} AND o_d_id = {d} AND o_id IN ({orders})")
        system.run(connection, f"UPDATE stock SET s_quantity = s_quantity + 1 WHERE s_w_id = {w} AND s_i_id IN ({stock})")
        system.run(connection, f"INSERT INTO order_line (ol_w_id, ol_d_id, ol_o_id, ol_number, ol_i_id, ol_amount) VALUES {lines}")
        system.seal(connection)
        return connection

    def round(self, parent: str) -> Figures:
        """CPU microseconds of each operation on new branches of `parent`, and the median milliseconds on the clock of a branch with its first query."""
        system, effort = self.system, self.effort
        names = [f"x{i}" for i in range(effort.branches if system.tree else 1)]
        connections: list[Any] = []
        created, reached, took = 0.0, 0.0, []
        for name in names:
            started = time.perf_counter()
            created += self._cpu(partial(system.create, parent, name))
            reached += self._cpu(partial(self._reach, name, connections))
            took.append(time.perf_counter() - started)
        figures = {"create": created / len(names), "connect and first query": reached / len(names)}
        figures |= self._operations(connections[0])
        for connection in connections:
            system.seal(connection)
            system.disconnect(connection)
        figures["delete"] = self._cpu(lambda: [system.delete(name) for name in names]) / len(names)
        figures["create to first answer, ms"] = median(took) * 1000
        return figures

    def _operations(self, connection: Any) -> Figures:
        run, effort = self.system.run, self.effort

        def point() -> None:
            w, d, o = self._order()
            run(connection, f"SELECT * FROM orders WHERE o_w_id = {w} AND o_d_id = {d} AND o_id = {o}")

        def span() -> None:
            w, d, o = self._order(100)
            run(connection, f"SELECT * FROM orders WHERE o_w_id = {w} AND o_d_id = {d} AND o_id BETWEEN {o} AND {o + 99}")

        def update() -> None:
            w, d, o = self._order()
            run(connection, f"UPDATE orders SET o_carrier_id = {self.rng.randint(1, 10)} WHERE o_w_id = {w} AND o_d_id = {d} AND o_id = {o}")

        return {
            "point read": self._cpu(point, effort.points),
            "range read": self._cpu(span, effort.ranges),
            "update": self._cpu(update, effort.updates),
            "add column": self._cpu(lambda: run(connection, "ALTER TABLE orders ADD COLUMN extra int DEFAULT 0")),
            "create index": self._cpu(lambda: run(connection, "CREATE INDEX orders_customer ON orders (o_c_id)")),
        }

    def _reach(self, name: str, connections: list[Any]) -> None:
        connections.append(self.system.connect(name))
        self.system.run(connections[-1], FIRST_QUERY)

    def _cpu(self, action: Callable[[], Any], times: int = 1) -> float:
        """CPU microseconds of one call."""
        started = self.system.cpu()
        for _ in range(times):
            action()
        return (self.system.cpu() - started) / times * 1e6


def over_depth(system: System, depths: list[int], rounds: int, effort: Effort) -> dict[str, Any]:
    """{"points": depths, "rounds": [[figures at each depth] for each round], "bytes": of a level, on the average}."""
    bench = Bench(system, effort)
    found: dict[int, list[Figures]] = {depth: [] for depth in depths}
    empty, name = system.bytes(trim=True), ROOT
    for depth in range(1, depths[-1] + 1):
        parent, name = name, f"d{depth}"
        system.disconnect(bench.grow(parent, name))
        if not system.tree and depth in found:
            found[depth] = [bench.round(name) for _ in range(rounds)]
    bytes_ = (system.bytes() - empty) / depths[-1]
    if system.tree:
        for _ in range(rounds):
            for depth in depths:
                found[depth].append(bench.round(f"d{depth}"))
    return {"points": depths, "rounds": [[found[depth][i] for depth in depths] for i in range(rounds)], "bytes": bytes_}


class Crowd:
    """Many live branches of one base, each with changes of its own, all of them connected."""

    def __init__(self, system: System, count: int, effort: Effort) -> None:
        self.bench = Bench(system, effort)
        empty = system.bytes(trim=True)
        self.connections = [self.bench.grow(ROOT, f"m{i}") for i in range(count)]
        self.bytes = (system.bytes() - empty) / count
        self.rng = random.Random(2)

    def round(self) -> Figures:
        """As `Bench.round`, and a point read on a random branch of them, each time another."""
        figures = self.bench.round(ROOT)
        clock, run = Clock(), self.bench.system.run
        for _ in range(100):
            sql = f"SELECT * FROM orders WHERE o_w_id = 1 AND o_d_id = 1 AND o_id = {self.rng.randint(1, self.bench.system.scale.customers)}"
            clock("read", run, self.rng.choice(self.connections), sql)
        return {**figures, "read on a random branch, ms": clock.table()["read"]["p50_ms"]}

    def close(self) -> None:
        for connection in self.connections:
            self.bench.system.disconnect(connection)
