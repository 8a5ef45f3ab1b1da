"""What a lease, a reset, a call and a trajectory cost, beside file copies, the backup API and SQLite: `python benchmarks/state.py [--json] [--small]`.

Makes databases of 1, 80 and 800 MB under `benchmarks/work/` (once), writes `benchmarks/results/state.json`, exits 1 when a row does not hold.
`--small` takes 8 MB in place of 800, and writes no results. Times are medians; those compared are taken in turns. Memory is that of a fresh process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import json
import os
import platform
import random
import shutil
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import apsw

from savepoint.state import AnySession, Backend, BaseImage, Quota, Session, SqliteBackend, WorkerBackend, open_backend
from savepoint.state.aio import AsyncBackend
from savepoint.state.sqlite import vfs
from state_peers import CopyPool, in_memory

WORK = Path(__file__).parent / "work"
QUERY = "SELECT name, city FROM customers WHERE id = 17"
TRAJECTORIES = 160
# What a trajectory does in the figures of memory: looks at the schema, joins, updates, makes a table, inserts, sums up.
SCRIPT = (
    "SELECT name, sql FROM sqlite_schema",
    "SELECT c.city, count(*), avg(o.amount) FROM customers c JOIN orders o ON o.customer_id = c.id WHERE c.id BETWEEN {low} AND {high} GROUP BY c.city",
    "UPDATE customers SET points = points + 1 WHERE id BETWEEN {low} AND {low} + 59",
    "CREATE TABLE report AS SELECT * FROM customers WHERE id BETWEEN {low} AND {high}",
    "INSERT INTO orders (customer_id, amount, note) VALUES ({low}, 1.5, 'new')",
    "SELECT sum(points) FROM report",
)


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


# ---------------------------------------------------------------------- measuring


def timed(action: Callable[[], Any], times: int) -> float:
    """Median milliseconds of one call."""
    took = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        took.append(time.perf_counter() - started)
    return median(took) * 1000


def cpu(action: Callable[[], Any]) -> float:
    """CPU milliseconds of this process for one call."""
    started = time.process_time()
    action()
    return (time.process_time() - started) * 1000


def private_bytes() -> int:
    """Memory of this process that no file backs, after what is free was given back."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(fields["Anonymous"].split()[0]) * 1024


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(function, *arguments).result()


