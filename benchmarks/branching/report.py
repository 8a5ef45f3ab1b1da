"""From measurements to rows: what was measured on each system, then the ratios between them and the bounds that are to hold.

A measurement is a row with a key (part, loop or what is varied, system): one measured again takes the place of the earlier. The rest is derived anew
from all that there are, also from those of an earlier run.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median, quantiles
from typing import Any

Row = dict[str, Any]
OURS = "ours"
FIRST_FOUR = ("software_dev", "failure_repro", "data_cleaning", "mcts")
PARTS = ("loops", "depth", "branches")
# part -> up to which point our slope is bounded, and the bound
SLOPE_TO = {"depth": 1024, "branches": 10_000}
SLOPE = 1.15
BOUNDED = ("point read", "range read", "update", "connect and first query")
CPU_BOUNDS = {"file copies": 0.7, "doltlite": 0.35, "PostgreSQL clones": 0.2}
BYTES_BOUND = 0.1
FIRST_ANSWER_MS = 0.3


def key(row: Row) -> tuple[str, str, str, str] | None:
    """What a measurement is of; None for a derived row."""
    return (row["part"], row.get("shape", ""), row.get("loop", ""), row["system"]) if "system" in row else None


def merge(earlier: list[Row], measured: list[Row]) -> list[Row]:
    """All measurements, the new ones in place of the earlier, and everything derived from them."""
    kept: dict[Any, Row] = {key(row): row for row in earlier if key(row) is not None}
    kept |= {key(row): row for row in measured}
    rows = sorted(kept.values(), key=lambda row: PARTS.index(row["part"]))
    return [*rows, *derived(rows)]


# ---------------------------------------------------------------------- measurements


def loop_row(loop: str, shape: str, scale: str, system: str, runs: list[dict[str, Any]]) -> Row:
    """The median of the CPU of several runs, which must have answered the same; the rest is of the run in the middle."""
    about = {"part": "loops", "loop": loop, "shape": shape, "scale": scale, "system": system}
    figure = f"{loop}, {shape}, {system}"
    if "unavailable" in runs[0]:
        return {**_row(figure, None, "CPU s"), **about, "unavailable": runs[0]["unavailable"]}
    runs = sorted(runs, key=lambda run: run["cpu_s"])
    middle = runs[(len(runs) - 1) // 2]
    same = len({(run["answers"], run["probes"]) for run in runs}) == 1
    row = _row(figure, middle["cpu_s"], "CPU s", bound="all steps, one answer", holds=same and middle["steps"] == middle["of"])
    return {**row, **about, "runs": [run["cpu_s"] for run in runs], **{name: value for name, value in middle.items() if name != "cpu_s"}}


def micro_row(part: str, scale: str, system: str, result: dict[str, Any]) -> Row:
    """What each operation costs at each point, and the slope from the first to the last that is bounded, in the median and its quartiles."""
    about = {"part": part, "scale": scale, "system": system}
    if "unavailable" in result:
        return {**_row(f"{part}, {system}", None, "bytes"), **about, "unavailable": result["unavailable"]}
    points, rounds = result["points"], result["rounds"]
    until = max((i for i, point in enumerate(points) if point <= SLOPE_TO[part]), default=0)
    operations = {}
    for name in rounds[0][0]:
        ratios = [one[until][name] / one[0][name] for one in rounds if one[0][name]]
        spread = quantiles(ratios, n=4) if len(ratios) > 1 else [1.0]
        operations[name] = {
            "at": [_digits(median(one[i][name] for one in rounds)) for i in range(len(points))],
            "slope": _digits(median(ratios)) if ratios else None, "quartiles": [_digits(spread[0]), _digits(spread[-1])],
        }  # fmt: skip
    row = _row(f"bytes of a {'level' if part == 'depth' else 'live branch'}, {system}", result["bytes"], "bytes")
    return {**row, **about, "points": points, "slope_to": points[until], "rounds": len(rounds), "operations": operations}


# ---------------------------------------------------------------------- what follows from them


def derived(rows: list[Row]) -> Iterator[Row]:
    loops = [row for row in rows if row["part"] == "loops" and "unavailable" not in row]
    for shape, scale in sorted({(row["shape"], row["scale"]) for row in loops}):
        here = {(row["loop"], row["system"]): row for row in loops if (row["shape"], row["scale"]) == (shape, scale)}
        yield from _agreement(shape, here)
        yield from _ratios(shape, here)
    for row in rows:
        if row["part"] in SLOPE_TO and row["system"] == OURS and "unavailable" not in row:
            yield from _slopes(row)


def _agreement(shape: str, here: dict[tuple[str, str], Row]) -> Iterator[Row]:
    """In each loop, how many systems gave the answers that ours gave."""
    for loop in dict.fromkeys(loop for loop, _ in here):
        answers = {system: (row["answers"], row["probes"]) for (name, system), row in here.items() if name == loop}
        if OURS in answers and len(answers) > 1:
            same = sum(answer == answers[OURS] for answer in answers.values())
            yield _row(f"systems that answer alike, {loop}, {shape}", same, "systems", bound=f"= {len(answers)}", holds=same == len(answers))


def _ratios(shape: str, here: dict[tuple[str, str], Row]) -> Iterator[Row]:
    """The first four loops together, and simulation alone, beside each system that did them all."""
    for loops in (FIRST_FOUR, ("simulation",)):
        what = "the first four loops" if len(loops) > 1 else loops[0]
        for system in dict.fromkeys(system for _, system in here if system != OURS):
            pairs = [(here.get((loop, OURS)), here.get((loop, system))) for loop in loops]
            if not all(ours and theirs for ours, theirs in pairs):
                continue
            for unit, name in (("CPU s", "value"), ("peak bytes", "peak_bytes")):
                ours, theirs = (sum(pair[i][name] for pair in pairs) for i in (0, 1))  # type: ignore[index]
                bound = CPU_BOUNDS.get(system) if unit == "CPU s" else BYTES_BOUND if system == "file copies" else None
                yield _against(f"{what}, {shape}, {OURS}", ours, unit, system, theirs, bound if len(loops) > 1 and shape == "reduced" else None)


def _slopes(row: Row) -> Iterator[Row]:
    part, to = row["part"], row["slope_to"]
    for name, figures in row["operations"].items():
        if name in BOUNDED:
            low, high = figures["quartiles"]
            figure = f"slope of {name}, {part} 1 to {to:,} (quartiles {low:g} to {high:g})"
            yield _row(figure, figures["slope"], "x", bound=f"<= {SLOPE}", holds=figures["slope"] <= SLOPE)
    if part == "branches":
        took = row["operations"]["create to first answer, ms"]["at"][row["points"].index(to)]
        yield _row(f"fork and first query at {to:,} live branches", took, "ms", bound=f"<= {FIRST_ANSWER_MS}", holds=took <= FIRST_ANSWER_MS)


def _against(figure: str, value: float, unit: str, system: str, theirs: float, at_most: float | None) -> Row:
    ratio = value / theirs if theirs > 0 else None
    holds = at_most is None or (ratio is not None and ratio <= at_most)
    bound = None if at_most is None else f"ratio <= {at_most:g}"
    return {**_row(figure, value, unit, bound=bound, holds=holds), "against": system, "ratio": None if ratio is None else _digits(ratio, 3)}


def _row(figure: str, value: float | None, unit: str, *, bound: str | None = None, holds: bool = True) -> Row:
    return {
        "figure": figure, "value": None if value is None else _digits(value), "unit": unit, "against": None, "ratio": None, "bound": bound, "holds": holds,
    }  # fmt: skip


def _digits(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def show(row: Row) -> str:
    """A row in one line, and the table of its operations where it has one."""
    if "unavailable" in row:
        return f" -  {row['figure']}: {row['unavailable']}"
    against = f" ({row['ratio']:g}x {row['against']})" if row["ratio"] is not None else ""
    line = f"{'ok ' if row['holds'] else 'NO '} {row['figure']}: {row['value']:,g} {row['unit']}{against}" + (f" [{row['bound']}]" if row["bound"] else "")
    if "part" in row:
        line += _details(row)
    return line


def _details(row: Row) -> str:
    if row["part"] == "loops":
        return f", {row['steps']} of {row['of']} steps, {row['leaves_compared']} leaves compared, peak {row['peak_bytes'] / 1e6:,.1f} MB"
    heads = f"\n      at {', '.join(f'{point:,}' for point in row['points'])}:"
    return heads + "".join(f"\n      {name}: {', '.join(f'{x:g}' for x in one['at'])}" for name, one in row["operations"].items())
