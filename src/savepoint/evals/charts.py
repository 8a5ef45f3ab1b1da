"""The report's charts: figures of plotly, whose colours are names of CSS variables that the page resolves for light and dark.

The library itself goes into the page compressed: plotly.js is 4.8 MB, and 1.9 MB as gzip in base64, which browsers unpack by themselves.
"""

from __future__ import annotations

import base64
import gzip
from collections import Counter
from html import escape
from statistics import fmean
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from savepoint.evals.run_record import MODES, PARTS, Evaluation, RunRecord

OUTCOME_COLOURS = {
    "correct": "var(--green)", "wrong_result": "var(--amber)", "wrong_state": "var(--teal)", "sql_error": "var(--rose)", "no_answer": "var(--grey)",
}  # fmt: skip
PART_COLOURS = dict(zip(PARTS, ("var(--blue)", "var(--teal)", "var(--green)", "var(--violet)", "var(--grey)"), strict=True))
_MODE_STYLE = {"single_turn": ("var(--amber)", "square", "dash"), "agentic": ("var(--blue)", "circle", "solid")}
_SORT_STYLE = {"renamed": ("renamed schema", "var(--teal)", "circle"), "bug": ("ordinary bug", "var(--violet)", "diamond")}
_POINTS = 150


def figures(run: RunRecord) -> dict[str, dict[str, Any]]:
    """Every chart that the run has data for, by name, as plain JSON."""
    made = {
        "success": success(run), "sorts": sorts(run), "reward": curve(run, "reward_mean"), "length": curve(run, "length_mean"),
        "turns": curve(run, "turns_mean"), "loss": loss(run), "outcomes": outcomes(run), "time": time(run),
    }  # fmt: skip
    return {name: figure.to_plotly_json() for name, figure in made.items() if figure.data}


def plotly_source() -> str:
    """plotly.js as gzip in base64; the same bytes every time."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def success(run: RunRecord) -> go.Figure:
    """Success over the curriculum in both modes with 95 % intervals, and the demonstrator's as lines."""
    figure = _figure(340, percent=True)
    for shift, (mode, name) in zip((-0.04, 0.04), MODES.items(), strict=True):
        colour, symbol, dash = _MODE_STYLE[mode]
        known = [(e, e.success(mode)) for e in run.evaluations if e.success(mode)]
        if known:
            _add_rates(figure, known, name, colour, symbol, dash, shift)
        rate = run.demonstrator.success(mode)
        if rate and known:
            ends = [-0.2, run.evaluations[-1].done + 0.2]
            line = {"color": colour, "width": 1.2, "dash": "dot"}
            figure.add_scatter(x=ends, y=[rate["success"]] * 2, mode="lines", line=line, name=f"demonstrator, {name}", hovertemplate="%{y:.1%}")
    return _stage_axis(figure, run)


def sorts(run: RunRecord) -> go.Figure:
    """Agentic success by sort of task: schemas renamed since the query was written, and ordinary bugs."""
    figure = _figure(340, percent=True)
    for shift, (sort, (name, colour, symbol)) in zip((-0.04, 0.04), _SORT_STYLE.items(), strict=True):
        known = [(e, rate) for e in run.evaluations if (rate := (e.success().get("by") or {}).get(sort)) and rate.get("success") is not None]
        if known:
            _add_rates(figure, known, name, colour, symbol, "solid", shift)
    return _stage_axis(figure, run)


def curve(run: RunRecord, key: str) -> go.Figure:
    """A quantity over the steps of every RL stage, one after the other: each step as a point, and the mean of five."""
    figure, at = _figure(250), 0
    figure.update_xaxes(title="RL step")
    for index, stage in enumerate(run.stages, 1):
        records = [record for record in run.steps_of(index) if stage["kind"] == "grpo" and record.get(key) is not None]
        if not records:
            continue
        steps, values = [at + record["step"] for record in records], [record[key] for record in records]
        colour = _MODE_STYLE.get(stage["mode"], _MODE_STYLE["agentic"])[0]
        name = f"{index} {escape(stage['name'])}"
        points = {"color": colour, "size": 4, "opacity": 0.4}
        figure.add_scatter(x=_thin(steps), y=_thin(values), mode="markers", marker=points, showlegend=False, hoverinfo="skip")
        figure.add_scatter(x=_thin(steps), y=_thin(_smooth(values)), mode="lines", line={"color": colour, "width": 2}, name=name)
        if at:
            figure.add_vline(at + 0.5, line={"color": "var(--line)", "width": 1})
        at = steps[-1]
    return figure


def loss(run: RunRecord) -> go.Figure:
    """The imitation stages' loss on the policy's own tokens."""
    figure, at = _figure(250), 0
    figure.update_xaxes(title="imitation step")
    colours = ("var(--blue)", "var(--violet)", "var(--teal)")
    for index, stage in enumerate(run.stages, 1):
        records = [record for record in run.steps_of(index) if stage["kind"] == "sft" and record.get("own_loss") is not None]
        if records:
            line = {"color": colours[index % len(colours)], "width": 2}
            steps = _thin([at + record["step"] for record in records])
            figure.add_scatter(
                x=steps, y=_thin([record["own_loss"] for record in records]), mode="lines", line=line, name=f"{index} {escape(stage['name'])}"
            )
            if at:
                figure.add_vline(at + 0.5, line={"color": "var(--line)", "width": 1})
            at += records[-1]["step"]
    figure.update_yaxes(type="log")  # it falls by orders of magnitude
    return figure


