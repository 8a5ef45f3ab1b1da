"""Migrations: the names that a column or table may have got since a query was written. Which of four it is, only the live database knows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from savepoint.envs.sql.schema import Schema, is_plain, quote

RENAMES: tuple[str, ...] = ("renamed_column", "renamed_table")
CANDIDATES = 4

# Words of everyday schemas and what else people call them. No word is offered for two others, so that a new name says what it stands for.
_SYNONYMS = {
    # columns
    "name": "fullname label alias handle", "city": "town place location site", "age": "years seniority span tenure",
    "points": "score credits bonus marks", "quantity": "amount units pieces number", "year": "season period vintage term",
    "title": "caption heading header headline", "category": "kind family sort genre", "price": "cost fee charge rate",
    "stock": "supply inventory reserve backlog", "salary": "wage pay income earnings", "budget": "funds purse allowance capital",
    "status": "state phase stage condition", "role": "job position duty post", "area": "surface size extent space",
    "weight": "mass load heft burden", "height": "stature altitude elevation tallness", "length": "duration minutes extension reach",
    "country": "nation land homeland realm", "street": "road lane avenue alley", "email": "mail mailbox inbox contact",
    "phone": "telephone mobile line dial", "date": "day moment calendar_day stamp", "total": "sum_due overall grand_sum whole",
    "rating": "grade stars mark verdict", "discount": "rebate reduction cut markdown", "gender": "sex salutation pronoun gender_class",
    "field": "specialty branch discipline subject", "floor": "level storey tier deck", "beds": "places berths cots slots",
    "dose": "strength portion potency measure", "color": "hue tint shade tone", "type": "class variety nature style",
    "region": "district province zone county", "description": "summary details remark text", "distance": "mileage range gap stretch",
    "language": "tongue idiom speech dialect", "publisher": "press imprint issuer house",
    # tables
    "customer": "client buyer patron shopper", "product": "good item ware article", "order": "purchase sale request deal",
    "employee": "worker colleague clerk associate", "store": "shop outlet market boutique", "department": "division section unit_group bureau",
    "patient": "case inmate sufferer visitor", "doctor": "physician medic clinician practitioner", "ward": "station wing unit block",
    "drug": "medicine remedy pill pharmaceutical", "booking": "appointment reservation engagement session",
    "supplier": "vendor provider source deliverer", "invoice": "bill receipt voucher statement", "album": "record release disc longplayer",
    "artist": "performer musician singer band", "track": "song tune piece recording", "film": "movie picture feature screening",
    "actor": "player star cast_member thespian", "flight": "departure trip service hop", "plane": "aircraft airliner jet machine",
    "airport": "airfield terminal aerodrome hub", "payment": "transfer settlement remittance payout",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rename:
    """One migration: a column (or, where `column` is None, the table itself) got another name. Names are as stored, unquoted."""

    table: str
    column: str | None
    new: str

    @property
    def kind(self) -> Literal["renamed_column", "renamed_table"]:
        return "renamed_table" if self.column is None else "renamed_column"

    @property
    def old(self) -> str:
        return self.table if self.column is None else self.column

    @property
    def sql(self) -> str:
        """The set-up statement."""
        if self.column is None:
            return f"ALTER TABLE {quote(self.table)} RENAME TO {quote(self.new)}"
        return f"ALTER TABLE {quote(self.table)} RENAME COLUMN {quote(self.column)} TO {quote(self.new)}"


def candidates(schema: Schema) -> dict[tuple[str, str | None], tuple[str, ...]]:
    """Four new names for each table, (table, None), and each column, (table, column), whose own name is a plain identifier.

    The same name gets the same candidates in every table; no candidate is offered for two names, and none is an identifier of the schema.
    """
    taken = {table.name.lower() for table in schema.tables} | {column.name.lower() for table in schema.tables for column in table.columns}
    taken |= {view.lower() for view in schema.views}
    columns = dict.fromkeys(column.name for table in schema.tables for column in table.columns)
    names = {name: _offer(name, taken) for name in columns if is_plain(name)}
    tables = {table.name: _offer(table.name, taken) for table in schema.tables if is_plain(table.name)}
    out: dict[tuple[str, str | None], tuple[str, ...]] = {(table, None): offered for table, offered in tables.items()}
    for table in schema.tables:
        out |= {(table.name, column.name): names[column.name] for column in table.columns if column.name in names}
    return out


def _offer(name: str, taken: set[str]) -> tuple[str, ...]:
    """Synonyms in the spelling of `name`, then variants of its spelling; they are marked as taken."""
    fresh: list[str] = []
    for offered in (*_synonyms(name), *_variants(name)):
        if offered.lower() not in taken and is_plain(offered):
            taken.add(offered.lower())
            fresh.append(offered)
        if len(fresh) == CANDIDATES:
            break
    return tuple(fresh)


def _synonyms(name: str) -> list[str]:
    """`unit_price` → `unit_cost` …, `UnitPrice` → `UnitCost` …: the last word is exchanged, plural for plural."""
    match = re.fullmatch(r"(.*?)([A-Z]?[a-z]+)", name)
    if match is None:
        return []
    head, last = match.groups()
    if head and last.islower() and not head.endswith("_"):
        return []
    plural = last.lower() not in _SYNONYMS and last.endswith("s")
    words = _SYNONYMS.get(last.lower().removesuffix("s") if plural else last.lower(), "").split()
    spelled = [_plural(word) if plural else word for word in words]
    if last[0].isupper():
        spelled = ["".join(part.capitalize() for part in word.split("_")) for word in spelled]
    return [head + word for word in spelled]


def _plural(word: str) -> str:
    if word.endswith("y") and word[-2] not in "aeiou":
        return f"{word[:-1]}ies"
    return f"{word}es" if word.endswith(("s", "x", "ch", "sh")) else f"{word}s"


def _variants(name: str) -> list[str]:
    """The name with a prefix or suffix that migrations leave behind, in its own style."""
    if "_" in name or name.islower():
        prefixed = [f"new_{name}", f"{name}_v2", f"main_{name}", f"{name}_code"]
    else:
        prefixed = [f"New{name}", f"{name}V2", f"Main{name}", f"{name}Code"]
    return prefixed + [f"{name}_{number}" for number in range(3, 50)]
