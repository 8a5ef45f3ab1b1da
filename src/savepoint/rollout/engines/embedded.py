"""The embedded engine: batched lock-step decoding in this process, over the learner's own weights and a KV cache that lives across turns.

Each distinct prompt of a wave is read once and its keys and values are copied to its group. A tool's answer is read in one forward pass over the rows
that got one. A finished trajectory gives its row up at once, and waiting groups move in. Left out of the textbook on purpose: paged
memory and preemption, since a row's whole budget of tokens is known beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from savepoint.rollout.engines.base import Respond, Sampled, checksum, copy_weights, weights_of
from savepoint.rollout.engines.forward import Cache, Decoder, check_supported

COLUMNS = 32
"""The cache grows by so many positions at a time: a copy now and then, against attention over columns that nobody uses yet."""
PIECE = 512
"""Longer prompts and answers are read in pieces of so many tokens, which bounds the scores in memory."""


class EmbeddedEngine:
    """Samples with a transformers model of a supported architecture (`forward.SUPPORTED`), on the device and in the type of its weights.

    slots: trajectories in flight; more than that are served as rows come free. max_tokens: the longest trajectory, prompt included.
    `seconds` ("generate", "respond"; wall clock) and `tokens` ("sampled", "fed", "prefilled") count up over the engine's life.
    """

    def __init__(self, model: nn.Module, *, slots: int = 256, max_tokens: int = 512, pad_id: int) -> None:
        if slots < 1 or max_tokens < 1:
            raise ValueError(f"slots and max_tokens must be positive, not {slots} and {max_tokens}")
        check_supported(model.config)
        self.model, self.slots, self.max_tokens, self.pad_id = model, slots, max_tokens, pad_id
        self.version, self.checksum = 0, checksum(weights_of(model))
        self.seconds = {"generate": 0.0, "respond": 0.0}
        self.tokens = {"sampled": 0, "fed": 0, "prefilled": 0}
        decoder = Decoder(model)
        self._cache, self._prompt_cache = decoder.cache(), decoder.cache()

    def load_weights(self, model_or_state: nn.Module | Mapping[str, Tensor], version: int) -> None:
        """Sample with these weights from now on: a model's, read where they are, or a state's, copied into the engine's model.

        ValueError when a state does not fit the model. `checksum` is that of the weights as they are now.
        """
        if isinstance(model_or_state, nn.Module):
            check_supported(model_or_state.config)
            self.model = model_or_state
        else:
            copy_weights(self.model, model_or_state)
        self.version, self.checksum = version, checksum(weights_of(self.model))

    def generate(
        self, prompts: list[list[int]], group_size: int, respond: Respond, *, stop_ids: Collection[int], temperature: float = 1.0,
        max_message_tokens: int, max_tokens: int, seed: int,
    ) -> list[Sampled]:  # fmt: skip
        """`group_size` trajectories for each prompt, in order: slot = prompt * group_size + member.

        `respond(slot, message, finish)` is called once for each sampled message, stop token included; finish is "stop", or "length" when a
        budget cut it. It returns the ids that follow, or None when the trajectory is over; what it raises ends the call. An answer that leaves
        no room for another token within `max_tokens` (prompt included) is dropped, and that trajectory's `finish` is "length".

        Log-probs are those of softmax(logits / temperature), from which tokens are drawn; at temperature 0 the likeliest token is taken and its
        log-prob is that at temperature 1. Every trajectory has random numbers of its own: the same seed gives the same tokens
        however rows are shared out, up to rounding. ValueError for a prompt that is empty or leaves no room to sample.
        """
        self._check(prompts, group_size, temperature, max_message_tokens, max_tokens)
        started, responding = time.perf_counter(), self.seconds["respond"]
        wave = Wave(self, prompts, group_size, stop_ids, temperature, max_message_tokens, max_tokens, seed)
        while wave.admit():
            ended = wave.sample()
            before = time.perf_counter()
            answers = [respond(*message) for message in ended]
            self.seconds["respond"] += time.perf_counter() - before
            wave.advance([slot for slot, _, _ in ended], answers)
        self.seconds["generate"] += time.perf_counter() - started - (self.seconds["respond"] - responding)
        return wave.result()

    def _check(self, prompts: Sequence[Sequence[int]], group_size: int, temperature: float, max_message_tokens: int, max_tokens: int) -> None:
        if group_size < 1 or max_message_tokens < 1:
            raise ValueError(f"group_size and max_message_tokens must be positive, not {group_size} and {max_message_tokens}")
        if temperature < 0:
            raise ValueError(f"temperature must not be negative: {temperature}")
        if max_tokens > self.max_tokens:
            raise ValueError(f"max_tokens = {max_tokens} is more than this engine's {self.max_tokens}")
        for i, prompt in enumerate(prompts):
            if not 0 < len(prompt) < max_tokens:
                raise ValueError(f"prompt {i} has {len(prompt)} tokens: it must have at least one and leave room to sample within max_tokens = {max_tokens}")


class Wave:
    """One call of `generate`. Row r of the cache holds trajectory `owner[r]`; `hidden[r]` is the state that its next token is drawn from.

    admit -> sample -> (respond, outside) -> advance -> admit ... until no row is left. Per trajectory, and not per row: `length` (tokens so far),
    `start` (where the current message began), `read` (tokens in the cache), and the tables `ids`, `mask`, `logprobs`, `noise` [trajectories, max_tokens].
    """

    def __init__(
        self, engine: EmbeddedEngine, prompts: list[list[int]], group_size: int, stop_ids: Collection[int], temperature: float,
        max_message_tokens: int, max_tokens: int, seed: int,
    ) -> None:  # fmt: skip
        self.engine, self.prompts, self.group_size = engine, prompts, group_size
        self.temperature, self.max_message_tokens, self.max_tokens = temperature, max_message_tokens, max_tokens
        self.decoder, self.cache = Decoder(engine.model), engine._cache
        self.cache.clear()
        self.device = self.decoder.embedding.device
        self.total, self.admitted = len(prompts) * group_size, 0
        shape = (self.total, max_tokens)
        self.ids = torch.full(shape, engine.pad_id, dtype=torch.long)
        self.mask, self.logprobs = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape)
        self.noise = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
        self.length = torch.tensor([len(prompt) for prompt in prompts for _ in range(group_size)], dtype=torch.long)
        self.start, self.read = self.length.clone(), self.length.clone()
        self.cut = torch.zeros(self.total, dtype=torch.bool)
        self.stops = torch.zeros(self.decoder.head.shape[0], dtype=torch.bool)
        self.stops[list(stop_ids)] = True
        self.owner = torch.empty(0, dtype=torch.long)
        self.hidden = self.decoder.embedding.new_empty(0, self.decoder.embedding.shape[1])

    @torch.no_grad()
    def admit(self) -> bool:
        """Give free rows to waiting trajectories, whole groups at a time where slots allow; whether any row is in use."""
        free = self.engine.slots - len(self.owner)
        unit = min(self.group_size, self.engine.slots)
        # Few at a time would spend more on reading prompts one by one than it saves on idle rows.
        if self.admitted < self.total and (not len(self.owner) or free >= max(unit, self.engine.slots // 4)):
            self._prefill(range(self.admitted, min(self.admitted + free // unit * unit, self.total)))
        return len(self.owner) > 0

    @torch.no_grad()
    def sample(self) -> list[tuple[int, list[int], str]]:
        """Draw one token a row; the messages that it ended, as (slot, ids, finish), in order of slots."""
        logits = self.decoder.logits(self.hidden)
        owner, length = self.owner, self.length[self.owner]
        token, logprob = self._draw(logits, self.noise[owner, length])
        if not torch.isfinite(logprob).all():
            raise FloatingPointError("the policy's log-probabilities are not finite: its weights have diverged")
        self.ids[owner, length], self.mask[owner, length], self.logprobs[owner, length] = token, True, logprob
        self.length[owner] = length = length + 1
        self.engine.tokens["sampled"] += len(owner)
        stop = self.stops[token]
        over = stop | (length - self.start[owner] >= self.max_message_tokens) | (length >= self.max_tokens)
        ended = sorted(zip(owner[over].tolist(), stop[over].tolist(), strict=True))
        return [(slot, self.ids[slot, self.start[slot] : self.length[slot]].tolist(), "stop" if stopped else "length") for slot, stopped in ended]

    @torch.no_grad()
    def advance(self, slots: list[int], answers: Sequence[list[int] | None]) -> None:
        """Drop the rows that are over, then read every row's newest token, and the answers after it."""
        over = []
        for slot, answer in zip(slots, answers, strict=True):
            end = int(self.length[slot]) + len(answer or ())
            self.cut[slot] = answer is not None and end >= self.max_tokens
            if answer is None or self.cut[slot]:
                over.append(slot)
                continue
            self.ids[slot, self.length[slot] : end] = torch.tensor(answer, dtype=torch.long)
            self.length[slot] = self.start[slot] = end
        if over:
            self._release(over)
        if len(self.owner):
            self._read()

    def result(self) -> list[Sampled]:
        """The trajectories, in order of slots."""
        columns = zip(self.ids.tolist(), self.mask.tolist(), self.logprobs.tolist(), self.length.tolist(), self.cut.tolist(), strict=True)
        return [Sampled(ids[:n], mask[:n], logprobs[:n], "length" if cut else "stop") for ids, mask, logprobs, n, cut in columns]

    def _draw(self, logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and their log-probs [rows], on the CPU. By the inverse of the distribution function: one uniform number a token, and many times
        faster here than torch.multinomial, which draws one a vocabulary entry."""
        if not self.temperature:
            logprobs = logits.log_softmax(-1)
            value, token = logprobs.max(-1)
            return token.cpu(), value.cpu()
        share = (logits / self.temperature).softmax(-1)
        reached = share.cumsum(-1, dtype=torch.float64)
        target = noise.to(self.device, torch.float64)[:, None] * reached[:, -1:]
        token = torch.searchsorted(reached, target, right=True).clamp_(max=share.shape[-1] - 1)
        return token[:, 0].cpu(), share.gather(1, token)[:, 0].log().cpu()

    def _prefill(self, slots: range) -> None:
        """Read each distinct prompt once and copy its keys and values to the rows of its trajectories."""
        wanted = [tuple(self.prompts[slot // self.group_size]) for slot in slots]
        distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(wanted))}
        width = max(map(len, distinct))
        ids = torch.full((len(distinct), width), self.engine.pad_id, dtype=torch.long)
        for i, prompt in enumerate(distinct):
            ids[i, : len(prompt)] = torch.tensor(prompt)
        prompt_cache = self.engine._prompt_cache
        prompt_cache.clear()
        prompt_cache.reserve(len(distinct), width)
        last = self._extend(prompt_cache, None, ids, torch.zeros(len(distinct), dtype=torch.long), torch.tensor([len(p) for p in distinct]))
        source = torch.tensor([distinct[prompt] for prompt in wanted], device=self.device)
        held, added = len(self.owner), len(slots)
        self._reserve(held + added, width)
        self.cache.put(torch.arange(held, held + added, device=self.device), prompt_cache, source)
        self.owner = torch.cat((self.owner, torch.arange(slots.start, slots.stop)))
        self.hidden = torch.cat((self.hidden, last[source]))
        for slot, prompt in zip(slots, wanted, strict=True):
            self.ids[slot, : len(prompt)] = torch.tensor(prompt)
        self.admitted = slots.stop
        self.engine.tokens["prefilled"] += sum(map(len, distinct))

    def _read(self) -> None:
        """Extend every row by its newest sampled token, in lock step; then the rows that got an answer by it."""
        position = self.read[self.owner]
        self._reserve(len(self.owner), int(self.length[self.owner].max()))
        ids = self.ids[self.owner, position][:, None].to(self.device)
        self.hidden = self.decoder.extend(self.cache, None, ids, position.to(self.device))[:, 0]
        self.read[self.owner] = position = position + 1
        rows = (position < self.length[self.owner]).nonzero()[:, 0]
        if len(rows):
            self._feed(rows)

    def _feed(self, rows: Tensor) -> None:
        slots = self.owner[rows]
        starts, ends = self.read[slots], self.length[slots]
        width = int((ends - starts).max())
        columns = starts[:, None] + torch.arange(width)
        self._reserve(len(self.owner), int(columns.max()) + 1)
        ids = self.ids[slots[:, None], columns.clamp(max=self.max_tokens - 1)]
        rows = rows.to(self.device)
        self.hidden[rows] = self._extend(self.cache, rows, ids, starts, ends - starts)
        self.read[slots] = ends
        self.engine.tokens["fed"] += int((ends - starts).sum())

    def _extend(self, cache: Cache, rows: Tensor | None, ids: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
        """Extend cache rows by `lengths` [R] of the padded `ids` [R, S], piece by piece; the hidden state of each row's last token [R, H]."""
        last = self.hidden.new_empty(len(ids), self.hidden.shape[1])
        for at in range(0, ids.shape[1], PIECE):
            piece = ids[:, at : at + PIECE].to(self.device)
            states = self.decoder.extend(cache, rows, piece, (starts + at).to(self.device))
            ends_here = ((lengths > at) & (lengths <= at + PIECE)).nonzero()[:, 0]
            last[ends_here] = states[ends_here, lengths[ends_here] - 1 - at]
        return last

    def _release(self, slots: list[int]) -> None:
        """Free the rows of finished trajectories: rows from the end move into the holes, so that the rest stays contiguous."""
        free = torch.isin(self.owner, torch.tensor(slots))
        kept = len(self.owner) - int(free.sum())
        holes, movers = free[:kept].nonzero()[:, 0], (~free[kept:]).nonzero()[:, 0] + kept
        if len(holes):
            self.cache.move(movers.to(self.device), holes.to(self.device))
            self.owner[holes], self.hidden[holes] = self.owner[movers], self.hidden[movers]
        self.owner, self.hidden = self.owner[:kept], self.hidden[:kept]
        self.cache.reserve(kept, self.cache.columns)

    def _reserve(self, rows: int, columns: int) -> None:
        if columns > self.cache.columns:
            columns = max(columns, min(-(-columns // COLUMNS) * COLUMNS, self.max_tokens))
        self.cache.reserve(rows, max(columns, self.cache.columns))