def outcomes(run: RunRecord) -> go.Figure:
    """How agentic episodes on held-out tasks ended, evaluation by evaluation."""
    known = [e for e in [*run.evaluations, run.demonstrator] if e.rates.get("agentic", {}).get("outcomes")]
    counts = [e.rates["agentic"]["outcomes"] for e in known]
    figure = _figure(90 + 34 * len(known), bars=True, percent=True)
    figure.update_xaxes(range=[0, 1])
    for code in outcome_codes(counts):
        shares = [count.get(code, 0) / max(1, sum(count.values())) for count in counts]
        _add_bar(figure, code.replace("_", " "), shares, known, OUTCOME_COLOURS.get(code, "var(--faint)"), ".0%")
    return figure


def outcome_codes(counts: list[dict[str, int]]) -> list[str]:
    """All codes that occur, success first, then the most frequent."""
    total: Counter[str] = sum(map(Counter, counts), Counter())
    return sorted(total, key=lambda code: (code != "correct", -total[code], code))


def time(run: RunRecord) -> go.Figure:
    """Where the seconds of each stage went."""
    stages = [(index, stage) for index, stage in enumerate(run.stages, 1) if stage.get("time")]
    figure = _figure(100 + 34 * len(stages), bars=True)
    figure.update_xaxes(title="seconds")
    rows = [Evaluation(index, f"{index} {stage['name']}", {}) for index, stage in stages]
    for part in PARTS:
        seconds = [stage["time"].get(part, 0.0) for _, stage in stages]
        if any(seconds):
            _add_bar(figure, part, seconds, rows, PART_COLOURS[part], ",.0f")
    return figure


def _figure(height: int, *, percent: bool = False, bars: bool = False) -> go.Figure:
    """An empty figure in the page's looks."""
    axis = {"gridcolor": "var(--line)", "linecolor": "var(--line)", "zeroline": False, "fixedrange": True, "automargin": True, "title": {"standoff": 8}}
    value = axis | ({"tickformat": ".0%", "rangemode": "tozero"} if percent else {})
    layout = go.Layout(
        height=height, template="none", paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", barmode="stack", bargap=0.35,
        font={"family": "system-ui, sans-serif", "size": 12, "color": "var(--muted)"}, margin={"l": 40, "r": 12, "t": 12, "b": 24},
        hovermode="closest" if bars else "x", hoverlabel={"bgcolor": "var(--card)", "bordercolor": "var(--line)", "font": {"color": "var(--ink)"}},
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        xaxis=(value if bars else axis | {"showgrid": False}), yaxis=(axis | {"autorange": "reversed", "showgrid": False} if bars else value),
    )  # fmt: skip
    return go.Figure(layout=layout)


def _stage_axis(figure: go.Figure, run: RunRecord) -> go.Figure:
    done = [e.done for e in run.evaluations]
    figure.update_xaxes(tickangle=0, tickvals=done, ticktext=[_wrapped(e.name, 9) for e in run.evaluations], range=[-0.3, max(done, default=0) + 0.3])
    return figure


def _wrapped(name: str, width: int) -> str:
    return "<br>".join(map(escape, wrap(name, width, break_on_hyphens=False)))


def _add_rates(
    figure: go.Figure, known: list[tuple[Evaluation, dict[str, Any]]], name: str, colour: str, symbol: str, dash: str, shift: float
) -> None:
    """A line of success rates, with intervals where there are any. `shift` keeps the whiskers of two lines apart."""
    rates = [rate for _, rate in known]
    below = [rate["success"] - low if (low := rate.get("low")) is not None else 0.0 for rate in rates]
    above = [high - rate["success"] if (high := rate.get("high")) is not None else 0.0 for rate in rates]
    figure.add_scatter(
        x=[e.done + shift for e, _ in known], y=[rate["success"] for rate in rates], name=name, mode="lines+markers",
        line={"color": colour, "width": 2, "dash": dash}, marker={"color": colour, "symbol": symbol, "size": 8}, hovertemplate="%{y:.1%}",
        error_y={"array": above, "arrayminus": below, "color": colour, "thickness": 1.2, "width": 4},
    )  # fmt: skip


def _add_bar(figure: go.Figure, name: str, values: list[float], rows: list[Evaluation], colour: str, form: str) -> None:
    """One part of stacked bars, a value a row, written into the bar where it is long enough to hold it."""
    longest = max(1e-9, *(sum(bar.x[i] for bar in figure.data) + values[i] for i in range(len(values))))
    texts = [format(value, form) if value > 0.07 * longest else "" for value in values]
    figure.add_bar(
        y=[_wrapped(row.name, 14) for row in rows], x=values, name=escape(name), orientation="h", marker={"color": colour}, text=texts, textposition="inside",
        insidetextanchor="middle", textangle=0, textfont={"color": "var(--card)", "size": 11}, hovertemplate=f"%{{x:{form}}}", constraintext="none",
    )  # fmt: skip


def _smooth(values: list[float], window: int = 5) -> list[float]:
    """The centred mean of `window` values, of fewer at the ends."""
    half = window // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _thin(values: list[float]) -> list[float]:
    """At most `_POINTS` values: means of equal blocks, rounded to what a chart can show."""
    block = -(-len(values) // _POINTS)
    return [round(fmean(values[at : at + block]), 5) for at in range(0, len(values), block or 1)]
