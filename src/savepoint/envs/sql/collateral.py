"""The collateral rule: what the gold leaves as it is must be so after the prediction.

Else `DELETE` and a constant pass a check that counts wrong rows. Whether a table changed is decided by its pages first: one whose b-tree has none among the
pages that differ is as it was, whatever its size. Only the others are read.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from savepoint.envs.sql.compare import Row
from savepoint.envs.sql.lexer import tokens
from savepoint.envs.sql.run import OwnWorkFailed, fetch, fetch_in_chunks
from savepoint.state import AnySession, Snapshot
from savepoint.state.sqlite.pack import unpack

_SCHEMA = "SELECT type, name, rootpage, sql FROM main.sqlite_schema WHERE name NOT LIKE 'sqlite\\_%' ESCAPE '\\' AND type <> 'index'"
_MODULUS = 1 << 128
Key = tuple[str, str]  # (type, name in lower case)


@dataclass(frozen=True, slots=True)
class Entry:
    """A table, view or trigger: its name, where its b-tree begins (0: it has none), its definition."""

    name: str
    root: int
    sql: str

    @property
    def has_rows(self) -> bool:
        """Whether it is a table that stores rows itself; the rows of a virtual table are in others."""
        return self.root > 0


@dataclass(slots=True)
class Inventory:
    """What a task image holds. pages: of each table the pages of its b-tree, by number from 0; None where SQLite has no dbstat to tell."""

    schema: dict[Key, Entry]
    pages: dict[str, frozenset[int]] | None
    _digests: dict[tuple[str, tuple[str, ...]], int] = field(default_factory=dict)

    def digest(self, session: AnySession, table: str, columns: tuple[str, ...]) -> int:
        """Digest of a table's rows in the image. session: shows the image."""
        key = (table.lower(), columns)
        if key not in self._digests:
            self._digests[key] = rows_digest(session, table, columns)
        return self._digests[key]


    def each_column(self, session: AnySession, table: str, columns: tuple[str, ...]) -> tuple[int, ...]:
        """Digest of each of some columns in the image, for itself."""
        missing = tuple(name for name in columns if (table.lower(), (name,)) not in self._digests)
        if missing:
            for name, digest in zip(missing, column_digests(session, table, missing), strict=True):
                self._digests[table.lower(), (name,)] = digest
        return tuple(self._digests[table.lower(), (name,)] for name in columns)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of a table after a run: its columns and a digest of the rows as a multiset."""

    columns: tuple[str, ...]
    digest: int


@dataclass(frozen=True, slots=True)
class Effect:
    """What a gold does to the image. kept: of each table that it changes the columns that it leaves as they are (none of a dropped one); a table that is not
    named is left alone. gone: definitions of views and triggers that it changes or drops. after: the tables that it changes or makes, as it leaves them.
    made: the views and triggers that it makes or changes, as their tokens.
    """

    kept: dict[Key, tuple[str, ...]] = field(default_factory=dict)
    gone: frozenset[Key] = frozenset()
    after: dict[Key, Table] = field(default_factory=dict)
    made: dict[Key, tuple[tuple[str, str], ...]] = field(default_factory=dict)

    @property
    def changes_nothing(self) -> bool:
        return not (self.kept or self.gone or self.after or self.made)


def read_schema(session: AnySession) -> dict[Key, Entry]:
    rows = fetch(session, _SCHEMA)
    return {(str(kind), str(name).lower()): Entry(str(name), int(root or 0), str(sql)) for kind, name, root, sql in rows}  # type: ignore[call-overload]


def take_inventory(session: AnySession) -> Inventory:
    """What the image that a fresh session shows holds."""
    schema = read_schema(session)
    try:
        found: dict[str, set[int]] = {}
        for name, page in fetch(session, "SELECT name, pageno FROM dbstat"):
            found.setdefault(str(name).lower(), set()).add(int(page) - 1)  # type: ignore[call-overload]
    except OwnWorkFailed:
        return Inventory(schema, None)
    return Inventory(schema, {name: frozenset(pages) for name, pages in found.items()})


def changed_pages(session: AnySession, since: Snapshot) -> frozenset[int]:
    """Numbers, from 0, of the pages in which a session differs from an earlier state."""
    pack = unpack(session.delta(since))
    step = 8 + pack.page_size
    return frozenset(struct.unpack_from("=q", pack.pages, at)[0] for at in range(0, len(pack.pages), step))


def effect(inventory: Inventory, session: AnySession, pages: frozenset[int], image: AnySession) -> Effect:
    """What the run did that `session` shows the end of, on a fresh connection. image: a session that shows the image."""
    if not pages:
        return Effect()
    schema = read_schema(session)
    kept: dict[Key, tuple[str, ...]] = {}
    gone: set[Key] = set()
    after: dict[Key, Table] = {}
    for key, entry in inventory.schema.items():
        now = schema.get(key)
        if key[0] != "table" or not entry.has_rows:
            if now is None or now.sql != entry.sql:
                gone.add(key)
            continue
        if now is None or not now.has_rows:
            kept[key] = ()
        elif _may_differ(inventory, key, entry, now, pages):
            table = read_table(session, now.name)
            columns = _columns(image, entry.name)
            if now.sql == entry.sql and table.digest == inventory.digest(image, entry.name, columns):
                continue
            kept[key] = _kept_columns(inventory, image, session, entry.name, columns, table.columns)
            after[key] = table
    made = {}
    for key, now in schema.items():
        if key not in inventory.schema and now.has_rows:
            after[key] = read_table(session, now.name)
        elif not now.has_rows and (key not in inventory.schema or key in gone):
            made[key] = _meaning(now.sql)
    return Effect(kept, frozenset(gone), after, made)


def collateral_damage(inventory: Inventory, gold: Effect, session: AnySession, pages: frozenset[int], image: AnySession) -> str | None:
    """None when the run whose end `session` shows leaves alone what the gold does, else one line that names what it touched."""
    if not pages:
        return None
    schema = read_schema(session)
    for key, entry in inventory.schema.items():
        if key in gold.gone or gold.kept.get(key) == ():
            continue
        kind, now = key[0], schema.get(key)
        if now is None:
            return f"{kind} {entry.name} is gone, which the gold leaves as it is"
        if kind != "table" or not entry.has_rows:
            if now.sql != entry.sql:
                return f"{kind} {entry.name} is defined otherwise, which the gold leaves as it is"
            continue
        if not now.has_rows:
            return f"table {entry.name} is a virtual table now"
        columns = gold.kept.get(key)
        if not _may_differ(inventory, key, entry, now, pages):
            continue
        if columns is None and now.sql != entry.sql:
            return f"table {entry.name} is defined otherwise, which the gold leaves as it is"
        columns = columns or _columns(image, entry.name)
        present = {name.lower() for name in _columns(session, now.name)}
        lost = [name for name in columns if name.lower() not in present]
        if lost:
            return f"column {entry.name}.{lost[0]} is gone, which the gold leaves as it is"
        if rows_digest(session, now.name, columns) != inventory.digest(image, entry.name, columns):
            return f"rows of table {entry.name} ({', '.join(columns)}) are changed, which the gold leaves as they are"
    return None


def state_difference(inventory: Inventory, gold: Effect, session: AnySession, *, existing_only: bool) -> str | None:
    """None when the tables that the gold changes (and, unless existing_only, what it makes) are as it leaves them, else one line."""
    schema = read_schema(session)
    for key, wanted in gold.after.items():
        if existing_only and key not in inventory.schema:
            continue
        now = schema.get(key)
        if now is None or not now.has_rows:
            return f"there is no table {key[1]}, which the gold leaves"
        table = read_table(session, now.name)
        if [name.lower() for name in table.columns] != [name.lower() for name in wanted.columns]:
            return f"table {now.name} has columns {', '.join(table.columns)}, expected {', '.join(wanted.columns)}"
        if table.digest != wanted.digest:
            return f"the rows of table {now.name} are others than the gold leaves"
    if existing_only:
        return None
    for key in gold.kept:
        if gold.kept[key] == () and key not in gold.after and key in schema:
            return f"table {schema[key].name} is still there, which the gold drops"
    for key in gold.gone:
        if key not in gold.made and key in schema:
            return f"{key[0]} {schema[key].name} is still there, which the gold drops"
    for key, meaning in gold.made.items():
        if key not in schema or _meaning(schema[key].sql) != meaning:
            return f"{key[0]} {key[1]} is not as the gold makes it"
    return None


def read_table(session: AnySession, name: str) -> Table:
    columns = _columns(session, name)
    return Table(columns, rows_digest(session, name, columns))


def rows_digest(session: AnySession, table: str, columns: tuple[str, ...]) -> int:
    """Digest of a table's rows in some of its columns, as a multiset: the sum modulo 2**128 does not depend on their order."""
    return sum(_hash(row) for rows in _chunks(session, table, columns) for row in rows) % _MODULUS


