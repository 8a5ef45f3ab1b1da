"""The start-up self-check passes a right backend and fails one that lacks any single term."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from savepoint.attention import BackendUnavailable, SelfCheckFailed, self_check
from savepoint.attention.backends import cpu_flash
from savepoint.attention.backends.eager import attend
from savepoint.attention.problem import Problem

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, Problem], tuple[Tensor, Tensor]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["auto", "eager", "block", "cpu_flash"])
def test_the_backends_of_this_machine_pass(backend: str, dtype: torch.dtype):
    checked = self_check("cpu", dtype, backend=backend)
    assert checked.backend == ("cpu_flash" if backend == "auto" else backend)
    assert set(checked.errors) == {"out", "lse", "dq", "dk", "dv", "dsinks"}
    assert json.loads(json.dumps(checked.record()))["dtype"] == str(dtype).removeprefix("torch.")


def without_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    out, lse = attend(q, k, v, None, problem)
    return out + 0 * sinks.sum().nan_to_num(neginf=0), lse


def without_the_gradient_of_lse(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    out, lse = attend(q, k, v, None, problem)
    return out * torch.sigmoid(lse - sinks[None, :, None])[..., None], torch.logaddexp(lse, sinks[None, :, None])


def with_lse_without_the_sink(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    return attend(q, k, v, sinks, problem)[0], attend(q, k, v, None, problem)[1]


def with_lse_in_bits(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    out, lse = attend(q, k, v, sinks, problem)
    return out, lse / math.log(2)


def with_one_key_too_many(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    wider = None if problem.window is None else problem.window + 1
    return attend(q, k, v, sinks, Problem(problem.scale, wider, problem.queries, problem.keys, problem.boundaries))


def without_documents(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    return attend(q, k, v, sinks, Problem(problem.scale, problem.window, problem.queries, problem.keys))


def with_scaled_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    return attend(q, k, v, sinks * problem.scale, problem)


BROKEN = [without_sinks, without_the_gradient_of_lse, with_lse_without_the_sink, with_lse_in_bits, with_one_key_too_many, without_documents, with_scaled_sinks]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda f: f.__name__)
def test_a_backend_that_lacks_a_term_fails(broken: Attend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_flash, "attend", broken)
    for dtype in (torch.float64, torch.bfloat16):
        with pytest.raises(SelfCheckFailed, match="'cpu_flash' is wrong on cpu"):
            self_check("cpu", dtype)


def test_a_nan_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_flash, "attend", lambda q, k, v, sinks, problem: tuple(x * math.nan for x in attend(q, k, v, sinks, problem)))
    with pytest.raises(SelfCheckFailed, match="differs by nan"):
        self_check()


def test_a_backend_that_cannot_run_here_says_so():
    with pytest.raises(BackendUnavailable, match="aten_flash"):
        self_check("cpu", torch.bfloat16, backend="aten_flash")
