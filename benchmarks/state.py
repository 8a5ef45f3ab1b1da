"""What a lease, a reset and a call cost, on a 1 MB and on an 800 MB database side by side: `python benchmarks/state.py [--json] [--small]`.

Makes both databases under `benchmarks/work/` (once), writes `benchmarks/results/state.json`, exits 1 when a row does not hold. `--small` takes a
40 MB database in place of the large one, and writes no results.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import apsw

from savepoint.state import BaseImage, SqliteBackend, open_backend
from savepoint.state.sqlite import vfs

WORK = Path(__file__).parent / "work"
QUERY = "SELECT name, city FROM customers WHERE id = 17"


def make_database(path: Path, orders: int) -> Path:
    """Five thousand customers and their orders, 470 bytes each."""
    if path.exists():
        return path
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    rng = random.Random(0)
    with sqlite3.connect(fresh) as db:
        db.execute("PRAGMA journal_mode = off")
        db.execute("PRAGMA synchronous = off")
        db.execute("CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT, points INTEGER)")
        db.executemany("INSERT INTO customers VALUES (?, ?, ?, ?)", ((i, f"customer {i}", rng.choice("ABCDE"), rng.randrange(1000)) for i in range(5000)))
        db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER, amount REAL, note TEXT)")
        note = "x" * 400
        rows = ((i, rng.randrange(5000), rng.random() * 100, note) for i in range(orders))
        db.executemany("INSERT INTO orders VALUES (?, ?, ?, ?)", rows)
        db.execute("CREATE INDEX orders_customer ON orders (customer_id)")
    db.close()
    fresh.rename(path)
    return path


def timed(action: Callable[[], Any], times: int) -> float:
    """Median milliseconds of one call."""
    took = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        took.append(time.perf_counter() - started)
    return median(took) * 1000


def lease_and_query(backend: SqliteBackend, image: BaseImage, times: int = 300) -> float:
    def once() -> None:
        with backend.lease(image, owner="benchmark") as session:
            assert session.execute(QUERY).rows

    return timed(once, times)


def reset(backend: SqliteBackend, image: BaseImage, times: int = 300) -> float:
    """Reset after an update of twenty rows; the update is not timed."""
    took = []
    with backend.lease(image, owner="benchmark") as session:
        for _ in range(times):
            assert session.execute("UPDATE customers SET points = points + 1 WHERE id < 20").status == "ok"
            started = time.perf_counter()
            proof = session.reset()
            took.append(time.perf_counter() - started)
            assert proof.holds
    return median(took) * 1000


def states(backend: SqliteBackend, image: BaseImage, times: int = 300) -> dict[str, float]:
    """Checkpoint, restore and fork of a session whose delta is some pages."""
    with backend.lease(image, owner="benchmark") as session:
        session.execute("UPDATE customers SET points = points + 1")
        kept = session.checkpoint("kept")

        def fork() -> None:
            for one in session.fork():
                one.close()

        return {"checkpoint": timed(lambda: session.checkpoint("x"), times), "restore": timed(lambda: session.restore(kept), times), "fork": timed(fork, times)}


def overhead(backend: SqliteBackend, image: BaseImage, path: Path, times: int = 3000) -> tuple[float, float]:
    """Milliseconds of a point query through `Session.execute`, and through a bare apsw connection on the file, taken in turns."""
    bare = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY, statementcachesize=0)
    ours, theirs = [], []
    with backend.lease(image, owner="benchmark") as session:
        for _ in range(times // 100):
            ours.append(timed(lambda: session.execute(QUERY), 100))
            theirs.append(timed(lambda: bare.execute(QUERY).fetchall(), 100))
    bare.close()
    return median(ours), median(theirs)


def copied(path: Path, times: int) -> float:
    """What a private copy costs without Savepoint: copy the file, open it, ask the same question."""
    target = WORK / "copy.sqlite"

    def once() -> None:
        shutil.copyfile(path, target)
        connection = apsw.Connection(str(target))
        assert connection.execute(QUERY).fetchall()
        connection.close()

    took = timed(once, times)
    target.unlink()
    return took


def reading(backend: SqliteBackend, image: BaseImage, path: Path) -> list[tuple[str, float, float]]:
    """(what, milliseconds in a session, on the file itself) of the same reading, both with a warm cache and in turns."""
    scan = "SELECT sum(length(note)) FROM orders WHERE id < 200000"
    numbers = "WITH RECURSIVE c(x) AS (SELECT 0 UNION ALL SELECT x + 1 FROM c LIMIT 10000) "
    points = numbers + "SELECT sum((SELECT amount FROM orders WHERE id = x * 37 % 80000)) FROM c"
    plain = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY, statementcachesize=0)
    figures = []
    with backend.lease(image, owner="benchmark") as session:
        for what, sql in (("a scan of 200,000 rows", scan), ("10,000 point reads", points)):
            ours, theirs = [], []
            for _ in range(5):
                ours.append(timed(lambda sql=sql: session.execute(sql, deadline_s=60), 1))
                theirs.append(timed(lambda sql=sql: plain.execute(sql).fetchall(), 1))
            figures.append((what, median(ours), median(theirs)))
    plain.close()
    return figures


def resident_bytes(field: str) -> int:
    """`RssAnon`: memory of this process alone. `VmRSS`: with what it has touched of mapped files (the base's pages are the kernel's cache)."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields[field].split()[0]) * 1024


