"""Declarative checks of an instance (docs/evaluation.md): each looks at one prediction's single run, or through a fresh connection at what it left.

A check of a state runs on that state; what its own `before` statements or its query change is dropped again afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from savepoint.envs.sql.compare import Rules, difference
from savepoint.envs.sql.lexer import has_keyword
from savepoint.envs.sql.run import Run, Runner, status_failure
from savepoint.envs.sql.verdict import Outcome, Verdict
from savepoint.state import AnySession, ExecResult

# Statuses by which a statement may answer a check: the others are faults of the prediction (it filled its quota, it made things slow) or ours.
_OVER = {"timeout": "timeout", "too_big": "too_big", "full": "too_big", "infra": "infra"}


class BadCheck(Exception):
    """A check that cannot be carried out: the instance is invalid. `str()` names the field."""


@dataclass(frozen=True, slots=True)
class Examined:
    """What checks look at. session: shows the prediction's end state, on a connection of its own. gold_difference: how the prediction's rows differ from the
    gold's under some rules (None: they do not). issue_steps: the VM steps of the issue SQL."""

    runner: Runner
    session: AnySession
    run: Run
    gold_difference: Callable[[Rules], str | None]
    issue_steps: Callable[[], int]


def run_check(check: Mapping[str, Any], examined: Examined) -> Verdict | None:
    """None when the check holds, else the verdict. BadCheck when it makes no sense."""
    kind = check["type"]
    if kind not in _KINDS:
        raise BadCheck(f"a check of type {kind!r}: must be one of {', '.join(_KINDS)}")
    return _KINDS[kind](check, examined)


def _result(check: Mapping[str, Any], examined: Examined) -> Verdict | None:
    order, multiset = _field(check, "order", bool, None), _field(check, "multiset", bool, None)
    places = decimal_places(check.get("places"))
    found = examined.gold_difference(Rules(order, True if multiset is None else multiset, places))
    return None if found is None else Verdict("wrong_result", found)


def _state(check: Mapping[str, Any], examined: Examined) -> Verdict | None:
    query, expect = _field(check, "query", str), _field(check, "expect", list)
    before = _field(check, "before", list, [])
    if not all(isinstance(row, list) for row in expect):
        raise BadCheck("expect of a state check must be a list of rows, each a list")
    try:
        for sql in before:
            result = examined.runner.ask(examined.session, sql)
            if result.status != "ok":
                return _failed(result, "wrong_state", f"{_short(sql)}: ")
        result = examined.runner.ask(examined.session, query)
    finally:
        _undo(examined)
    if result.status != "ok":
        return _failed(result, "wrong_state", f"{_short(query)}: ")
    wanted = [tuple(int(cell) if isinstance(cell, bool) else cell for cell in row) for row in expect]
    found = difference(result.rows, wanted, ordered=True, decimal=decimal_places(check.get("places")))
    return None if found is None else Verdict("wrong_state", f"{_short(query)}: {found}")


def _raises(check: Mapping[str, Any], examined: Examined) -> Verdict | None:
    query, error = _field(check, "query", str), _field(check, "error", bool, True)
    try:
        result = examined.runner.ask(examined.session, query)
    finally:
        _undo(examined)
    if result.status in _OVER:
        return _failed(result, "wrong_state", f"{_short(query)}: ")
    raised = result.status != "ok"
    if raised == error:
        return None
    return Verdict("wrong_state", f"{_short(query)}: " + (f"must not fail: {result.error}" if raised else "must fail, and does not"))


def _uses(check: Mapping[str, Any], examined: Examined) -> Verdict | None:
    lacking = [word for word in _keywords(check) if not has_keyword(examined.run.statements, word)]
    return Verdict("wrong_form", f"must use {lacking[0]}") if lacking else None


def _forbids(check: Mapping[str, Any], examined: Examined) -> Verdict | None:
    used = [word for word in _keywords(check) if has_keyword(examined.run.statements, word)]
    return Verdict("wrong_form", f"must not use {used[0]}") if used else None


def _columns(check: Mapping[str, Any], examined: Examined) -> Verdict | None:
    names = _field(check, "names", list)
    if examined.run.rows is None:
        return Verdict("wrong_form", "no statement gives rows")
    if list(examined.run.columns) != names:
        return Verdict("wrong_form", f"columns are {', '.join(examined.run.columns)[:300]}, expected {', '.join(map(str, names))}")
    return None


def _plan(check: Mapping[str, Any], examined: Examined) -> Verdict | None:
    query = check.get("query") or examined.run.query
    if not query:
        return Verdict("wrong_form", "no statement gives rows, so none has a plan to look at")
    result = examined.runner.ask(examined.session, f"EXPLAIN QUERY PLAN {query}", readonly=True)
    if result.status != "ok":
        return _failed(result, "wrong_form", "EXPLAIN QUERY PLAN: ")
    plan = " | ".join(str(row[3]) for row in result.rows)
    try:
        for pattern in _field(check, "must", list, []):
            if not re.search(pattern, plan):
                return Verdict("wrong_form", f"the plan must show {pattern!r}: {plan[:300]}")
        for pattern in _field(check, "must_not", list, []):
            if re.search(pattern, plan):
                return Verdict("wrong_form", f"the plan must not show {pattern!r}: {plan[:300]}")
    except re.error as error:
        raise BadCheck(f"a pattern of a plan check: {error}") from None
    return None


def _vm_steps(check: Mapping[str, Any], examined: Examined) -> Verdict | None:
    ratio, steps, base = _field(check, "max_ratio", (int, float)), examined.run.vm_steps, examined.issue_steps()
    if steps <= ratio * base:
        return None
    return Verdict("wrong_form", f"{steps:,} VM steps, more than {ratio:g} times the {base:,} of the issue SQL")


_KINDS: dict[str, Callable[[Mapping[str, Any], Examined], Verdict | None]] = {
    "result": _result, "state": _state, "raises": _raises, "uses": _uses, "forbids": _forbids, "columns": _columns, "plan": _plan, "vm_steps": _vm_steps,
}  # fmt: skip
_REQUIRED: Any = object()


def _field(check: Mapping[str, Any], name: str, kind: Any, default: Any = _REQUIRED) -> Any:
    value = check.get(name)
    if value is None and default is not _REQUIRED:
        return default
    if not isinstance(value, kind):
        raise BadCheck(f"{name} of a {check['type']} check must not be {value!r}")
    return value


def _keywords(check: Mapping[str, Any]) -> list[str]:
    words = _field(check, "keywords", list)
    if not all(isinstance(word, str) and word.strip() for word in words):
        raise BadCheck(f"keywords of a {check['type']} check must be texts, not {words!r}")
    return words


def decimal_places(value: object) -> int | None:
    """Digits that matter of a REAL, from `decimal` or `places`: null, absent and -1 are none; of a list the first counts."""
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _failed(result: ExecResult, otherwise: Outcome, where: str) -> Verdict:
    """A check's own statement did not run: over a limit, or else as the check says."""
    verdict = status_failure(result)
    return Verdict(verdict.outcome if result.status in _OVER else otherwise, where + verdict.detail)


def _undo(examined: Examined) -> None:
    assert examined.run.end is not None
    examined.session.restore(examined.run.end)


def _short(sql: str) -> str:
    text = " ".join(sql.split())
    return text if len(text) <= 120 else text[:120] + "…"
