"""The judge of growth on random series whose truth is known: what it clears, accuses and leaves undecided wrongly.

Each seed makes a series (``_growth_series.py``): a leak of 50 bytes to 1 MB a call, alone, in stairs, below teeth,
beside a step or a warm-up; or one or two steps, a cache that fills, teeth, a warm-up, nothing at all; 12 to 47
readings, with the noise of a quiet or a busy machine. Peers in the same run are what is usually written by hand:

* last above first: memory has grown by more than 1 MB between the first and the last reading;
* least squares: the fitted line rises by more than 1 MB, with a correlation of 0.7;
* thirds: the lowest readings of the thirds rise by more than 3 MB, and go on rising.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import _common
from _growth_series import HEALTHY, LEAKING, MB, Series, series

from modelguard.facts._growth_judge import judge

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Decide = Callable[[Sequence[int], Sequence[int]], str]
#: Seeds of a block: the spread is that of blocks.
BLOCK = 200


def ours(calls: Sequence[int], sizes: Sequence[int]) -> str:
    return judge(calls, sizes).verdict


def last_above_first(_: Sequence[int], sizes: Sequence[int]) -> str:
    return "grows" if sizes[-1] - sizes[0] > MB else "steady"


def least_squares(calls: Sequence[int], sizes: Sequence[int]) -> str:
    rises = statistics.linear_regression(calls, sizes).slope * calls[-1] > MB
    return "grows" if rises and statistics.correlation(calls, sizes) > 0.7 else "steady"  # noqa: PLR2004 - a usual bound


def thirds(calls: Sequence[int], sizes: Sequence[int]) -> str:
    third = len(sizes) // 3
    parts = ((0, third), (third, 2 * third), (2 * third, len(sizes)))
    low = [min(range(*part), key=sizes.__getitem__) for part in parts]
    if sizes[low[2]] - sizes[low[0]] <= 3 * MB:
        return "steady"
    early, late = (
        (sizes[second] - sizes[first]) / max(1, calls[second] - calls[first])
        for first, second in itertools.pairwise(low)
    )
    return "grows" if late > 0 and late >= early / 2 else "steady"


JUDGES: dict[str, Decide] = {
    "modelguard": ours,
    "last above first": last_above_first,
    "least squares": least_squares,
    "thirds": thirds,
}


def share(found: Sequence[tuple[Series, str]], kinds: Sequence[str], verdict: str) -> float:
    """The percentage of series of some kinds that got a verdict."""
    verdicts = [said for one, said in found if one.kind in kinds]
    return 100 * verdicts.count(verdict) / len(verdicts)


def main() -> None:
    bench = _common.Benchmark("growth_judge", "Verdicts on growth, of random series whose truth is known")
    blocks = [
        range(BLOCK * at, BLOCK * (at + 1)) for at in range(1, 4 if bench.quick else 26)
    ]  # not the seeds of the tests
    made = [[series(seed) for seed in block] for block in blocks]
    rows, tables = [], {}
    for name, decide in JUDGES.items():
        found = [[(one, decide(one.calls, one.sizes)) for one in block] for block in made]
        figures = {
            "leaks cleared": ([share(block, LEAKING, "steady") for block in found], 0.5),
            "healthy accused": ([share(block, HEALTHY, "grows") for block in found], 1.0),
            "leaks undecided": ([share(block, LEAKING, "undecided") for block in found], None),
            "healthy undecided": ([share(block, HEALTHY, "undecided") for block in found], None),
        }
        rows += [
            # The mean of equal blocks is the share of all; a median of mostly zeros would hide the rest.
            _common.Row(
                f"{name}: {what}",
                [statistics.fmean(values)],
                "%",
                bound if decide is ours else None,
                ours=decide is ours,
            )
            for what, (values, bound) in figures.items()
        ]
        rows.append(_common.Row(f"{name}: wrong in a block of {BLOCK}", _wrong(found), "series", ours=decide is ours))
        tables[name] = _by_kind([pair for block in found for pair in block])

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, 2, sharey=True)
        for part, (title, verdict, kinds) in zip(
            axes, (("leaks", "steady", LEAKING), ("healthy", "grows", HEALTHY)), strict=True
        ):
            for at, name in enumerate(JUDGES):
                wrong = [100 * tables[name][kind][verdict] / sum(tables[name][kind].values()) for kind in kinds]
                part.barh([place + 0.2 * at for place in range(len(kinds))], wrong, height=0.2, label=name)
            part.set_yticks([place + 0.3 for place in range(len(kinds))], kinds)
            part.set_xlabel(f"% of {title} judged {verdict!r}")
        axes[1].legend(frameon=False)

    notes = [f"{kind}: {dict(tables['modelguard'][kind])}" for kind in HEALTHY + LEAKING]
    bench.finish(rows, draw, size=(11, 5), notes=["", *notes])


def _wrong(found: Sequence[Sequence[tuple[Series, str]]]) -> list[float]:
    return [float(sum(said == ("steady" if one.leak else "grows") for one, said in block)) for block in found]


def _by_kind(found: Sequence[tuple[Series, str]]) -> dict[str, Counter[str]]:
    tables: dict[str, Counter[str]] = {kind: Counter() for kind in HEALTHY + LEAKING}
    for one, said in found:
        tables[one.kind][said] += 1
    return tables


if __name__ == "__main__":
    main()
