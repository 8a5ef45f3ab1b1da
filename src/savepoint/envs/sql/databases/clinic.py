"""A clinic: doctors see patients in wards; visits, prescriptions, laboratory results, invoices and allergies besides."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from random import Random

from savepoint.envs.sql.databases.chance import CITIES, Row, day, maybe, moment, money, person, sentence, skewed

SCHEMA = """
CREATE TABLE wards (id INTEGER PRIMARY KEY, title TEXT NOT NULL, wing TEXT NOT NULL, beds INTEGER NOT NULL, budget INTEGER NOT NULL);
CREATE TABLE doctors (id INTEGER PRIMARY KEY, name TEXT NOT NULL, field TEXT NOT NULL, salary INTEGER NOT NULL, age INTEGER NOT NULL,
    ward_id INTEGER NOT NULL REFERENCES wards (id));
CREATE TABLE patients (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT NOT NULL, age INTEGER NOT NULL, weight INTEGER);
CREATE TABLE drugs (id INTEGER PRIMARY KEY, title TEXT NOT NULL, type TEXT NOT NULL, price REAL NOT NULL, stock INTEGER NOT NULL);
CREATE TABLE bookings (id INTEGER PRIMARY KEY, patient_id INTEGER NOT NULL REFERENCES patients (id), doctor_id INTEGER NOT NULL REFERENCES doctors (id),
    status TEXT NOT NULL, length INTEGER NOT NULL, year INTEGER NOT NULL);
CREATE TABLE insurers (insurer_code TEXT PRIMARY KEY, company TEXT NOT NULL, phone TEXT, email TEXT, contract_from DATE NOT NULL, contract_to DATE);
CREATE TABLE policies (patient_id INTEGER NOT NULL REFERENCES patients (id), insurer_code TEXT NOT NULL REFERENCES insurers (insurer_code),
    policy_number TEXT NOT NULL, share REAL, PRIMARY KEY (patient_id, insurer_code)) WITHOUT ROWID;
CREATE TABLE visits (id INTEGER PRIMARY KEY, patient_id INTEGER NOT NULL REFERENCES patients (id), doctor_id INTEGER REFERENCES doctors (id),
    started_at DATETIME NOT NULL, ended_at DATETIME, reason TEXT, temperature REAL, notes TEXT);
CREATE TABLE prescriptions (id INTEGER PRIMARY KEY, visit_id INTEGER NOT NULL REFERENCES visits (id), drug_id INTEGER NOT NULL REFERENCES drugs (id),
    dose_mg REAL, times_a_day INTEGER, until DATE);
CREATE TABLE lab_results (id INTEGER PRIMARY KEY, visit_id INTEGER NOT NULL REFERENCES visits (id), analyte TEXT NOT NULL, result REAL, unit TEXT,
    taken_at DATETIME NOT NULL, remark TEXT);
CREATE TABLE invoices (id INTEGER PRIMARY KEY, visit_id INTEGER NOT NULL REFERENCES visits (id), issued_on DATE NOT NULL, due_on DATE NOT NULL, paid_on DATE,
    total REAL NOT NULL, reminder_text TEXT);
