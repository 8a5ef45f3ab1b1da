"""The names that published Python tests use, implemented anew: nothing is cut out of SQL by searching text, and nothing runs twice on one database.

A helper that is given the prediction's or the gold's statements (also after `remove_*`) answers from a run in a fork of the task image; anything else runs on
the test's own connection.
"""

from __future__ import annotations

import datetime
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from savepoint.envs.sql import lexer
from savepoint.state.sqlite.split import split_statements

Rows = list[tuple[Any, ...]]
Answer = tuple[Rows | None, bool, bool]
"""Rows of the last statement that has any, whether a statement failed, whether it ran out of time."""


class Helpers:
    """The helpers of one test.

    statements: the prediction's and the gold's, which `rerun` runs in a fork of the task image: it gives their answer and their VM steps.
    """

    def __init__(self, statements: Sequence[Sequence[str]], rerun: Callable[[Sequence[str]], tuple[Answer, int]]) -> None:
        self._known = {tuple(part) for part in statements}
        self._rerun = rerun

    def namespace(self) -> dict[str, Any]:
        """What a test finds among its globals."""
        names = (
            self.execute_queries, self.ex_base, self.remove_comments, self.remove_distinct, self.remove_round, self.performance_compare_by_qep,
            preprocess_results, check_sql_function_usage,
        )  # fmt: skip
        return {function.__name__: function for function in names} | {"date": datetime.date, "datetime": datetime, "Decimal": Decimal, "sqlite3": sqlite3}

    def execute_queries(self, queries: Any, db_path: str, conn: sqlite3.Connection, *_: Any, **__: Any) -> Answer:
        """Run statements in order up to the first that fails: (rows of the last that has any, whether one failed, whether one timed out)."""
        statements = _listed(queries)
        if tuple(statements) in self._known:
            return self._rerun(statements)[0]
        rows: Rows | None = None
        for sql in (part for text in statements for part in split_statements(text)):
            try:
                cursor = conn.execute(sql)
                found = cursor.fetchall()
            except sqlite3.Error as error:
                return rows, True, "interrupted" in str(error)
            rows = found if cursor.description else rows
        return rows, False, False

    def ex_base(self, pred_sqls: Any, sol_sqls: Any, db_path: str, conn: sqlite3.Connection, conditions: Mapping[str, Any] | None = None, *_: Any) -> int:
        """BIRD-CRITIC's soft EX: 1 when both give rows, and these are equal as sets (as lists where `conditions` say order); floats to two places."""
        if not pred_sqls or not sol_sqls:
            return 0
        found, failed, late = self.execute_queries(pred_sqls, db_path, conn)
        expected, gold_failed, gold_late = self.execute_queries(sol_sqls, db_path, conn)
        if failed or late or gold_failed or gold_late or not found or not expected:
            return 0
        left, right = preprocess_results(found), preprocess_results(expected)
        return int(left == right if (conditions or {}).get("order") else set(left) == set(right))

    def performance_compare_by_qep(self, old_sqls: Any, sol_sqls: Any, db_path: str, conn: sqlite3.Connection, *_: Any) -> int:
        """1 when `sol_sqls` take fewer steps of SQLite's virtual machine than `old_sqls`, each in a fork of the task image; no clock, no plan's text."""
        old, old_steps = self._rerun(_listed(old_sqls))
        new, new_steps = self._rerun(_listed(sol_sqls))
        return int(not (old[1] or new[1]) and new_steps < old_steps)

    def remove_comments(self, sqls: Any) -> Any:
        return self._rewrite(lexer.remove_comments, sqls)

    def remove_distinct(self, sqls: Any) -> Any:
        return self._rewrite(lexer.remove_distinct, sqls)

    def remove_round(self, sqls: Any) -> Any:
        return self._rewrite(lexer.remove_round, sqls)

    def _rewrite(self, change: Callable[[str], str], sqls: Any) -> Any:
        """The texts changed one by one; what was the prediction's or the gold's stays so."""
        statements = _listed(sqls)
        changed = [change(sql) for sql in statements]
        if tuple(statements) in self._known:
            self._known.add(tuple(changed))
        return changed[0] if isinstance(sqls, str) else changed


def preprocess_results(results: Any, decimal_places: int = 2) -> Any:
    """Rows ready to be compared as published: dates as YYYY-MM-DD, floats and Decimals rounded, dicts and lists as JSON."""
    return [tuple(_plain(value, decimal_places) for value in row) for row in results or ()]


def _plain(value: Any, places: int) -> Any:
    if isinstance(value, datetime.date):
        return value.strftime("%Y-%m-%d")
    if isinstance(value, float | Decimal):
        return round(float(value), places)
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value


def check_sql_function_usage(sqls: Any, required_keywords: Any) -> int:
    """1 when each keyword stands in the statements, outside of comments and literals."""
    statements, keywords = _listed(sqls), _listed(required_keywords)
    return int(bool(statements) and all(lexer.has_keyword(statements, keyword) for keyword in keywords))


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [str(item) for item in value or ()]
