"""The statements of the five loops of BranchBench (arXiv 2604.17180): schema changes, data changes, evaluation, comparison.

The paper publishes how many statements of which kind a step has and what they are about; the SQL is our own, written so that SQLite, doltlite and
PostgreSQL take the same text. Each step also has a `probe`, a query whose answer depends on the changes of its branch and of no other: the published
rewards of mcts and data_cleaning do not, so that a leak between branches would go unseen there.

Where it differs from the published definition: software_dev adds two columns at both shapes (the published full shape adds one, and its statements
use two); data_cleaning finds five percent of the balances NULL (TPC-C's data has none); all tables hold rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from branching.data import DISTRICTS, Scale

# A branch's own orders have numbers from here on, so that none is of the data.
OWN_ORDERS = 100_000
_LINE = "INSERT INTO order_line (ol_w_id, ol_d_id, ol_o_id, ol_number, ol_i_id, ol_supply_w_id, ol_quantity, ol_amount, ol_dist_info)"
_ORDER = "INSERT INTO orders (o_w_id, o_d_id, o_id, o_c_id, o_entry_d, o_ol_cnt)"
# mcts changes one of so many stock rows, which lie evenly over the table; its probe reads them all.
_HOT_ROWS = 200


@dataclass(frozen=True, slots=True)
class Step:
    """What a worker does on a new branch: ddl, dml, then queries. compare: of each live leaf in a comparison. probe: shows what this branch changed."""

    ddl: tuple[str, ...]
    dml: tuple[str, ...]
    queries: tuple[str, ...]
    compare: tuple[str, ...]
    probe: str


Workload = Callable[[int, int, random.Random, Scale], Step]


@dataclass(frozen=True, slots=True)
class Shape:
    """workers take `steps` steps each on one tree: the root has at most `root_children` children, another node `children`, and none below `depth` has any.
    comparisons: passes over all live leaves, evenly spaced. prune: probability that a finished branch is deleted."""

    workers: int
    steps: int
    root_children: int
    children: int
    depth: int
    comparisons: int
    prune: float


def software_dev(worker: int, step: int, rng: random.Random, scale: Scale) -> Step:
    """Add columns to the customers, fill them in all rows by a rule, count what is missing, group by the new column."""
    tier, limit, bar = f"tier_{worker}_{step}", f"limit_{worker}_{step}", rng.randint(8000, 10_000)
    grouped = f"SELECT {tier}, count(*), avg({limit}) FROM customer GROUP BY {tier}"
    rule = f"CASE WHEN c_ytd_payment > {bar} THEN 'gold' WHEN c_ytd_payment > 5000 THEN 'silver' ELSE 'bronze' END"
    return Step(
        (f"ALTER TABLE customer ADD COLUMN {tier} varchar(8)", f"ALTER TABLE customer ADD COLUMN {limit} numeric"),
        (f"UPDATE customer SET {limit} = c_credit_lim, {tier} = {rule}",),
        (f"SELECT count(*) FROM customer WHERE {tier} IS NULL", grouped),
        (grouped,),
        f"SELECT count(*), sum({limit}) FROM customer WHERE {tier} = 'gold'",
    )


def failure_repro(worker: int, step: int, rng: random.Random, scale: Scale) -> Step:
    """Change four tables, replay a failing request (an order whose 42 lines are not the 5 that it announces), look for orders that disagree."""
    mark, w, d, order = f"{worker}_{step}", rng.randint(1, scale.warehouses), rng.randint(1, DISTRICTS), OWN_ORDERS * (worker + 1) + step
    customer = rng.randint(1, scale.customers)
    items = [rng.choice((1, 50, 100, rng.randint(1, scale.items))) for _ in range(42)]
    return Step(
        (
            f"ALTER TABLE order_line ADD COLUMN discount_{mark} numeric",
            f"ALTER TABLE order_line DROP COLUMN discount_{mark}",
            f"ALTER TABLE orders ADD COLUMN flag_{mark} boolean DEFAULT false",
            f"ALTER TABLE customer ADD COLUMN note_{mark} varchar(64)",
            f"ALTER TABLE stock ADD COLUMN tag_{mark} varchar(16)",
        ),
        (
            f"{_ORDER} VALUES ({w}, {d}, {order}, {customer}, '2026-03-01', 5)",
            f"UPDATE customer SET c_balance = coalesce(c_balance, 0) - 72.5 WHERE c_w_id = {w} AND c_d_id = {d} AND c_id = {customer}",
            f"DELETE FROM order_line WHERE ol_w_id = {w} AND ol_d_id = {d} AND ol_o_id = {rng.randint(1, scale.customers)}",
            *(f"{_LINE} VALUES ({w}, {d}, {order}, {k}, {item}, {w}, 5, {k}.25, 'replayed')" for k, item in enumerate(items, 1)),
        ),
        (
            "SELECT o_w_id, o_d_id, o_id FROM orders JOIN order_line ON ol_w_id = o_w_id AND ol_d_id = o_d_id AND ol_o_id = o_id "
            "WHERE o_id >= (SELECT max(o_id) - 100000 FROM orders) GROUP BY o_w_id, o_d_id, o_id HAVING count(*) <> max(o_ol_cnt)",
        ),
        (),
        f"SELECT count(*), sum(ol_i_id), max(ol_o_id) FROM order_line WHERE ol_w_id = {w} AND ol_d_id = {d} AND ol_o_id >= {OWN_ORDERS}",
    )


def data_cleaning(worker: int, step: int, rng: random.Random, scale: Scale) -> Step:
    """Mark what is cleaned, then impute the missing balances (even workers) or delete their customers (odd ones)."""
    impute = f"UPDATE customer SET c_balance = {rng.randint(1, 4000)} WHERE c_balance IS NULL"
    flag = f"cleaned_{worker}_{step}"
    return Step(
        (f"ALTER TABLE customer ADD COLUMN {flag} boolean DEFAULT false",),
        (impute if worker % 2 == 0 else "DELETE FROM customer WHERE c_balance IS NULL",),
        ("SELECT sum(CASE WHEN c_balance < 0 THEN 1 ELSE 0 END) FROM customer",),
        ("SELECT sum(CASE WHEN c_balance IS NULL THEN 1 ELSE 0 END), max(c_ytd_payment) - min(c_ytd_payment) FROM customer",),
        f"SELECT count({flag}), count(c_balance), sum(c_balance) FROM customer",
    )


def mcts(worker: int, step: int, rng: random.Random, scale: Scale) -> Step:
    """One move, a sale out of stock, and the value of a position: the sum of all order lines over their warehouse."""
    stride, amount = max(1, scale.items // _HOT_ROWS), rng.randint(1, 10)
    hot = range(stride, scale.items + 1, stride)[:_HOT_ROWS]
    sale = f"UPDATE stock SET s_quantity = s_quantity - {amount} WHERE s_w_id = 1 AND s_i_id = {rng.choice(hot)} AND s_quantity >= {amount}"
    value = "SELECT sum(ol_amount) FROM order_line JOIN warehouse ON w_id = ol_supply_w_id"
    return Step((), (sale,), (value,), (), f"SELECT sum(s_quantity) FROM stock WHERE s_w_id = 1 AND s_i_id IN ({', '.join(map(str, hot))})")


def simulation(worker: int, step: int, rng: random.Random, scale: Scale) -> Step:
    """Sixteen days of orders, sales and deliveries, then what is out of stock, over the stock joined to all order lines."""
    w, first, dml = rng.randint(1, scale.warehouses), OWN_ORDERS * (worker + 1) + 100 * step, []
    d = 1
    for day in range(16):
        d, amount = rng.randint(1, DISTRICTS), rng.randint(1, 5)
        item, customer = rng.randint(1, scale.items), rng.randint(1, scale.customers)
        dml += [
            f"{_ORDER} VALUES ({w}, {d}, {first + day}, {customer}, '2026-03-01', 5)",
            f"UPDATE stock SET s_quantity = s_quantity - {amount} WHERE s_w_id = {w} AND s_i_id = {item} AND s_quantity >= {amount}",
            f"UPDATE stock SET s_quantity = s_quantity + 100 WHERE s_quantity < 10 AND s_w_id = {w}",
        ]
    item = rng.randint(1, scale.items)
    dml += [
        f"{_LINE} VALUES ({w}, {d}, {first + 15}, 1, {item}, {w}, 3, {rng.randint(1, 500)}.5, 'simulated')",
        f"UPDATE stock SET s_quantity = s_quantity - 1 WHERE s_w_id = {w} AND s_i_id = {item} AND s_quantity > 0",
    ]
    joined = "FROM stock JOIN order_line ON ol_i_id = s_i_id WHERE s_i_id <= 7500"
    return Step(
        (), tuple(dml), (f"SELECT sum(CASE WHEN s_quantity = 0 THEN 1 ELSE 0 END), sum(ol_amount) {joined}",),
        (f"SELECT avg(ol_amount), min(ol_amount) {joined}",),
        f"SELECT count(*), sum(o_id), sum(o_c_id) FROM orders WHERE o_id >= {OWN_ORDERS}",
    )  # fmt: skip


WORKLOADS: dict[str, Workload] = {f.__name__: f for f in (software_dev, failure_repro, data_cleaning, mcts, simulation)}
REDUCED = {
    "software_dev": Shape(2, 5, 3, 2, 3, 1, 0.1),
    "failure_repro": Shape(1, 10, 10, 0, 1, 0, 1.0),
    "data_cleaning": Shape(3, 6, 3, 2, 3, 1, 0.0),
    "mcts": Shape(3, 8, 5, 3, 5, 0, 0.1),
    "simulation": Shape(60, 1, 60, 0, 1, 1, 1.0),
}
FULL = {
    "software_dev": Shape(5, 20, 5, 3, 4, 1, 0.1),
    "failure_repro": Shape(1, 10, 10, 0, 1, 0, 1.0),
    "data_cleaning": Shape(10, 20, 10, 3, 3, 2, 0.0),
    "mcts": Shape(10, 100, 10, 10, 25, 0, 0.1),
    "simulation": Shape(1000, 1, 1000, 0, 1, 1, 1.0),
}
# For tests: every branch of the code in a second.
TINY = {
    "software_dev": Shape(2, 3, 3, 2, 3, 1, 0.3),
    "failure_repro": Shape(1, 3, 3, 0, 1, 0, 1.0),
    "data_cleaning": Shape(2, 3, 3, 2, 3, 1, 0.0),
    "mcts": Shape(2, 6, 3, 3, 5, 0, 0.2),
    "simulation": Shape(5, 1, 5, 0, 1, 1, 1.0),
}
SHAPES = {"reduced": REDUCED, "full": FULL, "tiny": TINY}