CREATE TABLE allergies (patient_id INTEGER NOT NULL REFERENCES patients (id), substance TEXT NOT NULL, since DATE, PRIMARY KEY (patient_id, substance));
CREATE INDEX visits_by_patient ON visits (patient_id);
CREATE INDEX bookings_by_doctor ON bookings (doctor_id);
CREATE VIEW overdue_invoices AS SELECT id, visit_id, due_on, total FROM invoices WHERE paid_on IS NULL AND due_on < '2025-01-01';
"""

_FIELDS = ("surgery", "cardiology", "paediatrics", "neurology", "oncology")
_WINGS = ("north", "east", "south", "west")
_TYPES = ("tablet", "syrup", "cream", "drops", "spray")
_SYLLABLES = ("ca", "do", "fe", "li", "mo", "na", "ri", "so", "ta", "vu", "xe", "zé")
_WORDS = ("patient", "feels", "better", "worse", "since", "yesterday", "pain", "in", "the", "left", "arm", "no", "fever", "café-au-lait", "spots", "rest")
_REASONS = ("check", "pain", "fever", "injury", "vaccine")
_ANALYTES = (("glucose", "mmol/L"), ("iron", "µmol/L"), ("sodium", "mmol/L"), ("CRP", "mg/L"))
_SUBSTANCES = ("pollen", "nuts", "latex", "penicillin", "milk", "Hausstaub")


def tables(rng: Random) -> Iterator[tuple[str, list[Row]]]:
    """(table, rows) in an order in which references point backwards."""
    yield "wards", [(i, f"{rng.choice(_WINGS)} ward {i}", rng.choice(_WINGS), rng.randint(4, 60), rng.randint(50, 2000)) for i in range(1, 49)]
    yield "doctors", [
        (i, f"Dr. {person(rng)}", skewed(rng, _FIELDS), rng.randint(3000, 16_000), rng.randint(27, 70), rng.randint(1, 48)) for i in range(1, 251)
    ]
    yield "patients", [(i, person(rng), skewed(rng, CITIES), rng.randint(0, 99), maybe(rng, 0.04, rng.randint(4, 140))) for i in range(1, 901)]
    titles = rng.sample([a + b + c for a in _SYLLABLES for b in _SYLLABLES for c in ("lin", "tol", "xan")], 220)
    yield "drugs", [(i, title, skewed(rng, _TYPES), money(rng, 1, 400), rng.randint(0, 1500)) for i, title in enumerate(titles, 1)]
    yield "bookings", [
        (i, rng.randint(1, 900), rng.randint(1, 250), skewed(rng, ("done", "open", "missed", "cancelled")), rng.randint(1, 18) * 5, rng.randint(2017, 2025))
        for i in range(1, 1801)
    ]
    yield from _insurance(rng)
    yield from _visits(rng)
    pairs = sorted({(rng.randint(1, 900), rng.choice(_SUBSTANCES)) for _ in range(500)})
    yield "allergies", [(patient, substance, maybe(rng, 0.4, day(rng, 1960, 2024).isoformat())) for patient, substance in pairs]


def _insurance(rng: Random) -> Iterator[tuple[str, list[Row]]]:
    codes = [f"I{number:03}" for number in range(1, 13)]
    yield "insurers", [
        (
            code, f"{person(rng).split()[1]} Versicherung", maybe(rng, 0.1, f"+{rng.randint(30, 59)} {rng.randrange(10**8):08}"),
            maybe(rng, 0.2, f"office@{code.lower()}.example"), day(rng, 2005, 2018).isoformat(), maybe(rng, 0.7, day(rng, 2019, 2026).isoformat()),
        )
        for code in codes
    ]  # fmt: skip
    yield "policies", [
        (patient, rng.choice(codes), f"{rng.randrange(10**9):09}", maybe(rng, 0.2, rng.choice((0.5, 0.8, 0.9, 1.0)))) for patient in range(1, 901)
    ]


def _visits(rng: Random) -> Iterator[tuple[str, list[Row]]]:
    visits: list[Row] = []
    days = [day(rng, 2017, 2025) for _ in range(9000)]
    for i, on in enumerate(sorted(days), 1):
        started = moment(rng, on)
        notes = maybe(rng, 0.3, sentence(rng, _WORDS))
        temperature = maybe(rng, 0.4, round(rng.uniform(35.8, 40.5), 1))
        ended = maybe(rng, 0.1, f"{on + timedelta(days=1)} 08:00:00")
        reason = maybe(rng, 0.2, skewed(rng, _REASONS))
        visits.append((i, rng.randint(1, 900), maybe(rng, 0.05, rng.randint(1, 250)), started, ended, reason, temperature, notes))
    yield "visits", visits
    yield "prescriptions", [
        (i, rng.randint(1, 9000), rng.randint(1, 220), maybe(rng, 0.1, rng.choice((5.0, 10.0, 12.5, 50.0, 200.0))), maybe(rng, 0.2, rng.randint(1, 4)),
         maybe(rng, 0.5, day(rng, 2017, 2026).isoformat()))
        for i in range(1, 6001)
    ]  # fmt: skip
    yield "lab_results", [_lab_result(rng, i) for i in range(1, 5001)]
    yield "invoices", [_invoice(rng, i) for i in range(1, 6001)]


def _lab_result(rng: Random, i: int) -> Row:
    analyte, unit = rng.choice(_ANALYTES)
    taken = moment(rng, day(rng, 2017, 2025))
    return i, rng.randint(1, 9000), analyte, maybe(rng, 0.05, round(rng.uniform(0.5, 150), 2)), unit, taken, maybe(rng, 0.9, sentence(rng, _WORDS))


def _invoice(rng: Random, i: int) -> Row:
    issued = day(rng, 2017, 2025)
    paid = maybe(rng, 0.15, (issued + timedelta(days=rng.randint(1, 60))).isoformat())
    due = issued + timedelta(days=30)
    return i, rng.randint(1, 9000), issued.isoformat(), due.isoformat(), paid, money(rng, 20, 3000), maybe(rng, 0.9, sentence(rng, _WORDS))
