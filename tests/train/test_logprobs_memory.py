"""Log-probs of a head in half precision: widened a slice at a time, and no other numbers for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from savepoint.train import logprobs
from savepoint.train.logprobs import chunked_logprobs


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((9, 16), (100, 16), (100,)))
    labels = torch.randint(0, 100, (9,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_(), labels


@pytest.mark.parametrize("slice_bytes", [1, 7 * 64, 64 << 20])
def test_slices_change_neither_values_nor_gradients(slice_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logprobs, "SLICE_BYTES", slice_bytes)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        hidden, weight, bias, labels = inputs(dtype)
        lp, entropy = chunked_logprobs(hidden, weight, labels, bias=bias, temperature=0.7, chunk=4, entropy=True)
        assert entropy is not None
        (lp.sum() + 0.3 * entropy.sum()).backward()
        results.append((lp, entropy, hidden.grad, weight.grad, bias.grad))
    for half, full in zip(*results, strict=True):
        assert half is not None and full is not None
        assert torch.allclose(half.float(), full, rtol=1e-2, atol=1e-2) and (half.dtype != torch.float32 or torch.allclose(half, full, atol=1e-5))


def test_the_whole_head_is_never_widened(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logprobs, "SLICE_BYTES", 10 * 64)
    hidden, weight, _, labels = inputs(torch.bfloat16)
    weight.requires_grad_(False)
    sizes: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor) and x.dtype == torch.float32)
            return out

    with Watch():
        chunked_logprobs(hidden, weight, labels, chunk=2)[0].sum().backward()
    assert max(sizes) <= 2 * 100 < weight.numel()
