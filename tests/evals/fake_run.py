"""TEST DATA, not results: a run folder as a run leaves it, with invented figures of the size that real runs give.

`python tests/evals/fake_run.py FOLDER` writes one to look at.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from savepoint.evals.metrics import success_rate
from savepoint.rollout.trajectory import Trajectory, Turn

STAGES = [("reasoning imitation", "sft", "single_turn", 400), ("tool-use imitation", "sft", "agentic", 618),
          ("reasoning RL", "grpo", "single_turn", 20), ("agentic RL", "grpo", "agentic", 30)]  # fmt: skip
TABLES = {"customer": ["name", "city", "age", "points"], "product": ["title", "category", "price", "stock"],
          "purchase": ["customer_id", "product_id", "quantity", "year"], "employee": ["name", "salary", "dept_id"], "dept": ["name", "budget"]}  # fmt: skip
WORDS = {"name": "alias", "city": "town", "age": "years", "points": "credits", "title": "caption", "category": "kind", "price": "cost", "stock": "supply"}
BUGS = ("misspelled_column", "wrong_table", "wrong_aggregate", "missing_group_by", "wrong_comparison", "wrong_direction")
LOOKS = {0: 0.0, 1: 0.02, 2: 0.42, 3: 0.45, 4: 0.93, "demonstrator": 0.55}
SKILL = {0: 0.0, 1: 0.45, 2: 0.72, 3: 0.86, 4: 0.90, "demonstrator": 1.0}
CARELESS = {0: 0.0, 1: 0.42, 2: 0.40, 3: 0.06, 4: 0.04, "demonstrator": 0.4}


def trajectory(task: int, sample: int, mode: str, k: int | str, rng: random.Random) -> Trajectory:
    """One invented episode of a policy after `k` stages."""
    table = list(TABLES)[task % 2]
    column, where = TABLES[table][task % 3], TABLES[table][3]
    renamed = task % 2 == 0
    old = f"SELECT {column} FROM {table} WHERE {where} > {10 + task} ORDER BY {where} DESC"
    category = "renamed_column" if renamed else BUGS[task // 2 % len(BUGS)]
    gold = old.replace(column, WORDS[column], 1) if renamed else old
    issue = old if renamed else old.replace(" > ", " < ")
    result = f"error: no such column: {column}" if renamed else f"7 rows: {column}\nŁódź, O'Brien & Söhne <ltd>\n... 6 more"
    question = f"{column} of {table}s with {where} over {10 + task}, highest first"
    turns = [Turn("system", "tools" if mode == "agentic" else "answer", (0, 2)), Turn("user", f"{question}\nsql: {issue}\nresult: {result}", (2, 60))]
    looks = mode == "agentic" and rng.random() < LOOKS[k]
    if k == 0:
        return finish(task, sample, mode, category, [*turns, Turn("assistant", "t t ttt", (60, 64), reward=0.0, finish_reason="stop")], "no_answer", "no_call")
    if looks:
        look = f"SELECT * FROM {table} LIMIT 0" if renamed else gold
        call = {"name": "execute_sql", "arguments": {"sql": look}}
        thought = "look" if renamed else category.replace("_", " ")
        columns = ", ".join(WORDS[c] if renamed and c == column else c for c in TABLES[table])
        seen = f"0 rows: {columns}" if renamed else f"5 rows: {column}\nŁódź\n... 4 more"
        turns += [Turn("assistant", thought, (60, 74), tool_call=call, reward=0.0, finish_reason="stop"), Turn("tool", "", (74, 90), observation=seen)]
    careless = not renamed and not looks and rng.random() < CARELESS[k]
    right = not careless and rng.random() < SKILL[k] * (1.0 if looks or not renamed else 0.25)
    guess = issue if careless else gold if right else gold.replace(WORDS[column] if renamed else "DESC", "handle" if renamed else "ASC")
    thought = "looks right" if careless else f"{column} is now {WORDS[column]}" if right and renamed else "done" if looks else "wrong comparison"
    call = {"name": "submit_solution", "arguments": {"sql_list": [guess]}}
    turns.append(Turn("assistant", thought, (90, 115), tool_call=call, reward=float(right), finish_reason="stop"))
    outcome = "correct" if right else "sql_error" if renamed else "wrong_result"
    return finish(task, sample, mode, category, turns, outcome, "submitted")


def finish(task: int, sample: int, mode: str, category: str, turns: list[Turn], outcome: str, reason: str) -> Trajectory:
    n, status = turns[-1].span[1], "invalid" if reason == "no_call" else "ok"
    return Trajectory(
        f"shop-{task:03}", 7, task, sample, ids=list(range(n)), mask=[True] * n, logprobs=[-0.125] * n, turns=turns, status=status,
        reason=reason, reward=float(outcome == "correct"), outcome=outcome, category=category, mode=mode,
    )  # fmt: skip


def summarise(trajectories: list[Trajectory]) -> dict[str, Any]:
    """An evaluation as `summary.json` holds it."""

    def rate(part: list[Trajectory]) -> dict[str, Any]:
        by_task = defaultdict(list)
        for t in part:
            by_task[t.task].append(t.reward or 0.0)
        return {**success_rate(list(by_task.values())), "looked": fmean(t.assistant_turns > 1 for t in part)}

    parts, categories = defaultdict(list), defaultdict(list)
    for t in trajectories:
        parts["renamed" if (t.category or "").startswith("renamed") else "bug"].append(t)
        categories[t.category].append(t)
    return {
        **rate(trajectories), "turns": fmean(t.assistant_turns for t in trajectories), "by": {name: rate(part) for name, part in parts.items()},
        "by_category": {name: rate(part) for name, part in sorted(categories.items())},
        "outcomes": dict(Counter(t.outcome for t in trajectories).most_common()),
    }  # fmt: skip


def write_traces(path: Path, trajectories: list[Trajectory]) -> dict[str, Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(t.to_json(), ensure_ascii=False) + "\n" for t in trajectories), encoding="utf-8")
    return summarise(trajectories)


def evaluation(folder: Path, k: int | str, tasks: int, samples: int) -> dict[str, Any]:
    """Invent the episodes of one evaluation in both modes, and write their traces."""
    out = {}
    for mode in ("single_turn", "agentic"):
        rng = random.Random(f"{k} {mode}")
        made = [trajectory(task, sample, mode, k, rng) for task in range(tasks) for sample in range(samples)]
        out[mode] = write_traces(folder / "traces" / (f"eval-{k}-{mode}.jsonl" if isinstance(k, int) else f"{k}-{mode}.jsonl"), made)
    return out


def metrics(done: int) -> list[dict[str, Any]]:
    rng, out = random.Random(0), []
    for index, (name, kind, mode, steps) in enumerate(STAGES[:done], 1):
        for step in range(1, steps + 1):
            progress = step / steps
            common = {"stage": name, "index": index, "kind": kind, "mode": mode, "step": step, "of": steps, "cpu_seconds": 1.2, "grad_norm": 0.4, "lr": 6e-4}
            if kind == "sft":
                loss = (2.6 if index == 1 else 1.1) / (1 + 9 * progress) + rng.gauss(0.1, 0.02)
                out.append(common | {"loss": loss * 1.4, "own_loss": loss, "tokens": 1840, "episodes": 16, "seconds": {"update": 0.26}})
                continue
            reward = (0.30 + 0.25 * progress if index == 3 else 0.48 + 0.27 * progress) + rng.gauss(0, 0.03)
            turns = 1.0 if mode == "single_turn" else 1.45 + 0.5 * progress + rng.gauss(0, 0.03)
            seconds = {"generate": 1.6 * turns, "environment": 0.5 * turns, "grade": 0.35, "update": 2.1}
            out.append(common | {
                "loss": 0.01, "reward_mean": reward, "success": reward, "mixed_groups": 0.7, "turns_mean": turns, "length_mean": 62 + 30 * turns,
                "tokens": 24_000, "episodes": 256, "clip_fraction": 0.01, "logprob_gap": 4e-6, "outcomes": {"correct": int(256 * reward)}, "seconds": seconds,
            })  # fmt: skip
    return out


def write_run(folder: Path, *, done: int = 4, tasks: int = 200, samples: int = 2) -> Path:
    """A run folder after `done` stages; with fewer than four, a run that was interrupted."""
    folder.mkdir(parents=True, exist_ok=True)
    evaluations = [evaluation(folder, k, tasks, samples) for k in range(done + 1)]
    demonstrator = evaluation(folder, "demonstrator", tasks, samples)
    records = metrics(done)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    stages = []
    for index, (name, kind, mode, steps) in enumerate(STAGES[:done], 1):
        mine = [record for record in records if record["index"] == index]
        time = {part: sum(r["seconds"].get(part, 0.0) for r in mine) for part in ("generate", "environment", "grade", "update")}
        stages.append({
            "name": name, "kind": kind, "mode": mode, "steps": steps, "episodes": sum(r["episodes"] for r in mine), "tokens": sum(r["tokens"] for r in mine),
            "seconds": sum(time.values()) + 6, "cpu_seconds": 1.8 * sum(time.values()), "time": time | {"other": 6.0}, "before": evaluations[index - 1],
            "after": evaluations[index], "outcomes": {},
        })  # fmt: skip
    gain = None
    if done == 4:
        before, after = evaluations[2]["agentic"], evaluations[4]["agentic"]
        parts = {kind: after["by"][kind]["n"] / after["n"] * (after["by"][kind]["success"] - before["by"][kind]["success"]) for kind in ("bug", "renamed")}
        gain = {"from": STAGES[1][0], "to": STAGES[3][0], "agentic": after["success"] - before["success"], "habit": parts["bug"], "looking": parts["renamed"]}
    summary = {
        "savepoint": "0.1.0", "recipe": "quickstart", "seed": 0, "profile": None, "interrupted": done < 4,
        "database": {"name": "shop", "digest": "9f2c4e1ab07d55c3e8a96f01", "size": 2_441_216, "tables": TABLES,
                     "left_out": {"audit_log": "fewer than 20 rows", "attachment": "too few columns of numbers or words"}},
        "stages": stages, "demonstrator": {"success": demonstrator["agentic"]["success"], "n": demonstrator["agentic"]["n"], **demonstrator}, "gain": gain,
        "targets": [{"figure": "agentic success, gain from stage 2 to stage 4", "value": 0.325, "bound": 0.2, "holds": True},
                    {"figure": "peak memory, GiB", "value": 2.31, "bound": 2.0, "holds": False}] if done == 4 else [],
        "peak_memory_bytes": 1_234_567_890, "seconds": 571.3, "cpu_seconds": 983.1, "outcomes": evaluations[-1]["agentic"]["outcomes"],
        "environment": {"python": "3.11.2", "torch": "2.13.0+cpu", "transformers": "5.24.0", "apsw": "3.54.1.0", "sqlite": "3.54.1", "state_backend": "sqlite",
                        "vfs": "c", "sandbox_level": "in-process", "attention_backend": "eager"},
        "settings": {"name": "quickstart", "seed": 0, "threads": 2, "tasks": {"database": "shop", "max_tables": 5, "max_columns": 25, "renamed_share": 0.5,
                     "heldout": tasks, "bugs": list(BUGS), "file": None}, "policy": {"architecture": "gpt_oss", "hidden_size": 96, "layers": 3, "model": None},
                     "environment": {"prompt": "brief", "max_turns": 4}, "evaluation": {"samples": samples, "temperature": 1.0},
                     "stages": [{"kind": kind, "name": name, "mode": mode, "steps": steps, "lr": 6e-4} for name, kind, mode, steps in STAGES]},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    return folder


if __name__ == "__main__":
    print(write_run(Path(sys.argv[1]), done=int(sys.argv[2]) if len(sys.argv) > 2 else 4))
