"""Micro-batches: sequences of like length, padded together, with what each token counts for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """ids, attention: [B, T] int64, padded right; trained: [B, T] bool."""

    ids: Tensor
    attention: Tensor
    trained: Tensor

    def flat(self, values: Sequence[Sequence[float]]) -> Tensor:
        """Per-token values of the B sequences, at the trained positions, in the order of `Policy.logprobs`: [trained tokens] float32."""
        padded = torch.zeros(self.ids.shape)
        for i, row in enumerate(values):
            padded[i, : len(row)] = torch.tensor(row, dtype=torch.float32)
        return padded[self.trained]

    def segments(self) -> Tensor:
        """The sequence that each trained token belongs to: [trained tokens] int64."""
        return self.trained.nonzero()[:, 0]


def pad(sequences: Sequence[Sequence[int]], trained: Sequence[Sequence[bool]], pad_id: int) -> Batch:
    """Sequences padded to the longest. The first token of a sequence has no prediction and is never trained."""
    shape = (len(sequences), max(map(len, sequences)))
    ids = torch.full(shape, pad_id, dtype=torch.long)
    attention = torch.zeros(shape, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.bool)
    for i, sequence in enumerate(sequences):
        ids[i, : len(sequence)] = torch.tensor(sequence)
        attention[i, : len(sequence)] = 1
        mask[i, : len(sequence)] = torch.tensor(trained[i], dtype=torch.bool)
    mask[:, 0] = False
    return Batch(ids, attention, mask)


def by_length(lengths: Sequence[int], rows: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Split `rows` into micro-batches of at most `max_tokens` tokens, padding included; a longer sequence goes alone. Sorted by length."""
    chunk: list[int] = []
    for row in sorted(rows, key=lambda r: (lengths[r], r)):
        if chunk and lengths[row] * (len(chunk) + 1) > max_tokens:
            yield chunk
            chunk = []
        chunk.append(row)
    if chunk:
        yield chunk
