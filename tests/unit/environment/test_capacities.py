"""How torch's libraries read the capacities of their caches. Every value here was given to torch 2.13 itself."""

from __future__ import annotations

import pytest

from modelguard.environment._capacities import IDEEP, ONEDNN, capacity, why_unusable

#: Values on which torch's first convolution on CPU crashes.
CRASHES = ["", "0", "00", "abc", "0x10", "-0", "+0", "0.5", "- 5", "4294967296", "\u0663"]

#: Other values, and what they are read as.
READ = {
    "1": 1,
    " 5": 5,
    "5 ": 5,
    "\t7": 7,
    "\v7": 7,
    "+3": 3,
    "12abc": 12,
    "1e3": 1,
    "-1": -1,
    "2147483647": 2**31 - 1,
    "2147483648": -(2**31),
    "4294967297": 1,
    "99999999999999999999": -1,
}


@pytest.mark.parametrize("value", CRASHES)
def test_values_that_crash_torch(value: str) -> None:
    """Everything that ideep reads as 0 is rejected, in any notation."""
    assert 0 == capacity(IDEEP, value)
    assert "crashes at its first convolution" in str(why_unusable(IDEEP, value))


@pytest.mark.parametrize(("value", "entries"), READ.items())
def test_values_that_torch_can_use(value: str, entries: int) -> None:
    """Everything else is read as ideep reads it, and accepted."""
    assert entries == capacity(IDEEP, value)
    assert why_unusable(IDEEP, value) is None


@pytest.mark.parametrize(
    ("value", "entries"), [("", None), ("0", 0), ("abc", 0), ("12abc", 12), ("0" * 11 + "9", None)]
)
def test_values_of_the_other_cache(value: str, entries: int | None) -> None:
    """OneDNN ignores empty and long values, and may have no cache at all."""
    assert entries == capacity(ONEDNN, value)
    assert why_unusable(ONEDNN, value) is None
