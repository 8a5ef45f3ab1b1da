"""Attention with sinks on the CPU, against eager attention and against torch's own attention without sinks: `python benchmarks/attention.py [--json]`.

Forward and backward of one layer: batch 1, 8 query heads, 2 key heads of 64, float32, one thread. Each measurement runs in a process of its own, after a
call of 512 tokens that brings in the libraries; methods that are compared take turns, and the least of the rounds counts. Memory is the kernel's high-water
mark (VmHWM, reset before the call) above what the process held with its inputs made: outputs, gradients and work. Linux only; about four
minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

HEADS, KV_HEADS, SIZE = 8, 2, 64
ROUNDS = 3
FULL = (None, None)  # no window, one document
Case = tuple[str, int, int | None, int | None]
"""Method, tokens, window, tokens of a document."""


def status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))


def method(name: str, window: int | None, document: int | None) -> Any:
    """A function of q, k, v, sinks that gives the output."""
    import torch
    import torch.nn.functional as F

    from savepoint.attention import sink_attention

    if name == "sdpa":  # torch's own, without sinks
        return lambda q, k, v, sinks: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def ours(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        tokens = q.shape[2]
        bounds = None if document is None else torch.arange(0, tokens + 1, min(document, tokens), dtype=torch.int32)
        return sink_attention(q, k, v, sinks, window=window, cu_seqlens=bounds, backend=name)[0]

    return ours


def measure(case: Case) -> dict[str, float]:
    """In this process: CPU seconds of a forward and a backward pass, and their memory in bytes."""
    import torch

    name, tokens, window, document = case
    torch.set_num_threads(1)
    torch.manual_seed(0)
    attend = method(name, window, document)

    def made(length: int) -> tuple[list[Any], Any]:
        shapes = [(1, HEADS, length, SIZE), (1, KV_HEADS, length, SIZE), (1, KV_HEADS, length, SIZE), (HEADS,)]
        return [torch.randn(*shape, requires_grad=True) for shape in shapes], torch.randn(1, HEADS, length, SIZE)

    inputs, upstream = made(512)
    attend(*inputs).backward(upstream)
    inputs, upstream = made(tokens)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    started = time.process_time()
    attend(*inputs).backward(upstream)
    return {"seconds": time.process_time() - started, "bytes": status("VmHWM") - before}


def in_its_own_process(*arguments: str) -> Any:
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {(done.stderr.strip().splitlines() or [f'status {done.returncode}'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def least(cases: list[Case]) -> dict[Case, dict[str, float]]:
    """Each case's least CPU seconds and bytes, over rounds in which the cases take turns."""
    found: dict[Case, dict[str, float]] = {}
    for _ in range(ROUNDS):
        for case in cases:
            one = in_its_own_process("--case", json.dumps(case))
            found[case] = {key: min(value, found.get(case, one)[key]) for key, value in one.items()}
    return found


def exactness() -> dict[str, float]:
    """In this process: the worst difference of out, lse and four gradients from float64 eager, relative to the largest entry, over backends, windows and
    documents; in bfloat16 the largest share (of L2 errors, tensor by tensor, from float64 of the same rounded inputs) that it is of transformers' own
    eager attention's, without documents and windows so small that rounding the output is all there is."""
    import torch

    from savepoint.attention import sink_attention

    torch.manual_seed(0)
    tokens = 257
    leaves = [torch.randn(1, h, tokens, SIZE, dtype=torch.float64) for h in (HEADS, KV_HEADS, KV_HEADS)] + [torch.randn(HEADS, dtype=torch.float64) * 4]
    upstream = torch.randn(1, HEADS, tokens, SIZE, dtype=torch.float64).bfloat16().double()

    def eager(q: Any, k: Any, v: Any, sinks: Any, window: int | None, bounds: Any) -> tuple[Any, Any]:
        """As transformers' gpt_oss computes it: scores and sink in one softmax, in the dtype given."""
        seen = torch.ones(tokens, tokens).tril().bool()
        if window is not None:
            seen &= torch.ones(tokens, tokens).triu(1 - window).bool()
        if bounds is not None:
            document = torch.bucketize(torch.arange(tokens), bounds, right=True)
            seen &= document[:, None] == document[None]
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        scores = (q @ k.mT * SIZE**-0.5).masked_fill(~seen, torch.finfo(q.dtype).min)
        whole = torch.cat([scores, sinks[None, :, None, None].expand(1, -1, tokens, 1)], -1)
        return (whole - whole.amax(-1, keepdim=True)).softmax(-1)[..., :-1] @ v, whole.double().logsumexp(-1)

    def run(attend: Any, values: list[Any], dtype: Any) -> list[Any]:
        """lse, out, gradients."""
        given = [x.to(dtype).requires_grad_() for x in values]
        out, lse = attend(*given)
        return [x.double() for x in (lse, out, *torch.autograd.grad(out, given, upstream.to(dtype)))]

    def distances(found: list[Any], wanted: list[Any], norm: float) -> list[float]:
        return [float((a - b).detach().norm(norm) / b.detach().norm(norm)) for a, b in zip(found, wanted, strict=True)]

    out = {"float64": 0.0, "float32": 0.0, "bfloat16": 0.0}
    for window, cut, backend in itertools.product((None, 1, 16, 100), (None, (0, 1, 100, 257)), ("block", "cpu_flash")):
        bounds = None if cut is None else torch.tensor(cut, dtype=torch.int32)
        naive, exact = partial(eager, window=window, bounds=bounds), partial(sink_attention, window=window, cu_seqlens=bounds, backend=backend)
        for dtype in (torch.float64, torch.float32):
            name = str(dtype).removeprefix("torch.")
            out[name] = max(out[name], *distances(run(exact, leaves, dtype), run(naive, leaves, torch.float64), math.inf))
        if cut is None and window in (None, 100):
            rounded = [x.bfloat16().double() for x in leaves]
            wanted = run(naive, rounded, torch.float64)[1:]
            ours, theirs = (distances(run(f, rounded, torch.bfloat16)[1:], wanted, 2) for f in (exact, naive))
            out["bfloat16"] = max(out["bfloat16"], *(a / b for a, b in zip(ours, theirs, strict=True)))
    return out


