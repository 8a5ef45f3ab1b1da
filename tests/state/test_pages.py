"""A volume is a file: random reads, writes and truncations against an array of bytes, with snapshots, on both page stores."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from savepoint.state import StateError
from savepoint.state.sqlite import vfs
from savepoint.state.sqlite.pages import HOST_FULL, PAGE_QUOTA, Image, PageStore, Volume

PAGE = 512
MANY = 1 << 20


@pytest.fixture
def store(kind: str) -> PageStore:
    return vfs.page_store(kind)


@pytest.fixture
def content() -> bytes:
    """150 pages: more than two chunks of the page table, and half a page at the end."""
    return os.urandom(150 * PAGE + PAGE // 2)


@pytest.fixture
def image(store: PageStore, content: bytes, tmp_path: Path) -> Image:
    (tmp_path / "base").write_bytes(content)
    return store.open_base(str(tmp_path / "base"), PAGE)


def open_file(volume: Volume) -> apsw.VFSFile:
    volume.register(True)
    return apsw.VFSFile(volume.name, "database", [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READWRITE, 0])


def everything(file: apsw.VFSFile) -> bytes:
    return file.xRead(file.xFileSize(), 0)


def pages_of(delta: bytes) -> Iterator[int]:
    return (number for number, _ in struct.iter_unpack(f"=q{PAGE}s", delta))


def patched(base: bytes, size: int, delta: bytes) -> bytes:
    """What a delta says the file is."""
    model = bytearray(base[:size].ljust(-(-size // PAGE) * PAGE, b"\0"))
    for at in range(0, len(delta), 8 + PAGE):
        (number,) = struct.unpack_from("=q", delta, at)
        model[number * PAGE : (number + 1) * PAGE] = delta[at + 8 : at + 8 + PAGE]
    return bytes(model[:size])


@pytest.mark.parametrize("seed", range(6))
def test_a_volume_behaves_as_a_file(store: PageStore, image: Image, content: bytes, seed: int):
    rng = random.Random(seed)
    volume = store.volume(image, None, MANY, MANY)
    equal = volume.freeze()
    file, model, snapshots = open_file(volume), bytearray(content), [(image, content)]
    for _ in range(300):
        action = rng.random()
        page = rng.randrange(260)
        if action < 0.35:
            data = rng.randbytes(PAGE) if rng.random() < 0.7 else content[page * PAGE : (page + 1) * PAGE].ljust(PAGE, b"\0")
            file.xWrite(data, page * PAGE)
            model.extend(bytes(max(0, page * PAGE - len(model))))
            model[page * PAGE : page * PAGE + PAGE] = data
        elif action < 0.45:
            offset, data = rng.randrange(len(model) + 2000), rng.randbytes(rng.randrange(1, 1500))
            file.xWrite(data, offset)
            model.extend(bytes(max(0, offset - len(model))))
            model[offset : offset + len(data)] = data
        elif action < 0.52:
            size = rng.randrange(260) * PAGE
            if size < len(model):  # SQLite truncates to whole pages, and only to shorten
                file.xTruncate(size)
                del model[size:]
        elif action < 0.85:
            offset, amount = rng.randrange(len(model) + 1), rng.randrange(1, 3000)
            expected = bytes(model[offset : offset + amount])
            if len(expected) == amount:
                assert file.xRead(amount, offset) == expected
        elif action < 0.93:
            frozen = volume.freeze()
            assert patched(content, frozen.size, frozen.delta()) == bytes(model)
            snapshots.append((frozen, bytes(model)))
        elif action < 0.96:
            earlier, contents = rng.choice(snapshots)  # an earlier state and what changed since make the present one
            frozen, other = volume.freeze(), store.volume(image, earlier, MANY, MANY)
            other.apply(memoryview(frozen.delta(earlier)), frozen.size)
            assert other.freeze().delta() == frozen.delta()
            other.close()
            counted = store.volume(equal, frozen, MANY, MANY)  # another origin with the same contents: the differences are counted anew
            assert counted.stats().delta_pages == volume.stats().delta_pages
            counted.close()
        elif action < 0.98:
            file.xClose()
            frozen, contents = rng.choice(snapshots)
            volume.restore(frozen)
            file, model = open_file(volume), bytearray(contents)
        assert file.xFileSize() == len(model)
    if model:
        assert everything(file) == bytes(model)
    file.xClose()
    for frozen, contents in snapshots:
        assert frozen.size == len(contents) and patched(content, frozen.size, frozen.delta()) == contents, "snapshots do not change"
    volume.restore(None)
    stats = volume.stats()
    assert (stats.delta_pages, stats.same_size) == (0, True)
    volume.close()


def test_a_delta_since_an_image_holds_what_was_written_and_no_more(store: PageStore, image: Image):
    volume = store.volume(image, None, MANY, MANY)
    file = open_file(volume)
    for page in range(100):
        file.xWrite(os.urandom(PAGE), page * PAGE)
    earlier = volume.freeze()
    for page in (3, 97, 131):
        file.xWrite(os.urandom(PAGE), page * PAGE)
    assert list(pages_of(volume.freeze().delta(earlier))) == [3, 97, 131]
    assert volume.freeze().delta(volume.freeze()) == b""
    file.xClose()
    volume.close()


def test_what_cannot_be_applied_is_refused(store: PageStore, image: Image):
    def page(number: int) -> bytes:
        return struct.pack("=q", number) + bytes(PAGE)

    volume = store.volume(image, None, 5, MANY)
    for pages in (b"x", page(-100000), page(1 << 40), page(150)[:-1]):
        with pytest.raises(StateError, match="applying a delta"):
            volume.apply(memoryview(pages), 150 * PAGE)
        volume.restore(None)
    with pytest.raises(StateError, match="applying a delta"):
        volume.apply(memoryview(b"".join(map(page, range(6)))), 150 * PAGE)
    file = open_file(volume)
    with pytest.raises(StateError):
        volume.apply(memoryview(page(1)), 150 * PAGE)
    file.xClose()
    volume.close()


def test_writes_count_what_changed(store: PageStore, image: Image, content: bytes):
    volume = store.volume(image, None, MANY, MANY)
    file = open_file(volume)
    before = volume.stats().writes
    file.xWrite(content[:PAGE], 0)
    assert volume.stats().writes == before
    file.xWrite(bytes(PAGE), 0)
    assert volume.stats().writes > before
    file.xClose()
    volume.close()


def test_a_parked_volume_is_no_name_that_sqlite_knows(store: PageStore, image: Image):
    volume = store.volume(image, None, MANY, MANY)
    assert volume.name not in apsw.vfs_names()
    file = open_file(volume)
    assert volume.name in apsw.vfs_names()
    file.xClose()
    volume.register(False)
    assert volume.name not in apsw.vfs_names()
    volume.close()


def test_a_process_has_a_budget_and_what_is_beyond_it_is_spilled_or_refused(store: PageStore, image: Image, tmp_path: Path):
    start = store.usage()[0]
    volume = store.volume(image, None, MANY, MANY)
    file = open_file(volume)
    with (tmp_path / "spill").open("w+b") as spill:
        try:
            store.budget(((start + 10 * PAGE + 2) // 3) * 4 if store.kind == "c" else start + 10 * PAGE, -1, 0)  # a quarter is kept for temporary files
            with pytest.raises(apsw.FullError):
                for page in range(20):
                    file.xWrite(os.urandom(PAGE), page * PAGE)
            assert (volume.stats().refused, volume.stats().delta_pages) == (HOST_FULL, 10)
            if store.kind == "c":
                store.budget(((start + 10 * PAGE + 2) // 3) * 4, spill.fileno(), 8 << 20)
                model = [os.urandom(PAGE) for _ in range(120)]
                for page, data in enumerate(model):
                    file.xWrite(data, page * PAGE)
                assert everything(file)[: 120 * PAGE] == b"".join(model)
                assert store.usage()[0] <= start + 10 * PAGE
                assert 0 < store.usage()[1] <= 8 << 20
        finally:
            file.xClose()
            volume.close()
            store.budget(0, spill.fileno() if store.kind == "c" else -1, 0)
    assert store.usage()[0] == start


def test_equal_contents_have_equal_deltas_whatever_the_way(store: PageStore, image: Image, content: bytes):
    deltas = []
    for truncated in (False, True):
        volume = store.volume(image, None, MANY, MANY)
        file = open_file(volume)
        if truncated:
            file.xTruncate(0)
        file.xWrite(bytes(PAGE), 3 * PAGE)
        for page in range(140):
            if page != 3:
                file.xWrite(content[page * PAGE : (page + 1) * PAGE], page * PAGE)
        file.xWrite(b"x" * PAGE, 139 * PAGE)
        file.xTruncate(140 * PAGE)
        file.xClose()
        deltas.append(volume.freeze().delta())
        volume.close()
    assert deltas[0] == deltas[1] and len(deltas[0]) == 2 * (8 + PAGE)


def test_a_volume_has_one_open_connection_and_is_restored_without(store: PageStore, image: Image):
    volume = store.volume(image, None, MANY, MANY)
    file = open_file(volume)
    with pytest.raises(apsw.CantOpenError):
        open_file(volume)
    for use in (lambda: volume.restore(None), volume.close):
        with pytest.raises(StateError):
            use()
    file.xClose()
    volume.close()
    volume.close()


@pytest.mark.parametrize("flag", [apsw.SQLITE_OPEN_TEMP_DB, apsw.SQLITE_OPEN_TRANSIENT_DB, apsw.SQLITE_OPEN_WAL])
def test_no_file_with_a_name_is_opened(store: PageStore, image: Image, tmp_path: Path, flag: int):
    volume = store.volume(image, None, MANY, MANY)
    volume.register(True)
    with pytest.raises(apsw.CantOpenError):
        apsw.VFSFile(volume.name, str(tmp_path / "leak"), [flag | apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE, 0])
    assert not (tmp_path / "leak").exists()
    volume.close()


def test_an_image_of_another_base_is_refused(store: PageStore, image: Image, tmp_path: Path):
    (tmp_path / "other").write_bytes(os.urandom(10 * PAGE))
    other = store.open_base(str(tmp_path / "other"), PAGE)
    volume = store.volume(image, None, MANY, MANY)
    with pytest.raises(StateError):
        volume.restore(other)
    volume.close()


def test_pages_are_counted_for_who_made_them(store: PageStore, image: Image, content: bytes):
    parent = store.volume(image, None, 3, MANY)
    file = open_file(parent)
    for page in range(3):
        file.xWrite(bytes(PAGE), page * PAGE)
    with pytest.raises(apsw.FullError):
        file.xWrite(bytes(PAGE), 3 * PAGE)
    assert parent.stats().refused == PAGE_QUOTA and parent.stats().held_pages == 3
    parent.begin()
    file.xWrite(b"y" * PAGE, 0)
    file.xWrite(content[PAGE : 2 * PAGE], PAGE)
    assert parent.stats().refused == 0 and parent.stats().held_pages == 2, "a page equal to the base is given back"
    snapshot = parent.freeze()
    file.xWrite(b"z" * PAGE, 0)
    assert parent.stats().held_pages == 3, "the snapshot keeps the page that was changed"
    with pytest.raises(apsw.FullError):
        file.xWrite(b"z" * PAGE, 2 * PAGE)
    child = store.volume(image, snapshot, 1, MANY)
    assert (child.stats().held_pages, child.stats().delta_pages) == (0, 2)
    own = open_file(child)
    own.xWrite(b"c" * PAGE, 0)
    assert child.stats().held_pages == 1 and file.xRead(PAGE, 0) == b"z" * PAGE
    del snapshot
    own.xClose()
    child.close()
    assert parent.stats().held_pages == 2
    file.xClose()
    parent.close()


def test_a_page_equal_to_the_image_is_the_images_own(store: PageStore, image: Image):
    setup = store.volume(image, None, MANY, MANY)
    file = open_file(setup)
    file.xWrite(b"s" * PAGE, 5 * PAGE)
    file.xClose()
    derived = setup.freeze()
    setup.close()
    volume = store.volume(derived, None, 1, MANY)
    file = open_file(volume)
    file.xWrite(b"t" * PAGE, 5 * PAGE)
    assert (volume.stats().delta_pages, volume.stats().held_pages) == (1, 1)
    file.xWrite(b"s" * PAGE, 5 * PAGE)
    assert (volume.stats().delta_pages, volume.stats().held_pages) == (0, 0)
    file.xClose()
    volume.close()


def test_what_is_no_longer_used_is_freed(store: PageStore, content: bytes, tmp_path: Path):
    before = store.live()
    (tmp_path / "base").write_bytes(content)
    image = store.open_base(str(tmp_path / "base"), PAGE)
    volume = store.volume(image, None, MANY, MANY)
    file = open_file(volume)
    file.xWrite(b"x" * PAGE, 0)
    snapshot = volume.freeze()
    assert store.live() == {"pages": before["pages"] + 1, "volumes": before["volumes"] + 1, "images": before["images"] + 2, "bases": before["bases"] + 1}
    file.xClose()
    del file
    volume.close()
    del image, volume
    assert store.live()["bases"] == before["bases"] + 1, "the snapshot needs the base"
    del snapshot
    assert store.live() == before and str(tmp_path / "base") not in Path("/proc/self/maps").read_text()
