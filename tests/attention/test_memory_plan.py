"""The memory plan: it counts what there is, grows where it should, and is what was measured."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_models import PLAIN, SINKS, made
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GptOssConfig, MambaConfig

from savepoint.attention.memory import Learner, Shape, device_budget, largest_tokens, memory_plan

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "memory.py"
GPT_OSS_20B = Shape(20_914_757_184, 201_088, 2880, 24, 64, 8, 64, 64, 0, 32, 4, 2880)
LORA = Learner(dtype=torch.bfloat16, lora_rank=16, device="cuda")


@pytest.mark.parametrize("architecture", SINKS + PLAIN)
def test_parameters_are_counted_without_making_the_model(architecture: str):
    model = made(architecture)
    shape = Shape.of(model.config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    attention = model.model.layers[0].self_attn
    assert shape.attention_values[0] == attention.q_proj.out_features and shape.attention_values[3] == attention.o_proj.in_features


def test_adapters_are_those_of_the_four_projections():
    from peft import LoraConfig, inject_adapter_in_model

    model = made("llama")
    inject_adapter_in_model(LoraConfig(r=3, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]), model)
    assert Shape.of(model.config, 0).adapter(3) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_the_default_gpt_oss_configuration_is_a_20b_shape_in_all_but_its_layers():
    shape = Shape.of(GptOssConfig(num_hidden_layers=24, num_local_experts=32), GPT_OSS_20B.parameters)
    assert shape == GPT_OSS_20B


@pytest.mark.parametrize("how", [Learner(), LORA, dataclasses.replace(LORA, recompute="layers", expert_tile=1024)])
def test_constant_parts_do_not_grow_and_the_others_are_linear(how: Learner):
    one, two, three = (memory_plan(GPT_OSS_20B, 10_000 * n, how) for n in (1, 2, 3))
    assert one.weights == two.weights and one.gradients == two.gradients and one.optimiser == two.optimiser
    for part in ("attention", "checkpoints", "mlp", "logits"):
        a, b, c = (getattr(plan, part) for plan in (one, two, three))
        assert abs((c - b) - (b - a)) <= 1e-9 * c, part


def test_eager_attention_is_quadratic():
    eager = dataclasses.replace(LORA, attention="eager", recompute="layers")
    growth = [memory_plan(GPT_OSS_20B, n, eager).attention for n in (4096, 8192, 16384)]
    assert growth[2] / growth[1] > 3.8 and memory_plan(GPT_OSS_20B, 8192, eager).attention > 64 * 8192**2 * 2


def test_each_way_to_save_memory_saves_it_where_it_says():
    everything = memory_plan(GPT_OSS_20B, 8192, LORA)
    again = memory_plan(GPT_OSS_20B, 8192, dataclasses.replace(LORA, recompute="layers"))
    host = memory_plan(GPT_OSS_20B, 8192, dataclasses.replace(LORA, recompute="host"))
    tiled = memory_plan(GPT_OSS_20B, 8192, dataclasses.replace(LORA, recompute="host", expert_tile=1024))
    assert everything.checkpoints == 0 and again.checkpoints == 24 * 8192 * 2880 * 2 and host.checkpoints == 0
    assert everything.peak > again.peak > host.peak >= tiled.peak and tiled.mlp < host.mlp / 3
    on_cpu = dataclasses.replace(LORA, recompute="host", device="cpu")
    assert memory_plan(GPT_OSS_20B, 8192, on_cpu).checkpoints == again.checkpoints  # the host's memory is the device's


def test_mixtures_by_tiles_keep_their_inputs_alone():
    tiled = dataclasses.replace(LORA, recompute="layers", expert_tile=512)
    growth = memory_plan(GPT_OSS_20B, 20_000, tiled).mlp - memory_plan(GPT_OSS_20B, 10_000, tiled).mlp
    assert growth == 10_000 * (2 * 2880 + 12 * 4)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**12), st.sampled_from([Learner(), LORA, dataclasses.replace(LORA, recompute="host", expert_tile=256)]))
def test_the_longest_microbatch_fits_and_one_token_more_does_not(budget: int, how: Learner):
    tokens = largest_tokens(GPT_OSS_20B, budget, how)
    assert tokens == 0 or memory_plan(GPT_OSS_20B, tokens, how).peak <= budget
    assert memory_plan(GPT_OSS_20B, tokens + 1, how).peak > budget


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ValueError, match="tokens"):
        memory_plan(GPT_OSS_20B, 0)
    with pytest.raises(ValueError, match="does not say its num_attention_heads"):
        Shape.of(MambaConfig())
    with pytest.raises(ValueError, match="'cuda:7' is not here"):
        device_budget("cuda:7")
    assert device_budget() > 1 << 28


def case(name: str) -> float:
    """planned / measured of one case of the benchmark, in its own process."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, BENCHMARK, "--case", name], capture_output=True, text=True, env=environment, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return float(found["plan"]["peak"] / found["measured"])


QUICK = "llama, every layer kept, 2,048 tokens"
SLOW = (
    "gpt_oss, every layer kept, 4,096 tokens",
    "gpt_oss, layers run again, experts by tiles, 16,384 tokens",
    "llama, layers run again, adapters alone learn, 8,192 tokens",
)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="high-water marks are Linux's")
@pytest.mark.parametrize("name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_planned_is_measured_within_a_fifth(name: str):
    assert 0.8 <= case(name) <= 1.2
