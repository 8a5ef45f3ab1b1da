"""Importing: once per content, without a trace on the source, and one clear line for what is no usable database."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from state_support import file_hash, make_shop, rows

from savepoint.errors import UserError
from savepoint.state import SqliteBackend, open_backend
from savepoint.state.sqlite import store as store_module
from savepoint.state.sqlite.store import Store, default_store


@pytest.fixture(autouse=True)
def kind() -> str:
    """What is imported does not depend on the page store: one will do."""
    return "auto"


def neighbours(path: Path) -> dict[str, tuple[int, int, str]]:
    """Everything beside a file (itself included): name, size, time stamp, content."""
    files = sorted(file for file in path.parent.iterdir() if file.is_file())
    return {file.name: (file.stat().st_size, file.stat().st_mtime_ns, file_hash(file)) for file in files}


def test_the_source_and_its_neighbours_stay_as_they_were(backend: SqliteBackend, tmp_path: Path):
    path = make_shop(tmp_path / "shop.sqlite", 200)
    before = neighbours(path)
    image = backend.import_base(path)
    assert neighbours(path) == before and image.path.parent.parent == tmp_path / "store" and not image.path.stat().st_mode & 0o222
    assert (image.size, image.page_size, image.setup) == (path.stat().st_size, 4096, ())


def test_a_write_ahead_log_is_folded_into_the_copy_and_not_into_the_source(backend: SqliteBackend, tmp_path: Path):
    writer = sqlite3.connect(tmp_path / "wal.sqlite")
    writer.execute("PRAGMA journal_mode = wal")
    writer.execute("PRAGMA wal_autocheckpoint = 0")
    writer.execute("CREATE TABLE t(a)")
    writer.execute("INSERT INTO t VALUES (42)")
    writer.commit()
    folder = tmp_path / "copied"
    folder.mkdir()
    for suffix in ("", "-wal"):  # as a backup of a running application leaves them
        shutil.copyfile(tmp_path / f"wal.sqlite{suffix}", folder / f"wal.sqlite{suffix}")
    before = neighbours(folder / "wal.sqlite")
    for path in (folder / "wal.sqlite", tmp_path / "wal.sqlite"):  # at rest, and while the application has it open
        with backend.lease(backend.import_base(path), owner="test") as session:
            assert rows(session, "SELECT a FROM t") == ((42,),)
    assert neighbours(folder / "wal.sqlite") == before and list(folder.glob("*-shm")) == []
    writer.execute("INSERT INTO t VALUES (43)")
    writer.commit()
    with backend.lease(backend.import_base(tmp_path / "wal.sqlite"), owner="test") as session:
        assert rows(session, "SELECT count(*) FROM t") == ((2,),), "a change in the log alone is seen"
    writer.close()


def test_a_database_in_wal_mode_that_was_closed_can_be_leased(backend: SqliteBackend, tmp_path: Path):
    path = make_shop(tmp_path / "shop.sqlite", 100)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode = wal")
    db.close()
    assert path.read_bytes()[18:20] == b"\2\2" and not Path(f"{path}-wal").exists()
    with backend.lease(backend.import_base(path), owner="test") as session:
        assert rows(session, "SELECT count(*) FROM orders; DELETE FROM orders") == ((100,),)


def test_a_hot_journal_is_rolled_back_in_the_copy(backend: SqliteBackend, tmp_path: Path):
    """A writer that was killed after its pages reached the file."""
    path = make_shop(tmp_path / "hot.sqlite", 2000)
    code = (
        "import sqlite3, os, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None); db.execute('PRAGMA cache_size = 5'); db.execute('BEGIN');"
        "db.execute(\"UPDATE orders SET note = 'torn'\"); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    assert (tmp_path / "hot.sqlite-journal").stat().st_size > 0
    before = neighbours(path)
    with backend.lease(backend.import_base(path), owner="test") as session:
        assert rows(session, "SELECT count(*) FROM orders WHERE note = 'torn'") == ((0,),)
    assert neighbours(path) == before


def test_the_same_content_is_kept_once_and_found_at_once(backend: SqliteBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = make_shop(tmp_path / "shop.sqlite", 100)
    copy = tmp_path / "another name.sqlite"
    shutil.copyfile(path, copy)
    os.utime(path, (1, 1))
    first = backend.import_base(path)
    assert backend.import_base(copy) is first and len(list((tmp_path / "store" / "bases").iterdir())) == 1
    monkeypatch.setattr("savepoint.state.sqlite.store._SETTLED_NS", -(10**12))  # as if the file had rested for a while

    def never(*arguments: object) -> None:
        raise AssertionError("the file was read again")

    monkeypatch.setattr(Store, "_import", never)
    assert backend.import_base(path) is first
    with open_backend("sqlite", store=tmp_path / "store") as another:
        assert another.import_base(path).digest == first.digest


def test_a_file_that_changed_within_the_clocks_granularity_is_read_again(backend: SqliteBackend, tmp_path: Path):
    path = make_shop(tmp_path / "shop.sqlite", 100)
    first, stamp = backend.import_base(path), path.stat()
    content = bytearray(path.read_bytes())
    content[68:72] = b"\0\0\0\7"  # application_id: same size, and the time stamp is set back
    path.write_bytes(content)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert backend.import_base(path).digest != first.digest


def test_a_change_that_leaves_no_trace_in_the_time_stamps_is_seen(backend: SqliteBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As where the clock of the file system ticks slowly: two writes in one tick."""
    path = make_shop(tmp_path / "shop.sqlite", 100)
    stamps = store_module._signature(path)
    monkeypatch.setattr("savepoint.state.sqlite.store._signature", lambda source: stamps)
    first = backend.import_base(path)
    content = bytearray(path.read_bytes())
    content[68:72] = b"\0\0\0\7"
    path.write_bytes(content)
    assert backend.import_base(path).digest != first.digest


