"""Grading against the published way, side by side: `python benchmarks/grading.py [--json] [--gradings 10000]`.

The published way, as BIRD-CRITIC's evaluator does it for every answer: start a Python process; copy the database file, run the issue SQL and the
test, which must fail; copy the file again, run the prediction, then the test, which is `exec`-ed there and runs prediction and gold once more. Ours: a
grader with its SQL in a worker process, as `savepoint score` uses it. Both on two processes, the same answers, no two texts alike, so that no cache of
results could help. Queries are short: what is measured is what grading costs beyond the SQL itself.

Writes `benchmarks/results/grading.json`, exits 1 when a row does not hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import quantiles
from typing import Any

import psutil

from savepoint.envs.sql.grade import Limits
from savepoint.envs.sql.tasks import Task
from savepoint.evals.bench import Bench, GradingOptions

CORES = 2
GOLD = "SELECT name, points FROM items WHERE id BETWEEN 100 AND 120"
PUBLISHED = """
import json, os, shutil, sqlite3, sys
template, copy, prediction, gold, issue = sys.argv[1:]
prediction = json.loads(prediction)
def execute_queries(sqls, conn):
    rows = None
    for sql in sqls:
        rows = conn.execute(sql).fetchall()
    conn.commit()
    return rows
def ex_base(pred_sqls, sol_sqls, conn):
    return set(execute_queries(pred_sqls[-1:], conn)) == set(execute_queries(sol_sqls, conn))
TEST = "def test_case(pred_sqls, sol_sqls, conn):\\n    assert ex_base(pred_sqls, sol_sqls, conn)"
def phase(sqls):
    if os.path.exists(copy):
        os.unlink(copy)
    shutil.copyfile(template, copy)
    conn = sqlite3.connect(copy, timeout=30)
    try:
        execute_queries(sqls, conn)
        space = {"ex_base": ex_base}
        exec(TEST, space)
        space["test_case"](sqls, [gold], conn)
        return True
    except (sqlite3.Error, AssertionError):
        return False
    finally:
        conn.close()
