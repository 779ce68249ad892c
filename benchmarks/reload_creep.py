"""What reloads of ja_ginza leave behind in each swap mode, in a bare process and in a service under traffic.

Private memory is its dirty part, as in reload_ja_ginza.py, read 0.8 s after each reload while one model is loaded,
above that of the process before the first load. The service is FastAPI under uvicorn: its plain routes run in a thread
pool, and four clients ask without a break, also during the reloads.
"""

from __future__ import annotations

import sys
import threading
import time
from array import array
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import _common

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples._driver import Server, ServerFailed

from modelguard import guard, memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from spacy.language import Language

MB = 1e6
MODES = ("load_first", "drain_first", "auto")
PLACES = ("bare", "uvicorn")
COLOURS = dict(zip(MODES, (_common.PEER, _common.THIRD, _common.OURS), strict=True))
CLIENTS = 4
SETTLE = 0.8
TEXT = "銀座でランチをご一緒しましょう。東京から京都まで新幹線で二時間かかります。"
#: MB for each reload, over the second half of the reloads: less than this is not a trend.
FLAT = 0.1
#: With fewer reloads than this there is no trend to see.
FEWEST = 10

APP = """
import time

from fastapi import FastAPI
from modelguard import guard, memory, telemetry

def load():
    import spacy
    return spacy.load("ja_ginza")

import spacy, ginza, sudachipy, ja_ginza
app = FastAPI()
nlp = guard(load, reload_on=None, swap="{mode}", wait_timeout="5m", name="ja_ginza")
telemetry.set_hooks([])

@app.get("/bare")
def bare() -> int:
    return memory.usage().private_dirty

@app.get("/words")
@nlp
def words(model) -> int:
    return len(model("{text}"))

@app.get("/reload")
def reload() -> None:
    nlp.reload()
    while nlp.engine.loading:
        time.sleep(0.01)
"""


def private(pid: int | None = None) -> float:
    return (memory.usage(pid).private_dirty or 0) / MB


def load() -> Language:
    import spacy

    return spacy.load("ja_ginza")


def bare(mode: Any, count: int) -> list[float]:
    """Reload in this process, which does nothing else."""
    import ginza  # noqa: F401 - what is imported before the first load is not a part of the model
    import ja_ginza  # noqa: F401
    import spacy  # noqa: F401
    import sudachipy  # noqa: F401

    from modelguard import telemetry

    telemetry.set_hooks([])
    before = private()
    nlp = guard(load, reload_on=None, swap=mode, name="ja_ginza")
    readings = array("d", bytes(8 * count))  # made beforehand: a list of floats would pin arenas itself

    @nlp
    def words(model: Language) -> int:
        return len(model(TEXT))

    for place in range(count):
        words()
        nlp.reload()
        while nlp.engine.loading:
            time.sleep(0.01)
        words()
        time.sleep(SETTLE)
        readings[place] = private() - before
    return list(readings)


def served(mode: str, count: int) -> list[float]:
    """Reload in a service that is asked all the time."""
    readings: list[float] = []
    over = threading.Event()
    with TemporaryDirectory() as folder:
        Path(folder, "app.py").write_text(APP.format(mode=mode, text=TEXT), encoding="utf-8")
        command = [sys.executable, "-m", "uvicorn", "--port", "0", "--no-access-log", "app:app"]
        server = Server(command, folder=Path(folder))
        try:
            server.wait_until_serving("/bare")
            before = int(server.ask("/bare").text) / MB
            server.ask("/words")

            def ask() -> None:
                with suppress(ConnectionError):  # at the end
                    while not over.is_set():
                        server.ask("/words", timeout=300)

            clients = [threading.Thread(target=ask, daemon=True) for _ in range(CLIENTS)]
            for client in clients:
                client.start()
            for _ in range(count):
                if server.ask("/reload", timeout=300).status != 200:  # noqa: PLR2004 - OK
                    raise ServerFailed(server.log)
                time.sleep(SETTLE)
                readings.append(private(server.process.pid) - before)
        finally:
            over.set()
            server.kill()
    return readings


def rows(found: dict[str, list[float]]) -> list[_common.Row]:
    result = []
    for name, readings in found.items():
        last = readings[len(readings) // 2 :]
        rise, error = _common.slope(last)
        ours = name.endswith("auto")
        title = f"{name}: slope over the last {len(last)} (standard error {error:.2f})"
        result.append(
            _common.Row(title, [rise], "MB/reload", FLAT if ours and len(last) >= FEWEST else None, ours=ours)
        )
        result.append(_common.Row(f"  {name}: memory after a reload", readings, "MB", worst=True, ours=ours))
    return result


def main() -> None:
    benchmark = _common.Benchmark("reload_creep", "What reloads of ja_ginza leave behind, in each swap mode")
    count = 6 if benchmark.quick else 50
    found = {f"{place}, {mode}": _common.fresh(__file__, place, mode, str(count)) for place in PLACES for mode in MODES}

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, len(PLACES), sharey=True)
        for place, part in zip(PLACES, axes, strict=True):
            for mode in MODES:
                readings = found[f"{place}, {mode}"]
                part.plot(
                    range(1, len(readings) + 1), readings, color=COLOURS[mode], marker="o", markersize=3, label=mode
                )
            part.set_title("bare process" if place == "bare" else "FastAPI under uvicorn, four clients")
            part.set_xlabel("reload")
        axes[0].set_ylim(bottom=0)
        axes[0].set_ylabel("MB above the process before the first load")
        axes[0].legend(frameon=False, loc="lower right", title="swap")

    benchmark.finish(rows(found), draw, size=(10, 4.5), readings=found)


if __name__ == "__main__":
    words = _common.job()
    if words is None:
        main()
    else:
        place, mode, count = words
        _common.answer((bare if place == "bare" else served)(mode, int(count)))
