"""transformers models through `sink_attention`: attention and mask function under one name, packed rows, padding, a key-value cache.

transformers 5.24 (and gpt-oss in it) forgets document boundaries in the masks it makes, so documents are read here, from what reaches every attention
layer: `cu_seq_lens_q` where the caller gives it, else `position_ids`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from savepoint.attention.errors import BackendUnavailable
from savepoint.attention.select import backends
from savepoint.attention.sink import resolve_backend, sink_attention

_SINK_LAYERS = {
    **dict.fromkeys(("gpt_oss", "flint", "granite_swa", "granitemoe_swa"), ("full_attention", "sliding_attention")),
    "mimo_v2_flash": ("sliding_attention",),
}
"""Architectures of transformers 5.24 whose sinks come through here, and the kinds of layer that have them."""
_BUILT_IN = ("eager", "sdpa", "flex_attention")


def register(name: str = "savepoint_sink", *, backend: str = "auto") -> str:
    """Register attention and mask function with transformers as `name`, for `attn_implementation=name` or `model.set_attn_implementation(name)`; returns it.

    Takes `s_aux` as sinks (absent: none) and `sliding_window` as W. Packed rows: a document starts wherever position_ids[t] != position_ids[t-1] + 1,
    row by row, or where `cu_seq_lens_q` says (one row). A 2-D padding mask, left or right, hides masked keys; documents are then read among real
    tokens only, and outputs at padding are 0. A growing key-value cache works, left-padded too.

    ValueError for a name that transformers would take for a kernel of its own ("flash", "/") or that is one of its own, and for an unknown backend.
    The attention itself raises ValueError, naming it, for what it would have to ignore: dropout while training, a 4-D mask, softcap, a position
    bias, attention that is not causal, a cache of fixed size, packed rows together with a cache, sinks that a module has and does not hand over.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if not name or "flash" in name.lower() or "/" in name:
        raise ValueError(f'name: {name!r}: transformers takes a name with "flash" or "/" for a kernel of its own and would load that one')
    if name in _BUILT_IN or "sdpa" in name or "flex_attention" in name or "|" in name:
        raise ValueError(f"name: {name!r} belongs to transformers itself")
    check_backend(backend)
    AttentionInterface.register(name, SinkAttention(backend))
    AttentionMaskInterface.register(name, padding_mask)
    return name


def check_backend(backend: str, device: str | torch.device | None = None) -> None:
    """ValueError for an unknown backend; BackendUnavailable with the reason for one that `device` (None: any) cannot have."""
    known = backends(device or "cpu")
    if backend not in ("auto", *known):
        raise ValueError(f"backend: unknown {backend!r} (known: {', '.join(('auto', *known))})")
    if device is not None and known.get(backend):
        raise BackendUnavailable(backend, str(known[backend]))


def check_sinks(model: Any) -> None:
    """ValueError that names the first attention layer of `model` whose sinks its architecture has and which are not there, or no parameter."""
    for name, module in model.named_modules():
        kinds = _SINK_LAYERS.get(model.config.model_type, ())
        if not name.endswith("self_attn") or not kinds:
            continue
        kind = "sliding_attention" if getattr(module, "sliding_window", None) is not None else "full_attention"
        if kind in kinds and not isinstance(getattr(module, "sinks", None), torch.nn.Parameter):
            raise ValueError(f"sinks: {name} of this {model.config.model_type!r} model has none: they were lost on the way here")


def implementation(model: Any) -> SinkAttention | None:
    """What `register` made for the attention of `model`, or None where the model computes attention in another way."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found = ALL_ATTENTION_FUNCTIONS.get(model.config._attn_implementation)
    return found if isinstance(found, SinkAttention) else None


def backend_of(model: Any) -> str:
    """The backend that computes the attention of `model` while it learns, or transformers' own name for its attention where that is not ours."""
    ours = implementation(model)
    if ours is None:
        return str(model.config._attn_implementation)
    if ours.backend != "auto":
        return ours.backend
    sample = torch.zeros(1, 1, 1, 8, dtype=model.dtype, device=model.device, requires_grad=True)
    return resolve_backend(sample, sample, sample, sample[..., 0, 0, 0].detach())


