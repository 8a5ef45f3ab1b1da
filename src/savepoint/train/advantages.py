"""From rewards to advantages: pure functions over the trajectories of a batch, each with its group and whether it counts.

rewards [R], group_ids [R] integers (any values, in any order), valid [R] bool -> [R]. A trajectory that is not valid gets 0 and moves nobody.
A group with fewer than two valid members, or whose valid members agree, gets exactly 0. ValueError for lengths or types that do not
fit, and for a valid reward that is not finite (it names the index).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def grpo(rewards: Tensor, group_ids: Tensor, valid: Tensor, *, eps: float = 1e-6) -> Tensor:
    """(r - mean) / (std + eps) with the sample standard deviation of the group (arXiv:2402.03300, §4.1)."""
    groups = _groups(rewards, group_ids, valid)
    variance = groups.total(groups.centred**2) / (groups.count - 1).clamp(min=1)
    return groups.advantages(groups.centred / (variance.sqrt() + eps))


def dr_grpo(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """r - mean: no division, which favours groups that agree (arXiv:2503.20783)."""
    groups = _groups(rewards, group_ids, valid)
    return groups.advantages(groups.centred)


def rloo(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """r - mean of the group's others, which is n / (n - 1) (r - mean) (arXiv:2402.14740)."""
    groups = _groups(rewards, group_ids, valid)
    return groups.advantages(groups.centred * groups.count / (groups.count - 1).clamp(min=1))


def from_optional(rewards: Sequence[float | None]) -> tuple[Tensor, Tensor]:
    """Rewards of which some are missing -> (rewards [R] float64 with NaN there, valid [R]). ValueError that names the index of a NaN or inf."""
    for i, reward in enumerate(rewards):
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"rewards: {reward} at index {i} is not finite; a reward that is missing is None")
    values = torch.tensor([math.nan if reward is None else float(reward) for reward in rewards], dtype=torch.float64)
    return values, ~values.isnan()


def to_tokens(values: Tensor, ids: Tensor) -> Tensor:
    """values[ids], and 0 where an id is -1. values [R], ids [N] -> [N]. ValueError for an id outside [-1, R)."""
    if values.dim() != 1 or ids.dim() != 1 or ids.is_floating_point():
        raise ValueError(f"values {tuple(values.shape)} and integer ids {tuple(ids.shape)} must be 1-D")
    if len(ids) and not (int(ids.min()) >= -1 and int(ids.max()) < len(values)):
        raise ValueError(f"ids must lie in [-1, {len(values)}), not in [{int(ids.min())}, {int(ids.max())}]")
    return torch.cat((values, values.new_zeros(1)))[ids]


@dataclass(frozen=True, slots=True)
class _Groups:
    """The groups of a batch: for each trajectory its group's number `index`, its group's valid `count`, and r - mean (`centred`), in float64."""

    index: Tensor
    valid: Tensor
    count: Tensor
    centred: Tensor
    level: Tensor
    dtype: torch.dtype

    def total(self, values: Tensor) -> Tensor:
        """The sum over the valid members of its group, for each trajectory."""
        return _total(values, self.index, self.valid)

    def advantages(self, values: Tensor) -> Tensor:
        """`values` in the rewards' type, exactly 0 where there is nothing to compare."""
        return values.masked_fill(~self.valid | self.level, 0).to(self.dtype)


def _groups(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> _Groups:
    _check(rewards, group_ids, valid)
    index = torch.unique(group_ids, return_inverse=True)[1]
    values = rewards.double().masked_fill(~valid, 0)
    count = _total(torch.ones_like(values), index, valid)
    # Asked of the rewards themselves: the mean of equal numbers need not equal them, and dividing by eps would make much of that.
    highest, lowest = (torch.full_like(values, -math.inf).scatter_reduce(0, index[valid], s * values[valid], "amax")[index] for s in (1, -1))
    level = (count < 2) | (highest == -lowest)
    mean = _total(values, index, valid) / count.clamp(min=1)
    return _Groups(index, valid, count, values - mean, level, torch.promote_types(rewards.dtype, torch.float32))


def _total(values: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    return torch.zeros_like(values).index_add(0, index[valid], values[valid])[index]


def _check(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> None:
    for name, value in (("rewards", rewards), ("group_ids", group_ids), ("valid", valid)):
        if value.shape != rewards.shape or value.dim() != 1:
            raise ValueError(f"{name} has shape {tuple(value.shape)}: rewards, group_ids and valid must be 1-D and of one length")
    if group_ids.is_floating_point() or valid.dtype != torch.bool:
        raise ValueError(f"group_ids must be integers and valid bool, not {group_ids.dtype} and {valid.dtype}")
    wrong = (valid & ~torch.isfinite(rewards)).nonzero()
    if len(wrong):
        raise ValueError(f"rewards: {rewards[wrong[0, 0]].item()} at index {wrong[0, 0].item()} is not finite, and valid says that it counts")
