"""What was seen of each server during the run, and the figures drawn from it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelguard.cli.demo.traffic import Answer

#: The first and last samples whose median stands for the memory at the start and at the end.
EDGE = 5
#: Seconds around a reload in which a reading may still see a part of it.
SLACK = 0.3


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of a server's private memory.

    Attributes:
        time: Seconds after the start.
        private: Bytes.
    """

    time: float
    private: int


@dataclass(frozen=True, slots=True)
class Reload:
    """One replacement of the model.

    Attributes:
        began: Seconds after the start at which the old generation stopped serving (``drain_first``) or the new one
            began to load (``load_first``).
        ended: When the new generation served.
        freed: Bytes that the old generation gave back, None if that was not told.
        reasons: Which policies were due.
    """

    began: float
    ended: float
    freed: int | None
    reasons: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.ended - self.began

    def met(self, answer: Answer) -> bool:
        """Whether a request was under way while the model was replaced."""
        return answer.due <= self.ended and answer.due + answer.latency >= self.began


@dataclass
class Record:
    """One server's run.

    Attributes:
        name: The server.
        samples: Its private memory.
        answers: Its requests, in no order while the run lasts.
        events: What modelguard told in its process, as the events' fields and ``event``, their name.
        epoch: ``time.time()`` at the start, which places the events in the run.
        last_lines: The end of what the server wrote to its standard error.
    """

    name: str
    samples: list[Sample] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    epoch: float = 0.0
    last_lines: Collection[str] = ()

    def reloads(self) -> list[Reload]:
        """The replacements that have ended, oldest first."""
        events = list(self.events)  # another thread may append
        freed = {
            event["generation"]: event["bytes_before"] - event["bytes_after"]
            for event in events
            if event["event"] == "GenerationReleased"
        }
        return [
            Reload(
                began=event["time"] - self.epoch - max(event["seconds"], event["waited_seconds"]),
                ended=event["time"] - self.epoch,
                freed=freed.get(event["generation"] - 1),
                reasons=tuple(event["reasons"]),
            )
            for event in events
            if event["event"] == "LoadFinished" and event["swap"] != "first"
        ]

    def errors(self) -> list[str]:
        """What went wrong with requests, in the order in which they were due."""
        answers = sorted(self.answers, key=lambda answer: answer.due)
        return [f"at {answer.due:.1f} s: {answer.error}" for answer in answers if answer.error is not None]

    def summary(self) -> Summary:
        """The figures so far."""
        answers = list(self.answers)
        latencies = sorted(answer.latency for answer in answers if answer.error is None)
        reloads = self.reloads()
        private = [sample.private for sample in self.samples]
        # At the edges only readings with a whole model: a run may begin or end in the middle of a reload.
        whole = [sample.private for sample in self.samples if not any(_around(reload, sample) for reload in reloads)]
        return Summary(
            start=_middle(whole[:EDGE]),
            end=_middle(whole[-EDGE:]),
            highest=max(private, default=0),
            requests=len(answers),
            errors=sum(answer.error is not None for answer in answers),
            p50=percentile(latencies, 50),
            p99=percentile(latencies, 99),
            slowest=latencies[-1] if latencies else math.nan,
            reloads=tuple(reloads),
        )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of one server: private memory in bytes, latencies in seconds (NaN before the first answer)."""

    start: int
    end: int
    highest: int
    requests: int
    errors: int
    p50: float
    p99: float
    slowest: float
    reloads: tuple[Reload, ...]

    @property
    def growth(self) -> int:
        """Bytes from the start to the end."""
        return self.end - self.start


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of the values do not exceed; NaN if there are none.

    Args:
        ordered: The values, ascending.
        percent: More than 0, up to 100.
    """
    if not ordered:
        return math.nan
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]


def differing(left: Record, right: Record) -> int:
    """How many requests both servers answered, but not alike."""
    answered = {answer.due: answer.digest for answer in left.answers if answer.error is None}
    return sum(
        answer.error is None and answer.due in answered and answered[answer.due] != answer.digest
        for answer in right.answers
    )


def slowest_beside(reload: Reload, answers: Sequence[Answer]) -> float:
    """Seconds of the slowest request that was under way during a reload; NaN if none was."""
    return max((answer.latency for answer in answers if reload.met(answer)), default=math.nan)


def _around(reload: Reload, sample: Sample) -> bool:
    return reload.began - SLACK <= sample.time <= reload.ended + SLACK


def _middle(values: Sequence[int]) -> int:
    return int(statistics.median(values)) if values else 0
