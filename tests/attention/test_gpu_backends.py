"""The backends for GPUs, as far as a CPU goes: what they hand their kernels, what they make of the answer, and what they refuse."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import fake_kernels
import pytest
import torch
from attention_support import Case, case, reference, worst
from test_sink_attention import GRID
from torch.nn.attention import flex_attention as torch_flex

from savepoint.attention import BackendUnavailable, sink_attention
from savepoint.attention.backends import aten_flash, fa4, flex
from savepoint.attention.call import Call, Device
from savepoint.attention.problem import Problem, state
from savepoint.attention.select import automatic, backends, choose

HOPPER, TURING = Device("cuda", (9, 0)), Device("cuda", (7, 5))
SMALL = [name for name in GRID if name not in ("scale of zero", "negative scale") and "wide" not in name]


def attend(module: ModuleType, c: Case, *, sinks_dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """out, lse and gradients by a backend's own function, past the check of the device."""
    q, k, v = (x.detach().requires_grad_() for x in (c.q, c.k, c.v))
    sinks = None if c.sinks is None else c.sinks.detach().to(sinks_dtype).requires_grad_()
    problem = state(q, k, v, sinks, scale=c.scale, window=c.window, cu_seqlens=None if c.cu is None else torch.tensor(c.cu))
    out, lse = module.attend(q, k, v, sinks, problem)
    assert not lse.requires_grad
    out.backward(c.dout)
    found = {"out": out.detach(), "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return found if sinks is None else found | {"dsinks": sinks.grad}


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten_flash, "_forward_kernel", fake_kernels.flash_forward)
    monkeypatch.setattr(aten_flash, "_backward_kernel", fake_kernels.flash_backward)


@pytest.fixture
def flash_attention_4(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    package = fake_kernels.flash_attention_4()
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    return package


@pytest.fixture
def flex_with_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's dense CPU path has one; only a check of the device stands before it."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: torch.Tensor, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
        return flex._flex(flex.flex_attention, q, k, v, first, problem.keys - problem.queries, problem)

    monkeypatch.setattr(flex, "_on_cpu", dense)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.usefixtures("flash")
def test_stock_cuda_flash_kernels_give_exact_sinks(name: str):
    c = case(**GRID[name])
    assert worst(attend(aten_flash, c), reference(c)) <= 1e-12


def test_the_cuda_kernels_are_called_by_their_schema(monkeypatch: pytest.MonkeyPatch):
    names: dict[str, list[str]] = {}
    for kind, fake in (("forward", fake_kernels.flash_forward), ("backward", fake_kernels.flash_backward)):
        schema = getattr(torch.ops.aten, f"_flash_attention_{kind}").default._schema
        positional = [a.name for a in schema.arguments if not a.kwarg_only]
        names[kind] = [a.name for a in schema.arguments]

        def recorded(*args: object, positional=positional, fake=fake, kind=kind, **options: object) -> object:
            assert len(args) == len(positional) and set(options) <= set(names[kind])
            return fake(**dict(zip(positional, args, strict=True)), **options)

        monkeypatch.setattr(aten_flash, f"_{kind}_kernel", recorded)
    c = case(tokens=40, cu=[0, 7, 40], window=5)
    assert worst(attend(aten_flash, c), reference(c)) <= 1e-12


def test_an_lse_in_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch):
    def padded(*args: object, **options: object) -> tuple[torch.Tensor, ...]:
        out, lse, *rest = fake_kernels.flash_forward(*args, **options)  # type: ignore[arg-type]
        return out, lse[:, None], *rest

    monkeypatch.setattr(aten_flash, "_forward_kernel", padded)
    with pytest.raises(RuntimeError, match="expects lse as"):
        attend(aten_flash, case())


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.usefixtures("flex_with_a_backward")
def test_flex_with_renormalisation_gives_exact_values_and_gradients(name: str):
    c = case(**GRID[name])
    assert worst(attend(flex, c), reference(c)) <= 1e-12


@pytest.mark.parametrize("name", SMALL)
def test_flex_runs_forward_on_the_cpu(name: str):
    c = case(**GRID[name])
    cu = None if c.cu is None else torch.tensor(c.cu)
    with torch.no_grad():
        out, lse = sink_attention(c.q.requires_grad_(), c.k, c.v, c.sinks, scale=c.scale, window=c.window, cu_seqlens=cu, backend="flex")
    expected = reference(c)
    assert worst({"out": out, "lse": lse}, {key: expected[key] for key in ("out", "lse")}) <= 1e-12


@pytest.mark.parametrize(
    "tokens,keys,window,cu", [(300, 300, None, None), (300, 300, 70, None), (500, 500, 200, [0, 130, 131, 400, 500]), (200, 700, 150, None)]
)
def test_the_block_mask_is_the_one_that_torch_would_make_of_the_whole(tokens: int, keys: int, window: int | None, cu: list[int] | None):
    q, k = torch.zeros(1, 1, tokens, 8), torch.zeros(1, 1, keys, 8)
    problem = state(q, k, k, None, window=window, cu_seqlens=None if cu is None else torch.tensor(cu))
    ours = flex.block_mask(flex.first_keys(problem, q.device), keys - tokens, keys)
    theirs = torch_flex.create_block_mask(ours.mask_mod, None, None, tokens, keys, device="cpu", BLOCK_SIZE=flex.BLOCK)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks) and torch.equal(ours.kv_num_blocks, theirs.kv_num_blocks)
    assert torch.equal(torch_flex.create_mask(ours.mask_mod, None, None, tokens, keys, device="cpu")[0, 0], fake_dense(problem))


