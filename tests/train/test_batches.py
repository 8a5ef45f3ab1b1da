"""Micro-batches hold every sequence once, in order and without padding, and every token counts for its own sequence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from savepoint.train.batches import microbatches, pack


def test_sequences_stand_end_to_end_and_first_tokens_are_not_trained():
    batch = pack([[5, 6, 7], [8, 9]], [[True, False, True], [True, True]])
    assert batch.ids.tolist() == [5, 6, 7, 8, 9] and batch.lengths == (3, 2)
    assert batch.trained.tolist() == [False, False, True, False, True]  # a first token has no prediction
    assert batch.flat([[1, 2, 3], [4, 5]]).tolist() == [3.0, 5.0]
    assert batch.segments().tolist() == [0, 1]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_every_sequence_is_in_one_microbatch_within_the_budget(lengths: list[int], budget: int):
    chunks = list(microbatches(lengths, budget))
    assert [row for chunk in chunks for row in chunk] == list(range(len(lengths)))
    for chunk in chunks:
        assert len(chunk) == 1 or sum(lengths[row] for row in chunk) <= budget


def test_a_microbatch_is_filled_before_the_next_begins():
    assert list(microbatches([3, 4, 3, 9, 1], 10)) == [[0, 1, 2], [3, 4]]


def test_what_does_not_fit_together_is_refused():
    for sequences, trained in (([], []), ([[1], []], [[True], []]), ([[1, 2]], [[True]])):
        with pytest.raises(ValueError, match="sequences|trained"):
            pack(sequences, trained)
