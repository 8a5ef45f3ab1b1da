"""One GRPO update of a small gpt-oss, 64 trajectories of 100 to 1,000 tokens: packed through our attention against padded through eager attention.

`python benchmarks/packing.py [--json]`, about two minutes. Each way runs in a process of its own on one thread: the same weights, trajectories, loss and
optimiser; micro-batches of the same number of tokens at most (padding included where there is any, and trajectories sorted by length so that little is
padded). CPU seconds of an update after one that warms up; the kernel's high-water mark of memory above what the process held before it. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TRAJECTORIES, SHORTEST, LONGEST, PROMPT = 64, 100, 1000, 60
TOKENS = 4096
VOCABULARY = 640
LEAST = {"CPU seconds": 1.5, "memory": 3.0}


def status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))


def trajectories() -> list[tuple[list[int], list[bool], float]]:
    """Tokens, which of them were sampled, and an advantage."""
    rng = random.Random(0)
    out = []
    for _ in range(TRAJECTORIES):
        length = rng.randrange(SHORTEST, LONGEST + 1)
        out.append(([rng.randrange(2, VOCABULARY) for _ in range(length)], [i >= PROMPT and i % 3 > 0 for i in range(length)], rng.choice([-1.0, 1.0])))
    return out


def padded(policy: Any, chosen: Sequence[tuple[list[int], list[bool], float]]) -> Any:
    """Log-probs of trained tokens of sequences padded to the longest, as they were before packing."""
    import torch

    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids, _, _ in chosen], batch_first=True)
    trained = torch.nn.utils.rnn.pad_sequence([torch.tensor(mask) for _, mask, _ in chosen], batch_first=True)
    attention = torch.zeros_like(ids)
    for row, (tokens, _, _) in enumerate(chosen):
        attention[row, : len(tokens)] = 1
    return policy.logprobs(ids, attention, trained)


def by_length(given: list[tuple[list[int], list[bool], float]]) -> list[list[tuple[list[int], list[bool], float]]]:
    """Micro-batches of like lengths, at most `TOKENS` with their padding."""
    out: list[list[tuple[list[int], list[bool], float]]] = [[]]
    for item in sorted(given, key=lambda t: len(t[0])):
        if out[-1] and len(item[0]) * (len(out[-1]) + 1) > TOKENS:
            out.append([])
        out[-1].append(item)
    return out


def measure(way: str) -> dict[str, float]:
    """In this process: CPU seconds, memory, and the loss (which must agree) of one update."""
    import torch

    from savepoint.train.batches import microbatches, pack
    from savepoint.train.losses import policy_loss
    from savepoint.train.policy import Policy, TinyConfig

    torch.set_num_threads(1)
    policy = Policy.tiny(TinyConfig(vocab_size=VOCABULARY), vocab_size=VOCABULARY, pad_id=0, end_id=1, seed=0)
    if way == "padded":
        policy.model.set_attn_implementation("eager")
    given = trajectories()
    total = sum(sum(mask) for _, mask, _ in given)
    optimiser = torch.optim.AdamW(list(policy.parameters()), 1e-4)
    chunks = by_length(given) if way == "padded" else [[given[i] for i in rows] for rows in microbatches([len(t[0]) for t in given], TOKENS)]

    def update(chunks: list[list[tuple[list[int], list[bool], float]]]) -> float:
        whole = 0.0
        for chosen in chunks:
            logprobs = padded(policy, chosen) if way == "padded" else policy.packed_logprobs(pack([t[0] for t in chosen], [t[1] for t in chosen]))
            counts = torch.tensor([sum(mask) for _, mask, _ in chosen])
            advantages = torch.tensor([a for _, _, a in chosen]).repeat_interleave(counts)
            segments = torch.arange(len(chosen)).repeat_interleave(counts)
            loss, _ = policy_loss(logprobs, logprobs.detach(), advantages, torch.ones_like(logprobs, dtype=torch.bool), segments, tokens=total)
            loss.backward()
            whole += loss.item()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return whole

    update([min(chunks, key=lambda chunk: sum(len(t[0]) for t in chunk))[:1]])
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    started = time.process_time()
    loss = update(chunks)
    return {"seconds": time.process_time() - started, "bytes": status("VmHWM") - before, "loss": loss}


def in_its_own_process(way: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, "--way", way], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{way}: {done.stderr.strip().splitlines()[-1]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def rows() -> list[dict[str, Any]]:
    ours, eager = in_its_own_process("packed"), in_its_own_process("padded")
    if abs(ours["loss"] - eager["loss"]) > 1e-4:
        raise RuntimeError(f"the two ways do not learn the same: losses {ours['loss']} and {eager['loss']}")
    out = []
    for figure, key, scale, unit in (("CPU seconds", "seconds", 1.0, "s"), ("memory", "bytes", 1e6, "MB")):
        ratio = eager[key] / ours[key]
        out.append(
            {"figure": f"one GRPO update, packed against padded eager: {figure}", "value": round(ours[key] / scale, 2), "unit": unit,
             "against": round(eager[key] / scale, 2), "ratio": round(ratio, 2), "bound": f"at least {LEAST[figure]}x less", "holds": ratio >= LEAST[figure]}
        )  # fmt: skip
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--way", choices=["packed", "padded"], help="measure one way in this process and print it")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "packing.json")
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measure(arguments.way)))
        return 0
    result: dict[str, Any] = {"name": "packing", "machine": {"platform": platform.platform(), "cores": os.cpu_count()}, "rows": rows()}
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        json.dump(result, sys.stdout, indent=1)
    else:
        for row in result["rows"]:
            print(f"{'ok ' if row['holds'] else 'NO '} {row['figure']}: {row['value']} {row['unit']} against {row['against']} ({row['ratio']}x)")
    return 0 if all(row["holds"] for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