def fake_dense(problem: Problem) -> torch.Tensor:
    p, j = torch.arange(problem.keys - problem.queries, problem.keys)[:, None], torch.arange(problem.keys)[None]
    document = torch.bucketize(torch.arange(problem.keys), torch.tensor(problem.boundaries or [0]), right=True)
    seen = (j <= p) & (document[j] == document[p])
    return seen if problem.window is None else seen & (j > p - problem.window)


@pytest.mark.parametrize("name", [name for name in SMALL if GRID[name].get("sinks") != "token"])
@pytest.mark.usefixtures("flash_attention_4")
def test_flash_attention_4_gets_its_sinks_gradient_from_the_shared_function(name: str):
    c = case(**GRID[name])
    if c.sinks is not None:
        c.sinks = c.sinks.bfloat16().double()
    found = attend(fa4, c, sinks_dtype=torch.bfloat16)
    expected = reference(c)
    if c.sinks is not None:
        assert torch.allclose(found.pop("dsinks").double(), expected.pop("dsinks"), rtol=2**-8)
    assert worst(found, expected) <= 1e-12


def call(**changes: object) -> Call:
    return replace(
        Call(
            HOPPER, torch.bfloat16, heads=(64, 8), head_sizes=(64, 64), sinks=torch.bfloat16, sinks_per_token=False, scale=0.125, window=False, packed=False,
            cached=False, gradient=True,
        ),
        **changes,
    )  # fmt: skip


@pytest.fixture
def flash_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)


@pytest.mark.usefixtures("flash_built")
def test_auto_is_a_pure_function_of_device_dtype_and_shapes():
    assert automatic(call()) == "aten_flash"
    assert automatic(call(dtype=torch.float16, gradient=False)) == "aten_flash"
    assert automatic(call(dtype=torch.float32)) == "block"
    assert automatic(call(head_sizes=(288, 64))) == "block"
    assert automatic(call(scale=-1.0)) == "block"
    assert automatic(call(device=TURING)) == "block"
    assert automatic(call(device=Device("mps"))) == "block"
    assert automatic(call(device=Device("cpu"), dtype=torch.float64)) == "cpu_flash"
    with pytest.raises(BackendUnavailable, match="no CUDA"):
        automatic(call(device=Device("cuda", absent="torch sees no CUDA device")))


REFUSED = [
    ("aten_flash", {"device": Device("cpu")}, "CUDA device, not cpu"),
    ("aten_flash", {"device": TURING}, r"8\.0 or newer \(bfloat16\), this GPU has 7\.5"),
    ("aten_flash", {"dtype": torch.float32}, "bfloat16 or float16, not torch.float32"),
    ("aten_flash", {"head_sizes": (64, 300)}, "256, not 300"),
    ("aten_flash", {"scale": 0.0}, "positive scale"),
    ("flex", {"device": Device("cpu")}, "no backward on the CPU"),
    ("flex", {"device": Device("mps")}, "not mps"),
    ("flex", {"device": TURING}, "bfloat16 needs"),
    ("flex", {"dtype": torch.float64}, "float64"),
    ("flex", {"head_sizes": (8, 64)}, "from 16, not 8"),
    ("flex", {"heads": (12, 4)}, "power of two"),
    ("fa4", {"device": Device("cpu")}, "CUDA device, not cpu"),
    ("fa4", {"device": Device("cuda", (8, 0))}, "9.0 or newer"),
    ("fa4", {"dtype": torch.float32}, "bfloat16 or float16"),
    ("fa4", {"sinks_per_token": True}, "per head"),
    ("fa4", {"sinks": torch.float32}, "sinks in bfloat16"),
    ("fa4", {"head_sizes": (64, 60)}, "multiples of 8"),
    ("fa4", {"scale": -1.0}, "positive scale"),
    ("cpu_flash", {}, "CPU only, not on cuda"),
]


@pytest.mark.parametrize("name,changes,reason", REFUSED, ids=[f"{name} {reason}" for name, _, reason in REFUSED])
@pytest.mark.usefixtures("flash_built", "flash_attention_4")
def test_what_a_backend_cannot_do_is_refused_with_the_reason(name: str, changes: dict, reason: str):
    with pytest.raises(BackendUnavailable, match=reason) as caught:
        choose(name, call(**changes))
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["aten_flash", "flex", "fa4"])
@pytest.mark.usefixtures("flash_built", "flash_attention_4")
def test_what_they_can_do_is_not_refused(name: str):
    assert choose(name, call(window=True, packed=True)).refusal(call()) is None


def test_an_old_flash_attention_4_is_refused(flash_attention_4: ModuleType):
    flash_attention_4.flash_attn_varlen_func = lambda q, k, v, softmax_scale, causal, window_size: None
    assert fa4.missing(HOPPER) == "this version of flash-attn-4 has no learnable_sink, return_lse"


def test_a_missing_package_is_named():
    assert "flash-attn-4 cannot be imported" in str(fa4.missing(HOPPER))


def test_a_build_of_torch_without_flash_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert aten_flash.missing(HOPPER) == "this build of torch has no flash attention"


def test_backends_says_one_line_for_each_of_six():
    here = backends()
    assert list(here) == ["eager", "block", "cpu_flash", "aten_flash", "flex", "fa4"]
    assert [name for name, why in here.items() if why is None] == ["eager", "block", "cpu_flash", "flex"]
    assert all("\n" not in why for why in here.values() if why)
