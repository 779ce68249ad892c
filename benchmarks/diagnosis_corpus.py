"""What the diagnosis makes of the corpus: programs that leak in a known way, and programs that do not.

``tests/diagnosis/programs.py`` says what is right. Each program is diagnosed in fresh processes three times, by
``modelguard.diagnosis.diagnose``; in the last round beside two processes that do nothing but compute. Counted in each:

* the cause: all known causes are named, they come first, and explain at least 40 % of the growth;
* the holder or the line: it is named in the evidence or in the fix;
* cleared: a healthy program is said not to grow. One that is undecided is not cleared, and not accused either.

With ``--quick``: one round.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import _common
from tests.diagnosis.programs import Program, diagnosed, programs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAKS, HEALTHY = programs("leaks"), programs("healthy")
#: What is wrong in a round, at most.
CAUSES, PLACES, ACCUSED = 4, 6, 0


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that compute."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def one(program: Program, number: int) -> dict[str, Any]:
    """One diagnosis, and what was right of it."""
    began = time.monotonic()
    report, outcome = diagnosed(program)
    took = time.monotonic() - began
    marks = f"{'' if outcome.cause else 'CAUSE '}{'' if outcome.place else 'PLACE '}"
    print(f"{number} {program.name:24} {took:5.1f} s  {marks}{outcome.verdict}: {outcome.said}", flush=True)
    return {
        "program": program.name,
        "leak": bool(program.causes),
        "expected": program.causes,
        "round": number,
        "seconds": round(took, 1),
        "verdict": outcome.verdict,
        "said": outcome.said,
        "cause": outcome.cause,
        "place": outcome.place,
        "growth": report.measured.growth,
        "causes": [
            {"name": each.name, "share": each.share, "seen": each.seen, "fix": each.fix} for each in report.causes
        ],
        "unknown": report.unknown,
    }


def main() -> None:
    bench = _common.Benchmark("diagnosis_corpus", "Verdicts on programs that leak in a known way, or not at all")
    found: list[dict[str, Any]] = []
    rounds = 1 if bench.quick else 3
    for number in range(1, rounds + 1):
        with busy(2 if number == 3 else 0):  # noqa: PLR2004 - the last
            found += [one(program, number) for program in LEAKS + HEALTHY if not program.missing]

    def wrong(what: str, *, leak: bool) -> list[float]:
        return [
            float(sum(not each[what] for each in found if each["round"] == number and each["leak"] is leak))
            for number in range(1, rounds + 1)
        ]

    accused = [
        float(sum(each["verdict"] == "grows" for each in found if each["round"] == number and not each["leak"]))
        for number in range(1, rounds + 1)
    ]
    rows = [
        _common.Row(f"the cause of {len(LEAKS)} leaks is wrong", wrong("cause", leak=True), "", CAUSES, worst=True),
        _common.Row("neither holder nor line is named", wrong("place", leak=True), "", PLACES, worst=True),
        _common.Row(f"of {len(HEALTHY)} healthy: not cleared", wrong("cause", leak=False), "", ACCUSED, worst=True),
        _common.Row(f"of {len(HEALTHY)} healthy: accused", accused, "", ACCUSED, worst=True),
    ]

    def draw(figure: Figure) -> None:
        _common.bars(figure.subplots(), rows, "Wrong in the worst of the rounds", axis="programs")

    missing = [program.name for program in LEAKS + HEALTHY if program.missing]
    notes = [f"left out, as a library is missing: {', '.join(missing)}"] if missing else []
    bench.finish(rows, draw, size=(8, 3), notes=notes, verdicts=found)


if __name__ == "__main__":
    main()
