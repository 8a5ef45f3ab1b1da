"""One stream of rows after TPC-C, with the three tables that CH-benCHmark adds: the same rows, in key order, for every system.

Cardinalities and column widths follow TPC-C, revision 5.11, clause 4.3 (a warehouse: 100,000 stock rows, 30,000 customers, 30,000 orders with some
300,000 lines), at one seed. One thing differs, on purpose: five percent of the customers' balances are NULL, so that cleaning has something to clean.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

SEED = 7
DISTRICTS = 10
Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """warehouses; items, which is also the stock rows of a warehouse; customers of a district, which is also its orders at first."""

    warehouses: int = 1
    items: int = 100_000
    customers: int = 3000

    @property
    def name(self) -> str:
        return f"w{self.warehouses}-i{self.items}-c{self.customers}"


# table -> its columns, its primary key (None: it has none, as TPC-C's history)
TABLES: dict[str, tuple[str, str | None]] = {
    "region": ("r_regionkey int, r_name varchar(55), r_comment varchar(152)", "r_regionkey"),
    "nation": ("n_nationkey int, n_name varchar(25), n_regionkey int, n_comment varchar(152)", "n_nationkey"),
    "supplier": (
        "su_suppkey int, su_name varchar(25), su_address varchar(40), su_nationkey int, su_phone char(15), su_acctbal numeric, su_comment varchar(101)",
        "su_suppkey",
    ),
    "warehouse": (
        "w_id int, w_name varchar(10), w_street varchar(20), w_city varchar(20), w_state char(2), w_zip char(9), w_tax numeric, w_ytd numeric",
        "w_id",
    ),
    "district": (
        "d_w_id int, d_id int, d_name varchar(10), d_street varchar(20), d_city varchar(20), d_state char(2), d_zip char(9), d_tax numeric, "
        "d_ytd numeric, d_next_o_id int",
        "d_w_id, d_id",
    ),
    "item": ("i_id int, i_im_id int, i_name varchar(24), i_price numeric, i_data varchar(50)", "i_id"),
    "customer": (
        "c_w_id int, c_d_id int, c_id int, c_first varchar(16), c_middle char(2), c_last varchar(16), c_street varchar(20), c_city varchar(20), "
        "c_state char(2), c_zip char(9), c_phone char(16), c_since varchar(19), c_credit char(2), c_credit_lim numeric, c_discount numeric, "
        "c_balance numeric, c_ytd_payment numeric, c_payment_cnt int, c_delivery_cnt int, c_data varchar(500)",
        "c_w_id, c_d_id, c_id",
    ),
    "history": (
        "h_c_id int, h_c_d_id int, h_c_w_id int, h_d_id int, h_w_id int, h_date varchar(19), h_amount numeric, h_data varchar(24)",
        None,
    ),
    "stock": (
        "s_w_id int, s_i_id int, s_quantity int, " + ", ".join(f"s_dist_{i:02d} char(24)" for i in range(1, DISTRICTS + 1)) + ", "
        "s_ytd numeric, s_order_cnt int, s_remote_cnt int, s_data varchar(50)",
        "s_w_id, s_i_id",
    ),
    "orders": (
        "o_w_id int, o_d_id int, o_id int, o_c_id int, o_entry_d varchar(19), o_carrier_id int, o_ol_cnt int, o_all_local int",
        "o_w_id, o_d_id, o_id",
    ),
    "new_order": ("no_w_id int, no_d_id int, no_o_id int", "no_w_id, no_d_id, no_o_id"),
    "order_line": (
        "ol_w_id int, ol_d_id int, ol_o_id int, ol_number int, ol_i_id int, ol_supply_w_id int, ol_delivery_d varchar(19), ol_quantity int, "
        "ol_amount numeric, ol_dist_info char(24)",
        "ol_w_id, ol_d_id, ol_o_id, ol_number",
    ),
}  # fmt: skip


def create_table(table: str) -> str:
    columns, key = TABLES[table]
    return f"CREATE TABLE {table} ({columns}{f', PRIMARY KEY ({key})' if key else ''})"


def width(table: str) -> int:
    """How many columns."""
    return TABLES[table][0].count(",") + 1


def rows(table: str, scale: Scale) -> Iterator[Row]:
    """The rows of a table in the order of its key. Each table has a stream of its own, so that none depends on the order of loading."""
    maker = _Maker(random.Random(f"{SEED}/{table}"), scale)
    if table in ("region", "nation", "supplier", "item", "warehouse"):
        return getattr(maker, table)()
    if table == "stock":
        return (row for w in range(1, scale.warehouses + 1) for row in maker.stock(w))
    make: Callable[[int, int], Iterable[Row]] = getattr(maker, table)
    return (row for w in range(1, scale.warehouses + 1) for d in range(1, DISTRICTS + 1) for row in make(w, d))


class _Maker:
    """One method a table; `w` and `d` are a warehouse and a district of it."""

    def __init__(self, rng: random.Random, scale: Scale) -> None:
        self.rng, self.scale = rng, scale
        self.letters = "".join(rng.choices(string.ascii_letters + string.digits, k=20_000))

    def text(self, least: int, most: int) -> str:
        start = self.rng.randrange(len(self.letters) - most)
        return self.letters[start : start + self.rng.randint(least, most)]

    def number(self, low: float, high: float, digits: int = 2) -> float:
        return round(self.rng.uniform(low, high), digits)

    def region(self) -> Iterator[Row]:
        return ((i, name, self.text(31, 115)) for i, name in enumerate(("africa", "america", "asia", "europe", "middle east")))

    def nation(self) -> Iterator[Row]:
        return ((i, f"nation {i}", i % 5, self.text(31, 114)) for i in range(62))

    def supplier(self) -> Iterator[Row]:
        for i in range(min(10_000, self.scale.items)):
            yield i, f"supplier {i}", self.text(10, 40), self.rng.randrange(62), self.text(15, 15), self.number(-999, 9999), self.text(25, 100)

    def item(self) -> Iterator[Row]:
        for i in range(1, self.scale.items + 1):
            yield i, self.rng.randint(1, 10_000), self.text(14, 24), self.number(1, 100), self.text(26, 50)

    def warehouse(self) -> Iterator[Row]:
        for w in range(1, self.scale.warehouses + 1):
            yield w, self.text(6, 10), self.text(10, 20), self.text(10, 20), "NY", self.text(9, 9), self.number(0, 0.2, 4), 300_000

    def district(self, w: int, d: int) -> Iterator[Row]:
        yield (
            w, d, self.text(6, 10), self.text(10, 20), self.text(10, 20), "NY", self.text(9, 9), self.number(0, 0.2, 4), 30_000, self.scale.customers + 1,
        )  # fmt: skip

    def customer(self, w: int, d: int) -> Iterator[Row]:
        for c in range(1, self.scale.customers + 1):
            balance = None if self.rng.random() < 0.05 else self.number(-500, 5000)
            yield (
                w, d, c, self.text(8, 16), "OE", self.text(8, 16), self.text(10, 20), self.text(10, 20), "NY", self.text(9, 9), self.text(16, 16),
                "2026-01-01 00:00:00", self.rng.choice(("GC", "BC")), 50_000, self.number(0, 0.5, 4), balance, self.number(10, 12_000), 1, 0,
                self.text(300, 500),
            )  # fmt: skip

    def history(self, w: int, d: int) -> Iterator[Row]:
        return ((c, d, w, d, w, "2026-01-01 00:00:00", 10, self.text(12, 24)) for c in range(1, self.scale.customers + 1))

    def stock(self, w: int) -> Iterator[Row]:
        for i in range(1, self.scale.items + 1):
            yield (w, i, self.rng.randint(10, 100), *(self.text(24, 24) for _ in range(DISTRICTS)), 0, 0, 0, self.text(26, 50))

    def orders(self, w: int, d: int) -> Iterator[Row]:
        for o in range(1, self.scale.customers + 1):
            carrier = self.rng.randint(1, 10) if o <= self.scale.customers * 7 // 10 else None
            yield w, d, o, self.rng.randint(1, self.scale.customers), "2026-01-02 00:00:00", carrier, _lines(w, d, o), 1

    def new_order(self, w: int, d: int) -> Iterator[Row]:
        return ((w, d, o) for o in range(self.scale.customers * 7 // 10 + 1, self.scale.customers + 1))

    def order_line(self, w: int, d: int) -> Iterator[Row]:
        for o in range(1, self.scale.customers + 1):
            for number in range(1, _lines(w, d, o) + 1):
                item, amount = self.rng.randint(1, self.scale.items), self.number(1, 9999)
                yield w, d, o, number, item, w, "2026-01-02 00:00:00", 5, amount, self.text(24, 24)


def _lines(w: int, d: int, o: int) -> int:
    """How many lines an order has, 5 to 15: `orders` and `order_line` agree on it without seeing each other."""
    return 5 + (w * 7919 + d * 104_729 + o * 1_299_709) // 97 % 11
