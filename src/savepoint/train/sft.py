"""Imitation: maximise the weighted log-likelihood of demonstrations, in chats rendered exactly as rollouts render them.

Left out of the textbook on purpose: a validation loss (the held-out tasks are evaluated by acting instead). Demonstrations stand end to end in a
micro-batch, and see nothing of one another.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import Field

from savepoint.config import Settings
from savepoint.rollout.render import Part
from savepoint.train.batches import microbatches, pack
from savepoint.train.muon import Muon, split_parameters
from savepoint.train.policy import Policy


class SftSettings(Settings):
    """How to imitate. Muon moves the hidden matrices, AdamW everything else; with `muon_lr = 0` AdamW moves all."""

    epochs: float = Field(1.0, gt=0, description="passes over the demonstrations")
    batch_size: int = Field(16, ge=1, description="sequences a step")
    lr: float = Field(4e-3, gt=0, description="peak learning rate of AdamW")
    muon_lr: float = Field(0.02, ge=0, description="peak learning rate of Muon")
    weight_decay: float = Field(0.05, ge=0, description="weight decay of AdamW")
    warmup_steps: int = Field(30, ge=0, description="steps of linear warm-up; then a cosine to a tenth")
    clip_norm: float = Field(1.0, gt=0, description="gradient norm is clipped to this")
    quoted_weight: float = Field(0.5, ge=0, le=1, description="loss weight of the SQL quoted in the prompt (own tokens: 1)")
    tokens_per_microbatch: int = Field(4096, ge=1, description="tokens of a micro-batch; a longer demonstration goes alone")
    context_weight: float = Field(0.1, ge=0, le=1, description="loss weight of other tokens of the context")


@dataclass(frozen=True, slots=True)
class Example:
    """One demonstration: its tokens, and what each is part of."""

    ids: list[int]
    parts: list[Part]


class Sft:
    """Optimisers, schedule and data order of one imitation stage. `step(k)` is a function of k and the state; nothing else moves."""

    def __init__(self, policy: Policy, examples: Sequence[Example], settings: SftSettings, rng: random.Random) -> None:
        self.policy, self.examples, self.settings = policy, examples, settings
        self.steps = max(1, int(len(examples) * settings.epochs / settings.batch_size))
        self.order = _order([len(e.ids) for e in examples], self.steps * settings.batch_size, settings.batch_size, rng)
        matrices, rest = split_parameters(policy.model) if settings.muon_lr else ([], list(policy.parameters()))
        adamw = torch.optim.AdamW(rest, settings.lr, betas=(0.9, 0.95), weight_decay=settings.weight_decay)
        self.optimisers: list[tuple[torch.optim.Optimizer, float]] = [(adamw, settings.lr)]
        if matrices:
            self.optimisers.append((Muon(matrices, settings.muon_lr), settings.muon_lr))

    def step(self, k: int) -> dict[str, float]:
        """One update (k from 0): weighted mean of -log p over the batch's tokens. Returns losses, gradient norm, tokens."""
        started = time.perf_counter()
        settings = self.settings
        rows = self.order[k * settings.batch_size : (k + 1) * settings.batch_size]
        weight_of = {Part.OWN: 1.0, Part.QUOTED: settings.quoted_weight, Part.CONTEXT: settings.context_weight}
        chosen = [self.examples[row] for row in rows]
        weights = [[weight_of[part] for part in example.parts] for example in chosen]
        scale = self._schedule(k)
        for optimiser, lr in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = lr * scale
        total, own, own_tokens = 0.0, 0.0, 0
        everything = sum(sum(row[1:]) for row in weights)
        for chunk in microbatches([len(example.ids) for example in chosen], settings.tokens_per_microbatch):
            batch = pack([chosen[i].ids for i in chunk], [[w > 0 for w in weights[i]] for i in chunk])
            logprobs = self.policy.packed_logprobs(batch)
            weight = batch.flat([weights[i] for i in chunk]).to(logprobs.device)
            loss = -(logprobs * weight).sum() / everything
            loss.backward()
            total, own, own_tokens = total + loss.item(), own - logprobs.detach()[weight == 1.0].sum().item(), own_tokens + int((weight == 1.0).sum())
        norm = clip_gradients(self.policy, settings.clip_norm)
        for optimiser, _ in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return {
            "loss": total, "own_loss": own / max(own_tokens, 1), "grad_norm": norm, "lr": self.optimisers[0][1] * scale,
            "tokens": sum(len(example.ids) for example in chosen), "episodes": len(rows), "update_s": time.perf_counter() - started,
        }  # fmt: skip

    def _schedule(self, k: int) -> float:
        warm = min(1.0, (k + 1) / self.settings.warmup_steps) if self.settings.warmup_steps else 1.0
        return warm * (0.1 + 0.45 * (1 + math.cos(math.pi * k / self.steps)))

    def state(self) -> dict[str, object]:
        return {str(i): optimiser.state_dict() for i, (optimiser, _) in enumerate(self.optimisers)}

    def load_state(self, state: dict[str, dict[str, object]]) -> None:
        for i, (optimiser, _) in enumerate(self.optimisers):
            optimiser.load_state_dict(state[str(i)])


def _order(lengths: Sequence[int], total: int, batch_size: int, rng: random.Random) -> list[int]:
    """`total` row indices in epochs of random order, sorted by length within spans of 16 batches so that a step's weights are alike; batches shuffled."""
    order: list[int] = []
    while len(order) < total:
        rows = list(range(len(lengths)))
        rng.shuffle(rows)
        for at in range(0, len(rows), 16 * batch_size):
            span = sorted(rows[at : at + 16 * batch_size], key=lambda row: lengths[row])
            batches = [span[i : i + batch_size] for i in range(0, len(span), batch_size)]
            rng.shuffle(batches)
            order += [row for batch in batches for row in batch]
    return order[:total]


def clip_gradients(policy: Policy, norm: float) -> float:
    """Clip the policy's gradients to a global norm; the norm before."""
    return float(torch.nn.utils.clip_grad_norm_(list(policy.parameters()), norm, foreach=True))

