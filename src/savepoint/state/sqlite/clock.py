"""What 'now' is in a session: a fixed moment, so that a replay is equal, or the real time."""

from __future__ import annotations

from datetime import UTC, datetime

DEFAULT_CLOCK = "2025-01-01T00:00:00Z"
_EPOCH_MS = 210_866_760_000_000  # 1970-01-01 in milliseconds of the Julian day, as SQLite's VFS counts


def clock_ms(clock: str) -> int:
    """Milliseconds of the Julian day of an ISO 8601 time (UTC where it names no zone); 0 for "real". ValueError for anything else."""
    if clock == "real":
        return 0
    try:
        moment = datetime.fromisoformat(clock)
    except ValueError:
        raise ValueError(f"clock={clock!r}: must be 'real' or an ISO time such as {DEFAULT_CLOCK}") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return _EPOCH_MS + round(moment.timestamp() * 1000)
