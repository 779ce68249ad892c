"""What was seen of each server during the run, and the figures drawn from it."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from examples.demo.traffic import Outcome

#: The first and last samples whose median stands for the memory at the start and at the end.
EDGE = 5
#: Seconds around a reload in which a reading may still see a part of it.
SLACK = 0.3


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of a server's private memory: the seconds after the start, and bytes."""

    time: float
    private: int


@dataclass(frozen=True, slots=True)
class Reload:
    """One replacement of the model.

    Attributes:
        began: Seconds after the start at which the old generation stopped serving (``drain_first``) or the new one
            began to load (``load_first``).
        ended: When the new generation served.
        freed: Bytes that the old generation gave back, None if that is not known.
        reasons: Which policies were due.
    """

    began: float
    ended: float
    freed: int | None
    reasons: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def slowest(self, outcomes: Sequence[Outcome]) -> float:
        """Seconds of the slowest request that was under way meanwhile; NaN if none was."""
        met = (one.latency for one in outcomes if one.due <= self.ended and one.due + one.latency >= self.began)
        return max(met, default=math.nan)


@dataclass
class Record:
    """One server's run.

    Attributes:
        name: The server.
        samples: Its private memory.
        outcomes: Its requests, in no order while the run lasts.
        events: What modelguard reported in its process, as the events' fields and ``event``, their name.
        epoch: ``time.time()`` at the start, which places the events in the run.
    """

    name: str
    samples: list[Sample] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    epoch: float = 0.0

    def reloads(self) -> list[Reload]:
        """The replacements that have ended, oldest first."""
        freed = {
            event["generation"]: event["bytes_before"] - event["bytes_after"]
            for event in self.events
            if event["event"] == "GenerationReleased"
        }
        return [
            Reload(
                began=event["time"] - self.epoch - max(event["seconds"], event["waited_seconds"]),
                ended=event["time"] - self.epoch,
                freed=freed.get(event["generation"] - 1),
                reasons=tuple(text for _, text in event["reasons"]),
            )
            for event in self.events
            if event["event"] == "LoadFinished" and event["swap"] != "first"
        ]

    def errors(self) -> list[str]:
        """What went wrong with requests, in the order in which they were due."""
        outcomes = sorted(self.outcomes, key=lambda outcome: outcome.due)
        return [f"at {outcome.due:.1f} s: {outcome.error}" for outcome in outcomes if outcome.error is not None]

    def summary(self) -> "Summary":
        """The figures so far."""
        outcomes = list(self.outcomes)  # other threads append
        latencies = sorted(outcome.latency for outcome in outcomes if outcome.error is None)
        reloads = self.reloads()
        # At the edges only readings with a whole model: a run may begin or end in the middle of a reload.
        whole = [
            sample.private
            for sample in self.samples
            if not any(reload.began - SLACK <= sample.time <= reload.ended + SLACK for reload in reloads)
        ]
        return Summary(
            private_start=int(statistics.median(whole[:EDGE] or [0])),
            private_end=int(statistics.median(whole[-EDGE:] or [0])),
            private_highest=max((sample.private for sample in self.samples), default=0),
            requests=len(outcomes),
            failed=sum(outcome.error is not None for outcome in outcomes),
            p50=percentile(latencies, 50),
            p99=percentile(latencies, 99),
            slowest=latencies[-1] if latencies else math.nan,
            reloads=tuple(reloads),
        )


Records = Mapping[str, Record]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of one server: private memory in bytes, latencies in seconds (NaN before the first answer)."""

    private_start: int
    private_end: int
    private_highest: int
    requests: int
    failed: int
    p50: float
    p99: float
    slowest: float
    reloads: tuple[Reload, ...]

    @property
    def growth(self) -> int:
        """Bytes from the start to the end."""
        return self.private_end - self.private_start


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest of the ascending values that at least ``percent`` of them do not exceed; NaN if there are none."""
    return ordered[math.ceil(len(ordered) * percent / 100) - 1] if ordered else math.nan


def differing(left: Record, right: Record) -> int:
    """How many requests both servers answered, but not alike."""
    answered = {outcome.due: outcome.digest for outcome in left.outcomes if outcome.error is None}
    return sum(
        outcome.error is None and answered.get(outcome.due, outcome.digest) != outcome.digest
        for outcome in right.outcomes
    )
