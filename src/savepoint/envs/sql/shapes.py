"""The shape of SQL: what is left of it without names and figures. Tasks are told apart by it, and train and held-out tasks are divided by it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import apsw

from savepoint.envs.sql.lexer import tokens
from savepoint.envs.sql.tasks import Task

_KEYWORDS = frozenset(word.upper() for word in apsw.keywords)


def normal_form(statements: Iterable[str]) -> str:
    """The statements with one blank between tokens, keywords and names in capitals: equal for SQL that differs in writing only."""
    return " ; ".join(" ".join(token.key[1] for token in tokens(sql)) for sql in statements)


def shape(statements: Iterable[str]) -> str:
    """The normal form with figures and texts as `?` and names numbered by first appearance; keywords and functions stay."""
    names: dict[str, str] = {}
    out = []
    for sql in statements:
        found = tokens(sql)
        for position, token in enumerate(found):
            after = found[position + 1].text if position + 1 < len(found) else ""
            if token.kind in ("string", "number"):
                out.append("?")
            elif token.kind == "name" or (token.kind == "word" and token.text.upper() not in _KEYWORDS and after != "("):
                out.append(names.setdefault(token.text.strip('"').lower(), f"n{len(names) + 1}"))
            else:
                out.append(token.key[1])
        out.append(";")
    return " ".join(out)


def shape_of(task: Task) -> str:
    """A short digest of the shape of a task's gold."""
    return blake2b(shape(task.sol_sql).encode(), digest_size=6).hexdigest()


def is_held_out(task: Task, share: float = 0.2) -> bool:
    """Whether a task without end is for evaluation: so are those of a fixed `share` of all shapes, whatever the database and the seed."""
    return int.from_bytes(blake2b(f"held out {shape_of(task)}".encode(), digest_size=8).digest()) < share * 2**64


def split_by_shape(tasks: Sequence[Task], heldout: float, *, seed: int = 0) -> tuple[list[Task], list[Task]]:
    """(train, held-out): about a share `heldout` of the tasks is held out, whole shapes at a time, so that no held-out task has a gold seen in training.

    Which shapes, is drawn from the seed and the shape alone. A shape stays in training where it has more than half of what may be held out, or where a
    kind of bug would else not be trained.
    """
    by_shape: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        by_shape[shape_of(task)].append(task)
    left = Counter(_kind(task) for task in tasks)
    taken: set[str] = set()
    wanted, count = round(heldout * len(tasks)), 0
    for name in sorted(by_shape, key=lambda name: blake2b(f"{seed} {name}".encode()).digest()):
        leaving = Counter(_kind(task) for task in by_shape[name])
        size = leaving.total()
        if count + size <= wanted and size <= max(1, wanted // 2) and all(left[kind] > number for kind, number in leaving.items()):
            left -= leaving
            taken.add(name)
            count += size
    names = {id(task): name for name, members in by_shape.items() for task in members}
    return [t for t in tasks if names[id(t)] not in taken], [t for t in tasks if names[id(t)] in taken]


def _kind(task: Task) -> str:
    return str(task.synth.get("kind", task.category))
