"""The loops over trees of states give the same answers on every system, and would show it if one branch saw another's changes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = (1, 300, 40)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("branching")


def run_loop(system: Any, name: str) -> dict[str, Any]:
    from branching.loops import Loop
    from branching.workload import TINY, WORKLOADS

    return Loop(system, WORKLOADS[name], TINY[name], system.scale, 60).run()


@pytest.mark.parametrize("loop", ["software_dev", "failure_repro", "data_cleaning", "mcts", "simulation"])
def test_every_system_gives_the_answers_that_ours_gives(loop: str, work: Path) -> None:
    from branching.data import Scale
    from branching.report import merge
    from branching.run import Runner

    systems = ["ours", "file copies", "savepoints"] + ["doltlite"] * (importlib.util.find_spec("doltlite") is not None)
    rows = Runner(Scale(*SMALL), work, systems).loops([loop], "tiny", 1)
    assert all(row["holds"] for row in rows), rows
    measured = {row["system"]: row for row in rows if "unavailable" not in row}
    with_savepoints = loop == "failure_repro"  # the only one with a single branch at a time
    assert set(measured) == set(systems) - (set() if with_savepoints else {"savepoints"})
    assert all(row["steps"] == row["of"] and row["asked"] > 0 and row["probed"] > 0 for row in measured.values())
    (alike,) = [row for row in merge([], rows) if row["figure"].startswith("systems that answer alike")]
    assert alike["value"] == len(measured)
    assert alike["holds"]


@pytest.mark.parametrize("loop", ["data_cleaning", "mcts", "simulation"])
def test_branches_that_share_a_state_do_not_pass(loop: str, work: Path) -> None:
    from branching.data import Scale
    from branching.systems import Sessions

    class Leaky(Sessions):
        def create(self, parent: str, name: str) -> None:
            self._sessions[name] = self._sessions[parent]

        def delete(self, name: str) -> None:
            del self._sessions[name]

    results = []
    for kind in (Sessions, Leaky):
        system = kind(work, Scale(*SMALL))
        results.append(run_loop(system, loop))
        system.close()
    honest, leaky = results
    assert honest["probes"] != leaky["probes"]


def test_the_leaves_that_are_compared_live_at_the_same_time(work: Path) -> None:
    from branching.data import Scale
    from branching.systems import Sessions

    system = Sessions(work, Scale(*SMALL))
    found = run_loop(system, "simulation")
    system.close()
    assert (found["steps"], found["at_once"], found["leaves_compared"], found["live_at_end"]) == (5, 5, 5, 0)


@pytest.mark.parametrize("name", ["ours", "file copies", "savepoints", "doltlite"])
def test_operations_are_measured_at_each_depth_and_among_branches(name: str, work: Path) -> None:
    from branching.data import Scale
    from branching.micro import Effort
    from branching.report import BOUNDED
    from branching.run import REACHES, Reach, Runner

    if name == "doltlite" and importlib.util.find_spec("doltlite") is None:
        pytest.skip("the package doltlite is not installed")
    runner = Runner(Scale(*SMALL), work, [name])
    reach = Reach((1, 3), (1, 4) if REACHES[name].branches else (), Effort(2, 3, 2, 3), 2)
    rows = [row for part in ("depth", "branches") for row in runner.micro(part, 2, {name: reach})]
    assert [(row["part"], row["points"], row["rounds"]) for row in rows] == [
        (part, points, 2) for part, points in (("depth", [1, 3]), ("branches", [1, 4])) if part == "depth" or name != "savepoints"
    ]
    for row in rows:
        operations = row["operations"]
        assert {"create", "add column", "create index", "delete", *BOUNDED} <= set(operations)
        assert all(len(one["at"]) == 2 and min(one["at"]) > 0 for one in operations.values()), operations


def test_a_selection_replaces_its_own_rows_only() -> None:
    from branching.report import loop_row, merge

    def measured(loop: str, system: str, cpu: float) -> dict[str, Any]:
        run = {"cpu_s": cpu, "steps": 1, "of": 1, "answers": "a", "probes": "p", "peak_bytes": 10, "leaves_compared": 1}
        return loop_row(loop, "reduced", "w1", system, [run])

    loops = ["software_dev", "failure_repro", "data_cleaning", "mcts"]
    first = merge([], [measured(loop, system, 1.0) for loop in loops for system in ("ours", "file copies")])
    second = merge(first, [measured("mcts", "file copies", 5.0)])
    values = {row["figure"]: row["value"] for row in second if row.get("system") == "file copies"}
    assert values == {f"{loop}, reduced, file copies": 5.0 if loop == "mcts" else 1.0 for loop in loops}
    (ratio,) = [row for row in second if row["figure"].startswith("the first four loops") and row["unit"] == "CPU s"]
    assert (ratio["ratio"], ratio["bound"], ratio["holds"]) == (0.5, "ratio <= 0.7", True)


def test_runs_that_answer_differently_do_not_hold() -> None:
    from branching.report import loop_row

    run = {"cpu_s": 1.0, "steps": 1, "of": 1, "answers": "a", "probes": "p", "peak_bytes": 10}
    assert loop_row("mcts", "reduced", "w1", "ours", [run, run])["holds"]
    assert not loop_row("mcts", "reduced", "w1", "ours", [run, {**run, "probes": "q"}])["holds"]
    assert not loop_row("mcts", "reduced", "w1", "ours", [{**run, "steps": 0}])["holds"]


def test_rows_are_the_same_at_each_making_and_fit_their_tables() -> None:
    from branching.data import TABLES, Scale, rows, width

    scale = Scale(2, 50, 10)
    for table in TABLES:
        found = list(rows(table, scale))
        assert found == list(rows(table, scale))
        assert {len(row) for row in found} == {width(table)}
    orders, lines = list(rows("orders", scale)), list(rows("order_line", scale))
    assert len(orders) == 2 * 10 * 10
    assert sum(row[6] for row in orders) == len(lines)
    assert sum(row[15] is None for row in rows("customer", Scale(1, 50, 300))) > 0


def test_the_docs_show_the_results_as_they_are() -> None:
    from branching.tables import tables

    rows = json.loads((BENCHMARKS / "results" / "branches.json").read_text(encoding="utf-8"))["rows"]
    assert tables(rows) in (BENCHMARKS.parent / "docs" / "branching.md").read_text(encoding="utf-8")
