"""The rows as the tables of docs/branching.md: `python benchmarks/branches.py --tables` prints them from the results, without measuring."""

from __future__ import annotations

from branching.report import OURS, SLOPE_TO, Row

_OPERATIONS = ("create", "connect and first query", "point read", "range read", "update", "add column", "create index", "delete")


def tables(rows: list[Row]) -> str:
    """Loops, bounds, one operation at a time."""
    shapes = [shape for shape in ("reduced", "full") if any(row.get("shape") == shape for row in rows)]
    parts = [f"The loops, {shape} shape.\n\n{_loops(rows, shape)}" for shape in shapes]
    parts += ["What follows, and what was to be reached.\n\n" + _bounds(rows)]
    parts += [f"One operation, by {_over(part)}.\n\n{_micro(rows, part)}" for part in SLOPE_TO if any(row.get("part") == part for row in rows)]
    return "\n\n".join(parts) + "\n"


def _over(part: str) -> str:
    return "depth" if part == "depth" else "the number of live branches"


def _table(heads: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [heads, ["---"] * len(heads), *lines])


def _loops(rows: list[Row], shape: str) -> str:
    """CPU seconds and peak bytes of a loop on each system."""
    here = {(row["loop"], row["system"]): row for row in rows if row.get("part") == "loops" and row["shape"] == shape}
    systems = list(dict.fromkeys(system for _, system in here))
    lines = []
    for loop in dict.fromkeys(loop for loop, _ in here):
        ours = here[loop, OURS]
        checked = ours["probed"] - ours["steps"]  # the query that depends on the branch's own changes was asked in each step, then of each leaf
        leaves = f"{ours['leaves_compared']:,} leaves compared on the way, {checked:,} checked at the end"
        what = f"{loop}: {ours['steps']:,} of {ours['of']:,} steps, {ours['at_once']:,} live at once, {leaves}"
        lines.append([what, *(_cell(here.get((loop, system))) for system in systems)])
    return _table([f"CPU s, peak bytes ({shape})", *systems], lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return "not run"
    if "unavailable" in row:
        return f"cannot: {row['unavailable']}"
    return f"{row['value']:.3g}, {_bytes(row['peak_bytes'])}"


def _bounds(rows: list[Row]) -> str:
    """The derived rows."""
    lines = []
    for row in rows:
        if "system" in row:
            continue
        value = _bytes(row["value"]) if row["unit"] == "peak bytes" else f"{row['value']:.3g} {row['unit']}"
        against = f"{row['ratio']:.3g}x {row['against']}" if row["ratio"] is not None else ""
        verdict = "" if row["bound"] is None else row["bound"].replace("<=", "≤") + ("" if row["holds"] else ": **missed**")
        lines.append([row["figure"], value, against, verdict])
    return _table(["figure", "value", "beside", "bound"], lines)


def _micro(rows: list[Row], part: str) -> str:
    """CPU microseconds of an operation at the first and the last point, by system."""
    measured = [row for row in rows if row.get("part") == part and "unavailable" not in row]
    heads = ["CPU µs", *(f"{row['system']}, {row['points'][0]:,} → {row['points'][-1]:,}" for row in measured)]
    lines = [[name, *(_change(row["operations"][name]["at"]) for row in measured)] for name in _OPERATIONS]
    lines.append(["create to first answer, ms on the clock", *(_change(row["operations"]["create to first answer, ms"]["at"]) for row in measured)])
    lines.append([f"bytes of a {'level' if part == 'depth' else 'live branch'}", *(_bytes(row["value"]) for row in measured)])
    return _table(heads, lines)


def _change(values: list[float]) -> str:
    return f"{_short(values[0])} → {_short(values[-1])}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"
