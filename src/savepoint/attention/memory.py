"""The memory plan: what one update of the learner needs at its peak, part by part, and the longest micro-batch that fits.

T tokens stand end to end in one micro-batch, e bytes a value. Constant in T: weights, gradients, optimiser. Then, with L layers, H hidden, and per token
and layer A = query values, K and V = key and value values, I = width of an MLP or expert, k experts a token:

    kept by a layer     two norms 4H + attention H + 2A + K + V (+ lse) + MLP: H + 4I dense, H + k (2H + 7I) for the stock mixture, H by tiles
    checkpoints         LH: each layer's input, when layers run again (nothing on the device when they wait on the host)
    logits              blocks of a fixed size, whatever T is

A layer's working set on top is one gradient of its inputs and of its MLP. Scores of all pairs, T^2 a head, exist in eager attention alone.
The counts are those of transformers' modules and of our own functions, and are held against measured high-water marks by `benchmarks/memory.py`.
"""

from __future__ import annotations

import bisect
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

Recompute = Literal["off", "layers", "host"]

LOGITS_BLOCK = {"cpu": 16 << 20, "cuda": 128 << 20}
"""Bytes of one block of logits, as `train.logprobs` makes them; three such blocks live at once in its backward pass."""
_HEAD_SLICE = 64 << 20
"""Bytes of a head in half precision that are widened at a time."""
_LONGEST = 1 << 24