@dataclass(frozen=True, slots=True)
class SinkAttention:
    """The function that transformers calls in every attention layer."""

    backend: str

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None, dropout: float = 0.0,
        sliding_window: int | None = None, s_aux: Tensor | None = None, position_ids: Tensor | None = None, **rest: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """query [B, Hq, Tq, D], key and value [B, Hkv, Tk, ·], attention_mask None or [B, Tk] -> ([B, Tq, Hq, Dv], None)."""
        _refuse(module, dropout, attention_mask, s_aux, rest)
        call = _Call(self.backend, s_aux, scaling, sliding_window)
        mask = None if attention_mask is None else attention_mask.bool()
        if query.shape[2] != key.shape[2]:
            return _cached(call, query, key, value, mask, position_ids).transpose(1, 2), None
        return _whole(call, query, key, value, mask, position_ids, rest.get("cu_seq_lens_q")).transpose(1, 2), None


@dataclass(frozen=True, slots=True)
class _Call:
    """`sink_attention` with what does not change within a layer."""

    backend: str
    sinks: Tensor | None
    scale: float | None
    window: int | None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return sink_attention(query, key, value, self.sinks, scale=self.scale, window=self.window, cu_seqlens=cu_seqlens, backend=self.backend)[0]


def _refuse(module: Any, dropout: float, mask: Tensor | None, sinks: Tensor | None, rest: dict[str, Any]) -> None:
    """ValueError for whatever would be left out of the result without a word."""
    name = type(module).__name__
    if dropout > 0 and getattr(module, "training", False):
        raise ValueError(f"dropout: {name} asks for {dropout}: attention here has none; set attention_dropout to 0")
    if mask is not None and mask.dim() != 2:
        raise ValueError(f"attention_mask: {name} got one of shape {tuple(mask.shape)}: only a 2-D padding mask is understood, everything else would leak")
    for key, what in (("softcap", "a cap on the scores"), ("position_bias", "a bias on the scores"), ("sinks", "sinks by another name than s_aux")):
        if rest.get(key) is not None:
            raise ValueError(f"{key}: {name} asks for {what}, which this attention does not compute")
    if not rest.get("is_causal", True) or not getattr(module, "is_causal", True):
        raise ValueError(f"is_causal: {name} looks at what comes later; this attention is causal")
    if sinks is None and getattr(module, "sinks", None) is not None:
        raise ValueError(f"s_aux: {name} has sinks and does not hand them to its attention: they would be dropped")
    if getattr(module, "compressor", None) is not None or getattr(module, "indexer", None) is not None:
        raise ValueError(f"{name} attends to compressed or selected keys, which this attention does not know")


