"""One event of each kind, for hooks that have to know them all."""

from __future__ import annotations

from modelguard import telemetry
from modelguard.telemetry import Event, Reason

MB = 10**6
FIRST_USE = Reason("first_use", "first use")
TTL = Reason("ttl", "TTL('1h')")

EVERY: tuple[Event, ...] = (
    telemetry.LoadStarted(
        guard="nlp", generation=1, reasons=(FIRST_USE,), deferred_seconds=0.0, deferred_growth=0, host_lock="none"
    ),
    telemetry.LoadFinished(
        guard="nlp",
        generation=1,
        reasons=(FIRST_USE,),
        seconds=2.0,
        stall_seconds=0.25,
        model_bytes=100 * MB,
        swap="first",
        waited_seconds=0.0,
        time=1000.0,
    ),
    telemetry.UnloadStarted(guard="nlp", generation=1, reasons=(Reason("idle", "Idle('10m')"),)),
    telemetry.IdleEnded(guard="nlp"),
    telemetry.ReloadPostponed(guard="nlp", generation=1, reasons=(TTL,), cause="min_lifetime", seconds=30.0),
    telemetry.GuardPaused(guard="nlp"),
    telemetry.GuardResumed(guard="nlp"),
    telemetry.ReloadDue(guard="nlp", generation=1, reasons=(TTL, Reason("uses", "Uses(50000)"))),
    telemetry.RecycleAsked(guard="nlp", generation=1, reasons=(Reason("memory_growth", "MemoryGrowth('500 MB')"),)),
    telemetry.SwapChosen(guard="nlp", swap="drain_first", why="room", model_bytes=100 * MB, headroom=None),
    telemetry.LoadStarted(
        guard="nlp", generation=2, reasons=(TTL,), deferred_seconds=1.5, deferred_growth=0, host_lock="timed_out"
    ),
    telemetry.RolledBack(guard="nlp", generation=1, version="a", replaced=2, replaced_version=None),
    telemetry.ReplayFinished(
        guard="nlp",
        generation=2,
        version="a",
        current=1,
        recorded=100,
        compared=98,
        agreed=97,
        slowdown=1.02,
        seconds=2.5,
        accepted=True,
    ),
    telemetry.LoadErrored(guard="nlp", attempt=3, error="OSError: gone", retry_after=2.0, current=1),
    telemetry.LoadDiscarded(guard="nlp", cause="stale"),
    telemetry.LoadFinished(
        guard="nlp",
        generation=2,
        reasons=(TTL,),
        seconds=3.0,
        stall_seconds=0.5,
        model_bytes=120 * MB,
        swap="drain_first",
        waited_seconds=4.0,
        version="2026-11-20",
        time=2000.0,
    ),
    telemetry.GenerationReleased(
        guard="nlp",
        generation=1,
        bytes_before=300 * MB,
        bytes_after=200 * MB,
        alive=True,
        holders=("a list",),
        collected=True,
        trimmed_by="glibc",
        trim_error=None,
        seconds=0.1,
        drain_seconds=0.2,
        error="OSError: in unload",
        in_use=150 * MB,
        held=190 * MB,
        gpu_reserved_before=900 * MB,
        gpu_reserved_after=500 * MB,
        gpu_allocated=400 * MB,
    ),
    telemetry.GenerationAbandoned(guard="nlp", generation=1, in_flight=2, drain_timeout=30.0),
    telemetry.MemoryTrimmed(
        guard="nlp", bytes_before=50 * MB, bytes_after=20 * MB, trimmed_by="glibc", trim_error=None, seconds=0.01
    ),
    telemetry.GpuCacheEmptied(
        guard="nlp",
        generation=2,
        policy="GpuMemoryLimit('80%')",
        reserved_before=900 * MB,
        reserved_after=700 * MB,
        allocated=600 * MB,
        seconds=0.01,
        advice=None,
    ),
    telemetry.GpuOutOfMemory(
        guard="nlp", generation=2, reserved_before=900 * MB, reserved_after=800 * MB, allocated=650 * MB, retry=True
    ),
    telemetry.PolicyIgnored(guard="nlp", generation=2, policy="MemoryLimit('1 GB')", detail="it holds more"),
    telemetry.GrowthFound(
        guard="service", cause="threads", share=0.9, seen="more threads", fix="End them.", growth=90 * MB, calls=1000
    ),
    telemetry.CallbackErrored(guard="nlp", callback="reload_on", error="ValueError: no"),
    telemetry.BatchFinished(
        guard="predict",
        size=8,
        waiting=5,
        wait_seconds=0.02,
        run_seconds=0.1,
        failed=2,
        reruns=6,
        weight=800.0,
        padding=200.0,
    ),
    telemetry.BatchErrored(guard="predict", size=8, failed=2, error="ValueError: no", reruns=6),
    telemetry.BatchSizeChosen(guard="predict", size=16, previous=8, slo=0.1, item_seconds=0.005, reachable=True),
    telemetry.RequestsRefused(guard="predict", full=1, late=2, open=3, quota=6, expired=4, cancelled=5, waiting=7),
    telemetry.CircuitOpened(guard="predict", failures=5, retry_after=1.0, error="ValueError: no"),
    telemetry.CircuitClosed(guard="predict"),
    telemetry.WorkerStarted(guard="nlp", generation=1, worker=4711, seconds=0.045),
    telemetry.WorkerEnded(guard="nlp", generation=1, worker=4711, cause="crashed", detail="SIGSEGV", age=2.5),
    telemetry.WorkersReleased(
        guard="nlp",
        generation=1,
        reasons=(Reason("idle", "Idle('10m', keep='mold')"),),
        workers=3,
        bytes_before=300_000_000,
        bytes_after=120_000_000,
        seconds=0.1,
    ),
)
