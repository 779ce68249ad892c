"""What was seen of each server during the run, and the figures drawn from it."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from examples.demo.traffic import Outcome

#: The first and last samples whose median stands for the memory at the start and at the end.
EDGE = 5
#: Seconds around a reload in which a reading may still see a part of it.
SLACK = 0.3


class Sample(NamedTuple):
    """One reading of a server's private memory: the seconds after the start, and bytes."""

    time: float
    private: int


class Reload(NamedTuple):
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

    def slowest(self, outcomes: Sequence[Outcome]) -> float | None:
        """Seconds of the slowest request that was under way meanwhile, if one was."""
        met = (one.latency for one in outcomes if one.due <= self.ended and one.due + one.latency >= self.began)
        return max(met, default=None)


@dataclass
class Record:
    """One server's run.

    Attributes:
        name: The server.
        samples: Its private memory.
        outcomes: Its requests, in no order.
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

    def replaced(self) -> list[float]:
        """When workers were replaced because a policy was due, in seconds after the start."""
        return [
            event["time"] - self.epoch
            for event in self.events
            if event["event"] == "WorkerEnded" and event["cause"] == "recycled"
        ]

    def errors(self) -> list[str]:
        """What went wrong with requests, in the order in which they were due."""
        return [
            f"at {one.due:.1f} s: {one.error}" for one in sorted(self.outcomes, key=lambda one: one.due) if one.error
        ]

    def figures(self) -> dict[str, Any]:
        """The figures so far: private memory in bytes, latencies in seconds (None before the first answer)."""
        latencies = sorted(one.latency for one in self.outcomes if one.error is None)
        # At the edges only readings with a whole model: a run may begin or end in the middle of a reload.
        reloads = self.reloads()
        whole = [
            sample.private
            for sample in self.samples
            if not any(reload.began - SLACK <= sample.time <= reload.ended + SLACK for reload in reloads)
        ]
        start, end = (int(statistics.median(edge or [0])) for edge in (whole[:EDGE], whole[-EDGE:]))
        return {
            "private_start": start,
            "private_end": end,
            "private_highest": max((sample.private for sample in self.samples), default=0),
            "growth": end - start,
            "requests": len(self.outcomes),
            "failed": len(self.outcomes) - len(latencies),
            "p50": percentile(latencies, 50),
            "p99": percentile(latencies, 99),
            "slowest": percentile(latencies, 100),
            "reloads": [reload._asdict() for reload in reloads],
            "replaced": self.replaced(),
        }


class Records(NamedTuple):
    """The runs of all servers, under the same traffic."""

    unguarded: Record
    guarded: Record
    isolated: Record


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """The smallest of the ascending values that at least ``percent`` of them do not exceed."""
    return ordered[math.ceil(len(ordered) * percent / 100) - 1] if ordered else None


def differing(first: Record, *others: Record) -> int:
    """How many answers of the others differ from what the first server answered to the same request."""
    answered = {outcome.due: outcome.digest for outcome in first.outcomes if outcome.error is None}
    return sum(
        outcome.error is None and answered.get(outcome.due, outcome.digest) != outcome.digest
        for other in others
        for outcome in other.outcomes
    )
