"""Micro-batches hold every sequence once, and what is padded counts for nothing."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from savepoint.train.batches import by_length, pad


def test_padding_is_neither_attended_nor_trained():
    batch = pad([[5, 6, 7], [8, 9]], [[True, False, True], [True, True]], pad_id=0)
    assert batch.ids.tolist() == [[5, 6, 7], [8, 9, 0]] and batch.attention.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.trained.tolist() == [[False, False, True], [False, True, False]]  # a first token has no prediction
    assert batch.flat([[0.1, 0.2, 0.3], [0.4, 0.5]]).tolist() == torch.tensor([0.3, 0.5]).tolist()
    assert batch.segments().tolist() == [0, 1]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_every_sequence_is_in_one_microbatch_within_the_budget(lengths: list[int], budget: int):
    chunks = list(by_length(lengths, range(len(lengths)), budget))
    assert sorted(row for chunk in chunks for row in chunk) == list(range(len(lengths)))
    for chunk in chunks:
        assert len(chunk) == 1 or len(chunk) * max(lengths[row] for row in chunk) <= budget
