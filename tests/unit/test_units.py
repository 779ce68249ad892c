from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelguard import _units
from modelguard._units import Percentage
from modelguard.errors import InvalidOption

anything = st.one_of(
    st.text(),
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.binary(),
    st.timedeltas(),
    st.lists(st.integers()),
)
amounts = st.from_regex(r"[0-9]{1,20}(\.[0-9]{1,20})? ?[a-zA-Z%]{0,3}", fullmatch=True)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (timedelta(minutes=1, milliseconds=500), 60.5),
        ("90s", 90.0),
        ("250ms", 0.25),
        ("1h30m", 5400.0),
        ("1h 30m", 5400.0),
        (" 1 h 30 m ", 5400.0),
        ("1.5h", 5400.0),
        ("2d", 172800.0),
        ("1d2h3m4s5ms", 93784.005),
    ],
)
def test_a_duration_may_be_written_in_every_usual_way(value: Any, expected: float) -> None:
    """Numbers, timedeltas and text with units from large to small all mean seconds."""
    assert expected == _units.seconds(value, "ttl")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (-1, "must not be negative"),
        (timedelta(seconds=-1), "must not be negative"),
        ("-5s", "must not be negative"),
        (float("nan"), "must be a number"),
        (float("inf"), "at most a hundred years"),
        (float("-inf"), "must not be negative"),
        (10**400, "at most a hundred years"),
        (-(10**400), "must not be negative"),
        ("40000d", "at most a hundred years"),
        (True, "must be a duration, not a bool"),
        (None, "must be a duration, not None"),
        (b"1h", "must be a duration, not a bytes"),
        ("", "must not be empty"),
        ("  ", "must not be empty"),
        ("90", "has no unit"),
        ("5 parsecs", "has the unknown unit 'parsecs'"),
        ("5M", "has the unknown unit 'M'"),
        ("soon", "is not a valid duration"),
        ("1h30", "is not a valid duration"),
        ("30m1h", "is not a valid duration"),
        ("1h1h", "is not a valid duration"),
        ("1,5h", "is not a valid duration"),
        ("1_000s", "is not a valid duration"),
        (0, "must not be zero"),
        ("0s", "must not be zero"),
    ],
)
def test_an_invalid_duration(value: Any, why: str) -> None:
    """The error names the argument, what was given, why not, and what to write instead."""
    with pytest.raises(InvalidOption, match=why) as caught:
        _units.seconds(value, "drain_timeout")
    assert "drain_timeout" == caught.value.argument
    assert repr(value)[:20] == caught.value.value[:20]  # a very long one is shortened
    assert "'1h30m'" in caught.value.fix


@pytest.mark.parametrize("value", [0, 0.0, "0s", timedelta(0)])
def test_no_time_at_all_is_taken_where_it_makes_sense(value: Any) -> None:
    """``zero=True`` lets a duration of zero through."""
    assert 0.0 == _units.seconds(value, "quiet", zero=True)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (2**70, 2**70),
        ("1 B", 1),
        ("64kB", 64_000),
        ("64 KB", 64_000),
        ("500 MB", 500_000_000),
        ("500mb", 500_000_000),
        ("1.5 GB", 1_500_000_000),
        ("2TB", 2 * 10**12),
        ("1 KiB", 1024),
        ("512 MiB", 2**29),
        ("1.5 GiB", 3 * 2**29),
        ("1tib", 2**40),
        ("0.001 kB", 1),
    ],
)
def test_a_size_may_be_written_in_every_usual_way(value: Any, expected: int) -> None:
    """kB, MB, GB, TB are powers of 1000 and KiB, MiB, GiB, TiB powers of 1024, in any case, with or without a blank."""
    assert expected == _units.size(value, "max_memory")
    assert expected < 10**6 or expected == _units.size_or_percentage(value, "max_memory")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (-1, "must not be negative"),
        ("-500 MB", "must not be negative"),
        (0, "must not be zero"),
        ("0 MB", "must not be zero"),
        ("0.1 B", "must not be zero"),
        (True, "whole number of bytes"),
        (None, "whole number of bytes"),
        (5e8, "whole number of bytes"),
        (float("nan"), "whole number of bytes"),
        ("", "must not be empty"),
        ("500", "has no unit"),
        ("64k", "has the unknown unit 'k'"),
        ("500 MO", "has the unknown unit 'MO'"),
        ("500_000 B", "is not a valid size"),
        ("1 GB 500 MB", "is not a valid size"),
        ("9" * 5000 + " B", "is not a valid size"),
    ],
)
def test_an_invalid_size(value: Any, why: str) -> None:
    """The error names the argument, what was given, why not, and what to write instead."""
    with pytest.raises(InvalidOption, match=why) as caught:
        _units.size(value, "max_memory")
    assert "max_memory" == caught.value.argument
    assert repr(value)[:20] == caught.value.value[:20]  # a very long one is shortened
    assert "'500 MB'" in caught.value.fix


