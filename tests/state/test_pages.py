"""A volume is a file: random reads, writes and truncations against an array of bytes, with snapshots, on both page stores."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import apsw
import pytest

from savepoint.state import StateError
from savepoint.state.sqlite import vfs
from savepoint.state.sqlite.pages import PAGE_QUOTA, Image, PageStore, Volume

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
    return apsw.VFSFile(volume.name, "database", [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READWRITE, 0])


def everything(file: apsw.VFSFile) -> bytes:
    return file.xRead(file.xFileSize(), 0)


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
