"""A shop: customers buy products in stores; suppliers, deliveries, payments, reviews and page views besides."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from random import Random

from savepoint.envs.sql.databases.chance import CITIES, Row, day, maybe, moment, money, person, sentence, skewed

SCHEMA = """
CREATE TABLE stores (id INTEGER PRIMARY KEY, title TEXT NOT NULL, city TEXT NOT NULL, area INTEGER NOT NULL, budget INTEGER NOT NULL);
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT NOT NULL, age INTEGER NOT NULL, points INTEGER);
CREATE TABLE products (id INTEGER PRIMARY KEY, title TEXT NOT NULL, category TEXT NOT NULL, price REAL NOT NULL, stock INTEGER NOT NULL);
CREATE TABLE employees (id INTEGER PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL, salary INTEGER NOT NULL, age INTEGER NOT NULL,
    store_id INTEGER NOT NULL REFERENCES stores (id));
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER NOT NULL REFERENCES customers (id), product_id INTEGER NOT NULL REFERENCES products (id),
    status TEXT NOT NULL, quantity INTEGER NOT NULL, year INTEGER NOT NULL);
CREATE TABLE suppliers (supplier_code TEXT PRIMARY KEY, company TEXT NOT NULL, contact_name TEXT, street_address TEXT, postal_code TEXT, country_code TEXT,
    phone TEXT, email TEXT, customer_since DATE, credit_limit REAL);
CREATE TABLE supplies (product_id INTEGER NOT NULL REFERENCES products (id), supplier_code TEXT NOT NULL REFERENCES suppliers (supplier_code),
    unit_cost REAL NOT NULL, lead_days INTEGER, PRIMARY KEY (product_id, supplier_code)) WITHOUT ROWID;
CREATE TABLE deliveries (id INTEGER PRIMARY KEY, order_id INTEGER NOT NULL REFERENCES orders (id), carrier TEXT, tracking_code TEXT UNIQUE,
    sent_on DATE NOT NULL, arrived_on DATE, weight_kg REAL, note TEXT);
CREATE TABLE payments (id INTEGER PRIMARY KEY, order_id INTEGER NOT NULL REFERENCES orders (id), method TEXT NOT NULL, amount REAL NOT NULL,
    paid_at DATETIME NOT NULL, reference TEXT);
CREATE TABLE reviews (id INTEGER PRIMARY KEY, product_id INTEGER NOT NULL REFERENCES products (id), customer_id INTEGER REFERENCES customers (id),
    stars INTEGER NOT NULL CHECK (stars BETWEEN 1 AND 5), body TEXT, written_on DATE NOT NULL);
CREATE TABLE page_views (id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers (id), product_id INTEGER NOT NULL REFERENCES products (id),
    seen_at DATETIME NOT NULL, seconds INTEGER, device TEXT, referrer TEXT);