def test_a_store_with_half_a_base_gets_it_again(backend: SqliteBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = make_shop(tmp_path / "shop.sqlite", 100)
    monkeypatch.setattr("savepoint.state.sqlite.store._SETTLED_NS", -(10**12))
    stored = backend.import_base(path).path
    stored.chmod(0o644)
    stored.write_bytes(stored.read_bytes()[:5000])
    with open_backend("sqlite", store=tmp_path / "store") as another:
        assert another.import_base(path).size == path.stat().st_size


def test_a_store_that_lost_a_base_gets_it_again(backend: SqliteBackend, tmp_path: Path):
    path = make_shop(tmp_path / "shop.sqlite", 100)
    stored = backend.import_base(path).path
    stored.unlink()
    with open_backend("sqlite", store=tmp_path / "store") as another:
        assert another.import_base(path).path == stored and stored.exists()


def test_what_a_killed_import_left_is_swept(backend: SqliteBackend, tmp_path: Path):
    left = tmp_path / "store" / "work" / "999999999-abc"
    left.mkdir(parents=True)
    (left / "copy.sqlite").write_bytes(b"half")
    backend.import_base(make_shop(tmp_path / "shop.sqlite", 100))
    assert list((tmp_path / "store" / "work").iterdir()) == []


def test_rows_that_break_their_own_tables_rules_are_no_corruption(backend: SqliteBackend, tmp_path: Path):
    """Published databases hold such rows; SQLite's integrity check reports them beside real damage."""
    with sqlite3.connect(tmp_path / "odd.sqlite") as db:
        db.execute("CREATE TABLE t(a, b)")
        db.execute("INSERT INTO t VALUES (NULL, 5)")
        db.execute("PRAGMA writable_schema = 1")
        db.execute("UPDATE sqlite_schema SET sql = 'CREATE TABLE t(a NOT NULL, b CHECK (b < 3))'")
    db.close()
    with backend.lease(backend.import_base(tmp_path / "odd.sqlite"), owner="test") as session:
        assert rows(session, "SELECT * FROM t") == ((None, 5),)


def test_collations_that_only_the_owner_has_are_no_corruption(backend: SqliteBackend, tmp_path: Path):
    with sqlite3.connect(tmp_path / "odd.sqlite") as db:
        db.create_collation("house", lambda a, b: (a > b) - (a < b))
        db.execute("CREATE TABLE t(a TEXT COLLATE house UNIQUE)")
        db.execute("INSERT INTO t VALUES ('x')")
    db.close()
    with backend.lease(backend.import_base(tmp_path / "odd.sqlite"), owner="test") as session:
        assert rows(session, "SELECT a FROM t NOT INDEXED") == (("x",),)


def test_progress_is_told(backend: SqliteBackend, tmp_path: Path):
    told: list[tuple[str, float]] = []
    backend.import_base(make_shop(tmp_path / "shop.sqlite", 100), progress=lambda stage, share: told.append((stage, share)))
    assert told[0][0] == "copying" and ("copying", 1.0) in told and told[-1][0] == "checking"


def test_several_processes_may_import_the_same_file_at_once(tmp_path: Path):
    path = make_shop(tmp_path / "shop.sqlite", 3000)
    code = "import sys; from savepoint.state import open_backend; print(open_backend(store=sys.argv[2]).import_base(sys.argv[1]).digest)"
    command = [sys.executable, "-c", code, str(path), str(tmp_path / "store")]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    digests = {run.communicate(timeout=60)[0] for run in runs}
    assert len(digests) == 1 and all(run.returncode == 0 for run in runs)
    assert len(list((tmp_path / "store" / "bases").iterdir())) == 1


def test_the_default_store_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("SAVEPOINT_STORE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_store() == tmp_path / "savepoint" / "store"
    monkeypatch.setenv("SAVEPOINT_STORE", str(tmp_path / "mine"))
    assert default_store() == tmp_path / "mine"


# ------------------------------------------------------------------ bad input


def refused(backend: SqliteBackend, path: Path) -> str:
    """The one line with which an import is refused; nothing stays behind in the store."""
    with pytest.raises(UserError) as caught:
        backend.import_base(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    bases = path.parent / "store" / "bases"
    assert not (bases.exists() and list(bases.iterdir()))
    return message


def test_a_missing_file_a_folder_and_a_pipe(backend: SqliteBackend, tmp_path: Path):
    assert "no such file" in refused(backend, tmp_path / "none.sqlite")
    (tmp_path / "folder").mkdir()
    assert "not a file" in refused(backend, tmp_path / "folder")
    os.mkfifo(tmp_path / "pipe")
    assert "not a file" in refused(backend, tmp_path / "pipe")


def test_an_empty_file_another_kind_of_file_and_an_encrypted_one(backend: SqliteBackend, tmp_path: Path):
    path = tmp_path / "x.sqlite"
    for content, words in ((b"", "an empty file"), (b"a,b\n1,2\n" * 100, "not a SQLite database"), (os.urandom(8192), "or an encrypted one")):
        path.write_bytes(content)
        assert words in refused(backend, path)
    path.write_bytes(b"SQLite format 3\0" + b"\xff" * 200)
    assert "not a SQLite database" in refused(backend, path)


@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_a_truncated_file(backend: SqliteBackend, tmp_path: Path, keep: float):
    path = make_shop(tmp_path / "x.sqlite", 1000)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(int(size * keep))
    assert f"truncated: it has {int(size * keep):,} bytes and should have {size:,}" in refused(backend, path)


@pytest.mark.parametrize("page", [1, 3, 20])
def test_a_corrupt_file(backend: SqliteBackend, tmp_path: Path, page: int):
    path = make_shop(tmp_path / "x.sqlite", 2000)
    with path.open("r+b") as file:
        file.seek(page * 4096)
        file.write(os.urandom(4096))
    assert "corrupt" in refused(backend, path)


def test_a_corrupt_schema(backend: SqliteBackend, tmp_path: Path):
    path = tmp_path / "x.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE t(a)")
        db.execute("PRAGMA writable_schema = 1")
        db.execute("UPDATE sqlite_schema SET sql = 'CREATE TABLE t(a,,)'")
    db.close()
    assert "corrupt" in refused(backend, path)


@pytest.mark.parametrize("where", ["this process", "another process"])
@pytest.mark.parametrize("begin", ["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"])
def test_a_file_that_somebody_writes_to(backend: SqliteBackend, tmp_path: Path, where: str, begin: str):
    path = make_shop(tmp_path / "x.sqlite", 100)
    code = f"import sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None); db.execute('{begin}'); print('locked', flush=True); sys.stdin.read()"
    if where == "this process":
        db = sqlite3.connect(path, isolation_level=None)
        db.execute(begin)
        assert "locked: another connection is writing" in refused(backend, path)
        stranger = sqlite3.connect(path, timeout=0, isolation_level=None)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            stranger.execute("BEGIN IMMEDIATE")
        check = f"import sqlite3; sqlite3.connect({str(path)!r}, timeout=0, isolation_level=None).execute('BEGIN IMMEDIATE')"
        done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
        assert "locked" in done.stderr, "looking at the file must not take the lock away"
        stranger.close()
        db.close()
    else:
        with subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == "locked\n"
            assert "locked: another connection is writing" in refused(backend, path)
    assert backend.import_base(path).size > 0, "and afterwards it can be imported"


def test_a_file_that_changes_all_the_time(backend: SqliteBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = make_shop(tmp_path / "x.sqlite", 100)
    ticks = iter(range(100, 1000))
    signature = store_module._signature
    monkeypatch.setattr("savepoint.state.sqlite.store._signature", lambda source: (os.utime(source, (0, next(ticks))), signature(source))[1])
    assert "changes while it is copied" in refused(backend, path)


def test_a_full_disk(backend: SqliteBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = make_shop(tmp_path / "x.sqlite", 100)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert "no space left on the disk" in refused(backend, path)
    assert list((tmp_path / "store" / "work").iterdir()) == []


def test_a_store_that_cannot_be_made(tmp_path: Path):
    path = make_shop(tmp_path / "x.sqlite", 100)
    (tmp_path / "file").write_text("")
    with open_backend("sqlite", store=tmp_path / "file" / "store") as backend:
        message = refused(backend, path)
    assert f"cannot be imported into {tmp_path / 'file' / 'store'}: Not a directory" in message


def test_an_unknown_backend_and_workers_are_refused():
    for arguments, words in (({"kind": "oracle"}, "only 'sqlite'"), ({"workers": -1}, "at least one of each"), ({"ship": "call"}, "only with workers")):
        with pytest.raises(UserError, match=words):
            open_backend(**arguments)  # type: ignore[arg-type]


def test_threads_may_import_at_once(backend: SqliteBackend, tmp_path: Path):
    path, images = make_shop(tmp_path / "shop.sqlite", 500), []
    threads = [threading.Thread(target=lambda: images.append(backend.import_base(path))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(images) == 6 and len({id(image) for image in images}) == 1


def test_importing_again_takes_no_time(backend: SqliteBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = make_shop(tmp_path / "shop.sqlite", 20_000)
    monkeypatch.setattr("savepoint.state.sqlite.store._SETTLED_NS", -(10**12))
    first = backend.import_base(path)
    started = time.monotonic()
    for _ in range(100):
        assert backend.import_base(path) is first
    assert time.monotonic() - started < 0.5
