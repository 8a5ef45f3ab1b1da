"""SQL text as SQLite's tokenizer sees it, and what graders do with it: find words, cut clauses, take DISTINCT or ROUND out.

Every change is made at a token's place in the original text. What a literal, a quoted name or a comment holds is never touched, and text that no
parser of ours knows stays as it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["word", "name", "string", "number", "symbol", "comment"]

_TOKEN = re.compile(
    r"""(?P<space>[ \t\n\f\r\ufeff]+)
      | (?P<comment>--[^\n]*|/\*.*?(?:\*/|\Z))
      | (?P<string>[xX]?'(?:[^']|'')*(?:'|\Z))
      | (?P<name>"(?:[^"]|"")*(?:"|\Z)|`(?:[^`]|``)*(?:`|\Z)|\[[^\]]*(?:\]|\Z))
      | (?P<number>(?:0[xX][0-9a-fA-F_]+|(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][+-]?[0-9_]+)?))
      | (?P<word>[^\W\d][\w$]*|[?@:$\#][\w$]*)
      | (?P<symbol>->>|->|\|\||<<|>>|<=|>=|<>|==|!=|.)""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of SQL at [start, end) of its text. depth: parentheses open around it, its own not counted. key: what it is compared by."""

    kind: Kind
    text: str
    start: int
    end: int
    depth: int

    @property
    def key(self) -> tuple[str, str]:
        return (self.kind, self.text.upper() if self.kind in ("word", "number") else self.text)

    def is_word(self, *words: str) -> bool:
        return self.kind == "word" and self.text.upper() in words


def tokens(sql: str) -> list[Token]:
    """The tokens of a statement or script, without blanks and comments."""
    return [token for token in _scan(sql) if token.kind != "comment"]


def _scan(sql: str) -> Iterator[Token]:
    depth = 0
    for match in _TOKEN.finditer(sql):
        kind = match.lastgroup
        if kind == "space":
            continue
        text = match.group()
        if kind == "symbol" and text == ")":
            depth = max(0, depth - 1)
        yield Token(kind, text, match.start(), match.end(), depth)  # type: ignore[arg-type]
        if kind == "symbol" and text == "(":
            depth += 1


def has_keyword(statements: Sequence[str], keyword: str) -> bool:
    """Whether any statement holds the keyword, of one or several tokens (`JOIN`, `GROUP BY`, `||`), outside of comments, literals and quoted names."""
    wanted = [token.key for token in tokens(keyword)]
    for sql in statements:
        found = [token.key for token in tokens(sql)]
        if wanted and any(found[i : i + len(wanted)] == wanted for i in range(len(found) - len(wanted) + 1)):
            return True
    return False


def mentions(statements: Sequence[str], *words: str) -> bool:
    """Whether a statement names one of the words in any way that SQLite would take for an identifier (quoted or not; strings too, which it may)."""
    folded = [sql.lower() for sql in statements]
    return any(word in sql for word in words for sql in folded)


# ---------------------------------------------------------------------- the clauses of a query


@dataclass(frozen=True, slots=True)
class Clauses:
    """Where the outermost clauses of a query stand. body: the text before ORDER BY and LIMIT.

    order: the terms of ORDER BY; limit: the text of LIMIT with its OFFSET, or None. select_end: where a further result column can be put in, None for a
    compound query, a VALUES list and a DISTINCT one.
    """

    body: str
    order: tuple[OrderTerm, ...]
    limit: str | None
    select_end: int | None
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OrderTerm:
    """A term of ORDER BY: its expression, and what stands behind it (COLLATE is part of the expression; ASC, DESC, NULLS FIRST or LAST is not)."""

    expression: str
    direction: str


def clauses(statement: str) -> Clauses | None:
    """The outermost clauses of a SELECT (or VALUES, or WITH ... SELECT); None for any other statement."""
    parts = tokens(statement)
    while parts and parts[-1].text == ";":
        parts.pop()
    if not parts or not parts[0].is_word("SELECT", "VALUES", "WITH"):
        return None
    outer = [token for token in parts if token.depth == 0]
    if any(token.is_word("INSERT", "REPLACE", "UPDATE", "DELETE") for token in outer[:1]) or _writes(outer):
        return None
    end = parts[-1].end
    limit = next((token.start for token in outer if token.is_word("LIMIT")), end)
    order = next((i for i, token in enumerate(outer[:-1]) if token.is_word("ORDER") and outer[i + 1].is_word("BY")), None)
    terms: tuple[OrderTerm, ...] = ()
    body_end = limit
    if order is not None:
        body_end = outer[order].start
        inside = [token for token in parts if outer[order + 1].end <= token.start < limit]
        terms = tuple(_term(statement, piece) for piece in _split(inside))
    select_end, outputs = _outputs(statement, parts, outer, body_end)
    return Clauses(statement[:body_end], terms, statement[limit:end] if limit < end else None, select_end, outputs)


def _writes(outer: Sequence[Token]) -> bool:
    """Whether a WITH introduces INSERT, UPDATE or DELETE: then that word comes before any outer SELECT."""
    first = next((token for token in outer if token.is_word("SELECT", "VALUES", "INSERT", "REPLACE", "UPDATE", "DELETE")), None)
    return first is None or not first.is_word("SELECT", "VALUES")


def _outputs(statement: str, parts: Sequence[Token], outer: Sequence[Token], body_end: int) -> tuple[int | None, tuple[str, ...]]:
    """Where the result columns of a simple SELECT end, and their texts."""
    if any(token.is_word("UNION", "INTERSECT", "EXCEPT", "VALUES") for token in outer):
        return None, ()
    start = next(i for i, token in enumerate(outer) if token.is_word("SELECT"))
    if outer[start + 1 : start + 2] and outer[start + 1].is_word("DISTINCT"):
        return None, ()
    stop = body_end
    for i in range(start + 1, len(outer)):
        token = outer[i]
        if token.is_word("WHERE", "GROUP", "HAVING", "WINDOW") or (token.is_word("FROM") and not outer[i - 1].is_word("DISTINCT")):
            stop = min(stop, token.start)
            break
    inside = [token for token in parts if outer[start].end <= token.start < stop]
    if not inside:
        return None, ()
    return inside[-1].end, tuple(statement[piece[0].start : piece[-1].end] for piece in _split(inside))


def _split(parts: Sequence[Token]) -> list[list[Token]]:
    """Tokens cut at the commas of depth 0."""
    pieces: list[list[Token]] = [[]]
    for token in parts:
        if token.depth == 0 and token.text == ",":
            pieces.append([])
        else:
            pieces[-1].append(token)
    return [piece for piece in pieces if piece]


def _term(statement: str, piece: Sequence[Token]) -> OrderTerm:
    cut = len(piece)
    while cut > 1 and piece[cut - 1].depth == 0 and piece[cut - 1].is_word("ASC", "DESC", "NULLS", "FIRST", "LAST"):
        cut -= 1
    return OrderTerm(statement[piece[0].start : piece[cut - 1].end], statement[piece[cut].start : piece[-1].end] if cut < len(piece) else "")


# ---------------------------------------------------------------------- taking things out


def remove_comments(sql: str) -> str:
    """The text with each comment replaced by a blank, trimmed."""
    pieces, at = [], 0
    for token in _scan(sql):
        if token.kind == "comment":
            pieces += [sql[at : token.start], " "]
            at = token.end
    return ("".join(pieces) + sql[at:]).strip()


def remove_distinct(sql: str) -> str:
    """The text without the DISTINCT of each SELECT. One inside an aggregate stays: it changes what is counted."""
    found = tokens(sql)
    pieces, at = [], 0
    for before, token in zip(found, found[1:], strict=False):
        if token.is_word("DISTINCT") and before.is_word("SELECT"):
            pieces += [sql[at : token.start], " "]
            at = token.end
    return "".join(pieces) + sql[at:]


def remove_round(sql: str) -> str:
    """The text with each call `ROUND(x)` or `ROUND(x, n)` replaced by `(x)`, also inside another one."""
    found = tokens(sql)
    drop: list[tuple[int, int]] = []
    for i, token in enumerate(found[:-1]):
        opened = found[i + 1]
        if not (token.is_word("ROUND") and opened.text == "(" and opened.kind == "symbol" and not (i and found[i - 1].text == ".")):
            continue
        inside = [t for t in found[i + 2 :] if t.depth >= opened.depth]
        close = next((t for t in inside if t.text == ")" and t.kind == "symbol" and t.depth == opened.depth), None)
        if close is None or close is inside[0]:
            continue
        comma = next((t for t in inside if t.text == "," and t.kind == "symbol" and t.depth == opened.depth + 1 and t.start < close.start), None)
        drop.append((token.start, opened.start))
        if comma is not None:
            drop.append((comma.start, close.start))
    pieces, at = [], 0
    for start, end in sorted(drop):
        if start < at:  # inside a second argument that is gone already
            continue
        pieces.append(sql[at:start])
        at = end
    return "".join(pieces) + sql[at:]
