"""How `savepoint shell` shows a tree of states and what differs between two of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from savepoint.state import TreeNode
from savepoint.state.sqlite.diff import TableDiff

# What is shown of a tree at most; the rest is counted.
_LINES, _WIDE, _DEEP = 200, 40, 24
_CELL = 60  # characters of a value in a sample row


def tree_text(nodes: Sequence[TreeNode], title: str, current: TreeNode | None, page_size: int) -> str:
    """A tree as lines with guides. A part that is too deep or wide to read is given as a count."""
    from rich.text import Text
    from rich.tree import Tree

    children: dict[int | None, list[TreeNode]] = {}
    for node in nodes:
        children.setdefault(node.parent, []).append(node)
    sizes = _sizes(nodes)
    root = nodes[0]
    shown = Tree(Text(title, no_wrap=True))
    stack, lines = [(root, shown)], 1
    while stack:
        node, place = stack.pop()
        below = children.get(node.id, [])
        fits = [] if node.depth >= _DEEP else below[: min(_WIDE, max(0, _LINES - lines))]
        places = [(child, place.add(Text(_line(child, child is current, page_size), no_wrap=True))) for child in fits]
        left = sum(sizes[child.id] for child in below[len(fits) :])
        if left:
            place.add(Text(f"... {left} more", no_wrap=True))
        lines += len(fits)
        stack.extend(reversed(places))
    return _printed(shown)


def _sizes(nodes: Sequence[TreeNode]) -> dict[int, int]:
    """How many nodes each subtree has; children come after their parents."""
    sizes = {node.id: 1 for node in nodes}
    for node in reversed(nodes):
        if node.parent is not None:
            sizes[node.parent] += sizes[node.id]
    return sizes


def _line(node: TreeNode, current: bool, page_size: int) -> str:
    if node.kind == "fork":
        return "(a state that was not kept)"
    if node.kind == "session":
        pages = "busy" if node.pages is None else f"{node.pages} pages differ from the file"
        return f"{'* ' if current else ''}{node.label or node.owner}  session, {pages}"
    return f"{node.label}  checkpoint, {node.delta_bytes // page_size} pages changed, digest {(node.digest or '')[:12]}"


def diff_text(diffs: Sequence[TableDiff], before: str, after: str) -> str:
    """A line for each table that differs, then the sample rows: - before, + after."""
    if not diffs:
        return f"nothing differs between {before} and {after}"
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("table", "what"):
        table.add_column(name, overflow="fold")
    for name in ("added", "removed", "changed"):
        table.add_column(name, justify="right")
    for diff in diffs:
        table.add_row(diff.table, diff.kind, str(diff.added), str(diff.removed), str(diff.changed))
    lines = [_printed(table), ""]
    for diff in diffs:
        for what, *rows in diff.samples:
            marks = {"added": "+", "removed": "-", "changed": "-+"}[what]
            lines += [f"{mark} {diff.table}: {', '.join(map(_cell, row))}" for mark, row in zip(marks, rows, strict=True)]
        counted = sum(len(sample) - 1 for sample in diff.samples if sample[0] != "changed") + sum(sample[0] == "changed" for sample in diff.samples)
        left = diff.added + diff.removed + diff.changed - counted
        if left:
            lines.append(f"  {diff.table}: {left} more rows")
    return "\n".join(lines)


def diff_data(diffs: Sequence[TableDiff]) -> list[dict[str, Any]]:
    return [
        {"table": diff.table, "kind": diff.kind, "added": diff.added, "removed": diff.removed, "changed": diff.changed} for diff in diffs
    ]  # fmt: skip


def tree_data(nodes: Sequence[TreeNode]) -> list[dict[str, Any]]:
    names = ("id", "parent", "depth", "kind", "label", "owner", "pages", "delta_bytes", "digest")
    return [{name: getattr(node, name) for name in names} for node in nodes]


def _cell(value: object) -> str:
    text = "NULL" if value is None else f"x'{value.hex()}'" if isinstance(value, bytes) else str(value)
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return text if len(text) <= _CELL else f"{text[:_CELL]}..."


def _printed(thing: Any) -> str:
    """As lines without colours, whatever the terminal, wide enough that nothing is cut."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=400, markup=False, highlight=False, color_system=None, force_terminal=False).print(thing)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
