"""Micro-batches: sequences end to end in one row, with where each begins and what each token counts for. Nothing is padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences end to end: ids [N] int64, trained [N] bool, and their lengths, which sum to N."""

    ids: Tensor
    trained: Tensor
    lengths: tuple[int, ...]

    def flat(self, values: Sequence[Sequence[float]]) -> Tensor:
        """Per-token values of the sequences, at the trained positions, in the order of `Policy.packed_logprobs`: [trained tokens] float32."""
        return torch.tensor([value for row in values for value in row], dtype=torch.float32)[self.trained]

    def segments(self) -> Tensor:
        """The sequence that each trained token belongs to: [trained tokens] int64."""
        return torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))[self.trained]


def pack(sequences: Sequence[Sequence[int]], trained: Sequence[Sequence[bool]]) -> Packed:
    """One row of sequences. The first token of a sequence has no prediction and is never trained. ValueError for none, an empty one, or a mask that does
    not fit its sequence."""
    if not sequences or not all(sequences):
        raise ValueError("sequences: every one needs at least one token, and there must be one")
    if [len(s) for s in sequences] != [len(t) for t in trained]:
        raise ValueError("trained: must hold one value for each token of each sequence")
    mask = [bool(t) and i > 0 for row in trained for i, t in enumerate(row)]
    ids = torch.tensor([token for row in sequences for token in row], dtype=torch.long)
    return Packed(ids, torch.tensor(mask, dtype=torch.bool), tuple(map(len, sequences)))


def microbatches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices of sequences, in order, split so that each micro-batch holds at most `max_tokens` tokens; a longer sequence goes alone."""
    chunk: list[int] = []
    held = 0
    for row, length in enumerate(lengths):
        if chunk and held + length > max_tokens:
            yield chunk
            chunk, held = [], 0
        chunk.append(row)
        held += length
    if chunk:
        yield chunk
