"""Metrics as their authors define them, for comparison with published figures. The outcome of an instance never depends on them.

They are computed from the same single runs as the outcome, where their definition allows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Literal, get_args

from savepoint.envs.sql import lexer
from savepoint.envs.sql.compare import Row
from savepoint.envs.sql.grade import Examination, Grader
from savepoint.envs.sql.helpers import preprocess_results
from savepoint.envs.sql.run import Run
from savepoint.envs.sql.tasks import Task
from savepoint.state import BaseImage

Metric = Literal["bird_ex", "soft_f1", "r_ves", "critic_soft_ex"]
METRICS: tuple[Metric, ...] = get_args(Metric)
BINARY: frozenset[str] = frozenset({"bird_ex", "critic_soft_ex"})
"""Those that are 0 or 1, so that one can say where an outcome disagrees with them."""
VES_PAIRS = 100


def bird_ex(prediction: Sequence[Row], gold: Sequence[Row]) -> float:
    """BIRD's execution accuracy: equal as sets of Python tuples (mini_dev, evaluation_ex.py). Order and duplicates do not count, and 1 equals 1.0."""
    return float(set(prediction) == set(gold))


def soft_f1(prediction: Sequence[Row], gold: Sequence[Row]) -> float:
    """BIRD's soft F1 (mini_dev, evaluation_f1.py): repeated rows dropped, then row i against row i, cell by cell.

    Of each pair of rows the shares, over the gold's width, of prediction cells that the gold row holds (tp), of those that it does not (fp), and of gold cells
    that the prediction row does not hold (fn) are added up; a row without a partner is 1 fp or 1 fn. Both empty: 1.
    """
    rows, wanted = list(dict.fromkeys(prediction)), list(dict.fromkeys(gold))
    if not rows and not wanted:
        return 1.0
    tp = 0.0
    fp, fn = float(max(0, len(rows) - len(wanted))), float(max(0, len(wanted) - len(rows)))
    for row, expected in zip(rows, wanted, strict=False):
        found = sum(cell in expected for cell in row)
        tp += found / len(expected)
        fp += (len(row) - found) / len(expected)
        fn += sum(cell not in row for cell in expected) / len(expected)
    precision = tp / (tp + fp) if tp + fp else 0.0
    recall = tp / (tp + fn) if tp + fn else 0.0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def ves_value(ratios: Sequence[float]) -> float:
    """BIRD's reward-based valid efficiency score (mini_dev, evaluation_ves.py) of gold/prediction time ratios: outliers beyond three sigma dropped, the mean
    put into classes, 100 times the root of the class's reward."""
    mean, sigma = fmean(ratios), pstdev(ratios)
    ratio = fmean([r for r in ratios if abs(r - mean) < 3 * sigma] or ratios)
    reward = next((reward for least, reward in ((2, 1.25), (1, 1.0), (0.5, 0.75), (0.25, 0.5)) if ratio >= least), 0.25)
    return 100 * math.sqrt(reward)


def measure(names: Sequence[Metric], grader: Grader, image: BaseImage, task: Task, examination: Examination) -> dict[str, float]:
    """The metrics of one graded answer; 0 where it did not run. {} where the gold could not be run, or the answer is not scored."""
    gold = examination.gold
    if not names or gold is None or gold.fault is not None or examination.verdict.reward is None:
        return {}
    run = examination.run
    if run is None or run.failure is not None:
        return dict.fromkeys(names, 0.0)
    return {name: _MEASURES[name](grader, image, task, run, gold.run) for name in names}


def _bird_ex(grader: Grader, image: BaseImage, task: Task, run: Run, gold: Run) -> float:
    return bird_ex(run.rows or (), gold.rows or ())


def _soft_f1(grader: Grader, image: BaseImage, task: Task, run: Run, gold: Run) -> float:
    return soft_f1(run.rows or (), gold.rows or ())


def _critic_soft_ex(grader: Grader, image: BaseImage, task: Task, run: Run, gold: Run) -> float:
    """BIRD-CRITIC's default test: SELECT DISTINCT and ROUND taken out of both, floats to two places, sets, or lists if the instance orders."""
    found, expected = (_stripped(grader, image, task, one) for one in (run, gold))
    if not found or not expected:
        return 0.0
    left, right = preprocess_results(found), preprocess_results(expected)
    return float(left == right if task.conditions.get("order") else set(left) == set(right))


def _stripped(grader: Grader, image: BaseImage, task: Task, run: Run) -> Sequence[Row] | None:
    """Rows of a script without DISTINCT and ROUND; None when it fails. What they change nothing in is not run again."""
    changed = [lexer.remove_round(lexer.remove_distinct(sql)) for sql in run.statements]
    if changed == list(run.statements):
        return run.rows
    again = grader.run_again(image, task, changed)
    return None if again.failure else again.rows


def _r_ves(grader: Grader, image: BaseImage, task: Task, run: Run, gold: Run) -> float:
    if not bird_ex(run.rows or (), gold.rows or ()):
        return 0.0
    ratios = []
    for _ in range(VES_PAIRS):
        theirs, ours = (grader.run_again(image, task, one.statements) for one in (gold, run))
        if theirs.failure is None and ours.failure is None:
            ratios.append(theirs.seconds / max(ours.seconds, 1e-9))
    return ves_value(ratios) if ratios else 0.0


_MEASURES: dict[str, Callable[[Grader, BaseImage, Task, Run, Run], float]] = {
    "bird_ex": _bird_ex, "soft_f1": _soft_f1, "r_ves": _r_ves, "critic_soft_ex": _critic_soft_ex,
}  # fmt: skip
