"""Attention with sinks on one CUDA device: `python benchmarks/attention_gpu.py [--json]`. Not yet run on a GPU.

First values: out, lse and four gradients of every backend that the device has, in bfloat16, against float64 eager of the same rounded inputs. Then time and
peak memory of a forward and a backward pass of a gpt-oss layer (64 query heads, 8 key heads of 64) at 1k to 64k tokens, causal, with a window of 128, and
packed in documents of 4,096. Eager is left out where its scores alone would not fit.

`--device cpu --tiny` runs the same code on small shapes, to see that it works: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from savepoint.attention import BackendUnavailable, backends, sink_attention

TOKENS = (1024, 4096, 16384, 65536)
TINY_TOKENS = (64, 256)
WINDOW, DOCUMENT = 128, 4096
HEADS, KV_HEADS, SIZE = 64, 8, 64
ROUNDS = 5
MOST = 5e-3  # relative L2 error in bfloat16; rounding a result alone costs 1.7e-3, and a dropped term 1e-1


def inputs(tokens: int, device: str, dtype: torch.dtype, heads: tuple[int, int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v, sinks as leaves, and an upstream gradient."""
    rng = torch.Generator().manual_seed(tokens)
    query, key = (1, heads[0], tokens, SIZE), (1, heads[1], tokens, SIZE)
    made = [torch.randn(*shape, generator=rng).to(device, dtype).requires_grad_() for shape in (query, key, key, (heads[0],))]
    return made, torch.randn(*query, generator=rng).to(device, dtype)


def bounds(tokens: int, document: int | None, device: str) -> torch.Tensor | None:
    return None if document is None or document >= tokens else torch.arange(0, tokens + 1, document, dtype=torch.int32, device=device)


def passes(name: str, given: list[torch.Tensor], upstream: torch.Tensor, window: int | None, cu: torch.Tensor | None) -> list[torch.Tensor]:
    """out, lse and the gradients to q, k, v and sinks."""
    out, lse = sink_attention(*given, window=window, cu_seqlens=cu, backend=name)
    return [out.detach(), lse, *torch.autograd.grad(out, given, upstream)]


def candidates(device: str) -> list[str]:
    return [name for name, reason in backends(device).items() if reason is None]


def exactness(device: str, heads: tuple[int, int], tokens: int) -> Iterator[dict[str, Any]]:
    """A row for each backend: its worst relative L2 error over tensors, windows and documents."""
    cut = torch.tensor([0, tokens // 3 + 1, tokens], dtype=torch.int32, device=device)
    given, upstream = inputs(tokens, device, torch.bfloat16, heads)
    for name in candidates(device):
        error = 0.0
        try:
            for window, cu in ((None, None), (WINDOW // 2, None), (None, cut), (WINDOW // 2, cut)):
                exact = passes("eager", [x.detach().double().requires_grad_() for x in given], upstream.double(), window, cu)
                found = passes(name, given, upstream, window, cu)
                error = max(error, *(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)))
        except BackendUnavailable as reason:
            yield {"figure": f"{name}: values and gradients", "value": None, "unit": str(reason), "against": None, "ratio": None, "bound": None, "holds": True}
            continue
        yield {
            "figure": f"{name}: worst error of out, lse and gradients in bfloat16", "value": round(error, 6), "unit": "relative L2", "against": None,
            "ratio": round(error, 6), "bound": f"<= {MOST:g}", "holds": error <= MOST,
        }  # fmt: skip


def timed(device: str, call: Callable[[], Any]) -> tuple[float, int]:
    """Median seconds of a call, and the bytes that it takes at its peak (0 on the CPU, where nothing counts them)."""
    if device == "cpu":
        seconds = []
        for _ in range(2):
            started = time.process_time()
            call()
            seconds.append(time.process_time() - started)
        return statistics.median(seconds), 0
    call()  # compiles what is compiled
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, seconds = torch.cuda.memory_allocated(), []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1000)
    return statistics.median(seconds), torch.cuda.max_memory_allocated() - before


def fits(name: str, tokens: int, heads: int, device: str) -> bool:
    """Whether eager's scores (a handful of copies of [heads, T, T] in float32) could be had at all."""
    if name != "eager":
        return True
    room = torch.cuda.get_device_properties(0).total_memory if device != "cpu" else 4 << 30
    return 5 * 4 * heads * tokens * tokens < room


def costs(device: str, heads: tuple[int, int], lengths: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    for tokens in lengths:
        for case, window, document in (("causal", None, None), (f"window of {WINDOW}", WINDOW, None), (f"documents of {DOCUMENT}", None, DOCUMENT)):
            cu = bounds(tokens, document, device)
            if document is not None and cu is None:
                continue
            given, upstream = inputs(tokens, device, torch.bfloat16, heads)
            for name in candidates(device):
                if not fits(name, tokens, heads[0], device):
                    continue
                try:
                    seconds, size = timed(device, lambda n=name, g=given, u=upstream, w=window, c=cu: passes(n, g, u, w, c))  # type: ignore[misc]
                except BackendUnavailable:
                    continue
                except torch.cuda.OutOfMemoryError:
                    seconds, size = float("nan"), 0
                figure = f"{name}, {tokens:,} tokens, {case}"
                common = {"against": None, "ratio": None, "bound": None, "holds": True}
                yield {"figure": f"{figure}: forward and backward", "value": None if seconds != seconds else round(seconds * 1000, 3), "unit": "ms", **common}
                if size:
                    yield {"figure": f"{figure}: peak memory", "value": round(size / 1e6, 1), "unit": "MB", **common}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--out", type=Path, default=None, help="default: benchmarks/results/attention_gpu.json; nothing is written on the CPU")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.tiny:
        print("attention_gpu: --device cpu needs --tiny: on the CPU only the code can be tried, see benchmarks/attention.py for figures", file=sys.stderr)
        return 2
    if arguments.device != "cpu" and not torch.cuda.is_available():
        print("attention_gpu: torch sees no CUDA device here; `--device cpu --tiny` tries the code", file=sys.stderr)
        return 2
    heads, lengths = ((8, 2), TINY_TOKENS) if arguments.tiny else ((HEADS, KV_HEADS), TOKENS)
    rows = [*exactness(arguments.device, heads, 200 if arguments.tiny else 1024), *costs(arguments.device, heads, lengths)]
    name = "cpu" if arguments.device == "cpu" else torch.cuda.get_device_name(0)
    result = {"name": "attention_gpu", "machine": {"platform": platform.platform(), "device": name, "torch": torch.__version__}, "rows": rows}
    out = arguments.out or (None if arguments.device == "cpu" else Path(__file__).parent / "results" / "attention_gpu.json")
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        json.dump(result, sys.stdout, indent=1)
    else:
        for row in rows:
            share = "" if row["bound"] is None else f"; {row['bound']}: {row['ratio']}"
            print(f"{'ok ' if row['holds'] else 'NO '} {row['figure']}: {row['value']} {row['unit']}{share}")
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