print(int(not phase([issue]) and phase(prediction)))
"""


def make_database(path: Path, megabytes: int) -> None:
    """A thousand small rows, and padding up to the size."""
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT, points INTEGER)")
        db.executemany("INSERT INTO items VALUES (?, ?, ?)", ((i, f"item {i}", i * 7 % 100) for i in range(1000)))
        db.execute("CREATE TABLE padding (id INTEGER PRIMARY KEY, bytes BLOB)")
        db.executemany("INSERT INTO padding(bytes) VALUES (?)", ((os.urandom(4000),) for _ in range(megabytes * 240)))
    db.close()


def answer(i: int) -> tuple[list[str], bool]:
    """The i-th answer and whether it is right: a right query, a wrong one, a broken one, and one that writes first."""
    kinds = (
        ([f"SELECT name, points FROM items WHERE id >= 100 AND id <= 120 AND {i} = {i}"], True),
        ([f"SELECT name, points + {i} FROM items WHERE id BETWEEN 100 AND 120"], False),
        ([f"SELECT name{i} FROM items"], False),
        ([f"CREATE INDEX ix{i} ON items(points)", f"{GOLD} AND {i} = {i}"], True),
    )
    return kinds[i % len(kinds)]


def published(template: Path, folder: Path, count: int) -> list[float]:
    """Seconds of each answer by the published way, two at a time."""

    def one(i: int) -> float:
        sql, right = answer(i)
        copy = folder / f"copy-{i}.sqlite"
        started = time.perf_counter()
        command = [sys.executable, "-c", PUBLISHED, str(template), str(copy), json.dumps(sql), GOLD, "SELECT 1, 2"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        copy.unlink()
        seconds = time.perf_counter() - started
        assert found == str(int(right)), (sql, found)
        return seconds

    with ThreadPoolExecutor(CORES) as pool:
        return list(pool.map(one, range(count)))


def task() -> Task:
    return Task("bench", "debugging", "bench", "?", [GOLD], ["SELECT 1"])


def grade_share(folder: str, numbers: range, gate: Any, out: Any) -> None:
    """One of our processes: warm up, wait for the other, grade, send the seconds of each answer."""
    bench = Bench(GradingOptions((Path(folder),), Path(folder) / "store", Limits()))
    try:
        image = bench.world.image(task())
        bench.grader.grade(image, task(), [GOLD])
        bench.grader.grade(image, task(), ["CREATE INDEX warm ON items(name)", GOLD])
        gate.wait()
        seconds = []
        for i in numbers:
            sql, right = answer(i)
            started = time.perf_counter()
            verdict = bench.grader.grade(image, task(), sql)
            seconds.append(time.perf_counter() - started)
            assert verdict.reward == float(right), (sql, verdict)
        out.put(seconds)
    finally:
        bench.close()


def ours(folder: Path, count: int) -> tuple[list[float], float]:
    """Seconds of each answer by ours, and of all of them together, on two processes."""
    context = multiprocessing.get_context("spawn")
    gate, out = context.Barrier(CORES + 1), context.Queue()
    crew = [context.Process(target=grade_share, args=(str(folder), range(part, count, CORES), gate, out)) for part in range(CORES)]
    for process in crew:
        process.start()
    gate.wait()
    started = time.perf_counter()
    seconds = [value for _ in crew for value in out.get()]
    elapsed = time.perf_counter() - started
    for process in crew:
        process.join()
    return seconds, elapsed


def growth(folder: Path, gradings: int) -> tuple[float, int]:
    """Megabytes of memory and descriptors by which the grader and its worker grow over many gradings, after a warm-up."""
    bench = Bench(GradingOptions((folder,), folder / "store", Limits()))
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    try:
        image = bench.world.image(task())

        def grade(first: int, count: int) -> None:
            for i in range(first, first + count):
                bench.grader.grade(image, task(), answer(i)[0])

        def held() -> tuple[int, int]:
            gc.collect()
            processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
            return sum(p.memory_info().rss for p in processes), sum(p.num_fds() for p in processes)

        grade(0, min(1000, gradings))
        before = held()
        grade(1000, gradings)
        after = held()
        return (after[0] - before[0]) / 1e6, after[1] - before[1]
    finally:
        del family
        bench.close()


def measure(megabytes: int, ours_count: int, published_count: int) -> list[dict[str, Any]]:
    least = {1: 10, 80: 50}[megabytes]
    with tempfile.TemporaryDirectory(prefix="savepoint-bench-") as name:
        folder = Path(name)
        make_database(folder / "bench.sqlite", megabytes)
        mine, elapsed = ours(folder, ours_count)
        started = time.perf_counter()
        theirs = published(folder / "bench.sqlite", folder, published_count)
        theirs_rate = published_count / (time.perf_counter() - started)
        shutil.rmtree(folder / "store", ignore_errors=True)
    rate = ours_count / elapsed
    rows = [
        _row(f"graded answers a second, {megabytes} MB database", rate, "1/s", theirs_rate, rate / theirs_rate, f">= {least}x", rate / theirs_rate >= least)
    ]
    for q in (50, 99):
        a, b = (1000 * quantiles(values, n=100)[q - 1] for values in (mine, theirs))
        rows.append(_row(f"latency p{q}, {megabytes} MB database", a, "ms", b, b / a, None, True))
    return rows


def _row(figure: str, value: float, unit: str, against: float | None, ratio: float | None, bound: str | None, holds: bool) -> dict[str, Any]:
    rounded = (None if number is None else round(number, 3) for number in (value, against, ratio))
    value_, against_, ratio_ = rounded
    return {"figure": figure, "value": value_, "unit": unit, "against": against_, "ratio": ratio_, "bound": bound, "holds": holds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--gradings", type=int, default=10_000, help="gradings of the growth test (default 10000)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "grading.json")
    arguments = parser.parse_args()
    rows = measure(1, 2000, 120) + measure(80, 2000, 60)
    with tempfile.TemporaryDirectory(prefix="savepoint-bench-") as name:
        make_database(Path(name) / "bench.sqlite", 1)
        megabytes, descriptors = growth(Path(name), arguments.gradings)
    rows.append(_row(f"memory grown over {arguments.gradings:,} gradings", megabytes, "MB", None, None, "<= 16", megabytes <= 16))
    rows.append(_row(f"descriptors grown over {arguments.gradings:,} gradings", descriptors, "descriptors", None, None, "<= 0", descriptors <= 0))
    result = {"name": "grading", "machine": {"platform": platform.platform(), "cores": os.cpu_count()}, "rows": rows}
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        json.dump(result, sys.stdout, indent=1)
    else:
        for row in rows:
            against = f" against {row['against']} ({row['ratio']}x)" if row["ratio"] else ""
            print(
                f"{'ok ' if row['holds'] else 'NO '} {row['figure']}: {row['value']} {row['unit']}{against}"
                + (f" (bound {row['bound']})" if row["bound"] else "")
            )
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
