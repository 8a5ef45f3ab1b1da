"""Inference over a KV cache, with the weights of a transformers model: the arithmetic of its learner, in fewer and larger operations.

The model is read, never called: `Decoder` holds its matrices (only the small query, key and value projections are copied, to be one product).
Left out on purpose: dropout, gradients, and attention masks other than causal and sliding-window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from savepoint.attention import sink_attention
from savepoint.attention.sinks import with_sinks
from savepoint.errors import UserError

SUPPORTED = ("gpt_oss", "llama", "qwen2", "qwen3")
STATIC_ROPE = ("default", "linear", "yarn", "llama3")
DENSE_EXPERTS = 8
"""Up to this many experts, all of them on every token is faster than gathering tokens by expert."""

Mlp = Callable[[Tensor], Tensor]


class Cache:
    """Keys and values of `rows` sequences, per layer `[rows, kv_heads, columns, head_dim]`. Column t holds the token at position t.

    Contiguous for any number of rows and columns, as batched products want it: views at the front of buffers that are kept between
    calls (the pages of fresh memory cost more than the arithmetic). Growing moves one tensor at a time through a spare buffer.
    """

    def __init__(self, layers: int, heads: int, head_dim: int, like: Tensor) -> None:
        self.heads, self.head_dim, self.like = heads, head_dim, like
        self.rows, self.columns = 0, 0
        self._buffers = [like.new_empty(0) for _ in range(2 * layers)]
        self._spare = like.new_empty(0)

    def clear(self) -> None:
        """Forget every row; the memory stays for the next use."""
        self.rows, self.columns = 0, 0

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        """Keys and values of layer i."""
        return self._view(self._buffers[2 * i]), self._view(self._buffers[2 * i + 1])

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for `rows` x `columns`, keeping what both shapes share."""
        if columns != self.columns:
            kept, width = min(rows, self.rows), min(columns, self.columns)
            size = rows * self.heads * columns * self.head_dim
            for i, old in enumerate(self._buffers):
                target = self._spare if self._spare.numel() >= size else self.like.new_empty(size + size // 2)
                fresh = target[:size].view(rows, self.heads, columns, self.head_dim)
                fresh[:kept, :, :width] = self._view(old)[:kept, :, :width]
                # A masked score times an unwritten value must be 0, and 0 * NaN is not.
                fresh[:kept, :, width:] = 0
                fresh[kept:] = 0
                self._buffers[i], self._spare = target, old
        elif rows > self.rows:
            self._more_rows(rows)
        self.rows, self.columns = rows, columns

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy rows `source` onto rows `target` (int64 each)."""
        for buffer in self._buffers:
            view = self._view(buffer)
            view[target] = view[source]

    def put(self, rows: Tensor, other: Cache, other_rows: Tensor) -> None:
        """Copy rows of another cache, of no more columns, into rows of this one."""
        for mine, theirs in zip(self._buffers, other._buffers, strict=True):
            self._view(mine)[:, :, : other.columns].index_copy_(0, rows, other._view(theirs).index_select(0, other_rows))

    def _more_rows(self, rows: int) -> None:
        size = rows * self.heads * self.columns * self.head_dim
        used = self.rows * self.heads * self.columns * self.head_dim
        for i, old in enumerate(self._buffers):
            if old.numel() < size:
                self._buffers[i] = self.like.new_empty(size + size // 2)
                self._buffers[i][:used] = old[:used]
            self._buffers[i][used:size] = 0

    def _view(self, buffer: Tensor) -> Tensor:
        return buffer[: self.rows * self.heads * self.columns * self.head_dim].view(self.rows, self.heads, self.columns, self.head_dim)


@dataclass(slots=True)
class Layer:
    """One decoder layer. `window`: keys that a query sees, itself included (None: all before it); `sinks` [heads] or None."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    window: int | None
    sinks: Tensor | None
    mlp_norm: Tensor
    mlp: Mlp


class Decoder:
    """A causal language model of a supported architecture, as matrices. UserError for any other."""

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        check_supported(config)
        base: Any = model.model
        self.head: Tensor = model.lm_head.weight  # type: ignore[union-attr, assignment]
        self.embedding: Tensor = base.embed_tokens.weight
        self.norm: Tensor = base.norm.weight
        self.eps: float = config.rms_norm_eps
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.layers = [_layer(layer) for layer in base.layers]
        self.head_dim: int = base.layers[0].self_attn.head_dim
        self.frequencies: Tensor = base.rotary_emb.inv_freq
        self.rope_scale: float = base.rotary_emb.attention_scaling

    def cache(self) -> Cache:
        return Cache(len(self.layers), self.kv_heads, self.head_dim, self.embedding)

    def extend(self, cache: Cache, rows: Tensor | None, ids: Tensor, start: Tensor) -> Tensor:
        """Read `ids` [R, S] into cache rows (None: all of them) from positions `start` [R] on; the hidden states [R, S, H] of every token.

        The columns that are written must be reserved. Padding on the right is harmless: what follows overwrites it before it is seen.
        """
        positions = start[:, None] + torch.arange(ids.shape[1], device=ids.device)
        angles = positions[..., None].float() * self.frequencies.float()
        turn = tuple((f(angles) * self.rope_scale).to(self.embedding.dtype)[:, :, None] for f in (torch.cos, torch.sin))
        columns = torch.arange(cache.columns, device=ids.device)
        together = int(start[0]) if ids.shape[1] > 1 and bool((start == start[0]).all()) else None
        masks = {window: None if together is not None else self._mask(positions, columns, window) for window in {layer.window for layer in self.layers}}
        x = F.embedding(ids, self.embedding)
        for i, layer in enumerate(self.layers):
            x = x + self._attention(layer, self._normed(x, layer.attention_norm), cache.layer(i), rows, positions, turn, masks[layer.window], together)
            x = x + layer.mlp(self._normed(x, layer.mlp_norm))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V], in float32."""
        return F.linear(self._normed(hidden, self.norm), self.head).float()

    def _attention(
        self, layer: Layer, x: Tensor, cached: tuple[Tensor, Tensor], rows: Tensor | None, positions: Tensor, turn: Any, mask: Tensor | None,
        together: int | None,
    ) -> Tensor:  # fmt: skip
        """Attention of a layer over its cache. together: the position at which every row begins, where they all begin at one; else `mask` says what is seen."""
        count, length, _ = x.shape
        groups = self.heads // self.kv_heads
        heads = F.linear(x, layer.qkv, layer.qkv_bias).view(count, length, self.heads + 2 * self.kv_heads, self.head_dim)
        turned, values = heads.split((self.heads + self.kv_heads, self.kv_heads), 2)
        if layer.query_norm is not None:
            query, key = turned.split((self.heads, self.kv_heads), 2)
            turned = torch.cat((self._normed(query, layer.query_norm), self._normed(key, layer.key_norm)), 2)
        query, key = _rotate(turned, *turn).split((self.heads, self.kv_heads), 2)
        at = torch.arange(count, device=x.device) if rows is None else rows
        for store, fresh in zip(cached, (key, values), strict=True):
            store[at[:, None], :, positions] = fresh
        keys, values = cached if rows is None else (cached[0][rows], cached[1][rows])
        query = query.transpose(1, 2)
        if together is not None:
            seen = together + length
            out, _ = sink_attention(query, keys[:, :, :seen], values[:, :, :seen], layer.sinks, window=layer.window)
        else:
            assert mask is not None
            out = _ragged(query.reshape(count * self.kv_heads, groups * length, self.head_dim), keys, values, mask, layer.sinks)
        return F.linear(out.transpose(1, 2).reshape(count, length, -1), layer.output, layer.output_bias)

    def _mask(self, positions: Tensor, columns: Tensor, window: int | None) -> Tensor:
        """0 where a query may look, -inf elsewhere: [R, 1, 1, S, columns]."""
        hidden = columns > positions[..., None]
        if window is not None:
            hidden |= columns <= positions[..., None] - window
        mask = torch.zeros(hidden.shape, dtype=self.embedding.dtype, device=hidden.device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None, None]

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)


def check_supported(config: Any) -> None:
    """UserError unless the embedded engine can read a model of this configuration."""
    if config.model_type not in SUPPORTED:
        raise UserError(f"the embedded engine cannot run a model of type {config.model_type!r}: it knows {', '.join(SUPPORTED)}")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in STATIC_ROPE:
        raise UserError(f"the embedded engine cannot run rope_type {rope!r}, whose frequencies depend on the length: it knows {', '.join(STATIC_ROPE)}")


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _ragged(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention of rows that stand at positions of their own: [R, heads, S, D]. query: [R * kv_heads, groups * S, D]; keys, values: [R, kv_heads, columns, D];
    mask: [R, 1, 1, S, columns]. Sinks are `savepoint.attention`'s: the softmax without them, and what they do to its output and log-sum-exp."""
    rows, kv_heads, columns, head_dim = keys.shape
    length = mask.shape[3]
    scores = torch.bmm(query, keys.reshape(-1, columns, head_dim).mT).view(rows, kv_heads, -1, length, columns)
    scores = torch.add(mask, scores, alpha=head_dim**-0.5)
    weights = scores.softmax(-1)
    out = torch.bmm(weights.view(rows * kv_heads, -1, columns), values.reshape(-1, columns, head_dim)).view(rows, -1, length, head_dim)
    if sinks is None:
        return out
    # log-sum-exp = the largest score - log of its share, which is at least 1 / columns: no pass over the scores but a maximum
    lse = (scores.amax(-1) - weights.amax(-1).log()).view(rows, -1, length)
    return with_sinks(out, lse, sinks.to(lse.dtype)[None, :, None].expand_as(lse))[0]


