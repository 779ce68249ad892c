"""How libraries read the values of their variables, and which they do not understand.

Torch's two libraries for convolutions read the capacities of their caches from variables, both as C's ``atoi`` does:
blanks, a sign, decimal digits, and whatever follows is ignored. Text without a number is 0. Measured with torch 2.13 on
x86-64.
"""

from __future__ import annotations

import re

__all__ = ["IDEEP", "ONEDNN", "capacity", "why_not_understood", "why_unusable"]

ONEDNN = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
IDEEP = "LRU_CACHE_CAPACITY"

#: oneDNN reads the value into a buffer of this size, and ignores a value that does not fit (src/common/utils.cpp).
_ONEDNN_BUFFER = 12

_LONG, _INT = 2**63, 2**32

#: jemalloc's options, 4.0 to 5.3. It skips a pair that it does not know, and after a malformed one all the rest.
_SWITCHES = (
    "abort abort_conf background_thread cache_oblivious confirm_conf experimental_infallible_new hpa junk munmap "
    "prof prof_accum prof_active prof_final prof_gdump prof_leak prof_leak_error prof_stats prof_sys_thread_name "
    "prof_thread_active_init redzone retain stats_print tcache trust_madvise utrace xmalloc zero"
)
_OTHERS = (
    "bin_shards debug_double_free_max_scan dirty_decay_ms dss hpa_dehugification_threshold hpa_dirty_mult "
    "hpa_hugification_threshold hpa_hugification_threshold_ratio hpa_hugify_delay_ms hpa_min_purge_interval_ms "
    "hpa_sec_batch_fill_extra hpa_sec_bytes_after_flush "
    "hpa_sec_max_alloc hpa_sec_max_bytes hpa_sec_nshards hpa_slab_max_alloc lg_chunk lg_dirty_mult "
    "lg_extent_max_active_fit lg_prof_interval lg_prof_sample lg_san_uaf_align lg_tcache_flush_large_div "
    "lg_tcache_flush_small_div lg_tcache_max lg_tcache_nslots_mul max_background_threads metadata_thp muzzy_decay_ms "
    "mutex_max_spin narenas oversize_threshold percpu_arena prof_bt_max prof_prefix prof_recent_alloc_max "
    "prof_time_resolution prof_unbias purge quarantine san_guard_large san_guard_small slab_sizes stats_interval "
    "stats_interval_opts stats_print_opts tcache_gc_delay_bytes tcache_gc_incr_bytes tcache_max tcache_ncached_max "
    "tcache_nslots_large tcache_nslots_small_max tcache_nslots_small_min thp zero_realloc decay_time"
)
_YES_OR_NO = frozenset(_SWITCHES.split())
_OPTIONS = _YES_OR_NO | frozenset(_OTHERS.split())

_NUMBERS = re.compile(r"lg_\w+|\w+_ms|max_background_threads|mutex_max_spin|narenas|oversize_threshold|tcache_max")

#: OpenMP takes a number for each level of nested regions, and libgomp and libiomp5 allow blanks.
_LEVELS = re.compile(r"\s*\+?0*[1-9]\d*\s*(,\s*\+?0*[1-9]\d*\s*)*")
_NUMBER = re.compile(r"\s*[+-]?\d+\s*")
#: As C's strtoul reads it: -1 is the largest number, by which mallopt(3) switches trimming off, and 08 is no octal one.
_SIZE = re.compile(r"\s*[+-]?(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9]\d*)\s*")

_SYNTAX = {
    "OMP_NUM_THREADS": (_LEVELS, "OpenMP takes a number of at least 1"),
    "MKL_NUM_THREADS": (_NUMBER, "MKL takes a number"),
    "OPENBLAS_NUM_THREADS": (_NUMBER, "OpenBLAS takes a number"),
    "MALLOC_ARENA_MAX": (_SIZE, "glibc takes a number"),
    "MALLOC_MMAP_THRESHOLD_": (_SIZE, "glibc takes a number of bytes, without a unit"),
    "MALLOC_TRIM_THRESHOLD_": (_SIZE, "glibc takes a number of bytes, without a unit"),
}


def capacity(name: str, value: str) -> int | None:
    """The number of entries that a library makes of a value.

    Args:
        name: The variable; every name except :data:`IDEEP` is one of oneDNN's.
        value: Its value.

    Returns:
        Entries. A negative number means no limit; 0 means no cache in oneDNN, and a crash in ideep. None if oneDNN
        ignores the value, which is empty or too long.
    """
    if name != IDEEP and not 0 < len(value.encode(errors="surrogateescape")) < _ONEDNN_BUFFER:
        return None
    number = re.match(r"[ \t\n\v\f\r]*([+-]?[0-9]{1,4000})", value)  # more digits than any variable has a use for
    if number is None:
        return 0
    # atoi is strtol, which ends at the limits of a long, and of this the lowest 32 bits.
    low = max(-_LONG, min(_LONG - 1, int(number[1]))) % _INT
    return low - _INT if low >= _INT // 2 else low


def why_unusable(name: str, value: str) -> str | None:
    """Why a process must not start with a value, as a clause; None if it may."""
    if name == IDEEP and capacity(name, value) == 0:
        return "is read as 0, and torch crashes at its first convolution on CPU (SIGSEGV)"
    return None


def why_not_understood(name: str, value: str) -> str | None:
    """Why the reader of a variable does not understand a value, as a clause; None if it does, or it is empty."""
    if name == "MALLOC_CONF":
        return next(filter(None, map(_why_not_jemallocs, value.split(","))), None) if value else None
    if name not in _SYNTAX or not value.strip():
        return None
    syntax, takes = _SYNTAX[name]
    return None if syntax.fullmatch(value) else takes


def _why_not_jemallocs(pair: str) -> str | None:
    option, colon, value = pair.partition(":")
    if not colon or not re.fullmatch(r"\w+", option, re.ASCII) or not re.fullmatch(r"\S+", value):
        return f"{pair!r} is no pair of an option and its value, such as narenas:2, with commas and without blanks"
    if option not in _OPTIONS:
        return f"jemalloc has no option {option!r}"
    if option in _YES_OR_NO and option != "junk" and value not in ("true", "false"):
        return f"{option} must be true or false"
    if _NUMBERS.fullmatch(option) and not (_SIZE.fullmatch(value) or (option, value) == ("narenas", "default")):
        return f"{option} must be a number"
    return None
