"""What the agent is told: the system line, the user's issue, and how an answer is read from text when there is only one turn."""

from __future__ import annotations

import re
from typing import Literal

from savepoint.envs.messages import Message
from savepoint.envs.sql.tasks import Task

PromptStyle = Literal["brief", "full"]

_FULL = {
    "agentic": (
        "You are an expert in SQLite. A user needs your help with a live database. Look at it with execute_sql as often as you need (what you change there "
        "stays until the end of this conversation), then hand in the final SQL with submit_solution. It will be run once on a fresh copy of the database."
    ),
    "single_turn": (
        "You are an expert in SQLite. A user needs your help with a database. Think, then give the final SQL, either by calling submit_solution or in one "
        "```sql block at the end of your message. It will be run once on a fresh copy of the database."
    ),
}
_BRIEF = {"agentic": "tools", "single_turn": "answer"}
_FENCE = re.compile(r"```(?:sql|sqlite)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def system_prompt(mode: str, style: PromptStyle) -> Message:
    """The instructions; one word in the brief style, whose readers learn what it means."""
    return Message("system", (_BRIEF if style == "brief" else _FULL)[mode])


def user_prompt(task: Task, issue_result: str | None, schema: str | None, style: PromptStyle) -> Message:
    """The user's text, the documented schema (full style), the query that failed, and what it gave. `quoted` marks that query."""
    text = task.query
    if style == "full":
        if task.evidence:
            text += f"\n\nHint: {task.evidence}"
        if schema:
            text += f"\n\nThe schema:\n{schema}"
    if not task.issue_sql:
        return Message("user", text)
    gap = "\n" if style == "brief" else "\n\n"
    before = f"{text}{gap}sql: "
    issue = ";\n".join(sql.rstrip().rstrip(";") for sql in task.issue_sql)
    return Message("user", f"{before}{issue}{gap}result: {issue_result}", quoted=(len(before), len(before) + len(issue)))


def answer_in_text(text: str) -> list[str] | None:
    """The SQL of the last fenced block of an answer in text; None when there is none."""
    blocks = _FENCE.findall(text)
    return [blocks[-1].strip()] if blocks and blocks[-1].strip() else None