def _layer(layer: Any) -> Layer:
    attention = layer.self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = [p.bias for p in projections]
    return Layer(
        layer.input_layernorm.weight,
        torch.cat([p.weight for p in projections]),
        None if biases[0] is None else torch.cat(biases),
        attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        attention.o_proj.weight,
        attention.o_proj.bias,
        getattr(attention, "sliding_window", None),
        getattr(attention, "sinks", None),
        layer.post_attention_layernorm.weight,
        _mlp(layer.mlp),
    )


def _mlp(module: Any) -> Mlp:
    if not hasattr(module, "experts"):
        return module
    return _dense_experts(module) if module.experts.num_experts <= DENSE_EXPERTS else lambda x: module(x)[0]


def _dense_experts(module: Any) -> Mlp:
    """gpt-oss's mixture with every expert on every token, in two products: an expert that was not chosen has weight 0."""
    experts, router = module.experts, module.router
    count, hidden, width = experts.num_experts, experts.hidden_size, experts.intermediate_size
    gate_up = torch.cat([experts.gate_up_proj[..., i::2].permute(0, 2, 1).reshape(count * width, hidden) for i in (0, 1)])
    gate_up_bias = torch.cat([experts.gate_up_proj_bias[:, i::2].flatten() for i in (0, 1)])
    down = experts.down_proj.view(count * width, hidden)

    def forward(x: Tensor) -> Tensor:
        flat = x.reshape(-1, hidden)
        logits = F.linear(flat, router.weight, router.bias)
        best, chosen = logits.topk(router.top_k, -1)
        share = torch.zeros_like(logits).scatter_(1, chosen, best.softmax(-1))
        gate, up = F.linear(flat, gate_up, gate_up_bias).chunk(2, -1)
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
        active = torch.sigmoid(gate * experts.alpha).mul_(gate).mul_(up + 1).view(-1, count, width).mul_(share[..., None])
        return torch.addmm(share @ experts.down_proj_bias, active.view(-1, count * width), down).view(x.shape)

    return forward
