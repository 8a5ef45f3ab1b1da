"""The outcome of one graded answer: a code, why, and what it pays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Outcome = Literal[
    "correct", "wrong_result", "wrong_state", "wrong_form", "test_failed", "sql_error", "timeout", "too_big", "denied", "no_answer",
    "gold_timeout", "invalid_instance", "infra",
]  # fmt: skip
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
UNSCORED: frozenset[str] = frozenset({"gold_timeout", "invalid_instance", "infra"})
"""Where the instance or our own infrastructure is at fault: such an answer is never counted."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome code and why. check: the index of the check (or Python test) that failed, where one did."""

    outcome: Outcome
    detail: str = ""
    check: int | None = None

    @property
    def reward(self) -> float | None:
        """1 or 0; None where the answer is not scored."""
        return None if self.outcome in UNSCORED else float(self.outcome == "correct")