@pytest.mark.parametrize(("text", "fraction"), [("80%", 0.8), ("80 %", 0.8), (" 12.5% ", 0.125), ("100%", 1.0)])
def test_a_percentage_of_the_limit(text: str, fraction: float) -> None:
    """Text with a percent sign is a percentage of the memory limit."""
    assert Percentage(fraction) == _units.size_or_percentage(text, "size")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("0%", "more than 0% and at most 100%"),
        ("101%", "more than 0% and at most 100%"),
        ("-5%", "must not be negative"),
        ("%", "is not a valid percentage"),
        ("most%", "is not a valid percentage"),
        ("8 GB", None),
        (0.5, "whole number"),
    ],
)
def test_an_invalid_percentage(value: Any, why: str | None) -> None:
    """0 % and more than 100 % are rejected; a plain size stays a size."""
    if why is None:
        assert 8_000_000_000 == _units.size_or_percentage(value, "size")
        return
    with pytest.raises(InvalidOption, match=why) as caught:
        _units.size_or_percentage(value, "size")
    assert "%'" in caught.value.fix


def test_a_fraction_given_as_a_size_is_answered_with_the_percentage() -> None:
    """0.8 probably stands for 80 %, so the error says how to write that."""
    with pytest.raises(InvalidOption) as caught:
        _units.size_or_percentage(0.8, "size")  # type: ignore[arg-type]
    assert "Write '80%' for a percentage of the memory limit." == caught.value.fix


@pytest.mark.parametrize(
    ("value", "fix"),
    [(80, "Write '80 MB' for megabytes"), (999_999, "Write '999999 MB'"), ("80 kB", "Give bytes as a whole number")],
)
def test_a_bound_below_a_megabyte_is_a_missing_unit(value: int | str, fix: str) -> None:
    """No model fits into a few bytes: a small number probably counts megabytes, so the error says how to write them."""
    with pytest.raises(InvalidOption, match="must be at least 1 MB") as caught:
        _units.size_or_percentage(value, "max_memory")
    assert caught.value.fix.startswith(fix)
    assert 10**6 == _units.size_or_percentage(10**6, "max_memory")


@pytest.mark.parametrize(
    ("value", "kind"),
    [(3, "an int"), ("x", "a str"), (int, "a class"), (None, "None"), ([], "a list"), (b"", "a bytes")],
)
def test_kinds_are_named_with_their_article(value: object, kind: str) -> None:
    """Messages say "an int" and "a str", and name None and classes for what they are."""
    assert kind == _units.kind_of(value)


def test_a_percentage_is_rejected_where_it_would_have_no_base() -> None:
    """A pool's budget, for example, is never a percentage."""
    with pytest.raises(InvalidOption, match="has the unknown unit '%'"):
        _units.size("80%", "max_memory")


