"""The memory plan against measured high-water marks, on the CPU: `python benchmarks/memory.py [--json]`, about two minutes.

Each case is one optimiser step of the learner in a process of its own, after a step of a much smaller model has brought in the libraries. The mark is the
kernel's (VmHWM, reset before), above what the process held before the model was made. glibc is told to give blocks of more than 256 KiB back at once
(MALLOC_MMAP_THRESHOLD_), since what it keeps of freed memory otherwise is a third on top and has nothing to do with the learner. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

SHARED = {"heads": 8, "kv_heads": 2, "head_dim": 32, "sliding_window": 128, "max_positions": 1 << 17}
CASES: dict[str, dict[str, Any]] = {
    "gpt_oss, every layer kept, 4,096 tokens": {
        "policy": {"hidden_size": 256, "layers": 3, "intermediate": 256, "experts": 8}, "vocabulary": 4096, "tokens": 4096,
    },
    "gpt_oss, layers run again, experts by tiles, 16,384 tokens": {
        "policy": {"hidden_size": 192, "layers": 4, "intermediate": 192, "experts": 8}, "vocabulary": 4096, "tokens": 16384, "recompute": "layers",
        "tile": 1024,
    },
    "llama, every layer kept, 2,048 tokens": {
        "policy": {"architecture": "llama", "hidden_size": 512, "layers": 3, "intermediate": 1536}, "vocabulary": 8192, "tokens": 2048,
    },
    "llama, layers run again, adapters alone learn, 8,192 tokens": {
        "policy": {"architecture": "llama", "hidden_size": 384, "layers": 4, "intermediate": 1024}, "vocabulary": 8192, "tokens": 8192, "recompute": "layers",
        "lora_rank": 8,
    },
}  # fmt: skip
DOCUMENTS = 4


def status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """In this process: the high-water mark of one optimiser step, and the plan of it."""
    import torch

    from savepoint.attention.memory import Learner, Shape, memory_plan
    from savepoint.train.batches import pack
    from savepoint.train.experts import tile_experts
    from savepoint.train.policy import Policy, TinyConfig
    from savepoint.train.recompute import recompute_layers

    torch.set_num_threads(1)

    def made(settings: dict[str, Any], vocabulary: int) -> Policy:
        policy = Policy.tiny(TinyConfig(**SHARED, **settings), vocab_size=vocabulary, pad_id=0, end_id=1, seed=0)
        if "lora_rank" in case:
            from peft import LoraConfig, inject_adapter_in_model

            inject_adapter_in_model(LoraConfig(r=case["lora_rank"], target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]), policy.model)
        if "tile" in case:
            tile_experts(policy.model, case["tile"])
        if case.get("recompute", "off") != "off":
            recompute_layers(policy.model)
        return policy

    def step(policy: Policy, tokens: int, vocabulary: int) -> None:
        optimiser = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad])
        length = tokens // DOCUMENTS
        batch = pack([torch.randint(2, vocabulary, (length,)).tolist() for _ in range(DOCUMENTS)], [[True] * length] * DOCUMENTS)
        for _ in range(2):  # the second has the optimiser's state
            policy.packed_logprobs(batch).mean().backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    small = {**case["policy"], "hidden_size": 64, "layers": 1, "intermediate": 64}
    step(made(small, 64), 1024, 64)
    before = status("VmRSS")
    policy = made(case["policy"], case["vocabulary"])
    Path("/proc/self/clear_refs").write_text("5")
    step(policy, case["tokens"], case["vocabulary"])
    how = Learner(lora_rank=case.get("lora_rank"), recompute=case.get("recompute", "off"), expert_tile=case.get("tile"))
    return {"measured": status("VmHWM") - before, "plan": memory_plan(Shape.of(policy.model.config), case["tokens"], how).to_json()}


def in_its_own_process(name: str) -> dict[str, Any]:
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, "--case", name], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def rows() -> list[dict[str, Any]]:
    out = []
    for name in CASES:
        found = in_its_own_process(name)
        ratio = found["plan"]["peak"] / found["measured"]
        out.append(
            {"figure": f"{name}: planned peak", "value": round(found["plan"]["peak"] / 1e6, 1), "unit": "MB", "against": round(found["measured"] / 1e6, 1),
             "ratio": round(ratio, 3), "bound": "0.8 to 1.2 of the measured", "holds": 0.8 <= ratio <= 1.2}
        )  # fmt: skip
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", choices=list(CASES), help="measure one case in this process and print it")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "memory.json")
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(CASES[arguments.case])))
        return 0
    result = {"name": "memory", "machine": {"platform": platform.platform(), "cores": os.cpu_count()}, "rows": rows()}
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        json.dump(result, sys.stdout, indent=1)
    else:
        for row in result["rows"]:  # type: ignore[attr-defined]
            print(f"{'ok ' if row['holds'] else 'NO '} {row['figure']}: {row['value']} MB, measured {row['against']} MB ({row['ratio']})")
    return 0 if all(row["holds"] for row in result["rows"]) else 1  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