def column_digests(session: AnySession, table: str, columns: tuple[str, ...]) -> tuple[int, ...]:
    """`rows_digest` of each column for itself, in one reading of the table."""
    totals = [0] * len(columns)
    for rows in _chunks(session, table, columns) if columns else ():
        for i, values in enumerate(zip(*rows, strict=True)):
            counts = Counter((type(value), value) for value in values)
            totals[i] += sum(_hash((value,)) * count for (_, value), count in counts.items())
    return tuple(total % _MODULUS for total in totals)


def _chunks(session: AnySession, table: str, columns: tuple[str, ...]) -> Iterator[tuple[Row, ...]]:
    return fetch_in_chunks(session, f"SELECT {', '.join(map(_quoted, columns))} FROM main.{_quoted(table)}")


def _hash(row: Row) -> int:
    return int.from_bytes(hashlib.blake2b(repr(row).encode("utf-8", "surrogateescape"), digest_size=16).digest(), "big")


def _may_differ(inventory: Inventory, key: Key, entry: Entry, now: Entry, pages: frozenset[int]) -> bool:
    """Whether a table may hold other rows: its b-tree begins elsewhere, is defined otherwise, or has a page among those that changed."""
    if inventory.pages is None or now.root != entry.root or now.sql != entry.sql:
        return True
    own = inventory.pages.get(key[1])
    return own is None or not own.isdisjoint(pages)


