"""Other images of a database: the same schema with slightly other rows. A query that is right only by chance on one image is found out on another."""

from __future__ import annotations

from savepoint.envs.sql.schema import Column, Schema, Table, literal, quote
from savepoint.envs.sql.verify import Images
from savepoint.state import BaseImage

_FEWEST_ROWS = 30


def other_images(images: Images, schema: Schema) -> tuple[BaseImage, ...]:
    """Two images beside the base: one with a seventh of the rows gone, one with values moved. Where constraints allow neither, fewer."""
    out = []
    for statements in ([_thinned(t) for t in schema.tables if t.rows >= _FEWEST_ROWS], [s for t in schema.tables for s in _moved(t)]):
        possible = images.possible(statements)
        made = images.derived(*possible) if possible else None
        if made is not None:
            out.append(made)
    return tuple(out)


def _thinned(table: Table) -> str:
    return f"DELETE FROM {quote(table.name)} WHERE rowid % 7 = 3"


def _moved(table: Table) -> list[str]:
    found = (_change(table, column) for column in table.columns)
    return [sql for sql in found if sql]


def _change(table: Table, column: Column) -> str | None:
    """The statement that moves some values of a column to others of its kind; None for a column that is left alone."""
    name, source = quote(column.name), quote(table.name)
    head = f"UPDATE OR IGNORE {source} SET {name} ="
    if column.role == "number" and column.figures:
        spread = float(column.figures[-1]) - float(column.figures[0])
        whole = all(isinstance(figure, int) for figure in column.figures)
        step = max(1, round(spread / 20)) if whole else round(spread / 20, 2) or 0.01
        return f"{head} {name} + {step} * (rowid % 3) WHERE rowid % 4 <> 0 AND typeof({name}) IN ('integer', 'real')"
    if column.role == "word" and len(column.figures) >= 2:
        first, second = (literal(figure) for figure in column.figures[:2])
        return f"{head} CASE {name} WHEN {first} THEN {second} ELSE {first} END WHERE rowid % 3 = 2 AND {name} IN ({first}, {second})"
    if column.role == "date":
        return f"{head} date({name}, '+1 day') || substr({name}, 11) WHERE rowid % 4 = 1 AND date({name}, '+1 day') IS NOT NULL"
    if column.role == "key" and table.primary != column.name:
        following = f"(SELECT o.{name} FROM {source} AS o WHERE o.rowid = {source}.rowid + 1)"
        return f"{head} COALESCE({following}, {name}) WHERE rowid % 5 = 1"
    return None
