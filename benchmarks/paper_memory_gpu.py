"""One GRPO update of a model of gpt-oss-20b's shape (random weights, low-rank adapters) on one CUDA device: `python benchmarks/paper_memory_gpu.py [--json]`.

Three ways at 4,096 and 8,192 tokens: eager attention, FlexAttention with renormalisation (as published), and ours; ours with layers run again and experts by
tiles at 32,768 as well. Each in a process of its own. Peak: `max_memory_allocated` above weights, gradients and optimiser. Needs 80 GB. Not yet run on a GPU.

`--device cpu --tiny` runs the same code on a model of half a million parameters, to see that it works: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GB = 1e9
RANK = 16
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"attention": "eager", "recompute": "layers"},
    "flex": {"attention": "flex", "recompute": "layers"},
    "ours": {"attention": "auto", "recompute": "layers", "expert_tile": 1024},
}
CASES = [("eager", 4096), ("eager", 8192), ("flex", 4096), ("flex", 8192), ("ours", 4096), ("ours", 8192), ("ours", 32768)]
TINY_CASES = [("eager", 256), ("ours", 256), ("ours", 512)]


def shape(tiny: bool) -> Any:
    """The configuration of gpt-oss-20b, or of a very small relative."""
    from transformers import GptOssConfig

    if not tiny:
        return GptOssConfig(num_hidden_layers=24, num_local_experts=32, max_position_embeddings=1 << 17)
    return GptOssConfig(
        num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=512, max_position_embeddings=4096, sliding_window=128,
    )  # fmt: skip


def model_of(config: Any, device: str) -> Any:
    """Random weights in bfloat16, made on the device: initialising 20 billion on the host would take longer than the benchmark."""
    import torch
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    finally:
        torch.set_default_dtype(before)
    model.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=RANK, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]), model)
    return model


def measure(way: str, tokens: int, device: str, tiny: bool) -> dict[str, float]:
    """In this process: bytes at the peak of the second update above weights, gradients and optimiser; seconds; the mean log-prob, which must
    agree between the ways."""
    import torch

    from savepoint.train.batches import pack
    from savepoint.train.learner import LearnerSettings, prepare
    from savepoint.train.losses import policy_loss
    from savepoint.train.policy import Policy

    config = shape(tiny)
    policy = Policy(model_of(config, device), pad_id=0, end_id=1)
    settings = WAYS[way]
    prepare(policy, LearnerSettings(**(settings | ({"attention": "auto"} if device == "cpu" and way != "eager" else {}))))
    learned = [p for p in policy.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(learned, 1e-5)
    rng = torch.Generator().manual_seed(1)
    batch = pack([torch.randint(2, config.vocab_size, (tokens,), generator=rng).tolist()], [[i % 3 > 0 for i in range(tokens)]])
    advantages = torch.ones(int(batch.trained.sum()), device=policy.device)

    def update() -> float:
        logprobs = policy.packed_logprobs(batch)
        old, kept = logprobs.detach(), torch.ones_like(logprobs, dtype=torch.bool)
        loss, _ = policy_loss(logprobs, old, advantages, kept, batch.segments().to(policy.device), tokens=len(advantages))
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=False)  # gradients count as held, not as part of the peak
        return float(logprobs.detach().mean())

    update()
    held = torch.cuda.memory_allocated() if device != "cpu" else 0
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    logprob = update()
    if device != "cpu":
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - held if device != "cpu" else 0
    return {"peak": peak, "seconds": time.perf_counter() - started, "logprob": logprob, "held": held}


def in_its_own_process(way: str, tokens: int, arguments: argparse.Namespace) -> dict[str, float] | str:
    """What was measured, or the last line of what went wrong (out of memory, say)."""
    command = [sys.executable, __file__, "--case", f"{way}:{tokens}", "--device", arguments.device, *(["--tiny"] if arguments.tiny else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(found: dict[tuple[str, int], dict[str, float] | str]) -> list[dict[str, Any]]:
    """The figures, and what must hold of them where both sides were measured."""
    out = []
    for (way, tokens), one in found.items():
        failed = isinstance(one, str)
        out.append(
            {"figure": f"{way}, {tokens:,} tokens: peak above weights, gradients and optimiser", "value": None if failed else round(one["peak"] / GB, 3),
             "unit": one if failed else "GB", "against": None, "ratio": None, "bound": None, "holds": not failed or way != "ours"}
        )  # fmt: skip
    for figure, ours, other, most in (
        ("ours at 4,096 tokens against eager", ("ours", 4096), ("eager", 4096), 0.25),
        ("ours at 8,192 tokens against its own at 4,096", ("ours", 8192), ("ours", 4096), 2.0),
    ):
        a, b = found.get(ours), found.get(other)
        if isinstance(a, dict) and isinstance(b, dict) and b["peak"]:
            ratio = a["peak"] / b["peak"]
            out.append({"figure": figure, "value": round(a["peak"] / GB, 3), "unit": "GB", "against": round(b["peak"] / GB, 3), "ratio": round(ratio, 3),
                        "bound": f"ratio <= {most:g}", "holds": ratio <= most})  # fmt: skip
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a very small model")
    parser.add_argument("--case", help="measure WAY:TOKENS in this process")
    parser.add_argument("--out", type=Path, default=None, help="default: benchmarks/results/paper_memory_gpu.json; nothing is written on the CPU")
    arguments = parser.parse_args()
    import torch

    if arguments.device == "cpu" and not arguments.tiny:
        print("paper_memory_gpu: --device cpu needs --tiny: on the CPU only the code can be tried", file=sys.stderr)
        return 2
    if arguments.device != "cpu" and not torch.cuda.is_available():
        print("paper_memory_gpu: torch sees no CUDA device here; `--device cpu --tiny` tries the code", file=sys.stderr)
        return 2
    if arguments.case:
        way, tokens = arguments.case.split(":")
        print(json.dumps(measure(way, int(tokens), arguments.device, arguments.tiny)))
        return 0
    cases = TINY_CASES if arguments.tiny else CASES
    found = {case: in_its_own_process(*case, arguments) for case in cases}
    name = "cpu" if arguments.device == "cpu" else torch.cuda.get_device_name(0)
    result = {"name": "paper_memory_gpu", "machine": {"platform": platform.platform(), "device": name, "torch": torch.__version__}, "rows": rows(found)}
    out = arguments.out or (None if arguments.device == "cpu" else Path(__file__).parent / "results" / "paper_memory_gpu.json")
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        json.dump(result, sys.stdout, indent=1)
    else:
        for row in result["rows"]:  # type: ignore[attr-defined]
            bound = "" if row["bound"] is None else f"; {row['bound']}: {row['ratio']}"
            print(f"{'ok ' if row['holds'] else 'NO '} {row['figure']}: {row['value']} {row['unit']}{bound}")
    return 0 if all(row["holds"] for row in result["rows"]) else 1  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
