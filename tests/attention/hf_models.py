"""Tiny random models of every architecture that goes through the registered attention, with sinks large enough to matter."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t
from torch import Tensor

VOCABULARY, WINDOW = 50, 5
_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MIXED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}

SINKS = ("gpt_oss", "flint", "granite_swa", "granitemoe_swa", "mimo_v2_flash")
PLAIN = ("llama", "qwen2", "qwen3")
EXACT = ("gpt_oss", "mimo_v2_flash")
"""Models whose eager attention keeps float64 throughout; the others take their softmax in float32 whatever they are given."""


def _config(architecture: str) -> Any:
    match architecture:
        case "gpt_oss":
            return t.GptOssConfig(**_SHARED, **_MIXED, **_MOE, num_local_experts=4, head_dim=8, rope_parameters=ROPE)
        case "flint":
            moe = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
            return t.FlintConfig(**_SHARED, **_MIXED, **_MOE, **moe, head_dim=8)
        case "granite_swa":
            return t.GraniteSWAConfig(**_SHARED, **_MIXED, attention_multiplier=0.3)
        case "granitemoe_swa":
            return t.GraniteMoeSWAConfig(**_SHARED, **_MIXED, **_MOE, num_local_experts=4, attention_multiplier=0.3)
        case "mimo_v2_flash":
            rope = {kind: ROPE | {"partial_rotary_factor": 0.5} for kind in ("full_attention", "sliding_attention")}
            return t.MiMoV2FlashConfig(
                **_SHARED, **_MIXED, **_MOE, moe_intermediate_size=16, n_routed_experts=4, head_dim=16, v_head_dim=8, rope_parameters=rope
            )
        case "qwen2":
            return t.Qwen2Config(**_SHARED)
        case "qwen3":
            return t.Qwen3Config(**_SHARED, head_dim=8)
        case "llama":
            return t.LlamaConfig(**_SHARED)
    raise KeyError(architecture)


def made(architecture: str, implementation: str = "eager", dtype: torch.dtype = torch.float64) -> Any:
    """The same weights whatever the implementation: spread enough that every layer matters, sinks from -4 to 4."""
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(_config(architecture), attn_implementation=implementation, experts_implementation="eager").to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith("sinks"):
                parameter.copy_(torch.linspace(-4, 4, parameter.numel()))
            elif parameter.dim() > 1:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def slopes(model: Any, logits: Tensor) -> dict[str, Tensor]:
    """Gradients of a fixed weighted sum of the logits."""
    model.zero_grad()
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view(logits.shape)
    (logits * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def difference(a: Tensor, b: Tensor) -> float:
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-3))