def row(figure: str, value: float, unit: str, against: float | None, ratio: float, bound: float, *, least_is: bool = False) -> dict[str, Any]:
    """least_is: the ratio must be at least the bound; else at most."""
    holds = ratio >= bound if least_is else ratio <= bound
    return {
        "figure": figure, "value": value, "unit": unit, "against": against, "ratio": ratio, "bound": f"ratio {'>=' if least_is else '<='} {bound:g}",
        "holds": bool(holds),
    }  # fmt: skip


def exact_rows() -> list[dict[str, Any]]:
    found = in_its_own_process("--exactness")
    return [
        row("worst error, float64, against float64 eager", found["float64"], "relative", None, found["float64"], 1e-12),
        row("worst error, float32, against float64 eager", found["float32"], "relative", None, found["float32"], 2e-6),
        row("worst error, bfloat16, over that of eager attention in bfloat16", found["bfloat16"], "of eager's", None, found["bfloat16"], 0.5),
    ]


def compared(figure: str, ours: dict[str, float], other: dict[str, float], memory: float | None, cpu: float, *, least_is: bool) -> list[dict[str, Any]]:
    """Rows of memory and CPU; ratios are other / ours where they must be at least the bounds, else ours / other."""
    out = []
    for what, key, unit, scale, bound in (("memory", "bytes", "MB", 1e6, memory), ("CPU", "seconds", "s", 1.0, cpu)):
        if bound is not None:
            ratio = other[key] / ours[key] if least_is else ours[key] / other[key]
            out.append(row(f"{figure}: {what}", round(ours[key] / scale, 3), unit, round(other[key] / scale, 3), round(ratio, 3), bound, least_is=least_is))
    return out


def rows() -> list[dict[str, Any]]:
    out = exact_rows()
    ours = {t: ("cpu_flash", t, *FULL) for t in (4096, 8192)}
    windowed = {t: ("cpu_flash", t, 128, None) for t in (4096, 8192, 16384)}
    packed = ("cpu_flash", 8192, None, 512)
    others = {(name, t): (name, t, *FULL) for name in ("eager", "sdpa") for t in (4096, 8192)}
    found = least([*ours.values(), *windowed.values(), packed, *others.values()])
    for tokens, memory, cpu in ((4096, 35, 5.5), (8192, 90, 6.5)):
        out += compared(f"{tokens:,} tokens, causal, eager against ours", found[ours[tokens]], found[others["eager", tokens]], memory, cpu, least_is=True)
    out += compared("8,192 tokens, window of 128 against our own causal", found[windowed[8192]], found[ours[8192]], None, 0.15, least_is=False)
    for tokens in windowed:
        held = 4 * SIZE * tokens * (2 * HEADS + 2 * KV_HEADS)  # out, dq, dk, dv
        mark = found[windowed[tokens]]["bytes"]
        figure = f"{tokens:,} tokens, window of 128: peak over out, dq, dk and dv"
        out.append(row(figure, round(mark / 1e6, 2), "MB", round(held / 1e6, 2), round(mark / held, 3), 1.15))
    growth = found[windowed[16384]]["seconds"] / found[windowed[4096]]["seconds"] / 4
    figure = "window of 128, CPU a token at 16,384 over that at 4,096"
    out.append(row(figure, round(found[windowed[16384]]["seconds"], 3), "s", round(found[windowed[4096]]["seconds"], 3), round(growth, 3), 1.15))
    for tokens in (4096, 8192):
        figure = f"{tokens:,} tokens, causal, with sinks against torch's own without"
        out += compared(figure, found[ours[tokens]], found[others["sdpa", tokens]], 0.75, 1.0, least_is=False)
    out += compared("16 documents of 512 against one of 8,192", found[packed], found[ours[8192]], None, 0.15, least_is=False)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", help="measure one case in this process: a JSON list of method, tokens, window, tokens of a document")
    parser.add_argument("--exactness", action="store_true", help="compare values and gradients in this process")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "attention.json")
    arguments = parser.parse_args()
    if arguments.case or arguments.exactness:
        print(json.dumps(measure(tuple(json.loads(arguments.case))) if arguments.case else exactness()))
        return 0
    import torch

    machine = {"platform": platform.platform(), "cores": os.cpu_count(), "torch": torch.__version__}
    result: dict[str, Any] = {"name": "attention", "machine": machine, "rows": rows()}
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        json.dump(result, sys.stdout, indent=1)
    else:
        for found in result["rows"]:
            against = "" if found["against"] is None else f" against {found['against']}"
            mark = "ok " if found["holds"] else "NO "
            print(f"{mark} {found['figure']}: {found['value']:.4g} {found['unit']}{against}; {found['bound']}: {found['ratio']:.4g}")
    return 0 if all(found["holds"] for found in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