@pytest.mark.parametrize(("fraction", "text"), [(0.8, "80%"), (0.125, "12.5%"), (1.0, "100%"), (0.07, "7%")])
def test_a_percentage_prints_as_it_was_written(fraction: float, text: str) -> None:
    """A percentage reads back as its own text."""
    assert text == str(Percentage(fraction))
    assert Percentage(fraction) == _units.size_or_percentage(text, "size")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1_250_000_000, "1.2 GB"),
        (500_000_000, "500 MB"),
        (999_999, "1 MB"),
        (-3_000, "-3 kB"),
        (5 * 10**15, "5000 TB"),
    ],
)
def test_bytes_are_written_for_people(count: int, text: str) -> None:
    """One decimal at most, in the unit that keeps the number short."""
    assert text == _units.format_bytes(count)


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0.0, "0ms"),
        (0.25, "250ms"),
        (1.0, "1s"),
        (59.97, "60s"),
        (90.0, "1m30s"),
        (3599.7, "1h"),
        (5400.0, "1h30m"),
        (93784.0, "1d2h"),
    ],
)
def test_seconds_are_written_for_people(amount: float, text: str) -> None:
    """Two units at most, the way durations are given."""
    assert text == _units.format_seconds(amount)


@given(st.integers(min_value=1, max_value=10**17))
def test_written_bytes_read_back_as_about_the_same(count: int) -> None:
    """What a message says may be copied into an argument; rounding costs a twentieth at most."""
    assert count == pytest.approx(_units.size(_units.format_bytes(count), "size"), rel=0.05)


@given(st.floats(min_value=0.01, max_value=10**9))
def test_written_seconds_read_back_as_about_the_same(amount: float) -> None:
    """What a message says may be copied into an argument; rounding costs a twentieth at most."""
    assert amount == pytest.approx(_units.seconds(_units.format_seconds(amount), "ttl"), rel=0.05)


@given(st.integers(min_value=1, max_value=10**18 - 1))
def test_bytes_given_as_text_are_exact(count: int) -> None:
    """No digit of a whole number of bytes is lost, however large."""
    assert count == _units.size(f"{count} B", "size")


@given(st.integers(0, 99), st.integers(0, 23), st.integers(0, 59), st.integers(1, 59), st.integers(0, 999))
def test_the_parts_of_a_duration_add_up(days: int, hours: int, minutes: int, seconds: int, milliseconds: int) -> None:
    """Text with all its units and the same timedelta are one duration."""
    whole = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=milliseconds)
    text = f"{days}d{hours}h{minutes}m{seconds}s{milliseconds}ms"
    assert _units.seconds(whole, "ttl") == pytest.approx(_units.seconds(text, "ttl"))


@pytest.mark.parametrize(("value", "at_least"), [(1, 1), (0, 0), (10**18, 1), (7, 7)])
def test_a_whole_number_is_returned_as_it_is(value: int, at_least: int) -> None:
    """Any int from the smallest allowed one on."""
    assert value == _units.whole_number(value, "count", at_least=at_least)


@pytest.mark.parametrize("value", [0, -1, 1.0, 2.5, True, False, "3", None, float("nan")])
def test_anything_but_a_whole_number_is_rejected(value: Any) -> None:
    """The error names the argument and the smallest number; True is not a number."""
    with pytest.raises(InvalidOption, match="must be a whole number of at least 1") as rejected:
        _units.whole_number(value, "count")
    assert "count" == rejected.value.argument
    assert rejected.value.fix


@given(anything | amounts)
def test_nothing_is_ever_answered_with_another_error(value: Any) -> None:
    """Whatever is given, it is a good value or an InvalidOption."""
    for read in (_units.seconds, _units.size, _units.size_or_percentage, _units.whole_number):
        try:
            result = read(value, "argument")
        except InvalidOption as error:
            assert "argument" == error.argument  # noqa: PT017 - good values raise nothing
        else:
            assert (result.fraction if isinstance(result, Percentage) else result) > 0
