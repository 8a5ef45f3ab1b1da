"""Scripts cut into statements where SQLite itself cuts them."""

from __future__ import annotations

import re

import apsw

# What a semicolon can hide in. An unterminated string or comment runs to the end, as in SQLite's tokenizer.
_TOKEN = re.compile(r"'(?:[^']|'')*(?:'|\Z)|\"(?:[^\"]|\"\")*(?:\"|\Z)|`(?:[^`]|``)*(?:`|\Z)|\[[^\]]*(?:\]|\Z)|--[^\n]*|/\*.*?(?:\*/|\Z)|;", re.DOTALL)
_NOTHING = re.compile(r"(?>[\s;\ufeff]|--[^\n]*|/\*.*?(?:\*/|\Z))*+", re.DOTALL)  # atomic: a comment must not stretch over what follows it


def split_statements(sql: str) -> list[str]:
    """The statements of a script, each with its own text (comments before it and the `;` included), without surrounding blanks.

    Pieces of nothing but blanks, semicolons and comments are left out. The bodies of triggers stay whole (`sqlite3_complete` decides).
    """
    statements, start = [], 0
    for token in _TOKEN.finditer(sql):
        if token.group() == ";" and ends_statement(sql[start : token.end()]):
            statements.append(sql[start : token.end()])
            start = token.end()
    statements.append(sql[start:])
    return [text.strip() for text in statements if not _NOTHING.fullmatch(text)]


def bare_statement(statement: str) -> str:
    """A statement without its `;` and the blanks after it, as it may stand inside parentheses on lines of its own."""
    return statement.rstrip(" \t\n\r\f;")


def ends_statement(text: str) -> bool:
    """Whether SQLite takes the text for complete statements: it ends with a `;` that is no part of a string, a comment or a trigger's body."""
    try:
        return apsw.complete(text)
    except (ValueError, UnicodeEncodeError):  # a NUL or a lone surrogate: SQLite will refuse the statement, wherever it ends
        return True
