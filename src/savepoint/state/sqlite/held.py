"""What a session holds and must give back: its volume, its connection, its place in the book. Outlives the session that leaked."""

from __future__ import annotations

from collections.abc import Callable

from savepoint.state.session import Quota
from savepoint.state.sqlite.connection import Connection
from savepoint.state.sqlite.dice import Dice
from savepoint.state.sqlite.pack import Pack
from savepoint.state.sqlite.pages import Image, Volume

MOVING = _RANDOM, _ROWID = "random", "last_insert_rowid"  # keys beside those of the pragmas; no pragma has these names


class Held:
    """A volume, and a connection on it while there is one: without (parked), a session is its pages and a few numbers.

    settings: of the connection, as they were when it was last closed in good order. commits: how often something was committed.
    """

    __slots__ = ("__weakref__", "_released", "columns", "commits", "connection", "dice", "over", "quota", "settings", "volume")

    def __init__(self, volume: Volume, quota: Quota, columns: int, seed: int, released: Callable[[], object]) -> None:
        self.volume, self.quota, self.columns = volume, quota, columns
        self.dice = Dice(seed, quota.length)
        self.connection: Connection | None = None
        self.settings: dict[str, str] = {}
        self.over, self.commits = False, 0
        self._released = released

    def open(self) -> Connection:
        """The connection, opened if the session was parked."""
        if self.connection is None:
            self.connection = Connection(self.volume, self.quota, self.columns, self.dice, self._committed)
            self._apply(self.connection)
        return self.connection

    def current(self) -> dict[str, str]:
        """The settings of the connection now, and what else of it goes along with the contents."""
        if self.connection is None:
            return self.settings
        settings = self.connection.settings()
        rowid = self.connection.raw.last_insert_rowid()
        if rowid:
            settings[_ROWID] = str(rowid)
        if self.dice.drawn:
            settings[_RANDOM] = str(self.dice.drawn)
        return settings

    def park(self) -> None:
        """Close the connection and keep what can be kept."""
        if self.connection is not None:
            self.settings = self.current()
            self.connection.close()
            self.connection = None

    def show(self, contents: Image | None, settings: dict[str, str]) -> None:
        """The volume goes to `contents` (None: the image), without a connection: the old one caches pages."""
        self._drop()
        self.volume.restore(contents)
        self.resume(settings)

    def rewrite(self, packs: list[Pack], whole: Image) -> None:
        """The volume shows what was packed; the image, when that does not fit."""
        self._drop()
        try:
            for pack in packs:
                pack.write(self.volume, whole)
        except BaseException:
            self.volume.restore(None)
            self.resume({})
            raise
        self.resume(packs[-1].extras)

    def resume(self, settings: dict[str, str]) -> None:
        """The next connection begins with these."""
        self.settings = settings
        self.dice.drawn = int(settings.get(_RANDOM, 0))

    def release(self) -> None:
        if not self.over:
            self.over = True
            self._drop()
            self.volume.close()
            self._released()

    def _committed(self) -> bool:
        self.commits += 1
        return False  # True would roll it back

    def _apply(self, connection: Connection) -> None:
        connection.apply(self.settings)
        if _ROWID in self.settings:
            connection.raw.set_last_insert_rowid(int(self.settings[_ROWID]))

    def _drop(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None