def live_sessions(path: Path, n: int = 256) -> tuple[int, int]:
    """(Bytes that `n` sessions hold that have each read and written, all memory of the process then); called in a fresh process."""
    with open_backend("sqlite", store=WORK / "store") as backend:
        image = backend.import_base(path)
        gc.collect()
        before = resident_bytes("RssAnon")
        sessions = [backend.lease(image, owner=f"benchmark-{i}") for i in range(n)]
        for i, session in enumerate(sessions):
            session.execute(f"SELECT count(*) FROM orders WHERE customer_id = {i}")
            assert session.execute(f"UPDATE customers SET points = points + 1 WHERE id BETWEEN {i * 10} AND {i * 10 + 60}").status == "ok"
        return resident_bytes("RssAnon") - before, resident_bytes("VmRSS")


def row(
    figure: str, value: float, unit: str, *,
    at_most: float | None = None, ratio_at_most: float | None = None, against: str | None = None, ratio: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    bound = f"<= {at_most}" if at_most is not None else f"ratio <= {ratio_at_most}" if ratio_at_most is not None else None
    holds = (at_most is None or value <= at_most) and (ratio_at_most is None or (ratio is not None and ratio <= ratio_at_most))
    ratio = None if ratio is None else float(f"{ratio:.3g}")
    return {"figure": figure, "value": round(value, 4), "unit": unit, "against": against, "ratio": ratio, "bound": bound, "holds": holds}


def measure(small: bool) -> list[dict[str, Any]]:
    large_orders = 85_000 if small else 1_700_000
    paths = {"1 MB": make_database(WORK / "1700.sqlite", 1700), "large": make_database(WORK / f"{large_orders}.sqlite", large_orders)}
    name = f"{paths['large'].stat().st_size / 1e6:.0f} MB"
    rows = []
    store = WORK / "store"
    shutil.rmtree(store, ignore_errors=True)  # so that the first import is one
    with open_backend("sqlite", store=store) as backend:
        images = {}
        for key, path in paths.items():
            started = time.perf_counter()
            images[key] = backend.import_base(path)
            rows.append(row(f"import of {path.stat().st_size / 1e6:.0f} MB, once", time.perf_counter() - started, "s"))
        copies = {"1 MB": copied(paths["1 MB"], 100), "large": copied(paths["large"], 3)}
        for what, action in (("lease + first query", lease_and_query), ("reset, with proof", reset)):
            took = {key: action(backend, images[key]) for key in paths}
            for key, label in (("1 MB", "1 MB"), ("large", name)):
                against = f"file copy, open, query: {copies[key]:.2f} ms"
                rows.append(row(f"{what}, {label}", took[key], "ms", at_most=1.0, against=against, ratio=took[key] / copies[key]))
            rows.append(row(f"{what}, {name}", took["large"], "ms", ratio_at_most=2.0, against="1 MB", ratio=took["large"] / took["1 MB"]))
        rows += [row(f"{what}, {name}", value, "ms", at_most=1.0) for what, value in states(backend, images["large"]).items()]
        ours, bare = overhead(backend, images["large"], paths["large"])
        against = f"the query itself, {bare:.4f} ms"
        rows.append(row("a call of Session.execute adds to a bare query", ours - bare, "ms", at_most=0.2, against=against, ratio=(ours - bare) / bare))
        for what, mine, plain in reading(backend, images["large"], paths["large"]):
            rows.append(row(f"{what}, {name}", mine, "ms", against=f"SQLite on the file, {plain:.1f} ms", ratio=mine / plain))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        held, resident = fresh.submit(live_sessions, paths["large"]).result()
    space = 256 * paths["large"].stat().st_size
    against = f"256 file copies, {space / 1e6:.0f} MB"
    rows.append(row(f"256 live sessions on {name}, their own memory", held / 1e6, "MB", at_most=500.0, against=against, ratio=held / space))
    rows.append(row(f"256 live sessions on {name}, the whole process", resident / 1e6, "MB", at_most=500.0))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--clean", action="store_true", help="remove the databases afterwards")
    arguments = parser.parse_args()
    rows = measure(arguments.small)
    machine = {"platform": platform.platform(), "cores": os.cpu_count(), "vfs": vfs.status()["vfs"], "sqlite": apsw.sqlite_lib_version()}
    result = {"name": "state", "machine": machine, "rows": rows}
    target = Path(__file__).parent / "results" / "state.json"
    target.parent.mkdir(exist_ok=True)
    if not arguments.small:  # the figures of record are those of the large database
        target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.clean:
        shutil.rmtree(WORK)
    if arguments.json:
        json.dump(result, sys.stdout, indent=1)
    else:
        for r in rows:
            compared = f" = {r['ratio']} of {r['against']}" if r["against"] else ""
            print(f"{'ok ' if r['holds'] else 'NO '} {r['figure']}: {r['value']} {r['unit']}{compared}" + (f" (bound {r['bound']})" if r["bound"] else ""))
    return 0 if all(r["holds"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
