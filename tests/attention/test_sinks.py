"""The sink's own algebra, alone: what it does to (out, lse), and the gradients through it."""

from __future__ import annotations

import math

import pytest
import torch

from savepoint.attention import sinks as algebra
from savepoint.attention.sinks import Renormalise, TapSinkGradient, row_dot, scale_rows_, sink_gradient, with_sinks


@pytest.fixture
def rows() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
    return {"scores": draw(2, 3, 5, 7), "v": draw(2, 3, 7, 4), "sinks": draw(3) * 4, "dout": draw(2, 3, 5, 4)}


def softmax_with_sink(rows: dict[str, torch.Tensor], sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    column = (sinks[None, :, None, None] if sinks.ndim == 1 else sinks[..., None]).expand(2, 3, 5, 1)
    logits = torch.cat([rows["scores"], column], -1)
    return logits.softmax(-1)[..., :-1] @ rows["v"], logits.logsumexp(-1)


def test_out_and_lse_hold_the_sink(rows):
    out, lse = with_sinks(rows["scores"].softmax(-1) @ rows["v"], rows["scores"].logsumexp(-1), rows["sinks"][None, :, None].expand(2, 3, 5))
    expected, expected_lse = softmax_with_sink(rows, rows["sinks"])
    assert torch.allclose(out, expected, rtol=1e-13, atol=1e-13) and torch.allclose(lse, expected_lse, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("per_token", [False, True])
def test_a_kernel_that_carries_the_gradient_of_lse_gets_the_right_one(rows, per_token):
    sinks = torch.randn(2, 3, 5, dtype=torch.float64) * 3 if per_token else rows["sinks"]
    leaves = [x.clone().requires_grad_() for x in (rows["scores"], rows["v"], sinks)]
    out, lse = Renormalise.apply(leaves[0].softmax(-1) @ leaves[1], leaves[0].logsumexp(-1), leaves[2])
    assert not lse.requires_grad
    out.backward(rows["dout"])
    theirs = [x.clone().requires_grad_() for x in (rows["scores"], rows["v"], sinks)]
    expected, expected_lse = softmax_with_sink({"scores": theirs[0], "v": theirs[1]}, theirs[2])
    expected.backward(rows["dout"])
    assert torch.allclose(out, expected, atol=1e-13) and torch.allclose(lse, expected_lse, atol=1e-13)
    for ours, reference in zip(leaves, theirs, strict=True):
        assert torch.allclose(ours.grad, reference.grad, rtol=1e-12, atol=1e-13)


def test_a_kernel_with_sinks_of_its_own_gets_their_gradient(rows):
    sinks = rows["sinks"].clone().requires_grad_()
    out, lse = softmax_with_sink(rows, rows["sinks"])
    TapSinkGradient.apply(out.requires_grad_(), lse, sinks).backward(rows["dout"])
    theirs = rows["sinks"].clone().requires_grad_()
    softmax_with_sink(rows, theirs)[0].backward(rows["dout"])
    assert torch.equal(out.grad, rows["dout"]) and torch.allclose(sinks.grad, theirs.grad, rtol=1e-12)


@pytest.mark.parametrize("function", [Renormalise, TapSinkGradient])
def test_neither_can_be_differentiated_twice(rows, function):
    sinks = rows["sinks"].clone().requires_grad_()
    out = rows["dout"].clone().requires_grad_()
    result = function.apply(out, rows["scores"].logsumexp(-1), sinks)
    (first,) = torch.autograd.grad((result if isinstance(result, torch.Tensor) else result[0]).sum(), sinks, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        torch.autograd.grad(first.sum(), out)


def test_a_sink_of_minus_infinity_gets_a_gradient_of_exactly_zero():
    gradient = sink_gradient(torch.tensor([-math.inf, 0.0]), torch.tensor([[[-90.0, 3.0], [0.0, 1.0]]]), torch.full((1, 2, 2), 1e30))
    assert gradient[0] == 0 and gradient[1] < 0


def test_the_gradient_of_a_sink_comes_in_its_dtype():
    lse = torch.zeros(1, 2, 3)
    assert sink_gradient(torch.zeros(2, dtype=torch.bfloat16), lse, lse).dtype == torch.bfloat16
    assert sink_gradient(torch.zeros(1, 2, 3, dtype=torch.float64), lse, lse).dtype == torch.float64


def test_rows_are_multiplied_a_few_tokens_at_a_time_and_once_rounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(algebra, "ROWS_BYTES", 4 * 2 * 3 * 8 * 2)  # two tokens of [2, 3, T, 8]
    left, right = torch.randn(2, 3, 7, 8, dtype=torch.bfloat16), torch.randn(2, 3, 7, 8, dtype=torch.bfloat16)
    dot = row_dot(left, right)
    assert dot.dtype == torch.float32 and torch.allclose(dot, (left.float() * right.float()).sum(-1))
    factor = torch.rand(2, 3, 7)
    assert torch.equal(scale_rows_(left.clone(), factor), (left.float() * factor[..., None]).bfloat16())