CREATE INDEX orders_by_customer ON orders (customer_id);
CREATE INDEX page_views_by_product ON page_views (product_id);
CREATE VIEW late_deliveries AS SELECT order_id, carrier, sent_on, arrived_on FROM deliveries WHERE julianday(arrived_on) - julianday(sent_on) > 7;
"""

_CATEGORIES = ("home", "garden", "office", "toys", "sport", "music")
_MATERIALS = ("oak", "steel", "linen", "cork", "glass", "paper", "wool", "clay", "café", "crème")
_THINGS = ("lamp", "desk", "chair", "sofa", "rug", "shelf", "kite", "drum", "rake", "vase", "tent", "mug")
_WORDS = ("it", "arrived", "late", "but", "works", "very", "well", "naïve", "colour", "and", "my", "family", "loves", "the", "quality", "is", "not", "déjà")
_ROLES = ("clerk", "driver", "buyer", "guard", "cleaner", "manager")
_STATUSES = ("paid", "sent", "open", "returned", "cancelled")


def tables(rng: Random) -> Iterator[tuple[str, list[Row]]]:
    """(table, rows) in an order in which references point backwards."""
    yield "stores", [
        (i, f"{rng.choice(_MATERIALS)} house {i}", skewed(rng, CITIES), rng.randint(50, 2500), rng.randint(20, 900)) for i in range(1, 61)
    ]
    yield "customers", [(i, person(rng), skewed(rng, CITIES), rng.randint(18, 90), maybe(rng, 0.03, rng.randint(0, 5000))) for i in range(1, 801)]
    titles = rng.sample([f"{material} {thing}{size}" for material in _MATERIALS for thing in _THINGS for size in ("", " XL", " mini")], 300)
    yield "products", [(i, title, skewed(rng, _CATEGORIES), money(rng, 2, 600), rng.randint(0, 800)) for i, title in enumerate(titles, 1)]
    yield "employees", [(i, person(rng), skewed(rng, _ROLES), rng.randint(1600, 9000), rng.randint(18, 66), rng.randint(1, 60)) for i in range(1, 301)]
    orders: list[Row] = [
        (i, rng.randint(1, 800), rng.randint(1, 300), skewed(rng, _STATUSES), rng.randint(1, 40), rng.randint(2016, 2025)) for i in range(1, 2001)
    ]
    yield "orders", orders
    yield from _suppliers(rng)
    yield from _fulfilment(rng, len(orders))
    yield "reviews", [_review(rng, i) for i in range(1, 2501)]
    yield "page_views", [_page_view(rng, i) for i in range(1, 16_001)]


def _suppliers(rng: Random) -> Iterator[tuple[str, list[Row]]]:
    codes = [f"S-{number:04}" for number in rng.sample(range(1, 9999), 40)]
    yield "suppliers", [
        (
            code, f"{person(rng).split()[1]} & Söhne", maybe(rng, 0.2, person(rng)), f"{rng.randint(1, 200)} Main Street", f"{rng.randrange(100_000):05}",
            rng.choice(("IT", "NO", "PE", "UA", "CH", "PT")), maybe(rng, 0.1, f"+{rng.randint(30, 59)} {rng.randrange(10**8):08}"),
            maybe(rng, 0.3, f"sales@{code.lower()}.example"), maybe(rng, 0.1, day(rng, 2008, 2024).isoformat()), maybe(rng, 0.5, money(rng, 500, 90_000)),
        )
        for code in codes
    ]  # fmt: skip
    yield "supplies", [
        (product, code, money(rng, 1, 300), maybe(rng, 0.1, rng.randint(1, 45)))
        for product in range(1, 301)
        for code in sorted(rng.sample(codes, rng.randint(1, 3)))
    ]


def _fulfilment(rng: Random, orders: int) -> Iterator[tuple[str, list[Row]]]:
    deliveries: list[Row] = []
    for i, order in enumerate(sorted(rng.sample(range(1, orders + 1), 1500)), 1):
        sent = day(rng, 2016, 2025)
        arrived = maybe(rng, 0.08, (sent + timedelta(days=rng.randint(1, 14))).isoformat())
        note = maybe(rng, 0.7, sentence(rng, _WORDS))
        carrier = maybe(rng, 0.05, rng.choice(("DHL", "UPS", "Poste", "PostNord")))
        deliveries.append((i, order, carrier, f"T{i * 7919:09}", sent.isoformat(), arrived, money(rng, 0.1, 80), note))
    yield "deliveries", deliveries
    yield "payments", [
        (i, rng.randint(1, orders), skewed(rng, ("card", "cash", "transfer", "voucher")), money(rng, 2, 4000), moment(rng, day(rng, 2016, 2025)),
         maybe(rng, 0.4, f"R{rng.randrange(16**10):010x}"))
        for i in range(1, 2001)
    ]  # fmt: skip


def _review(rng: Random, i: int) -> Row:
    stars = skewed(rng, (5, 4, 3, 1, 2))
    return i, rng.randint(1, 300), maybe(rng, 0.1, rng.randint(1, 800)), stars, maybe(rng, 0.3, sentence(rng, _WORDS)), day(rng, 2016, 2025).isoformat()


def _page_view(rng: Random, i: int) -> Row:
    seen = moment(rng, day(rng, 2023, 2025))
    device = skewed(rng, ("phone", "laptop", "tablet"))
    referrer = maybe(rng, 0.5, skewed(rng, ("search", "mail", "ad")))
    return i, maybe(rng, 0.4, rng.randint(1, 800)), rng.randint(1, 300), seen, maybe(rng, 0.05, rng.randint(1, 600)), device, referrer
