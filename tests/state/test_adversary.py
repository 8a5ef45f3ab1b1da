"""An agent that tries to get out, to stay in, or to starve its neighbours: after each attack base, sibling and reset are exact."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from state_support import Lease, file_hash, rows

LOOP = (
    "CREATE TABLE l(a); CREATE TRIGGER t AFTER INSERT ON l BEGIN INSERT INTO l VALUES (new.a + 1); END; PRAGMA recursive_triggers = 1; INSERT INTO l VALUES (1)"
)
VIEWS = "CREATE VIEW v0 AS SELECT 1 AS a;" + "".join(f"CREATE VIEW v{i} AS SELECT a.a FROM v{i - 1} a, v{i - 1} b;" for i in range(1, 16))
GAMES = "BEGIN; UPDATE orders SET amount = 1; COMMIT; BEGIN; DELETE FROM orders; ROLLBACK; SAVEPOINT a; DELETE FROM orders; RELEASE a"
NUMBERS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 2000000) "
FOREVER = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) "
FULL_OR_LATE = {"full", "timeout"}
ATTACKS: dict[str, tuple[str, set[str]]] = {
    "commit and rollback games": (GAMES, {"ok"}),
    "left-open BEGIN": ("BEGIN IMMEDIATE; UPDATE orders SET amount = 9", {"ok"}),
    "drop everything": ("DROP TABLE orders; DROP TABLE customer", {"ok"}),
    "vacuum": ("DELETE FROM orders WHERE id % 2; VACUUM", {"ok"}),
    "reindex and analyze": ("REINDEX; ANALYZE", {"ok"}),
    "vacuum into a file": ("VACUUM INTO 'LEAK1'", {"denied"}),
    "page size": ("PRAGMA page_size = 8192; VACUUM", {"denied"}),
    "journal off": ("PRAGMA journal_mode = off", {"denied"}),
    "write-ahead log": ("PRAGMA journal_mode = wal", {"denied"}),
    "writable schema": ("PRAGMA writable_schema = 1; UPDATE sqlite_schema SET sql = 'x'", {"denied"}),
    "schema by DML": ("DELETE FROM sqlite_schema", {"sql_error"}),
    "auto vacuum": ("PRAGMA auto_vacuum = 1; VACUUM", {"denied"}),
    "heap of the process": ("PRAGMA hard_heap_limit = 1", {"denied"}),
    "heap by table function": ("SELECT * FROM pragma_soft_heap_limit(1)", {"denied", "sql_error"}),
    "temporary directory": ("PRAGMA temp_store_directory = '/etc'", {"denied"}),
    "attach a file": ("ATTACH 'LEAK2' AS x", {"denied"}),
    "attach a URI": ("ATTACH 'file:BASE?vfs=unix' AS x; DELETE FROM x.orders", {"denied"}),
    "attach memory": ("ATTACH ':memory:' AS m", {"denied"}),
    "attach nothing": ("ATTACH '' AS m; CREATE TABLE m.t(a); INSERT INTO m.t VALUES (1)", {"ok"}),
    "attach a sibling": ("ATTACH 'file:database?vfs=SIBLING' AS x", {"denied"}),
    "attach an expression": ("ATTACH 'LEA' || 'K3' AS x", {"denied"}),
    "extension": ("SELECT load_extension('x.so')", {"denied"}),
    "extension in a trigger": ("CREATE TRIGGER t AFTER DELETE ON orders BEGIN SELECT load_extension('x'); END; DELETE FROM orders", {"denied"}),
    "extension in a view": ("CREATE VIEW v AS SELECT load_extension('x'); SELECT * FROM v", {"denied"}),
    "pragma in a view": ("CREATE VIEW v AS SELECT * FROM pragma_database_list; SELECT * FROM v", {"denied"}),
    "files by function": ("SELECT writefile('LEAK4', 'x'), readfile('/etc/passwd')", {"denied", "sql_error"}),
    "tokenizer": ("SELECT fts3_tokenizer('simple', x'4141414141414141')", {"denied"}),
    "raw pages": ("UPDATE sqlite_dbpage SET data = zeroblob(4096)", {"sql_error", "denied"}),
    "shadow tables": ("CREATE VIRTUAL TABLE f USING fts5(a); UPDATE f_data SET block = x'00'", {"sql_error"}),
    "endless recursion": (FOREVER + "SELECT sum(x) FROM c", {"timeout"}),
    "endless rows": (FOREVER + "SELECT x FROM c", {"ok"}),
    "cross join": ("SELECT count(*) FROM orders a, orders b, orders c WHERE a.amount + b.amount > c.amount", {"timeout"}),
    "huge blob": ("SELECT length(randomblob(1000000000))", {"too_big"}),
    "huge stored blob": ("CREATE TABLE z(x); INSERT INTO z VALUES (zeroblob(1000000000))", {"too_big"}),
    "doubling": ("SELECT length(hex(hex(hex(hex(hex(hex(randomblob(100000))))))))", {"too_big"}),
    "padding": ("SELECT length(printf('%.*c', 999999999, 'x'))", {"too_big"}),
    "concatenation": ("SELECT length(group_concat(note, (SELECT group_concat(note) FROM orders))) FROM orders", {"too_big"}),
    "replacement": ("SELECT length(replace(printf('%.*c', 150000, 'a'), 'a', printf('%.*c', 150000, 'b')))", {"too_big"}),
    "large delta": (f"CREATE TABLE big AS {NUMBERS} SELECT x, randomblob(1000) AS b FROM c", FULL_OR_LATE),
    "large TEMP table": (f"CREATE TEMP TABLE big AS {NUMBERS} SELECT x, randomblob(1000) AS b FROM c", FULL_OR_LATE),
    "large sort": (f"SELECT b FROM ({NUMBERS} SELECT x, randomblob(500) AS b FROM c) ORDER BY b LIMIT 1", FULL_OR_LATE),
    "endless trigger": (LOOP, {"sql_error"}),
    "trigger for later": ("CREATE TRIGGER z AFTER INSERT ON customer BEGIN DELETE FROM orders; END", {"ok"}),
    "view bomb": (VIEWS + "SELECT count(*) FROM v15", {"timeout"}),
    "deep parentheses": ("SELECT " + "(" * 5000 + "1" + ")" * 5000, {"sql_error"}),
    "long list": ("SELECT 1 IN (" + ",".join(["1"] * 60000) + ")", {"ok"}),
    "deep JSON": ("SELECT json('" + "[" * 3000 + "]" * 3000 + "')", {"sql_error"}),
    "malformed JSONB": ("SELECT jsonb_extract(x'ffffffffffffffff', '$.a'), json(x'cc0fffff')", {"sql_error", "ok"}),
    "statistics by pragma function": ("SELECT * FROM pragma_optimize(0x10002)", {"ok"}),
    "locking mode": ("PRAGMA locking_mode = normal; SELECT 1", {"denied"}),
    "cache of the connection": ("PRAGMA cache_size = 1000000", {"denied"}),
    "mapped reads": ("PRAGMA mmap_size = 1000000000", {"denied"}),
    "temporary store": ("PRAGMA temp_store = memory", {"denied"}),
    "threads of sorters": ("PRAGMA threads = 8", {"denied"}),
    "trusted schema": ("PRAGMA trusted_schema = 1", {"denied"}),
    "checkpoint of a log": ("PRAGMA wal_checkpoint(truncate)", {"denied"}),
    "shrinking the heap": ("PRAGMA shrink_memory", {"denied"}),
    "collation list as a weapon": ("SELECT count(*) FROM pragma_collation_list a, pragma_function_list b, pragma_function_list c", {"timeout", "ok"}),
    "schema version": ("PRAGMA schema_version = 9999", {"denied"}),
    "schema version by function": ("SELECT * FROM pragma_schema_version(9999)", {"denied", "sql_error"}),
    "encoding": ("PRAGMA encoding = 'UTF-16'", {"denied"}),
    "page count": ("PRAGMA max_page_count = 1", {"denied"}),
    "secure delete": ("PRAGMA secure_delete = 1", {"denied"}),
    "query only, for ever": ("PRAGMA query_only = 1", {"denied"}),
    "vacuum a named schema into a URI": ("VACUUM main INTO 'file:LEAK5?mode=rwc'", {"denied"}),
    "attach by upper case and comment": ("aTtAcH /* x */ dataBase 'LEAK6' AS y", {"denied"}),
    "attach through explain": ("EXPLAIN ATTACH 'LEAK7' AS x", {"denied", "ok"}),
    "attach many": ("ATTACH '' AS a; ATTACH '' AS b; ATTACH '' AS c; ATTACH '' AS d", {"sql_error"}),
    "detach main": ("DETACH main", {"sql_error"}),
    "rename the schema table": ("ALTER TABLE sqlite_schema RENAME TO s", {"sql_error"}),
    "trigger on the schema table": ("CREATE TRIGGER t AFTER INSERT ON sqlite_schema BEGIN SELECT 1; END", {"sql_error"}),
    "sequence by hand": ("CREATE TABLE s(a INTEGER PRIMARY KEY AUTOINCREMENT); UPDATE sqlite_sequence SET seq = 9223372036854775807", {"ok"}),
    "statistics by hand": ("ANALYZE; UPDATE sqlite_stat1 SET stat = 'x y z'; ANALYZE sqlite_schema; SELECT * FROM orders WHERE customer = 1", {"ok"}),
    "geopoly and r-tree garbage": (
        "CREATE VIRTUAL TABLE r USING rtree(i, a, b); UPDATE r_node SET data = x'ff'; SELECT * FROM r WHERE a > "
        "0", {"ok", "sql_error", "denied"},
    ),
    "full text garbage": ("CREATE VIRTUAL TABLE f USING fts5(a); INSERT INTO f VALUES ('x'); INSERT INTO f(f, rank) VALUES ('pgsz', 32)", {"ok", "sql_error"}),
    "a million savepoints": ("BEGIN;" + "SAVEPOINT a;" * 5000, {"denied"}),
    "left-open savepoint": ("SAVEPOINT a; DELETE FROM orders", {"ok"}),
    "generated columns for ever": (
        "CREATE TABLE g(a, b AS (a || a), c AS (b || b), d AS (c || c)); INSERT INTO g(a) VALUES (printf('%.*c', 190000, 'x')); "
        "SELECT length(d) FROM g", {"too_big"},
    ),
    "window over everything": (
        "SELECT sum(amount) OVER (ORDER BY amount ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING) FROM orders, "
        "(SELECT 1 FROM orders)", FULL_OR_LATE,
    ),
    "pattern by LIKE": ("SELECT sum(printf('%.*c', 190000, 'a') || id LIKE '%a%a%a%a%a%a%a%a%a%b') FROM orders", {"timeout", "ok"}),
    "pattern by GLOB": ("SELECT sum(printf('%.*c', 190000, 'a') || id GLOB '*[a-z]*[a-z]*[a-z]*[0-9]') FROM orders", {"timeout"}),
    "search in a long text": ("SELECT sum(instr(printf('%.*c', 199000, 'a'), printf('%.*c', 99000, 'a') || 'b')) FROM orders", {"timeout"}),
    "names that are long": ("SELECT " + ", ".join(f"1 AS {'n' * 3000}{i}" for i in range(60)), {"ok", "too_big"}),
    "words that are long": (
        "CREATE TRIGGER t BEFORE DELETE ON orders BEGIN SELECT RAISE(ABORT, 'LONG'); END; DELETE FROM orders".replace("LONG", "m" * 100_000), {"sql_error"},
    ),
    "a NUL in the middle": ("SELECT 1; \0 DELETE FROM orders", {"sql_error"}),
    "random numbers without end": (FOREVER + "SELECT sum(length(randomblob(100000))) FROM c", {"timeout"}),
}  # fmt: skip
# With the authorizer off these would change the process or its directories, which no page store can undo.
OF_THE_PROCESS = {"heap of the process", "heap by table function", "temporary directory"}


@pytest.mark.parametrize("attack", ATTACKS)
def test_after_an_attack_the_base_a_sibling_and_the_reset_session_are_exact(lease: Lease, tmp_path: Path, attack: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    session, sibling = lease(delta_bytes=4 << 20, temp_bytes=8 << 20), lease()
    sql, expected = ATTACKS[attack]
    for word, value in (("LEAK", str(tmp_path / "leak")), ("BASE", str(session.image.path)), ("SIBLING", sibling._lease.volume.name)):
        sql = sql.replace(word, value)
    content, stored = "SELECT count(*), sum(amount), (SELECT count(*) FROM customer) FROM orders", file_hash(session.image.path)
    truth, digest, started = rows(sibling, content), sibling.digest(), time.monotonic()

    result = session.execute(sql, deadline_s=0.4)

    assert time.monotonic() - started < 3, "the deadline holds"
    assert result.status in expected, result
    assert session.reset().holds and session.digest() == digest
    for each in (session, sibling):
        assert rows(each, content) == truth and rows(each, "PRAGMA integrity_check") == (("ok",),)
    assert file_hash(session.image.path) == stored and not list(tmp_path.glob("leak*"))


@pytest.mark.parametrize("attack", sorted(ATTACKS.keys() - OF_THE_PROCESS))
def test_without_the_authorizer_the_page_store_alone_keeps_the_base_and_a_sibling_exact(
    lease: Lease, tmp_path: Path, attack: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    session, sibling = lease(delta_bytes=4 << 20, temp_bytes=8 << 20), lease()
    sql = ATTACKS[attack][0]
    for word, value in (("LEAK", str(tmp_path / "leak")), ("BASE", str(session.image.path)), ("SIBLING", sibling._lease.volume.name)):
        sql = sql.replace(word, value)
    content, stored = "SELECT count(*), sum(amount), (SELECT count(*) FROM customer) FROM orders", file_hash(session.image.path)
    truth = rows(sibling, content)
    session._lease.open().raw.authorizer = None

    result = session.execute(sql, deadline_s=0.4)

    assert result.status != "denied" or "LEAK" not in ATTACKS[attack][0]
    assert session.reset().holds
    for each in (session, sibling):
        assert rows(each, content) == truth
        assert rows(each, "PRAGMA integrity_check") == (("ok",),)
    assert file_hash(session.image.path) == stored
    assert not list(tmp_path.glob("leak*"))


READ_ONLY_DENIED = [
    "INSERT INTO customer DEFAULT VALUES", "WITH x AS (SELECT 1) DELETE FROM orders", "UPDATE orders SET amount = 1 RETURNING id", "CREATE TABLE t(a)",
    "CREATE TEMP TABLE t(a)", "DROP TABLE orders", "ALTER TABLE orders RENAME TO o", "VACUUM", "ANALYZE", "REINDEX", "REPLACE INTO customer DEFAULT VALUES",
    "PRAGMA user_version = 9", "PRAGMA user_version(9)", "PRAGMA foreign_keys = 1", "PRAGMA optimize", "PRAGMA incremental_vacuum",
    "SELECT * FROM pragma_optimize(0x10002)", "ATTACH '' AS x", "BEGIN IMMEDIATE", "EXPLAIN DELETE FROM orders", "SELECT 1; DELETE FROM orders",
]  # fmt: skip
READ_ONLY_FINE = [
    "SELECT replace('DELETE', 'x', 'y') AS created_at", "WITH x AS (SELECT 1 AS a) SELECT a FROM x", "SELECT sql FROM sqlite_master",
    "PRAGMA table_info(orders)",
    "SELECT name FROM pragma_table_info('orders')", "EXPLAIN QUERY PLAN SELECT 1", "PRAGMA user_version", "PRAGMA foreign_keys", "VALUES (1), (2)",
    "SELECT id FROM orders ORDER BY note LIMIT 3",
]  # fmt: skip


@pytest.mark.parametrize("sql", READ_ONLY_DENIED)
def test_a_read_only_call_denies_what_could_write(lease: Lease, sql: str):
    session = lease()
    result = session.execute(sql, readonly=True)
    assert result.status == "denied" and session.stats().delta_pages == 0 and not session.in_transaction
    assert rows(session, "SELECT count(*) FROM temp.sqlite_schema") == ((0,),) and rows(session, "PRAGMA user_version") == ((0,),)


@pytest.mark.parametrize("sql", READ_ONLY_FINE)
def test_a_read_only_call_lets_reading_by(lease: Lease, sql: str):
    assert lease().execute(sql, readonly=True).status == "ok"
