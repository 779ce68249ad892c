"""How torch's libraries read the capacities of their caches. Every value here was given to torch 2.13 itself."""

from __future__ import annotations

import pytest

from modelguard.environment._knobs import IDEEP, ONEDNN, capacity, why_not_understood, why_unusable

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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OMP_NUM_THREADS", "two"),
        ("OMP_NUM_THREADS", "0"),
        ("OMP_NUM_THREADS", "-1"),
        ("OMP_NUM_THREADS", "2.5"),
        ("OMP_NUM_THREADS", "00"),
        ("MKL_NUM_THREADS", "all"),
        ("MALLOC_ARENA_MAX", "two"),
        ("MALLOC_ARENA_MAX", "08"),
        ("MALLOC_CONF", "narenas:two"),
        ("MALLOC_CONF", "dirty_decay_ms:10s"),
        ("MALLOC_TRIM_THRESHOLD_", "128K"),
        ("MALLOC_CONF", "narenas=2"),
        ("MALLOC_CONF", "narenas:2 dirty_decay_ms:0"),
        ("MALLOC_CONF", "narenas:2, dirty_decay_ms:0"),
        ("MALLOC_CONF", "narenas:2,"),
        ("MALLOC_CONF", "background_thread:1"),
        ("MALLOC_CONF", "dirty_decay:0"),
    ],
)
def test_values_that_are_not_understood(name: str, value: str) -> None:
    """They are as good as not set."""
    assert why_not_understood(name, value) is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OMP_NUM_THREADS", "4"),
        ("OMP_NUM_THREADS", " 4, 2 "),
        ("OMP_NUM_THREADS", ""),
        ("MALLOC_ARENA_MAX", "2"),
        ("MALLOC_ARENA_MAX", "010"),
        ("MALLOC_CONF", "narenas:default"),
        ("OMP_NUM_THREADS", "+4"),
        ("OMP_NUM_THREADS", "04"),
        ("MALLOC_TRIM_THRESHOLD_", "0x20000"),
        ("MALLOC_TRIM_THRESHOLD_", "-1"),
        ("MALLOC_CONF", "bin_shards:1-160:16|161-256:8,hpa_hugification_threshold_ratio:0.9"),
        ("MALLOC_CONF", "background_thread:false,dirty_decay_ms:1000,muzzy_decay_ms:0"),
        ("MALLOC_CONF", "narenas:2,percpu_arena:percpu,lg_tcache_max:13,dirty_decay_ms:-1"),
        ("MALLOC_CONF", "slab_sizes:1-4096:4,junk:alloc"),
        ("PYTHONMALLOC", "anything"),
    ],
)
def test_values_that_are_understood(name: str, value: str) -> None:
    """They are left alone."""
    assert why_not_understood(name, value) is None
