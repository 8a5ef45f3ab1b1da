"""Success rates and their uncertainty: pure functions over outcomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Z95 = 1.959964
"""The standard normal's 97.5 % quantile: two-sided 95 % intervals."""


def wilson(k: float, n: float, z: float = Z95) -> tuple[float, float] | None:
    """Wilson's score interval of a proportion, `k` successes of `n` independent trials (Wilson 1927, JASA 22:209). None when n = 0.

    `k` and `n` need not be whole: `success_rate` passes an effective sample size. ValueError unless 0 <= k <= n.
    """
    if not 0 <= k <= n:
        raise ValueError(f"wilson: needs 0 <= k <= n, not k = {k}, n = {n}")
    if n == 0:
        return None
    p, z2 = k / n, z * z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    # At k = 0 and k = n an end is exactly 0 or 1; rounding must not move it.
    return (0.0 if k == 0 else max(0.0, centre - half)), (1.0 if k == n else min(1.0, centre + half))


def success_rate(outcomes: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The mean of all outcomes with a 95 % interval, where several samples of one task are not independent.

    outcomes: for each task its samples' outcomes, each in [0, 1]; tasks may differ in their number of samples, and empty ones count for
    nothing. Returns `{"success", "low", "high", "n"}`; n is the number of samples, and without any the other three are None.

    Tasks are the independent units. With y_i the sum and n_i the number of task i's samples, N of all m tasks, and p = sum y_i / N, the
    variance of p between tasks is  v = m/(m-1) * sum (y_i - p n_i)^2 / N^2  (the ratio estimator's, Cochran 1977, chapter 6; the same as
    the clustered standard errors of arXiv:2411.00640, but for m/(m-1)). Against independent samples that is a design effect
    deff = v / (p (1-p) / N), and the interval is Wilson's with N/deff in place of N (Korn and Graubard 1998; compared with others
    by Dean and Pagano 2015, J. Surv. Stat. Methodol. 3:484). deff is at least 1; where v says nothing (p of 0 or 1, a single task),
    samples of a task are taken to agree entirely, so that the effective size is m.
    """
    tasks = [task for task in outcomes if len(task)]
    m, n = len(tasks), sum(len(task) for task in tasks)
    if n == 0:
        return {"success": None, "low": None, "high": None, "n": 0}
    p = math.fsum(math.fsum(task) for task in tasks) / n
    effective = float(m)
    if m > 1 and 0 < p < 1:
        v = m / (m - 1) * math.fsum((math.fsum(task) - p * len(task)) ** 2 for task in tasks) / n**2
        deff = max(1.0, v / (p * (1 - p) / n))
        effective = n / deff
    interval = wilson(p * effective, effective)
    assert interval is not None
    return {"success": p, "low": interval[0], "high": interval[1], "n": n}


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the probability that all of `k` samples succeed (pass^k), from `n` samples of which `c` did.

    C(c, k) / C(n, k) (arXiv:2406.12045, section 3). ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_hat_k: needs 0 <= c <= n and 1 <= k <= n, not n = {n}, c = {c}, k = {k}")
    return math.comb(c, k) / math.comb(n, k)


def over_tasks(estimate: Callable[[int, int, int], float], counts: Sequence[tuple[int, int]], k: int) -> dict[str, Any]:
    """The mean over tasks of `estimate(n, c, k)`, with a 95 % interval as `success_rate` gives it; n is then the number of tasks.

    counts: (n, c) of each task; those with fewer than k samples are left out. One task is one observation, and the interval no narrower than
    Wilson's for as many trials: of all values in [0, 1] with one mean, zeros and ones vary most.
    """
    return success_rate([[estimate(n, c, k)] for n, c in counts if n >= k])


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of `k` samples succeeds, from `n` samples of which `c` did.

    1 - C(n-c, k) / C(n, k) (arXiv:2107.03374, eq. 1). ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k: needs 0 <= c <= n and 1 <= k <= n, not n = {n}, c = {c}, k = {k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
