"""What both embedded databases draw from: people's names, days and moments, sentences."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from random import Random
from typing import TypeVar

Row = tuple[None | int | float | str, ...]
T = TypeVar("T")

FIRST_NAMES = (
    "Ann", "Bob", "Zoë", "José", "Łukasz", "Chloé", "Jürgen", "Søren", "Åsa", "Ömer", "Nadia", "Ivan", "Mei", "Kenji", "Amina", "Tomáš", "Inés", "Bjørn",
    "Eve", "Noah", "Lena", "Paul", "Rosa", "Emil", "Ольга", "Νίκος", "美咲", "यश",
)  # fmt: skip
LAST_NAMES = (
    "Smith", "Müller", "García", "Nováková", "Kowalski", "O'Neill", "Lefèvre", "Østergaard", "Ångström", "Yılmaz", "Rossi", "Petrov", "Tanaka", "Okafor",
    "Silva", "Dvořák", "Núñez", "Hansen", "Weiß", "Brown", "Иванова", "Παππάς", "佐藤", "शर्मा",
)  # fmt: skip
CITIES = ("Rome", "Oslo", "Lima", "Kyiv", "Bern", "Porto", "Malmö", "Zürich")


def person(rng: Random) -> str:
    """A full name."""
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def skewed(rng: Random, values: Sequence[T]) -> T:
    """One of the values, the first most often, the last least."""
    return values[min(rng.randrange(len(values)), rng.randrange(len(values)))]


def day(rng: Random, first: int, last: int) -> date:
    """A day of the years `first` to `last`."""
    start = date(first, 1, 1)
    return start + timedelta(days=rng.randrange((date(last + 1, 1, 1) - start).days))


def moment(rng: Random, on: date) -> str:
    """A time of that day, to the second."""
    return f"{on.isoformat()} {rng.randrange(24):02}:{rng.randrange(60):02}:{rng.randrange(60):02}"


def maybe(rng: Random, share: float, value: T) -> T | None:
    """The value, or NULL for a `share` of calls."""
    return None if rng.random() < share else value


def money(rng: Random, low: float, high: float) -> float:
    """An amount with two decimals, small ones more often."""
    return round(low + (high - low) * rng.random() ** 2, 2)


def sentence(rng: Random, words: Sequence[str]) -> str:
    """Four to twelve of the words in a row."""
    return " ".join(rng.choice(words) for _ in range(rng.randint(4, 12))).capitalize() + "."
