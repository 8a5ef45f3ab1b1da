"""The databases that tasks live on: base images found by name, task images derived from them, and what a failing query gave."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from savepoint.envs.sql.catalogue import TableEntry, read_catalogue
from savepoint.envs.sql.descriptions import FOLDER, read_descriptions
from savepoint.envs.sql.observation import ObservationFormat, observe
from savepoint.envs.sql.schema_text import SchemaFormat, render_schema
from savepoint.envs.sql.tasks import Task
from savepoint.errors import UserError
from savepoint.state import Backend, BaseImage, open_backend

_SCHEMAS_KEPT = 1000


class World:
    """Base images by `db_id`, and task images derived from them. One world serves all environments of a process.

    databases: a folder (or several) that holds `<db_id>/<db_id>_template.sqlite`, `<db_id>/<db_id>.sqlite` or `<db_id>.sqlite`; or a
    mapping of `db_id` to an image that is imported already.
    """

    def __init__(
        self, databases: str | Path | Sequence[str | Path] | None = None, *, images: dict[str, BaseImage] | None = None, backend: Backend | None = None
    ) -> None:
        self._folders = [Path(databases)] if isinstance(databases, str | Path) else [Path(folder) for folder in databases or ()]
        for folder in self._folders:
            if not folder.is_dir():
                raise UserError(f"{folder}: no such folder of databases")
        self._owns_backend = backend is None
        self.backend = backend or open_backend("sqlite")
        self._bases = dict(images or {})
        self._results: OrderedDict[tuple[str, tuple[str, ...], ObservationFormat], str] = OrderedDict()
        self._found: dict[str, Path] = {}
        self._catalogues: dict[tuple[str, int], tuple[TableEntry, ...]] = {}
        self._schemas: OrderedDict[tuple[str, SchemaFormat, str], str] = OrderedDict()

    def base(self, db_id: str) -> BaseImage:
        """The base image of a database, imported when it is first asked for. UserError that names the places looked at."""
        if db_id not in self._bases:
            if not db_id or db_id in (".", "..") or any(part in db_id for part in ("/", "\\", "\0")):
                raise UserError(f"db_id {db_id!r}: must be a plain name")
            places = [folder / name for folder in self._folders for name in (f"{db_id}/{db_id}_template.sqlite", f"{db_id}/{db_id}.sqlite", f"{db_id}.sqlite")]
            found = next((place for place in places if place.is_file()), None)
            if found is None:
                raise UserError(f"no database {db_id!r}: looked for {', '.join(map(str, places)) or 'it in no folder (pass databases=)'}")
            self._bases[db_id] = self.backend.import_base(found)
            self._found[db_id] = found
        return self._bases[db_id]

    def image(self, task: Task) -> BaseImage:
        """The task image: the database with the task's set-up applied, strictly, once."""
        base = self.base(task.db_id)
        return self.backend.derive(base, list(task.preprocess_sql)) if task.preprocess_sql else base

    def observe_issue(self, task: Task, form: ObservationFormat, deadline_s: float) -> str:
        """What the user's query gives on the task image, in the form of every observation. Kept by (image, exact text)."""
        image = self.image(task)
        key = (image.digest, tuple(task.issue_sql), form)
        if key not in self._results:
            with self.backend.lease(image, owner=f"issue {task.instance_id}") as session:
                for sql in task.issue_sql:
                    result = session.execute(sql, deadline_s=deadline_s)
                    if result.status != "ok":
                        break
            self._results[key] = observe(result, form)
            if len(self._results) > 50_000:
                self._results.popitem(last=False)
        return self._results[key]

    def schema(self, task: Task, form: SchemaFormat) -> str:
        """The schema as it was documented: the base image's, before the task's set-up, with the descriptions that lie beside the database."""
        base = self.base(task.db_id)
        # The task's own words only matter where tables must be left out; as part of the key they keep the cache right, not small.
        key = (base.digest, form, "\n".join((task.query, task.evidence or "", *task.issue_sql)))
        if key not in self._schemas:
            self._schemas[key] = render_schema(self._catalogue(task.db_id, form.sample_rows), form, key[2])
            if len(self._schemas) > _SCHEMAS_KEPT:
                self._schemas.popitem(last=False)
        return self._schemas[key]

    def _catalogue(self, db_id: str, rows: int) -> tuple[TableEntry, ...]:
        base = self.base(db_id)
        if (base.digest, rows) not in self._catalogues:
            found = self._found.get(db_id)
            descriptions = read_descriptions(found.parent / FOLDER) if found is not None and found.parent.name == db_id else {}
            with self.backend.lease(base, owner="schema") as session:
                self._catalogues[base.digest, rows] = read_catalogue(session, descriptions, rows)
        return self._catalogues[base.digest, rows]

    def close(self) -> None:
        """Close the backend, where this world opened it."""
        if self._owns_backend:
            self.backend.close()
