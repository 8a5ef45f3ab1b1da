"""Contents of a session as bytes: what moves it to another process, and what a worker ships so that its death costs nothing.

    header   magic with version, whether it is an increment (u32), page size (u32), file size (u64), number of pages (u64),
             bytes of the settings (u32), digest of the base
    settings MessagePack: pragmas of the connection, last_insert_rowid
    pages    of each its number (i64) and its bytes, ascending
    seal     BLAKE2b of all of it

The seal and the base are checked before a page is written: a damaged or foreign pack changes nothing.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

import msgpack

from savepoint.state.errors import StateError
from savepoint.state.sqlite.pages import Image, Volume

_MAGIC = b"SVPTDLT1"
_HEADER = struct.Struct("<8sIIQQI64s")
_SEAL_BYTES = 16


@dataclass(frozen=True, slots=True)
class Pack:
    """base_digest: the imported file that the pages belong to. increment: they go on top of an earlier state, not of that file. size: bytes of the
    database. pages: as `Image.delta` gives them. extras: of the connection."""

    base_digest: str
    increment: bool
    page_size: int
    size: int
    pages: memoryview
    extras: dict[str, Any]

    def check(self, base_digest: str) -> None:
        """StateError when it is of another base."""
        if self.base_digest != base_digest:
            raise StateError(f"a delta of base {self.base_digest} cannot be applied to base {base_digest}")

    def write(self, volume: Volume, whole: Image) -> None:
        """Have the volume show the contents. Its connection must be closed; `whole` is the imported file, which a pack that is no increment begins from.

        StateError when they do not fit into the volume's quota; it then shows a part of them.
        """
        if not self.increment:
            volume.restore(whole)
        volume.apply(self.pages, self.size)


def pack(image: Image, page_size: int, base_digest: str, extras: dict[str, Any], since: Image | None = None) -> bytes:
    """The contents of an image as bytes: relative to its base file, or, an increment, to the earlier image `since`. O(what differs)."""
    pages = image.delta(since)
    settings = msgpack.packb(extras)
    header = _HEADER.pack(_MAGIC, since is not None, page_size, image.size, len(pages) // (8 + page_size), len(settings), base_digest.encode())
    body = b"".join((header, settings, pages))
    return body + hashlib.blake2b(body, digest_size=_SEAL_BYTES).digest()


def unpack(data: bytes) -> Pack:
    """StateError, one line, when it is no pack or was damaged on the way."""
    view = memoryview(data)
    if len(view) < _HEADER.size + _SEAL_BYTES or bytes(view[:8]) != _MAGIC:
        raise StateError("not a delta of a session")
    body, seal = view[:-_SEAL_BYTES], bytes(view[-_SEAL_BYTES:])
    if hashlib.blake2b(body, digest_size=_SEAL_BYTES).digest() != seal:
        raise StateError("a delta that was damaged: its checksum does not match")
    _, increment, page_size, size, count, settings, digest = _HEADER.unpack_from(body)
    pages = body[_HEADER.size + settings :]
    if page_size < 512 or page_size > 65536 or len(pages) != count * (8 + page_size):
        raise StateError("a delta that was damaged: its pages are not those that it announces")
    extras = msgpack.unpackb(body[_HEADER.size : _HEADER.size + settings])
    return Pack(digest.rstrip(b"\0").decode(), bool(increment), page_size, size, pages, extras)
