"""`random()` and `randomblob()` of one session: numbers that follow from its seed, so that what an agent did can be replayed.

SQLite's own generator belongs to the process and cannot be seeded by connection. These are counted: the n-th draw of a seed is a mixing function
of n (SplitMix64; Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), so the state is one number, which goes along
with checkpoints, forks and deltas.
"""

from __future__ import annotations

import random
from typing import Any

import apsw

_GAMMA, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class Dice:
    """seed: of the session. drawn: numbers drawn so far. length: bytes of the largest blob."""

    __slots__ = ("_origin", "drawn", "length")

    def __init__(self, seed: int, length: int) -> None:
        self._origin = self._mix(seed & _MASK)
        self.drawn, self.length = 0, length

    def integer(self, *nothing: Any) -> int:
        """A number from -2**63 to 2**63 - 1."""
        self.drawn += 1
        value = self._mix((self._origin + self.drawn * _GAMMA) & _MASK)
        return value - (1 << 64) if value >> 63 else value

    def blob(self, size: Any = 0, *nothing: Any) -> bytes:
        """So many bytes, at least one, as SQLite's randomblob takes its argument."""
        try:
            count = max(1, int(size))
        except (TypeError, ValueError, OverflowError):
            count = 1
        if count > self.length:
            raise apsw.TooBigError("string or blob too big")
        return random.Random(self.integer()).randbytes(count)

    def install(self, connection: apsw.Connection) -> None:
        """Take the place of SQLite's own. Innocuous, as those are: views and triggers may use them."""
        connection.create_scalar_function("random", self.integer, 0, flags=apsw.SQLITE_INNOCUOUS)
        connection.create_scalar_function("randomblob", self.blob, 1, flags=apsw.SQLITE_INNOCUOUS)

    @staticmethod
    def _mix(value: int) -> int:
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
        return value ^ (value >> 31)