@dataclass(frozen=True, slots=True)
class Shape:
    """What the plan needs to know of a model. `parameters` counts tied ones once; `width` is of the dense MLP, 0 where every layer is a mixture."""

    parameters: int
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    width: int
    experts: int = 0
    chosen: int = 0
    expert_width: int = 0

    @classmethod
    def of(cls, config: Any, parameters: int | None = None) -> Shape:
        """Of a transformers configuration; without `parameters` the model is laid out (without memory) to count them. ValueError that names what the
        configuration does not say."""
        text = config.get_text_config()
        missing = [name for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads") if getattr(text, name, None) is None]
        if missing:
            raise ValueError(f"config: a {config.model_type!r} model does not say its {missing[0]}: its memory cannot be planned")
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        experts = next((n for name in ("num_local_experts", "num_experts", "n_routed_experts") if (n := getattr(text, name, None))), 0)
        expert_width = (getattr(text, "moe_intermediate_size", None) or text.intermediate_size) if experts else 0
        shared = next((n for name in ("shared_expert_intermediate_size", "shared_intermediate_size") if (n := getattr(text, name, None))), 0)
        return cls(
            parameters if parameters is not None else _count(config), text.vocab_size, text.hidden_size, text.num_hidden_layers, text.num_attention_heads,
            getattr(text, "num_key_value_heads", None) or text.num_attention_heads, head_dim, getattr(text, "v_head_dim", None) or head_dim,
            shared if experts else text.intermediate_size, experts, text.num_experts_per_tok if experts else 0, expert_width,
        )  # fmt: skip

    @property
    def attention_values(self) -> tuple[int, int, int, int]:
        """Values a token in queries, keys, values and outputs of one layer."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.value_dim, self.heads * self.value_dim

    def adapter(self, rank: int) -> int:
        """Parameters of low-rank adapters of the four attention projections."""
        query, key, value, out = self.attention_values
        return self.layers * rank * (4 * self.hidden + query + key + value + out)


def _count(config: Any) -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


@dataclass(frozen=True, slots=True)
class Learner:
    """How the learner computes. lora_rank None: all weights learn. optimiser_values: kept per learned parameter (AdamW: 2)."""

    dtype: torch.dtype = torch.float32
    lora_rank: int | None = None
    optimiser_values: int = 2
    attention: Literal["flash", "eager"] = "flash"
    recompute: Recompute = "off"
    expert_tile: int | None = None
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on the device at the peak of one update, by part. `peak` is less than their sum where layers run again: their working set and
    the logits' are then never there together."""

    tokens: int
    weights: int
    gradients: int
    optimiser: int
    checkpoints: int
    attention: int
    mlp: int
    logits: int
    peak: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def memory_plan(shape: Shape, tokens: int, learner: Learner | None = None) -> MemoryPlan:
    """The plan for one micro-batch of `tokens` tokens in one row. ValueError for tokens < 1."""
    if tokens < 1:
        raise ValueError(f"tokens: a micro-batch has at least one, not {tokens}")
    how = learner or Learner()
    size = how.dtype.itemsize
    learned = shape.parameters if how.lora_rank is None else shape.adapter(how.lora_rank)
    weights = (shape.parameters + (learned if how.lora_rank is not None else 0)) * size
    gradients, optimiser = learned * size, learned * size * how.optimiser_values
    kept_attention, kept_mlp = tokens * _attention(shape, size) + _scores(shape, tokens, how, kept=True), tokens * _mlp(shape, size, how.expert_tile)
    work_attention = _scores(shape, tokens, how, kept=False) + tokens * size * shape.hidden
    work_mlp = _mlp_work(shape, tokens, how)
    logits = _logits(shape, tokens, how)
    again = how.recompute != "off"
    on_host = how.recompute == "host" and how.device != "cpu"
    checkpoints = 0 if not again or on_host else shape.layers * tokens * shape.hidden * size
    times = 1 if again else shape.layers
    attention, mlp = times * kept_attention + work_attention, times * kept_mlp + work_mlp
    constant = weights + gradients + optimiser + checkpoints
    # The head comes first in the backward pass: when layers kept everything, that is all still there; when they run again, nothing is.
    peak = constant + (max(attention + mlp, logits) if again else times * (kept_attention + kept_mlp) + max(work_attention + work_mlp, logits))
    return MemoryPlan(tokens, weights, gradients, optimiser, checkpoints, attention, mlp, logits, peak)


def largest_tokens(shape: Shape, budget: int, learner: Learner | None = None) -> int:
    """The longest micro-batch whose plan stays within `budget` bytes; 0 where not even one token does."""
    return bisect.bisect_right(range(1, _LONGEST), budget, key=lambda tokens: memory_plan(shape, tokens, learner).peak)


def device_budget(device: str = "cpu") -> int:
    """Bytes that a device has in all. ValueError for one that is not here."""
    if device == "cpu":
        import os

        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not device.startswith("cuda") or not torch.cuda.is_available():
        raise ValueError(f"device: {device!r} is not here")
    return int(torch.cuda.get_device_properties(device).total_memory)


def _attention(shape: Shape, size: int) -> int:
    """Bytes a token that attention and both norms of one layer keep. Norms keep their input and what they scale in float32."""
    query, key, value, out = shape.attention_values
    return 2 * shape.hidden * (4 + 4) + size * (shape.hidden + query + key + value + 2 * out) + 4 * shape.heads


def _scores(shape: Shape, tokens: int, how: Learner, *, kept: bool) -> int:
    """Scores of all pairs of tokens: what eager attention keeps of a layer, and what it holds besides while it works. Measured: 1, and 3 in bf16."""
    if how.attention != "eager":
        return 0
    return shape.heads * tokens**2 * how.dtype.itemsize * (1 if kept else 2 if how.dtype.itemsize >= 4 else 3)


def _mlp(shape: Shape, size: int, tile: int | None) -> int:
    """Bytes a token that the MLP of one layer keeps."""
    values = shape.hidden + 4 * shape.width
    if shape.experts and tile is None:
        values += shape.chosen * (2 * shape.hidden + 7 * shape.expert_width)
    return values * size + 12 * shape.chosen  # which experts (int64), and their shares


def _mlp_work(shape: Shape, tokens: int, how: Learner) -> int:
    """Bytes that the backward pass of one MLP holds besides."""
    size = how.dtype.itemsize
    work = tokens * size * 3 * shape.width // 2
    if not shape.experts:
        return work
    if how.expert_tile is None:
        return work + tokens * size * shape.chosen * shape.hidden
    # At worst one expert gets a whole tile; the gradients of the matrices of a layer are summed in float32.
    tile = min(how.expert_tile, tokens)
    matrices = 3 * shape.experts * shape.hidden * shape.expert_width * 4 if how.lora_rank is None else 0
    return work + tile * size * (3 * shape.hidden + 9 * shape.expert_width) + matrices


def _logits(shape: Shape, tokens: int, how: Learner) -> int:
    """Bytes of the log-probs' backward pass: blocks, the head's gradient, and hidden states around the last norm."""
    size = how.dtype.itemsize
    head = 4 * shape.vocabulary * shape.hidden if how.lora_rank is None else 0
    widened = min(_HEAD_SLICE, 4 * shape.vocabulary * shape.hidden) if size < 4 else 0
    return 3 * LOGITS_BLOCK.get(how.device.partition(":")[0], LOGITS_BLOCK["cuda"]) + head + widened + tokens * shape.hidden * (8 + 3 * size)