def _whole(
    call: _Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, position_ids: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:  # fmt: skip
    """Rows without a past: [B, Hq, T, Dv]. Where rows hold documents or padding, all real tokens become one packed row."""
    batch, _, length, _ = query.shape
    if not length:
        raise ValueError("query: holds no tokens (T = 0)")
    if cu_seqlens is not None:
        if batch != 1 or mask is not None:
            raise ValueError("cu_seq_lens_q: belongs to one row without a padding mask")
        return call(query, key, value, cu_seqlens)
    real = query.new_ones(batch, length, dtype=torch.bool) if mask is None else mask
    starts = _starts(real, position_ids)
    if mask is None and int(starts.sum()) == batch:
        return call(query, key, value)
    at = real.flatten().nonzero()[:, 0]
    if not len(at):
        return query.new_zeros(*query.shape[:3], value.shape[3])
    bounds = torch.cat((starts.flatten()[at].nonzero()[:, 0], at.new_tensor([len(at)]))).to(torch.int32)
    if batch == 1 and mask is None:
        return call(query, key, value, bounds)
    query, key, value = (x.transpose(1, 2).flatten(0, 1)[at].transpose(0, 1)[None] for x in (query, key, value))
    packed = call(query, key, value, bounds)
    out = packed.new_zeros(batch * length, *packed.shape[1::2]).index_copy(0, at, packed[0].transpose(0, 1))
    return out.view(batch, length, *out.shape[1:]).transpose(1, 2)


def _starts(real: Tensor, position_ids: Tensor | None) -> Tensor:
    """Where a document begins: [B, T] bool, among real tokens. The first real token of a row begins one."""
    batch, length = real.shape
    columns = torch.arange(length, device=real.device)
    # The column of the last real token before each: -1 where there is none.
    before = torch.where(real, columns, -1).cummax(1).values.roll(1, 1)
    before[:, 0] = -1
    if position_ids is None:
        return real & (before < 0)
    positions = _positions(position_ids, batch, length)
    follows = positions == positions.gather(1, before.clamp(min=0)) + 1
    return real & ((before < 0) | ~follows)


def _positions(position_ids: Tensor, batch: int, length: int) -> Tensor:
    if position_ids.dim() != 2 or position_ids.shape[1] != length or position_ids.shape[0] not in (1, batch):
        raise ValueError(f"position_ids: must be [{batch}, {length}], not {list(position_ids.shape)}")
    return position_ids.expand(batch, length)


def _cached(call: _Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
    """The newest tokens over a key-value cache: [B, Hq, Tq, Dv]. Padding is taken out row by row."""
    batch, _, length, _ = query.shape
    real = query.new_ones(batch, length, dtype=torch.bool) if mask is None else mask[:, -length:]
    if length > 1 and int(_starts(real, position_ids).sum()) > int(real.any(1).sum()):
        raise ValueError("position_ids: several documents in a row cannot be told apart in a key-value cache; call the model with use_cache=False")
    if mask is None:
        return call(query, key, value)
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    for row in range(batch):
        if bool(real[row].any()):
            keys, queries = mask[row], real[row]
            out[row, :, queries] = call(query[row, None][:, :, queries], key[row, None][:, :, keys], value[row, None][:, :, keys])[0]
    return out


def padding_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, mask_function: Any = None, attention_mask: Tensor | None = None,
    config: Any = None, device: Any = None, **rest: Any,
) -> Tensor | None:  # fmt: skip
    """What transformers calls to make a mask: the [B, Tk] padding mask, or None where nothing is padded. ValueError for masks that are more than
    causal, windowed and padded, and for caches of fixed size, whose unwritten keys cannot be told from written ones."""
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise ValueError("cache: one of fixed size is not supported by this attention; use a DynamicCache")
    unknown = [kind for kind in getattr(config, "layer_types", None) or () if kind in ("chunked_attention", "indexed_attention")]
    if unknown:
        raise ValueError(f"layer_types: {unknown[0]} is not computed by this attention")
    if mask_function is not None and q_length > 1:
        zero = torch.zeros((), dtype=torch.long, device=device)
        queries = torch.arange(q_length - 1, device=device) + q_offset
        if bool(torch.as_tensor(mask_function(zero, zero, queries, queries + 1)).any()):
            raise ValueError("attention_mask: this model's lets tokens see what comes later; this attention is causal")
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, -kv_length:]
    return None if bool(attention_mask.all()) else attention_mask


def check_packing(model: Any) -> None:
    """ValueError with the reason when `model` (a causal language model) would let packed documents see one another, in whatever layer.

    By a derivative, so that nothing depends on weights or precision: of the last document's hidden states in two packed documents with respect to the
    first one's embeddings. It must be exactly 0 where they are apart, and is not where anything leaks.
    """
    if implementation(model) is None:
        raise ValueError(
            f"packing: the model computes attention by {model.config._attn_implementation!r}, which does not keep packed documents apart in every model; "
            "set it to the name that savepoint.attention.hf.register returned"
        )
    base, length = model.model, 3
    embeddings = base.embed_tokens.weight
    inputs = torch.randn(1, 2 * length, embeddings.shape[1], generator=torch.Generator().manual_seed(0)).to(embeddings).requires_grad_()
    with torch.enable_grad():
        hidden = base(inputs_embeds=inputs, use_cache=False, **packed_arguments([length, length], inputs.device)).last_hidden_state
        (slope,) = torch.autograd.grad(hidden[:, length:].float().square().sum(), inputs)
    if bool((slope[:, :length] != 0).any()):
        kinds = ", ".join(sorted(set(getattr(model.config, "layer_types", None) or ()))) or "not named"
        raise ValueError(f"packing: a {model.config.model_type!r} model mixes packed documents (layers: {kinds}); do not pack")


def packed_arguments(lengths: Sequence[int], device: torch.device | str = "cpu") -> dict[str, Any]:
    """What a transformers model is called with, beside `input_ids` [1, N], for documents of these lengths in one row."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths: every document needs at least one token, not {list(lengths)}")
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    return {"position_ids": positions, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": max(lengths), "max_length_k": max(lengths)}
