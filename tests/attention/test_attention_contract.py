"""What `sink_attention` promises beside its numbers: dtypes, frozen inputs, strides, determinism, memory, and what it refuses."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from attention_support import case, l2, reference, run
from torch import Tensor

from savepoint.attention import BackendUnavailable, resolve_backend, sink_attention

BACKENDS = ["eager", "block", "cpu_flash"]
TILED = ["block", "cpu_flash"]


def inputs(tokens: int = 20, *, heads: int = 4, kv_heads: int = 2, size: int = 8, batch: int = 1, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v, sinks."""
    rng = torch.Generator().manual_seed(1)
    shapes = [(batch, heads, tokens, size), (batch, kv_heads, tokens, size), (batch, kv_heads, tokens, size), (heads,)]
    return [torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes]


def transformers_eager(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """gpt-oss's own arithmetic in transformers 5.24: scores and softmax in the model's dtype."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
    q, k, v, sinks = leaves
    groups = q.shape[1] // k.shape[1]
    scores = torch.matmul(q, k.repeat_interleave(groups, 1).transpose(2, 3)) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, torch.finfo(q.dtype).min)
    logits = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)], -1)
    logits = logits - logits.max(-1, keepdim=True).values
    out = torch.matmul(torch.softmax(logits, -1, dtype=logits.dtype)[..., :-1], v.repeat_interleave(groups, 1))
    out.backward(dout)
    return {"out": out.detach()} | {f"d{name}": x.grad for name, x in zip(("q", "k", "v", "sinks"), leaves, strict=True)}  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_is_twice_as_exact_as_transformers(backend: str, dtype: torch.dtype):
    c = case(tokens=300, heads=8, size=64, sinks="mild")
    for name in ("q", "k", "v", "sinks", "dout"):
        setattr(c, name, getattr(c, name).to(dtype).double())
    expected, found = reference(c), run(c, backend, dtype)
    theirs = transformers_eager(*(x.to(dtype) for x in (c.q, c.k, c.v, c.sinks, c.dout)))
    for name in theirs:
        assert found[name].dtype == dtype
        assert l2(found[name], expected[name]) <= 0.5 * l2(theirs[name], expected[name]), name
    assert found["lse"].dtype == torch.float32 and (found["lse"] - expected["lse"]).abs().max() <= 5e-4
    ratio = (found["out"].double() * expected["out"]).sum(-1) / expected["out"].square().sum(-1) - 1
    assert ratio.square().mean().sqrt() <= 1.25e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_has_the_dtype_of_q_and_lse_that_of_the_statistics(backend: str):
    for dtype, statistics in ((torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float32)):
        out, lse = sink_attention(*inputs(dtype=dtype), backend=backend)
        assert out.dtype == dtype and lse.dtype == statistics and not lse.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_may_have_a_dtype_of_their_own(backend: str):
    q, k, v, sinks = (x.requires_grad_() for x in inputs(dtype=torch.bfloat16))
    sinks = sinks.detach().float().requires_grad_()
    sink_attention(q, k, v, sinks, backend=backend)[0].sum().backward()
    assert sinks.grad is not None and sinks.grad.dtype == torch.float32


@pytest.mark.parametrize("frozen", [0, 1, 2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_frozen_input_gets_none_and_changes_no_other_gradient(backend: str, frozen: int):
    everything = [x.requires_grad_() for x in inputs()]
    sink_attention(*everything, backend=backend)[0].square().sum().backward()
    some = [x.requires_grad_(i != frozen) for i, x in enumerate(inputs())]
    sink_attention(*some, backend=backend)[0].square().sum().backward()
    for i, (a, b) in enumerate(zip(everything, some, strict=True)):
        assert b.grad is None if i == frozen else torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_of_minus_infinity_is_no_sink_and_has_a_zero_gradient(backend: str):
    q, k, v, sinks = (x.requires_grad_() for x in inputs())
    off = torch.full_like(sinks, -math.inf).requires_grad_()
    out, lse = sink_attention(q, k, v, off, backend=backend)
    plain, plain_lse = sink_attention(q, k, v, None, backend=backend)
    assert torch.allclose(out, plain, atol=1e-7) and torch.allclose(lse, plain_lse, atol=1e-6)
    out.sum().backward()
    assert torch.equal(off.grad, torch.zeros(4)) and not any(x.grad.isnan().any() for x in (q, k, v))


@pytest.mark.parametrize("backend", TILED)
def test_a_sink_of_minus_infinity_survives_key_blocks_that_are_wholly_masked(backend: str):
    q, k, v, _ = (x.requires_grad_() for x in inputs(2600, heads=1, kv_heads=1, size=4))
    out, lse = sink_attention(q, k, v, torch.tensor([-math.inf]), window=2100, backend=backend)
    out.sum().backward()
    assert not any(x.isnan().any() for x in (out, lse, q.grad, k.grad, v.grad))


@pytest.mark.parametrize("backend", TILED)
def test_differentiating_twice_is_an_error(backend: str):
    q, k, v, sinks = (x.requires_grad_() for x in inputs())
    (dq,) = torch.autograd.grad(sink_attention(q, k, v, sinks, backend=backend)[0].sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dq.square().sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_strides_are_read_and_nothing_is_written(backend: str):
    q, k, v, sinks = inputs(30, batch=2)
    expected = sink_attention(q, k, v, sinks, backend=backend)[0]
    strided = [
        q.transpose(1, 2).contiguous().transpose(1, 2),
        k.mT.contiguous().mT,
        torch.cat([v, v], -1)[..., : v.shape[-1]],
        sinks.repeat_interleave(2)[::2],
    ]
    before = [x.clone() for x in strided]
    leaves = [x.requires_grad_() for x in strided]
    out, _ = sink_attention(*leaves, backend=backend)
    assert torch.allclose(out, expected, atol=1e-6)
    out.backward(torch.ones(1).expand_as(out))
    assert all(torch.equal(a, b) for a, b in zip(before, strided, strict=True))
    shared = k[:, :1].expand(-1, 2, -1, -1)
    assert torch.allclose(
        sink_attention(q, shared, shared, sinks, backend=backend)[0], sink_attention(q, shared.clone(), shared.clone(), sinks, backend=backend)[0]
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_call_gives_the_same_bits(backend: str):
    def once() -> list[Tensor]:
        leaves = [x.requires_grad_() for x in inputs(700)]
        out, lse = sink_attention(*leaves, window=300, backend=backend)
        out.square().sum().backward()
        return [out, lse, *(x.grad for x in leaves)]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_passes_between_documents_not_even_nan(backend: str):
    q, k, v, sinks = inputs(30)
    poisoned = [x.clone() for x in (q, k, v)]
    for x in poisoned:
        x[:, :, :10] = math.nan
        x[:, :, 25:] = math.nan
        x.requires_grad_()
    out, lse = sink_attention(*poisoned, sinks, cu_seqlens=torch.tensor([0, 10, 25, 30]), backend=backend)
    alone, alone_lse = sink_attention(q[:, :, 10:25], k[:, :, 10:25], v[:, :, 10:25], sinks, backend=backend)
    assert torch.allclose(out[:, :, 10:25], alone, atol=1e-7) and torch.allclose(lse[:, :, 10:25], alone_lse, atol=1e-6)
    out[:, :, 10:25].sum().backward()
    assert not any(x.grad[:, :, 10:25].isnan().any() for x in poisoned)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_around_the_forward_changes_nothing(backend: str):
    leaves = [x.requires_grad_() for x in inputs()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = sink_attention(*leaves, backend=backend)
    out.sum().backward()
    plain = [x.requires_grad_() for x in inputs()]
    expected, _ = sink_attention(*plain, backend=backend)
    expected.sum().backward()
    assert torch.equal(out, expected) and all(torch.equal(a.grad, b.grad) for a, b in zip(leaves, plain, strict=True))


MEMORY = """
import sys, torch
from savepoint.attention import sink_attention
torch.set_num_threads(1)
def field(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
def go(tokens, window, backend):
    q, k, v = (torch.randn(1, heads, tokens, 64, requires_grad=True) for heads in (8, 2, 2))
    sinks, dout = torch.randn(8, requires_grad=True), torch.randn(1, 8, tokens, 64)
    before = field("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    sink_attention(q, k, v, sinks, window=window, backend=backend)[0].backward(dout)
    return field("VmHWM") - before
go(256, 128, sys.argv[1])
print(go(4096, int(sys.argv[2]) or None, sys.argv[1]))
"""
DENSE = 4 * 8 * 4096 * 4097 * 3 // 1024
"""KiB of scores, probabilities and their gradient with the sink column: less than a dense softmax needs at 4,096 tokens."""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize("window,share", [(0, 10), (128, 15)], ids=["causal", "window of 128"])
@pytest.mark.parametrize("backend", TILED)
def test_memory_is_that_of_the_outputs_and_a_few_tiles(backend: str, window: int, share: int):
    result = subprocess.run([sys.executable, "-c", MEMORY, backend, str(window)], capture_output=True, text=True, check=True)
    assert int(result.stdout) < DENSE / share


def changed(**changes: Tensor | None) -> dict[str, Tensor | None]:
    q, k, v, sinks = inputs()
    return {"q": q, "k": k, "v": v, "sinks": sinks} | changes


ones = torch.ones
REFUSED = [
    (ValueError, "q", {"q": ones(4, 20, 8)}, {}),
    (ValueError, "k", {"k": ones(1, 2, 20, 8, 1)}, {}),
    (ValueError, "q", {"q": ones(1, 4, 0, 8)}, {}),
    (ValueError, "k", {"k": ones(1, 2, 0, 8), "v": ones(1, 2, 0, 8)}, {}),
    (ValueError, "k", {"k": ones(2, 2, 20, 8)}, {}),
    (ValueError, "v", {"v": ones(2, 2, 20, 8)}, {}),
    (ValueError, "v", {"v": ones(1, 4, 20, 8)}, {}),
    (ValueError, "v", {"v": ones(1, 2, 19, 8)}, {}),
    (ValueError, "k", {"k": ones(1, 2, 20, 9)}, {}),
    (ValueError, "multiple", {"k": ones(1, 3, 20, 8), "v": ones(1, 3, 20, 8)}, {}),
    (ValueError, "fewer", {"k": ones(1, 2, 19, 8), "v": ones(1, 2, 19, 8)}, {}),
    (ValueError, "sinks", {"sinks": ones(2)}, {}),
    (ValueError, "sinks", {"sinks": ones(1, 4)}, {}),
    (ValueError, "sinks", {"sinks": ones(1, 4, 19)}, {}),
    (ValueError, "window", {}, {"window": 0}),
    (ValueError, "window", {}, {"window": -3}),
    (TypeError, "window", {}, {"window": True}),
    (TypeError, "window", {}, {"window": 3.0}),
    (TypeError, "window", {}, {"window": "3"}),
    (ValueError, "scale", {}, {"scale": math.nan}),
    (TypeError, "scale", {}, {"scale": "0.1"}),
    (ValueError, "cu_seqlens", {}, {"cu_seqlens": torch.tensor([[0, 20]])}),
    (ValueError, "cu_seqlens must start", {}, {"cu_seqlens": torch.tensor([1, 20])}),
    (ValueError, "cu_seqlens must start", {}, {"cu_seqlens": torch.tensor([], dtype=torch.int32)}),
    (ValueError, "cu_seqlens must end", {}, {"cu_seqlens": torch.tensor([0, 19])}),
    (ValueError, "cu_seqlens must end", {}, {"cu_seqlens": torch.tensor([0])}),
    (ValueError, "cu_seqlens must end", {}, {"cu_seqlens": torch.tensor([0, 21])}),
    (ValueError, "cu_seqlens must be strictly increasing", {}, {"cu_seqlens": torch.tensor([0, 7, 7, 20])}),
    (ValueError, "cu_seqlens must be strictly increasing", {}, {"cu_seqlens": torch.tensor([0, 9, 7, 20])}),
    (ValueError, "cu_seqlens needs batch", {"q": ones(2, 4, 20, 8), "k": ones(2, 2, 20, 8), "v": ones(2, 2, 20, 8)}, {"cu_seqlens": torch.tensor([0, 20])}),
    (ValueError, "cu_seqlens needs as many keys", {"q": ones(1, 4, 10, 8)}, {"cu_seqlens": torch.tensor([0, 10])}),
    (TypeError, "cu_seqlens", {}, {"cu_seqlens": torch.tensor([0.0, 20.0])}),
    (TypeError, "cu_seqlens", {}, {"cu_seqlens": torch.tensor([False, True])}),
    (TypeError, "cu_seqlens", {}, {"cu_seqlens": [0, 20]}),
    (TypeError, "k is torch.float64", {"k": ones(1, 2, 20, 8, dtype=torch.float64)}, {}),
    (TypeError, "v is torch.bfloat16", {"v": ones(1, 2, 20, 8, dtype=torch.bfloat16)}, {}),
    (TypeError, "q", {"q": ones(1, 4, 20, 8, dtype=torch.int64)}, {}),
    (TypeError, "sinks", {"sinks": ones(4, dtype=torch.int64)}, {}),
    (TypeError, "v", {"v": None}, {}),
    (ValueError, "k is on meta", {"k": ones(1, 2, 20, 8, device="meta")}, {}),
    (ValueError, "sinks is on meta", {"sinks": ones(4, device="meta")}, {}),
    (ValueError, "cu_seqlens is on meta", {}, {"cu_seqlens": torch.tensor([0, 20], device="meta")}),
    (ValueError, "eager, block, cpu_flash, aten_flash, flex, fa4", {}, {"backend": "flash_attention_2"}),
]


@pytest.mark.parametrize("kind,words,tensors,options", REFUSED, ids=[f"{kind.__name__} {words} {i}" for i, (kind, words, _, _) in enumerate(REFUSED)])
def test_bad_input_is_refused_in_one_line_that_names_it(kind: type[Exception], words: str, tensors: dict, options: dict):
    with pytest.raises(kind, match=words) as caught:
        sink_attention(**changed(**tensors), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", ["aten_flash", "fa4"])
def test_a_named_backend_never_turns_into_another_one(backend: str):
    with pytest.raises(BackendUnavailable, match=f"'{backend}'.*CUDA"):
        sink_attention(**changed(), backend=backend)


def test_an_inference_only_backend_is_refused_when_a_gradient_is_wanted():
    q, k, v, sinks = inputs()
    with pytest.raises(BackendUnavailable, match="'flex'.*CPU"):
        sink_attention(q, k, v, sinks.requires_grad_(), backend="flex")
    with torch.no_grad():
        sink_attention(q, k, v, sinks, backend="flex")


def test_errors_come_before_any_work():
    q = torch.ones(1, 4, 1 << 16, 8).expand(64, -1, -1, -1)
    with pytest.raises(ValueError, match="window"):
        sink_attention(q, q, q, None, window=0, backend="eager")


def test_auto_is_the_flash_kernel_on_the_cpu_and_the_same_bits():
    q, k, v, sinks = inputs()
    assert resolve_backend(q, k, v, sinks) == "cpu_flash" == resolve_backend(q, k, v, None, window=3, cu_seqlens=torch.tensor([0, 20]))
    assert torch.equal(sink_attention(q, k, v, sinks)[0], sink_attention(q, k, v, sinks, backend="cpu_flash")[0])
    with pytest.raises(ValueError, match="window"):
        resolve_backend(q, k, v, sinks, window=0)


def test_other_integers_are_taken_as_such():
    import numpy as np

    q, k, v, sinks = inputs()
    wanted = sink_attention(q, k, v, sinks, window=3, cu_seqlens=torch.tensor([0, 9, 20], dtype=torch.int32))[0]
    assert torch.equal(wanted, sink_attention(q, k, v, sinks, window=np.int64(3), cu_seqlens=torch.tensor([0, 9, 20]))[0])


@pytest.mark.parametrize("backend", ["eager", "block"])
def test_a_device_without_kernels_still_has_eager_and_block(backend: str):
    q, k, v, sinks = (x.to("meta") for x in inputs())
    assert sink_attention(q, k, v, sinks, backend=backend)[0].shape == q.shape and resolve_backend(q, k, v, sinks) == "block"
