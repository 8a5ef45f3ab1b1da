"""Figures as people read them, and the sentences of the report: what was trained, how far it came, and where the gain comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from savepoint.evals.run_record import Evaluation, RunRecord

_NBSP = "\u00a0"


def percent(share: float | None) -> str:
    """`41.5 %`; a dash for what was not measured."""
    return "–" if share is None else f"{100 * share:.1f}{_NBSP}%"


def interval(rate: Mapping[str, Any]) -> str:
    """`36.6 – 46.5 %`; empty without one."""
    return "" if rate.get("low") is None or rate.get("high") is None else f"{100 * rate['low']:.1f}{_NBSP}–{_NBSP}{100 * rate['high']:.1f}{_NBSP}%"


def points(change: float) -> str:
    """A difference of two rates: `+32.5 points`."""
    return f"{'+' if change > 0 else '−' if change < 0 else '±'}{abs(100 * change):.1f} points"


def size(count: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"


def policy(run: RunRecord) -> str:
    """Who learns, in a few words."""
    settings = (run.summary.get("settings") or {}).get("policy") or {}
    if settings.get("model"):
        return f"the model {settings['model']}"
    architecture = str(settings.get("architecture") or "").replace("_", "-")
    return f"a small {architecture} policy that starts from random weights" if architecture else "a policy"


def lede(run: RunRecord) -> str:
    """The run in three sentences."""
    name = policy(run)
    database = (run.summary.get("database") or {}).get("name") or "its database"
    stages = len(run.stages)
    text = f"{name[0].upper()}{name[1:]} was trained to repair SQL on the live database {database}"
    minutes = (run.summary.get("seconds") or 0.0) / 60
    text += f", in {stages} stage{'s' * (stages != 1)} and {minutes:.1f} minutes." if stages else "."
    first, last = (e.success() if e else {} for e in (run.before, run.final))
    if first and last and run.before and run.final:
        text += f" With tools, it solved {percent(first['success'])} of held-out tasks {run.before.after} and {percent(last['success'])} {run.final.after}."
    elif first and run.before:
        text += f" With tools, it solved {percent(first['success'])} of held-out tasks {run.before.after}."
    teacher = run.demonstrator.success()
    return text + (f" The demonstrator that it first imitated, imperfect on purpose, solves {percent(teacher['success'])}." if teacher else "")


def cards(run: RunRecord) -> list[dict[str, str]]:
    """The headline figures: agentic success before and after RL, and the demonstrator's."""
    out = []
    for evaluation, tone in ((run.before, ""), (run.final, "accent")):
        if evaluation and evaluation.success():
            out.append(_card(f"Agentic success {evaluation.after}", evaluation.success(), tone))
    first, last = (e.success() if e else {} for e in (run.before, run.final))
    if first and last:
        out[-1]["change"] = points(last["success"] - first["success"])
    teacher = run.demonstrator.success()
    if teacher:
        out.append(_card("The demonstrator's own", teacher, "teacher"))
        if last:
            out[-1]["change"] = f"the policy: {points(last['success'] - teacher['success'])}"
    return out


def _card(label: str, rate: Mapping[str, Any], tone: str) -> dict[str, str]:
    span = interval(rate)
    note = ", ".join(filter(None, (f"95 % interval {span}" if span else "", f"{rate['n']:,} episodes")))
    return {"label": label, "value": percent(rate["success"]), "note": note, "tone": tone, "change": ""}


def notices(run: RunRecord) -> list[str]:
    """What a reader must know before any figure."""
    out = []
    if run.summary.get("interrupted"):
        shown = f"up to the evaluation {run.evaluations[-1].after}" if run.evaluations else "and the policy has not been evaluated yet"
        out.append(f"This run was interrupted. The report shows what there is, {shown}; savepoint run --resume goes on.")
    if run.summary.get("profile"):
        out.append(f"Run with the profile {run.summary['profile']!r}: its figures are not those of the full recipe.")
    return out


def gain_parts(run: RunRecord, behaviour: Mapping[int | str, Mapping[str, Mapping[str, Any]]]) -> list[dict[str, str]]:
    """The two parts of what RL added to agentic success: un-learning a habit (plain bugs) and learning to look (renamed schemas).

    behaviour: by number of stages done and for "demonstrator", what `transcripts.behaviour` counts. Empty while RL has not been evaluated.
    """
    gain, before, after = run.summary.get("gain"), run.before, run.final
    if not gain or before is None or after is None:
        return []
    both = [part for part in (gain.get("habit"), gain.get("looking")) if part is not None]
    whole = gain["agentic"] if gain["agentic"] > 0 and min(both, default=0) >= 0 else None
    out = []
    for key, sort, title in (("habit", "bug", "Un-learning a habit"), ("looking", "renamed", "Learning to look")):
        if gain.get(key) is None:
            continue
        was, now, demonstrated = (behaviour.get(k, {}).get(sort, {}) for k in (before.done, after.done, "demonstrator"))
        tell = _habit if key == "habit" else _looking
        share = f"{100 * gain[key] / whole:.0f}{_NBSP}% of the gain" if whole else "of the change"
        out.append({"title": title, "value": points(gain[key]), "share": share, "text": tell(before, after, was, now, demonstrated)})
    return out


def _habit(before: Evaluation, after: Evaluation, was: Mapping[str, Any], now: Mapping[str, Any], demonstrated: Mapping[str, Any]) -> str:
    text = f"{_share_of(after, 'bug')} of the held-out tasks carry an ordinary bug, and the prompt holds all that it takes to repair it. "
    text += "Here the demonstrator has a bad habit: it hands the query back unchanged"
    if None not in (demonstrated.get("unchanged"), was.get("unchanged"), now.get("unchanged")):
        text += f" ({percent(demonstrated['unchanged'])} of its submissions). The policy did so in {percent(was['unchanged'])} of its own "
        text += f"{before.after}, and in {percent(now['unchanged'])} {after.after}"
    return f"{text}. {_success_of('bug', before, after)}"


def _looking(before: Evaluation, after: Evaluation, was: Mapping[str, Any], now: Mapping[str, Any], demonstrated: Mapping[str, Any]) -> str:
    text = f"In {_share_of(after, 'renamed')} of the held-out tasks a name of the schema has changed since the query was written. "
    text += "The prompt does not tell the new one: the agent can guess it, or read it from the live database"
    if None not in (was.get("looked"), now.get("looked")):
        text += f". It ran a query first in {percent(was['looked'])} of these episodes {before.after}, in {percent(now['looked'])} {after.after}"
    if None not in (now.get("when_looked"), now.get("when_not")):
        text += f"; at the end it solved {percent(now['when_looked'])} of those where it looked and {percent(now['when_not'])} of those where it did not"
    return f"{text}. {_success_of('renamed', before, after)}"


def _part(evaluation: Evaluation, sort: str, mode: str = "agentic") -> Mapping[str, Any]:
    found: Mapping[str, Any] = (evaluation.success(mode).get("by") or {}).get(sort) or {}
    return found


def _share_of(evaluation: Evaluation, sort: str) -> str:
    return f"{100 * _part(evaluation, sort).get('n', 0) / max(1, evaluation.success().get('n', 0)):.0f}{_NBSP}%"


def _success_of(sort: str, before: Evaluation, after: Evaluation) -> str:
    text = f"Success on such tasks: {percent(_part(before, sort).get('success'))} → {percent(_part(after, sort).get('success'))}"
    alone = [_part(e, sort, "single_turn").get("success") for e in (before, after)]
    return text + (f"; in a single turn, without the database, {percent(alone[0])} → {percent(alone[1])}." if None not in alone else ".")