def _kept_columns(
    inventory: Inventory, image: AnySession, session: AnySession, table: str, columns: tuple[str, ...], after: tuple[str, ...]
) -> tuple[str, ...]:
    """The columns that a run left as they are, together as rows: each alone first, then as many as agree together, in the table's order."""
    present = {other.lower() for other in after}
    common = tuple(name for name in columns if name.lower() in present)
    before, now = inventory.each_column(image, table, common), column_digests(session, table, common)
    alone = [name for name, first, second in zip(common, before, now, strict=True) if first == second]
    together: tuple[str, ...] = tuple(alone)
    if together and rows_digest(session, table, together) != inventory.digest(image, table, together):
        together = ()
        for name in alone:
            tried = (*together, name)
            if rows_digest(session, table, tried) == inventory.digest(image, table, tried):
                together = tried
    return together


def _columns(session: AnySession, table: str) -> tuple[str, ...]:
    """The visible columns, generated ones too."""
    literal = table.replace("'", "''")
    return tuple(str(name) for name, hidden in fetch(session, f"SELECT name, hidden FROM pragma_table_xinfo('{literal}', 'main')") if hidden != 1)


def _meaning(sql: str) -> tuple[tuple[str, str], ...]:
    """A definition without its layout, letter case and quotes of plain names."""
    return tuple((kind, text.upper() if kind == "word" else text) for kind, text in (token.key for token in tokens(sql)))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
