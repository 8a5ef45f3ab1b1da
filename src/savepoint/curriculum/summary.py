"""The ledger of a run, and the summary that is made of it."""

from __future__ import annotations

import contextlib
import platform
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import savepoint

_PARTS = ("generate", "environment", "grade", "update")


@dataclass(slots=True)
class Ledger:
    """Where a run stands (`stage` stages done, `step` steps of the next) and what it has cost and shown so far. Plain JSON, kept in checkpoints.

    `evaluations[k]`: what the policy did on the held-out tasks after k stages, by mode. `demonstrator`: what the demonstrator did.
    """

    stage: int = 0
    step: int = 0
    stages: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    demonstrator: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory_bytes: int = 0
    _mark: tuple[float, float] = field(default_factory=lambda: (time.perf_counter(), time.process_time()))

    def begin(self, name: str, kind: str, mode: str) -> None:
        """Open the account of a stage."""
        zero = dict.fromkeys((*_PARTS, "other"), 0.0)
        account = {"name": name, "kind": kind, "mode": mode, "steps": 0, "episodes": 0, "tokens": 0, "seconds": 0.0, "cpu_seconds": 0.0}
        self.stages.append(account | {"time": zero, "outcomes": {}})

    @contextlib.contextmanager
    def clock(self, index: int) -> Iterator[None]:
        """Charge the time spent within to a stage."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.stages[index]["seconds"] += time.perf_counter() - wall
            self.stages[index]["cpu_seconds"] += time.process_time() - cpu

    def add(self, index: int, record: dict[str, Any]) -> None:
        """Charge a step's counts and parts of time to a stage."""
        account = self.stages[index]
        account["steps"] += 1
        for name in ("episodes", "tokens"):
            account[name] += record[name]
        self.spend(index, record["seconds"])
        account["outcomes"] = dict(Counter(account["outcomes"]) + Counter(record.get("outcomes", {})))

    def spend(self, index: int, seconds: dict[str, float]) -> None:
        """Charge parts of a stage's time to what they were spent on; what is left of it is `other`."""
        account = self.stages[index]
        for part, spent in seconds.items():
            account["time"][part] += spent
        account["time"]["other"] = max(0.0, account["seconds"] - sum(account["time"][part] for part in _PARTS))

    def settle(self) -> None:
        """Bring the totals up to this moment."""
        now = (time.perf_counter(), time.process_time())
        self.seconds += now[0] - self._mark[0]
        self.cpu_seconds += now[1] - self._mark[1]
        self._mark = now
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        self.peak_memory_bytes = max(self.peak_memory_bytes, peak)

    def to_json(self) -> dict[str, Any]:
        self.settle()
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> Ledger:
        return cls(**state)


def summary_of(ledger: Ledger) -> dict[str, Any]:
    """What a run did, from its ledger: stages with the evaluations around them, the demonstrator, the gain and its parts, totals."""
    ledger.settle()
    stages = [account | {"before": _at(ledger, i), "after": _at(ledger, i + 1)} for i, account in enumerate(ledger.stages)]
    demonstrator = ledger.demonstrator.get("agentic", {})
    outcomes = sum((Counter(mode["outcomes"]) for evaluation in ledger.evaluations[-1:] for mode in evaluation.values()), Counter())
    return {
        "savepoint": savepoint.__version__, "stages": stages, "interrupted": len(ledger.evaluations) <= len(ledger.stages) or not stages,
        "demonstrator": {"success": demonstrator.get("success"), "n": demonstrator.get("n", 0), **ledger.demonstrator},
        "gain": gain(ledger), "outcomes": dict(outcomes.most_common()),
        "seconds": ledger.seconds, "cpu_seconds": ledger.cpu_seconds, "peak_memory_bytes": ledger.peak_memory_bytes,
    }  # fmt: skip


def _at(ledger: Ledger, k: int) -> dict[str, Any] | None:
    return ledger.evaluations[k] if k < len(ledger.evaluations) else None


def gain(ledger: Ledger) -> dict[str, Any] | None:
    """What reinforcement learning added to agentic success, and how much of it came from which kind of task.

    From the last imitation stage before the first RL stage, to the last evaluation. A gain on all tasks is the sum, over both kinds, of the
    kind's share of the tasks times its own gain. On plain bugs the demonstrator's fault is a habit (it hands the query back unchanged), on
    renamed schemas it guesses what it could look up; `looked` is the share of renamed tasks in which the policy ran anything before it submitted.
    """
    first = next((i for i, account in enumerate(ledger.stages) if account["kind"] == "grpo"), None)
    if first is None or not first or len(ledger.evaluations) <= first + 1:
        return None
    before, after = ledger.evaluations[first]["agentic"], ledger.evaluations[-1]["agentic"]
    out: dict[str, Any] = {
        "from": ledger.stages[first - 1]["name"], "to": ledger.stages[len(ledger.evaluations) - 2]["name"],
        "agentic": after["success"] - before["success"], "habit": None, "looking": None, "looked": None,
    }  # fmt: skip
    for name, kind in (("habit", "bug"), ("looking", "renamed")):
        if kind in before["by"] and kind in after["by"]:
            share = after["by"][kind]["n"] / after["n"]
            out[name] = share * (after["by"][kind]["success"] - before["by"][kind]["success"])
    if "renamed" in before["by"]:
        out["looked"] = {"before": before["by"]["renamed"]["looked"], "after": after["by"]["renamed"]["looked"]}
    return out


def environment_of_run(attention: str, check: dict[str, object] | None, state: dict[str, Any]) -> dict[str, Any]:
    """Versions and levels that a run's figures depend on. attention: what the learner's model computes attention with. check: what its self-check found
    (`savepoint.attention.self_check`). state: the state backend's manifest."""
    import apsw
    import torch
    import transformers

    from savepoint.state.sqlite import vfs

    status = vfs.status()
    return {
        "python": platform.python_version(), "platform": platform.platform(), "torch": torch.__version__, "threads": torch.get_num_threads(),
        "transformers": transformers.__version__, "apsw": apsw.apsw_version(), "sqlite": apsw.sqlite_lib_version(),
        "state_backend": state["backend"], "state_workers": state["workers"], "vfs": status["vfs"], "sandbox_level": state["sandbox_level"],
        "sandbox": state["sandbox"], "attention_backend": attention, "attention_check": check,
    }  # fmt: skip
