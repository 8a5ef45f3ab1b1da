"""What people have written about columns: the `database_description` folder that BIRD puts beside a database, one CSV a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from savepoint.errors import UserError

FOLDER = "database_description"


@dataclass(frozen=True, slots=True)
class Description:
    """Of one column: what it means, and what its values mean. Either may be empty."""

    text: str = ""
    values: str = ""


Descriptions = Mapping[str, Mapping[str, Description]]
"""By table, then by column; both in lower case, as SQLite compares identifiers."""


def read_descriptions(folder: Path) -> Descriptions:
    """The descriptions in a folder of CSV files, `<table>.csv` each; {} where there is no such folder.

    Columns are those of BIRD: original_column_name, column_name, column_description, data_format, value_description. Published files mix
    encodings: one that is no UTF-8 is read as Windows-1252. UserError for a file that has no column original_column_name.
    """
    if not folder.is_dir():
        return {}
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".csv" and not path.name.startswith("."))
    return {path.stem.strip().lower(): _table(path) for path in paths}


def _table(path: Path) -> dict[str, Description]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = raw.decode("cp1252", "replace")
    reader = csv.DictReader(io.StringIO(text.replace("\0", ""), newline=""))
    names = [(name or "").strip().lower() for name in reader.fieldnames or ()]
    if "original_column_name" not in names:
        raise UserError(f"{path}:1: has no column original_column_name")
    reader.fieldnames = names
    found = {}
    for row in reader:
        name = _one_line(row.get("original_column_name"))
        if name:
            # `column_name` says the name in full words; it is only worth its tokens where nothing better is said.
            said = _one_line(row.get("column_description")) or _one_line(row.get("column_name"))
            found[name.lower()] = Description("" if said.lower() == name.lower() else said, _one_line(row.get("value_description")))
    return found


def _one_line(text: object) -> str:
    return " ".join(text.split()) if isinstance(text, str) else ""
