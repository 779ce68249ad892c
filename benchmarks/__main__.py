"""Run benchmarks, each in its own process, and gather their tables: ``python -m benchmarks [--quick] [NAME...]``.

With ``--page PATH`` nothing is run: the page of figures is made of what a run has left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # as for the scripts themselves

import _common  # noqa: E402 - found by the line above
import _figures  # noqa: E402

NAMES = (
    "auto_size",
    "batching",
    "batching_http",
    "call_overhead",
    "endurance",
    "fairness",
    "fleet",
    "goodput",
    "idle",
    "import_cost",
    "isolation",
    "isolation_batching",
    "isolation_replacement",
    "padding",
    "recycling",
    "reload_creep",
    "reload_ja_ginza",
    "reload_stall",
    "renewed_copies",
    "sharing",
    "spacy_growth",
    "torch_dynamic_shapes",
    "torch_families",
    "trim_every",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run the benchmarks; by default all.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--quick", action="store_true", help="fewer rounds: to see that they run, not for figures")
    parser.add_argument("--out", type=Path, default=_common.DEFAULT_OUT, metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--page", type=Path, metavar="PATH", help="run nothing: make the page of figures of what a run left in DIR"
    )
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(NAMES))
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(NAMES)}")
    names = options.names or NAMES
    if options.page is not None:
        try:
            missing = _figures.write(options.page, options.out, names, quick=options.quick)
        except _figures.NoFigures as error:
            parser.error(str(error))
        print(options.page, *(f"without {name}: it has left no file" for name in missing), sep="\n")
        return 0
    failed = []
    for name in names:
        command = [sys.executable, str(HERE / f"{name}.py"), "--out", str(options.out)]
        started, before = time.monotonic(), os.times()
        code = subprocess.run([*command, "--quick"] if options.quick else command, check=False).returncode
        wall, after = time.monotonic() - started, os.times()
        cpu = after.children_user - before.children_user + after.children_system - before.children_system
        print(f"{name}: {wall:.0f} s, {cpu:.0f} s of CPU time\n", flush=True)
        if code:
            failed.append(name)
    summary = options.out / "summary.md"
    summary.write_text(summarize([name for name in names if name not in failed], failed, options.out), encoding="utf-8")
    print(summary)
    return 1 if failed else 0


def summarize(names: list[str], failed: list[str], out: Path) -> str:
    """The tables of all that ran, with their pictures, in Markdown."""
    parts = ["# Benchmarks"]
    for name in names:
        record = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
        parts += [
            f"## {record['title']}",
            "A quick run, not for figures." if record["quick"] else "",
            "\n".join(f"{line}  " for line in _common.describe(record["machine"]).splitlines()),
            "\n".join(["```", *record["table"], *record["notes"], "```"]),
            f"![{record['title']}]({name}.png)",
        ]
    parts += [f"{name} failed: see what it printed." for name in failed]
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    sys.exit(main())
