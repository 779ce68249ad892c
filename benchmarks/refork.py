"""Refork: memory of an isolated function after traffic, with and without a worker that takes the place of the mold.

jieba's tokenizer and ja_ginza, four workers and a spare one each. Every round starts anew, and every function gets the
same texts, each of them once. Measured at rest afterwards: proportional memory (PSS) of the mold and all workers, which
counts shared pages once, and what a worker has written of its own. The rounds take turns.
"""

from __future__ import annotations

import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import _common
import _reforked
import psutil

from modelguard import memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FUNCTIONS = {
    "jieba": (_reforked.jieba_plain, _reforked.jieba_reforked),
    "ja_ginza": (_reforked.spacy_plain, _reforked.spacy_reforked),
}
#: Calls of one round: before the refork and after it.
CALLS = 10 * _reforked.AFTER


def text_of(chance: random.Random, name: str) -> str:
    """A text with words that no text before had."""
    letters = range(0x4E00, 0x6E00) if name == "jieba" else range(0x30A2, 0x30F3)
    words = ["".join(chr(chance.choice(letters)) for _ in range(chance.randint(2, 5))) for _ in range(6)]
    return "我来到北京清华大学".join(words) if name == "jieba" else "さんが東京で".join(words) + "に会いました。"


def at_rest(function: Any, *, reforked: bool) -> bool:
    status = function.status()
    idle = [one for one in status.workers if one.state == "idle" and not one.worn]
    return len(idle) == _reforked.WORKERS + 1 == len(status.workers) and status.reforked == reforked


def measured(name: str, calls: int, *, reforked: bool) -> dict[str, float]:
    """The memory after so many calls, in MB."""
    function = FUNCTIONS[name][reforked]
    chance = random.Random(1)
    with function, ThreadPoolExecutor(_reforked.WORKERS) as pool:
        for _ in range(2):  # the refork is in the first half
            for _ in pool.map(function, [text_of(chance, name) for _ in range(calls // 2)]):
                pass
            until = time.monotonic() + 60
            while not at_rest(function, reforked=reforked) and time.monotonic() < until:
                function("東京")
                time.sleep(0.05)
        time.sleep(1.0)
        status = function.status()
        workers = [memory.usage(one.pid) for one in status.workers if one.calls]
        tree = [memory.usage(process.pid) for process in psutil.Process().children(recursive=True)]
        return {
            "tree": sum(one.pss or 0 for one in tree) / 1e6,
            "worker": statistics.median((one.private_dirty or 0) / 1e6 for one in workers),
            "processes": len(tree),
            "reforked": status.reforked,
        }


def main() -> None:
    benchmark = _common.Benchmark("refork", "Refork: a worker that has taken calls becomes the mold")
    rounds, calls = (1, 3 * _reforked.AFTER) if benchmark.quick else (3, CALLS)
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name in FUNCTIONS:
            kinds = found.setdefault(name, {})
            for reforked in (False, True):
                answer = _common.fresh(__file__, name, str(calls), str(int(reforked)))
                assert answer["reforked"] == reforked, answer
                for what in ("tree", "worker"):
                    kinds.setdefault(f"{what} {'reforked' if reforked else 'plain'}", []).append(answer[what])
    rows = []
    row = _common.Row
    for name, kinds in found.items():
        for what, text in (("tree", "PSS of mold and workers"), ("worker", "private memory of a worker")):
            plain, reforked = kinds[f"{what} plain"], kinds[f"{what} reforked"]
            ratios = [after / before for before, after in zip(plain, reforked, strict=True)]
            rows.append(row(f"{name}: {text}, reforked / not", ratios, "x", ours=True))
            rows.append(row("  not reforked", plain, "MB"))
            rows.append(row("  reforked", reforked, "MB", ours=True))

    def draw(figure: Figure) -> None:
        bars = [one for one in rows if one.unit == "x"]
        _common.bars(figure.subplots(), bars, "Memory with refork", axis="x the same without")

    benchmark.finish(rows, draw, size=(9, 3), found=found)


if __name__ == "__main__":
    words = _common.job()
    if words is None:
        main()
    else:
        name, calls, reforked = words
        _common.answer(measured(name, int(calls), reforked=bool(int(reforked))))
