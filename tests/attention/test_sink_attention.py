"""Values and gradients of every backend that runs here, against a dense f64 softmax."""

from __future__ import annotations

import pytest
import torch
from attention_support import Case, case, fp32_error, reference, run, worst
from hypothesis import given, settings
from hypothesis import strategies as st

BACKENDS = ["eager", "block", "cpu_flash"]
TILED = ["block", "cpu_flash"]

GRID = {
    "causal": {},
    "batch of 3": {"batch": 3},
    "no sinks": {"sinks": None},
    "sinks per token": {"sinks": "token", "batch": 2},
    "window of 1: self only": {"window": 1},
    "window of 17": {"window": 17},
    "window of T - 1": {"window": 69},
    "window of T": {"window": 70},
    "window above T": {"window": 71},
    "documents": {"cu": [0, 20, 21, 53, 70]},
    "documents and a window": {"cu": [0, 20, 21, 53, 70], "window": 9},
    "documents and sinks per token": {"cu": [0, 20, 21, 53, 70], "sinks": "token"},
    "one head": {"heads": 1, "kv_heads": 1},
    "no grouping": {"heads": 3, "kv_heads": 3},
    "one KV head": {"heads": 5, "kv_heads": 1},
    "three query heads a KV head": {"heads": 6, "kv_heads": 2},
    "values wider than keys": {"value_size": 13},
    "values narrower than keys": {"value_size": 3, "window": 11},
    "a cache": {"keys": 101},
    "a cache and a window": {"keys": 101, "window": 13},
    "one query on a cache": {"tokens": 1, "keys": 40},
    "one query on a cache and a window": {"tokens": 1, "keys": 40, "window": 7},
    "one token": {"tokens": 1},
    "own scale": {"scale": 0.7},
    "scale of zero": {"scale": 0.0},
    "negative scale": {"scale": -0.4},
    "several chunks": {"tokens": 1100, "heads": 4, "size": 4},
    "several chunks, window": {"tokens": 700, "size": 4, "window": 100},
    "several chunks, wide window": {"tokens": 2700, "heads": 2, "kv_heads": 1, "size": 4, "window": 2200},
    "several chunks, cache": {"tokens": 600, "keys": 1300, "heads": 2, "kv_heads": 1, "size": 4},
    "several chunks, wide window on a cache": {"tokens": 600, "keys": 3000, "heads": 2, "kv_heads": 1, "size": 4, "window": 2150},
    "several chunks, documents": {"tokens": 1500, "heads": 2, "kv_heads": 1, "size": 4, "cu": [0, 700, 703, 1500], "window": 300},
}  # fmt: skip


@pytest.fixture(scope="module")
def grid() -> dict[str, tuple[Case, dict[str, torch.Tensor]]]:
    return {}


def once(grid: dict, name: str, **changes: str) -> tuple[Case, dict[str, torch.Tensor]]:
    key = name + str(changes)
    if key not in grid:
        c = case(**{**GRID[name], **changes})
        grid[key] = c, reference(c)
    return grid[key]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", GRID)
def test_values_lse_and_gradients_are_those_of_a_dense_softmax(name: str, backend: str, grid: dict):
    c, expected = once(grid, name)
    assert worst(run(c, backend), expected) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in GRID if GRID[name].get("sinks") != "token"])
def test_fp32_is_within_2e_6(name: str, backend: str, grid: dict):
    c, expected = once(grid, name, sinks="mild")
    assert fp32_error(run(c, backend, torch.float32), expected, c) <= 2e-6


@given(
    data=st.data(), batch=st.integers(1, 2), kv_heads=st.integers(1, 3), groups=st.integers(1, 3), tokens=st.integers(1, 60), size=st.integers(1, 9),
    value_size=st.integers(1, 9), sinks=st.sampled_from(["head", "mild", "token", None]), backend=st.sampled_from(TILED),
    window=st.none() | st.integers(1, 70), kind=st.sampled_from(["plain", "packed", "cached"]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_shape_agrees_with_the_dense_softmax(data, batch, kv_heads, groups, tokens, size, value_size, sinks, backend, window, kind):
    cu = None
    if kind == "packed":
        batch, cu = 1, [0, *sorted(data.draw(st.sets(st.integers(1, tokens - 1)))), tokens] if tokens > 1 else [0, 1]
    keys = tokens + data.draw(st.integers(0, 40)) if kind == "cached" else tokens
    heads = kv_heads * groups
    c = case(
        batch=batch, heads=heads, kv_heads=kv_heads, tokens=tokens, keys=keys, size=size, value_size=value_size, sinks=sinks, window=window, cu=cu
    )  # fmt: skip
    found, expected = run(c, backend), reference(c)
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-11, atol=1e-11), name