def row(
    figure: str, value: float, unit: str, *, at_most: float | None = None, ratio_at_most: float | None = None, ratio_at_least: float | None = None,
    against: str | None = None, ratio: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    bound, holds = None, True
    if at_most is not None:
        bound, holds = f"<= {at_most:g}", value <= at_most
    if ratio_at_most is not None:
        bound, holds = f"ratio <= {ratio_at_most:g}", holds and ratio is not None and ratio <= ratio_at_most
    if ratio_at_least is not None:
        bound, holds = f"ratio >= {ratio_at_least:g}", holds and ratio is not None and ratio >= ratio_at_least
    ratio = None if ratio is None else float(f"{ratio:.3g}")
    return {"figure": figure, "value": float(f"{value:.4g}"), "unit": unit, "against": against, "ratio": ratio, "bound": bound, "holds": holds}


# ---------------------------------------------------------------------- leases, resets, states


def lease_and_query(backend: Backend, image: BaseImage, times: int = 200) -> float:
    def once() -> None:
        with backend.lease(image, owner="benchmark") as session:
            assert session.execute(QUERY).rows

    return timed(once, times)


def reset(backend: SqliteBackend, image: BaseImage, times: int = 200) -> float:
    """Reset with its proof after an update of twenty rows, and the query that opens the connection again; the update is not timed."""
    took = []
    with backend.lease(image, owner="benchmark") as session:
        for _ in range(times):
            assert session.execute("UPDATE customers SET points = points + 1 WHERE id < 20").status == "ok"
            started = time.perf_counter()
            proof = session.reset()
            session.execute(QUERY)
            took.append(time.perf_counter() - started)
            assert proof.holds
    return median(took) * 1000


def leases(backend: SqliteBackend, images: dict[str, BaseImage], paths: dict[str, Path]) -> Iterator[dict[str, Any]]:
    names = list(paths)
    ours = {what: dict.fromkeys(names, 0.0) for what in ("lease + first query", "reset with proof + first query")}
    for name in names:
        ours["lease + first query"][name] = lease_and_query(backend, images[name])
        ours["reset with proof + first query"][name] = reset(backend, images[name])
    for what, took in ours.items():
        for name in names:
            yield row(f"{what}, {name}", took[name], "ms", at_most=1.0)
        yield row(f"{what}, {names[-1]}", took[names[-1]], "ms", against=f"{names[0]}", ratio=took[names[-1]] / took[names[0]], ratio_at_most=2.0)
    for name in names:
        pool = CopyPool(paths[name], WORK / "pool")
        copied = timed(lambda pool=pool: pool.execute(pool.acquire(0), QUERY), 5 if name == names[0] else 3)
        pool.close()
        memory = timed(lambda name=name: in_memory(paths[name]).close(), 3)
        least = 1000 if name == names[-1] else None
        took = ours["lease + first query"][name]
        yield row(f"copy, process, query, {name}", copied, "ms", against="lease + first query", ratio=copied / took, ratio_at_least=least)
        yield row(f"backup into memory, {name}", memory, "ms", against="lease + first query", ratio=memory / took)


def states(backend: SqliteBackend, image: BaseImage, name: str) -> Iterator[dict[str, Any]]:
    """Checkpoint, restore and fork with the connection, and the bare fork of pages, with a small and a large delta."""
    for what, update in (("small delta", "UPDATE customers SET points = points + 1 WHERE id < 20"), ("80 MB delta", "UPDATE orders SET amount = amount + 1")):
        with backend.lease(image, owner="benchmark", quota=Quota(delta_bytes=2 << 30, temp_bytes=2 << 30)) as session:
            limit = "" if what == "small delta" else " WHERE id < 160000"
            assert session.execute(update + limit, deadline_s=120).status == "ok"
            kept = session.checkpoint("kept")

            def restore(session: Session = session, kept: Any = kept) -> None:
                session.restore(kept)
                session.execute(QUERY)

            def fork(session: Session = session) -> None:
                for one in session.fork():
                    one.execute(QUERY)
                    one.close()

            def bare(session: Session = session, kept: Any = kept) -> None:
                backend.pages.volume(image.pages(), kept.contents, 1 << 30, 1 << 30).close()

            yield row(f"checkpoint, {name}, {what}", timed(lambda session=session: session.checkpoint("x"), 300), "ms", at_most=0.3)
            yield row(f"restore + first query, {name}, {what}", timed(restore, 300), "ms", at_most=0.3)
            yield row(f"fork + first query, {name}, {what}", timed(fork, 300), "ms", at_most=0.3)
            yield row(f"bare fork and drop, {name}, {what}", timed(bare, 2000) * 1000, "us", at_most=10.0)


# ---------------------------------------------------------------------- memory


def run_script(session: AnySession, number: int) -> None:
    low = number * 29 % 4900
    for sql in SCRIPT:
        result = session.execute(sql.format(low=low, high=low + 99))
        assert result.status == "ok", result


def trajectories_in_memory(path: Path, count: int, parked: bool) -> tuple[float, float]:
    """(private bytes for each of so many trajectories, of which delta pages), all alive at once, and beside 160 that were there before: what the
    allocator and the interpreter take once is not a trajectory's."""
    with open_backend("sqlite", store=WORK / "store") as backend:
        image = backend.import_base(path)

        def run(i: int) -> Session:
            session = backend.lease(image, owner=f"trajectory {i}")
            run_script(session, i)
            if parked:
                session.park()
            return session

        warm = [run(i) for i in range(160)]
        before = private_bytes()
        sessions = [run(i) for i in range(len(warm), len(warm) + count)]
        held = private_bytes() - before
        return held / count, sum(session.stats().held_bytes for session in sessions) / count


def memory(paths: dict[str, Path], small: bool) -> Iterator[dict[str, Any]]:
    names = list(paths)
    for name in names:
        size = paths[name].stat().st_size
        # A copy takes the file's size on the disk, plus what the agent adds; the processes of its calls are gone between them.
        live, delta = in_fresh_process(trajectories_in_memory, paths[name], TRAJECTORIES, False)
        least = {names[1]: 40, names[2]: 100}.get(name) if not small else None
        yield row(f"a live trajectory of {TRAJECTORIES}, {name}", live / 1e3, "kB", against="a file copy", ratio=size / live, ratio_at_least=least)
        yield row(f"the same, beyond its {delta / 1e3:.0f} kB of changed pages", (live - delta) / 1e3, "kB", at_most=200.0)
        parked, delta = in_fresh_process(trajectories_in_memory, paths[name], TRAJECTORIES, True)
        yield row(f"a parked trajectory of {TRAJECTORIES}, {name}", parked / 1e3, "kB", against="a file copy", ratio=size / parked)
        yield row(f"the same, beyond its {delta / 1e3:.0f} kB of changed pages", (parked - delta) / 1e3, "kB", at_most=16.0)
    parked, _ = in_fresh_process(trajectories_in_memory, paths[names[2]], 1000, True)
    size = paths[names[2]].stat().st_size
    held = 1000 * parked + size  # the base counts once
    least = None if small else 500
    ratio = 1000 * size / held
    yield row(f"1,000 parked trajectories and their base, {names[2]}", held / 1e6, "MB", against="1,000 file copies", ratio=ratio, ratio_at_least=least)


def mixed_space(paths: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """The published claim is 12.8 times less space for 28 databases and 160 trajectories on each. The databases' sizes are not published: a mix of
    ours, half of them small, as in BIRD. Formula: sum of 160 S against sum of (S + 160 trajectories)."""
    names = list(paths)
    mix = {names[0]: 14, names[1]: 11, names[2]: 3}
    copies = ours = 0.0
    for name, databases in mix.items():
        size = paths[name].stat().st_size
        each, _ = in_fresh_process(trajectories_in_memory, paths[name], TRAJECTORIES, False)
        copies += databases * TRAJECTORIES * size
        ours += databases * (size + TRAJECTORIES * each)
    words = ", ".join(f"{databases} of {name}" for name, databases in mix.items())
    against = "160 file copies of each"
    yield row(f"28 databases ({words}), 160 live trajectories each", ours / 1e9, "GB", against=against, ratio=copies / ours, ratio_at_least=12.8)


# ---------------------------------------------------------------------- queries


READS = {
    "scan": "SELECT sum(length(note)) FROM orders",
    "10,000 point reads": "WITH RECURSIVE c(x) AS (SELECT 0 UNION ALL SELECT x + 1 FROM c LIMIT 10000) "
    "SELECT sum((SELECT amount FROM orders WHERE id = x * 7919 % 160000)) FROM c",
    "join and group": "SELECT c.city, count(*), avg(o.amount) FROM customers c JOIN orders o ON o.customer_id = c.id GROUP BY c.city",
}
WRITES = {
    "update of 100,000 rows": "UPDATE orders SET amount = amount + 1 WHERE id < 100000",
    "index": "CREATE INDEX by_amount ON orders (amount)",
    "insert of 30,000 rows": "INSERT INTO orders (customer_id, amount, note) SELECT customer_id, amount, note FROM orders WHERE id < 30000",
    "delete of 50,000 rows": "DELETE FROM orders WHERE id < 50000",
}


def queries(backend: SqliteBackend, image: BaseImage, path: Path, name: str) -> Iterator[dict[str, Any]]:
    """CPU of the same statement in a session and on a file with SQLite's own VFS, in turns; neither syncs."""
    file = WORK / "native.sqlite"
    quota = Quota(delta_bytes=1 << 30, temp_bytes=1 << 30)
    for what, sql in (READS | WRITES).items():
        ours, native = [], []
        for _ in range(5):
            with backend.lease(image, owner="benchmark", quota=quota) as session:
                session.execute(QUERY)
                ours.append(cpu(lambda session=session, sql=sql: _ok(session, sql)))
            shutil.copyfile(path, file)
            connection = apsw.Connection(str(file))
            connection.execute("PRAGMA journal_mode = truncate; PRAGMA synchronous = off").fetchall()
            connection.execute(QUERY).fetchall()
            native.append(cpu(lambda connection=connection, sql=sql: connection.execute(sql).fetchall()))
            connection.close()
        file.unlink()
        ratio = median(ours) / median(native)
        bound = 1.0 if what in READS else 1.2
        yield row(f"{what}, {name}", median(ours), "CPU ms", against=f"SQLite on the file, {median(native):.1f}", ratio=ratio, ratio_at_most=bound)


def _ok(session: Session, sql: str) -> None:
    result = session.execute(sql, deadline_s=120)
    assert result.status == "ok", result


# ---------------------------------------------------------------------- workers


def calls(store: Path, paths: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """A point query through a worker against the bare query and against a process a call; then how many a second.

    The caller is a process as trainers are, with torch loaded: what forks from it pays for that.
    """
    import torch
    import transformers

    assert torch.zeros(1).sum() == 0
    assert transformers.GPT2Config().n_layer
    path = next(iter(paths.values()))
    with WorkerBackend(store, workers=1) as pool:
        image = pool.import_base(path)
        bare = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        copies = CopyPool(path, WORK / "pool")
        file = copies.acquire(0)
        with pool.lease(image, owner="benchmark") as session:
            ours, native, process = [], [], []
            for _ in range(20):
                ours.append(timed(lambda session=session: session.execute(QUERY), 100))
                native.append(timed(lambda: bare.execute(QUERY).fetchall(), 100))
                process.append(timed(lambda: copies.execute(file, QUERY), 3))
        bare.close()
        copies.close()
        # The least of the medians: what others do on the machine only adds to it.
        added = min(ours) - min(native)
        yield row("a call through a worker adds to the bare query", added, "ms", at_most=0.3)
        against = "a call through a worker"
        ratio = min(process) / min(ours)
        yield row("a process and a connection a call, forked from one with torch", min(process), "ms", against=against, ratio=ratio, ratio_at_least=50)
    rates = {}
    for workers in (1, 2):
        with WorkerBackend(store, workers=workers, threads=2) as pool:
            rates[workers] = throughput(pool, pool.import_base(path))
        against = None if workers == 1 else "one worker"
        yield row(f"calls a second, {workers} worker(s), 8 trajectories", rates[workers], "1/s", against=against, ratio=rates[workers] / rates[1])
    work = {}
    for workers in (1, 2):
        with WorkerBackend(store, workers=workers, threads=1) as pool:
            work[workers] = throughput(pool, pool.import_base(path), "SELECT sum(length(hex(note))) FROM orders", 1.5)
        against = None if workers == 1 else "one worker"
        yield row(f"scans of 0.9 MB a second, {workers} worker(s), 8 trajectories", work[workers], "1/s", against=against, ratio=work[workers] / work[1])
    with WorkerBackend(store, workers=1, threads=2) as pool:
        for what, megabytes in (("1 MB", 1), ("10 MB", 10)):
            yield row(f"the longest callback on the event loop, results of {what}", loop_gap(pool, pool.import_base(path), megabytes), "CPU ms", at_most=5.0)


def throughput(pool: WorkerBackend, image: BaseImage, sql: str = QUERY, seconds: float = 2.0) -> float:
    """Calls a second of eight trajectories on one event loop."""

    async def main() -> float:
        backend = AsyncBackend(pool)
        sessions = [await backend.lease(image, owner=f"benchmark {i}") for i in range(8)]
        for session in sessions:
            await session.execute(sql)
        done, ends = 0, time.monotonic() + seconds

        async def one(session: Any) -> None:
            nonlocal done
            while time.monotonic() < ends:
                assert (await session.execute(sql)).status == "ok"
                done += 1

        started = time.monotonic()
        await asyncio.gather(*map(one, sessions))
        return done / (time.monotonic() - started)

    return asyncio.run(main())


def loop_gap(pool: WorkerBackend, image: BaseImage, megabytes: int) -> float:
    """CPU milliseconds of the longest callback that the event loop ran while results arrived: while it runs, nothing else on the loop does. (Time on
    the clock would tell how busy the machine is with others.)"""
    gc.disable()  # going through all that the process holds is Python's affair, and takes as long as there is much of it
    longest = 0.0
    real = asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        nonlocal longest
        started = time.thread_time()
        real(handle)
        longest = max(longest, time.thread_time() - started)

    async def main() -> None:
        async with await AsyncBackend(pool).lease(image, owner="benchmark") as session:
            kept: list[Any] = []
            sql = f"SELECT a.id, a.note, b.note FROM orders a, orders b WHERE b.id < {megabytes}"
            await session.execute("SELECT 1")
            asyncio.Handle._run = measured  # type: ignore[method-assign]
            ends = time.monotonic() + 2
            while time.monotonic() < ends:
                result = await session.execute(sql, max_rows=1_000_000, max_bytes=64 << 20)
                assert result.status == "ok", result
                assert not result.truncated
                kept.append(result)  # giving a large result back takes Python milliseconds, which are the caller's
            asyncio.Handle._run = real  # type: ignore[method-assign]

    asyncio.run(main())
    gc.enable()
    return longest * 1000


# ---------------------------------------------------------------------- deadlines

SLOW = (
    "WITH RECURSIVE c(x) AS (SELECT 0 UNION ALL SELECT x + 1 FROM c) SELECT max(x) FROM c",
    "SELECT count(*) FROM orders a, orders b, orders c",
    "SELECT sum(length(hex(zeroblob(99000 + x % 2)))) FROM (WITH RECURSIVE c(x) AS (SELECT 0 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c)",
    "SELECT length(hex(zeroblob(90000)));" * 2500,
    "SELECT instr(printf('%.*c', 199000, 'a'), printf('%.*c', 99000, 'a') || 'b') FROM orders",
    "SELECT replace(printf('%.*c', 99000, 'a'), 'a', 'aa') FROM orders a, orders b",
    "SELECT sum(printf('%.*c', 190000, 'a') LIKE '%a%a%a%a%a%a%a%a%a%b') FROM orders",
    "SELECT sum(printf('%.*c', 190000, 'a') GLOB '*[a-z]*[a-z]*[a-z]*[a-z]*[0-9]') FROM orders",
    "SELECT note, count(*) FROM orders a, customers b GROUP BY note || b.id ORDER BY 2",
    "CREATE TABLE big AS SELECT a.note FROM orders a, orders b",
    "UPDATE orders SET note = note || hex(randomblob(200)); VACUUM; REINDEX; ANALYZE; PRAGMA integrity_check;" * 50,
    "SELECT * FROM orders a, orders b, orders c ORDER BY a.note || b.note || c.note",
)


def deadlines(store: Path, path: Path) -> Iterator[dict[str, Any]]:
    """How far beyond its deadline a hostile statement holds a session, in a worker; and one that nothing but a kill ends."""
    with WorkerBackend(store, workers=1) as pool:
        image = pool.import_base(path)
        over, worst = 0.0, ""
        for sql in SLOW:
            with pool.lease(image, owner="benchmark", quota=Quota(delta_bytes=512 << 20, temp_bytes=512 << 20)) as session:
                started = time.monotonic()
                session.execute(sql, deadline_s=0.5)
                beyond = time.monotonic() - started - 0.5
                over, worst = max((over, worst), (beyond, sql[:40]))
        restarts = pool.stats().workers[0].restarts
        yield row(f"beyond a deadline of 0.5 s, worst of {len(SLOW)} hostile statements ({worst}...), {restarts} kills", over, "s", at_most=0.5)
        with pool.lease(image, owner="benchmark", quota=Quota(length=16 << 20)) as session:
            started = time.monotonic()
            session.execute("SELECT instr(hex(zeroblob(6000000)), hex(zeroblob(3000000)) || 'x')", deadline_s=0.5)
            yield row("beyond it, where only a kill helps", time.monotonic() - started - 0.5, "s", at_most=5.5)


# ---------------------------------------------------------------------- all of it


PARTS = ("import", "leases", "states", "queries", "memory", "space", "calls", "deadlines")


def measure(small: bool, parts: set[str]) -> list[dict[str, Any]]:
    orders = {"1 MB": 1700, "80 MB": 170_000, "800 MB": 17_000 if small else 1_700_000}
    paths = {name: make_database(WORK / f"{count}.sqlite", count) for name, count in orders.items()}
    large = list(paths)[-1]
    store = WORK / "store"
    shutil.rmtree(store, ignore_errors=True)  # so that the first import is one
    rows: list[dict[str, Any]] = []

    def add(part: str, figures: Callable[[], Iterator[dict[str, Any]]]) -> None:
        if parts and part not in parts:
            return
        for figure in figures():
            rows.append({"part": part, **figure})
            print(show(figure), file=sys.stderr, flush=True)

    with open_backend("sqlite", store=store) as backend:
        images = {}
        for name, path in paths.items():
            started = time.perf_counter()
            images[name] = backend.import_base(path)
            rows.append({"part": "import", **row(f"import of {path.stat().st_size / 1e6:.0f} MB, once", time.perf_counter() - started, "s")})
        add("leases", lambda: leases(backend, images, paths))
        add("states", lambda: states(backend, images[large], large))
        add("queries", lambda: queries(backend, images["80 MB"], paths["80 MB"], "80 MB"))
    add("memory", lambda: memory(paths, small))
    add("space", lambda: mixed_space(paths))
    add("calls", lambda: calls(store, paths))
    add("deadlines", lambda: deadlines(store, paths["1 MB"]))
    return rows


def show(r: dict[str, Any]) -> str:
    compared = f" ({r['ratio']:g}x {r['against']})" if r["ratio"] is not None else ""
    return f"{'ok ' if r['holds'] else 'NO '} {r['figure']}: {r['value']:g} {r['unit']}{compared}" + (f" [{r['bound']}]" if r["bound"] else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--clean", action="store_true", help="remove the databases afterwards")
    parser.add_argument("--only", action="append", default=[], choices=PARTS[1:], help="measure this part, and put its rows in the place of the earlier")
    arguments = parser.parse_args()
    rows = measure(arguments.small, set(arguments.only))
    machine = {"platform": platform.platform(), "cores": os.cpu_count(), "vfs": vfs.status()["vfs"], "sqlite": apsw.sqlite_lib_version()}
    target = Path(__file__).parent / "results" / "state.json"
    target.parent.mkdir(exist_ok=True)
    if arguments.only and not arguments.small and target.exists():  # the parts that were measured take the place of their earlier rows
        measured = {r["part"] for r in rows}
        earlier = [r for r in json.loads(target.read_text(encoding="utf-8"))["rows"] if r["part"] not in measured]
        rows = sorted(earlier + rows, key=lambda r: PARTS.index(r["part"]))
    result = {"name": "state", "machine": machine, "rows": rows}
    if not arguments.small:  # the figures of record are those of the large database
        target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.clean:
        shutil.rmtree(WORK)
    if arguments.json:
        json.dump(result, sys.stdout, indent=1)
    return 0 if all(r["holds"] for r in rows) else 1


if __name__ == "__main__":
    threading.stack_size(256 << 10)
    sys.exit(main())
