"""The policy: a transformers causal language model, made from scratch or read from a folder, as the learner uses it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from savepoint.attention import BackendUnavailable, hf
from savepoint.config import Settings
from savepoint.errors import UserError
from savepoint.rollout.engines.base import checksum, copy_weights, weights_of
from savepoint.train.batches import Packed
from savepoint.train.logprobs import chunked_logprobs


class TinyConfig(Settings):
    """Shape of a policy made from scratch; half a million parameters as it stands."""

    architecture: Literal["gpt_oss", "llama"] = Field("gpt_oss", description="gpt_oss: attention sinks, sliding windows, mixture of experts; llama: dense")
    hidden_size: int = Field(96, ge=1, description="width of the residual stream")
    layers: int = Field(3, ge=1, description="decoder layers; of gpt_oss every other one, from the first, has the sliding window")
    heads: int = Field(4, ge=1, description="query heads")
    kv_heads: int = Field(4, ge=1, description="key and value heads; must divide the query heads")
    head_dim: int = Field(32, ge=2, multiple_of=2, description="width of a head")
    intermediate: int | None = Field(None, ge=1, description="width of an expert (gpt_oss, 64 if not given) or of the MLP (llama, 192)")
    experts: int = Field(4, ge=1, description="experts a layer (gpt_oss)")
    experts_per_token: int = Field(2, ge=1, description="experts that a token is sent to (gpt_oss)")
    sliding_window: int = Field(128, ge=1, description="tokens that a sliding-window layer sees (gpt_oss)")
    vocab_size: int = Field(640, ge=1, description="tokens that the tokenizer learns at most")
    embedding_std: float = Field(0.12, gt=0, description="spread of the initial embeddings; at the usual .02 synonyms stay alike and copying is not learned")
    max_positions: int = Field(1024, ge=1, description="longest sequence")

    @model_validator(mode="after")
    def _divides(self) -> TinyConfig:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}")
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token = {self.experts_per_token} is more than experts = {self.experts}")
        return self


class Policy:
    """A causal language model with its pad and end tokens. `model` is the transformers module; the engine reads its weights in place.

    Its attention is `savepoint.attention`'s, which keeps packed sequences apart; a model that will not have it keeps its own, and cannot be trained.
    """

    def __init__(self, model: Any, *, pad_id: int | None, end_id: int | None) -> None:
        self.model, self.pad_id, self.end_id = model, pad_id, end_id
        self._packs: str | None = None
        self.attend()

    def attend(self, backend: str = "auto") -> None:
        """Compute attention with a backend of `savepoint.attention`. UserError that says which are known, why this one cannot be had here, or why the
        model cannot have it."""
        try:
            hf.check_backend(backend, self.device)
            # Another name, since transformers takes one with "flash" in it for a kernel of its own.
            self.model.set_attn_implementation(hf.register(f"savepoint_{backend.replace('flash', 'fused')}", backend=backend))
            hf.check_sinks(self.model)
        except (ValueError, BackendUnavailable) as error:
            raise UserError(f"attention: {error}") from None

    @classmethod
    def tiny(cls, config: TinyConfig, *, vocab_size: int, pad_id: int, end_id: int, seed: int) -> Policy:
        """A policy from scratch; `vocab_size` is the tokenizer's own. Tied embeddings. The same seed gives the same weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _tiny_model(config, vocab_size, pad_id, end_id)
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(config.embedding_std / model.config.initializer_range)
        return cls(model, pad_id=pad_id, end_id=end_id)

    @classmethod
    def load(cls, folder: Path | str) -> Policy:
        """The model in a local transformers folder, in float32. Never downloads. UserError where it is missing, broken or no language model."""
        model = _load_model(Path(folder))
        end = model.config.eos_token_id
        return cls(model, pad_id=model.config.pad_token_id, end_id=end[0] if isinstance(end, list) else end)

    def save(self, folder: Path | str) -> None:
        """Write configuration and weights as a transformers folder."""
        disable_progress_bar()  # it would write over our own display
        self.model.save_pretrained(str(folder))

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    @property
    def device(self) -> torch.device:
        return self.model.device

    def hidden(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Hidden states [B, T, H] after the last norm. ids, attention_mask: [B, T]; padding stands on the right only (else ValueError).

        On the right padding needs no mask: a causal model never looks there, and what is computed there is not used.
        """
        if ids.shape != attention_mask.shape or ids.dim() != 2:
            raise ValueError(f"ids {tuple(ids.shape)} and attention_mask {tuple(attention_mask.shape)} must be one [B, T]")
        if bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any()):
            raise ValueError("attention_mask: padding must stand on the right")
        return self.model.model(input_ids=ids.to(self.device), use_cache=False).last_hidden_state

    def logprobs(self, ids: Tensor, attention_mask: Tensor, positions: Tensor, *, temperature: float = 1.0) -> Tensor:
        """log p(ids[b, t] | ids[b, :t]) of softmax(logits / temperature) where `positions` [B, T] is True, row by row: [trained], float32.

        Logits are made in chunks at those positions only, so no [B, T, V] exists. ValueError where position 0 or padding is asked for.
        """
        if positions.shape != ids.shape or positions.dtype != torch.bool:
            raise ValueError(f"positions must be bool of shape {tuple(ids.shape)}, not {positions.dtype} of shape {tuple(positions.shape)}")
        if bool(positions[:, 0].any()) or bool((positions & (attention_mask == 0)).any()):
            raise ValueError("positions: the first token of a sequence and padding have no log-prob")
        rows, columns = positions.nonzero(as_tuple=True)
        states = self.hidden(ids, attention_mask)[rows.to(self.device), columns.to(self.device) - 1]
        head = self.model.lm_head
        return chunked_logprobs(states, head.weight, ids[rows, columns].to(self.device), bias=head.bias, temperature=temperature)[0]

    def packed_logprobs(self, batch: Packed, *, temperature: float = 1.0) -> Tensor:
        """As `logprobs`, of sequences that stand end to end: [trained tokens], float32. What a sequence gets depends on its own tokens alone.

        UserError with the reason where the model would let sequences see one another; found out, once, before anything is computed.
        """
        implementation = self.model.config._attn_implementation
        if self._packs != implementation:
            try:
                hf.check_packing(self.model)
            except ValueError as error:
                raise UserError(str(error)) from None
            self._packs = implementation
        ids = batch.ids.to(self.device)
        hidden = self.model.model(input_ids=ids[None], use_cache=False, **hf.packed_arguments(batch.lengths, self.device)).last_hidden_state[0]
        at = batch.trained.nonzero()[:, 0].to(self.device)
        head = self.model.lm_head
        return chunked_logprobs(hidden[at - 1], head.weight, ids[at], bias=head.bias, temperature=temperature)[0]

    def weights(self) -> dict[str, Tensor]:
        """The parameters by name, each once; the model's own memory, not a copy."""
        return weights_of(self.model)

    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `weights` gave. ValueError that names the first parameters that do not fit."""
        copy_weights(self.model, state)

    def checksum(self) -> str:
        """A digest of the weights; an engine that holds the same has the same."""
        return checksum(self.weights())


def tiny_config(config: TinyConfig, *, vocab_size: int, pad_id: int, end_id: int) -> Any:
    """The transformers configuration of a policy made from scratch."""
    from transformers import GptOssConfig, LlamaConfig

    shared: dict[str, Any] = {
        "vocab_size": vocab_size, "hidden_size": config.hidden_size, "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": True, "pad_token_id": pad_id, "bos_token_id": None, "eos_token_id": end_id,
    }  # fmt: skip
    if config.architecture == "llama":
        return LlamaConfig(**shared, intermediate_size=config.intermediate or 192)
    return GptOssConfig(
        **shared, intermediate_size=config.intermediate or 64, num_local_experts=config.experts, num_experts_per_tok=config.experts_per_token,
        sliding_window=config.sliding_window, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip


def _tiny_model(config: TinyConfig, vocab_size: int, pad_id: int, end_id: int) -> Any:
    from transformers import GptOssForCausalLM, LlamaForCausalLM

    model = LlamaForCausalLM if config.architecture == "llama" else GptOssForCausalLM
    return model(tiny_config(config, vocab_size=vocab_size, pad_id=pad_id, end_id=end_id))


def _load_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    disable_progress_bar()
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder}: no config.json: not the folder of a transformers model") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'}: cannot be read: {error}") from None
    if not isinstance(described, dict) or "model_type" not in described:
        raise UserError(f"{folder / 'config.json'}: has no model_type: not the configuration of a transformers model")
    try:
        return AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True, dtype=torch.float32)
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"{folder}: a model of type {described['model_type']!r} cannot be loaded from it: {reason}") from None
