"""One service unguarded, guarded and isolated, side by side under the same traffic: python -m examples.demo"""

import argparse
import importlib.util
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from examples._driver import Server, ServerFailed, megabytes, running
from examples.demo import report, serve
from examples.demo.record import Record, Records, Sample
from examples.demo.traffic import Clients, warm_up

from modelguard import MemoryGrowth
from modelguard.errors import InvalidOption

ROOT = Path(__file__).parents[2]
#: The application of each server.
APPS = {"unguarded": "unguarded:app", "guarded": "app:app", "isolated": "isolated:app"}
FILES = [f"{app.partition(':')[0]}.py" for app in APPS.values()]
#: What each module is installed with. ja_ginza is a package of its own, beside spaCy.
PACKAGES = {
    "spacy": "spacy",
    "ja_ginza": "ja-ginza",
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "matplotlib": "matplotlib",
}
#: Seconds between two looks. Reading a process's memory walks its page tables, about 6 ms for 600 MB, six times.
LOOK = 0.25
#: Seconds between two lines on what happens.
PACE = 10.0
#: Seconds that the traffic goes on at most until the guard has reloaded often enough, on a slow machine.
EXTRA = 60.0
SHORTEST = 5.0

FAILED, INTERRUPTED = 1, 130


def main(words: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    options = _parser().parse_args(words)
    for number in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C, so that every `finally` which stops a server runs
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup has SIGHUP ignored, and means it
            signal.signal(number, signal.default_int_handler)
    try:
        records = compare(options.app_dir, options.seconds, options.growth, options.reloads)
    except ServerFailed as failure:
        print(failure, file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("Interrupted; all servers have been stopped.", file=sys.stderr)
        return INTERRUPTED
    report.write(options.out, options.growth, records)
    print(
        "",
        report.comparison(records),
        report.reloads(records.guarded),
        report.replaced(records.isolated),
        "",
        sep="\n\n",
    )
    print(*(options.out / name for name in ("demo.png", "report.md", "demo.json")), sep="\n")
    failed = [record for record in (records.guarded, records.isolated) if record.errors()]
    for record in failed:
        errors = record.errors()
        count = f"{len(errors)} of {len(record.outcomes)} requests"
        print(f"The {record.name} server failed {count}, the first {errors[0]}", file=sys.stderr)
    return FAILED if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Runs three uvicorn servers with ja_ginza, one guarded and one isolated, under the same traffic of "
        "ever-new words, for about two minutes. Leaves a picture, the figures and a report behind.",
        epilog="exit status: 0 success, 1 a server died, or one other than the unguarded failed a request, 2 it could "
        "not run",
    )
    missing = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        parser.error(f"some packages are not installed: pip install {' '.join(missing)}")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--seconds", type=_seconds, default=100.0, metavar="N", help="length of the traffic, default: %(default)g"
    )
    parser.add_argument(
        "--growth", type=_size, default="45 MB", help="growth at which the model is replaced, default: %(default)s"
    )
    parser.add_argument(
        "--reloads",
        type=int,
        default=1,
        metavar="N",
        help=f"go on for up to {EXTRA:g} s more until the model has been replaced so often, default: %(default)s",
    )
    folder = ROOT / "examples" / "fastapi_spacy"
    parser.add_argument("--app-dir", type=_services, default=folder, metavar="DIR", help=f"of {', '.join(FILES)}")
    return parser


def _seconds(text: str) -> float:
    if not SHORTEST <= (seconds := float(text)) <= 24 * 3600:
        raise argparse.ArgumentTypeError(f"must be between {SHORTEST:g} and {24 * 3600}")
    return seconds


def _services(text: str) -> Path:
    missing = [name for name in FILES if not Path(text, name).is_file()]
    if missing:
        raise argparse.ArgumentTypeError(f"there is no {' and no '.join(missing)} in {text}")
    return Path(text)


def _size(text: str) -> str:
    try:
        MemoryGrowth(text)
    except InvalidOption as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def compare(folder: Path, seconds: float, growth: str, reloads: int) -> Records:
    """Run all services under the same traffic.

    Args:
        folder: Where the services are.
        seconds: Length of the traffic.
        growth: Growth of private memory after which the model is replaced, in words of ``MemoryGrowth``.
        reloads: How often it should be. The traffic goes on for up to ``EXTRA`` seconds until then.

    Raises:
        ServerFailed: A server died, or was not ready in time.
    """
    servers: dict[str, Server] = {}
    with ExitStack() as stack:
        for name, app in APPS.items():  # one after the other: two loads at once on two cores would slow each other
            _show(f"starting the {name} server, which loads its model")
            command = [sys.executable, "-m", serve.__name__, app, folder.resolve()]
            server = running(
                command, folder=ROOT, environment={"MAX_GROWTH": growth}, name=name, path="/openapi.json", stop=8
            )
            servers[name] = stack.enter_context(server)
            warm_up(servers[name].port)
        return Records(**drive(servers, seconds, reloads))


def drive(servers: Mapping[str, Server], seconds: float, reloads: int) -> dict[str, Record]:
    """Send the same requests to all servers, and look at them four times a second."""
    began, shown = time.perf_counter(), 0.0
    records = {name: Record(name, epoch=time.time()) for name in servers}
    clients = {name: Clients(server.port, began) for name, server in servers.items()}
    stopped = False
    try:
        while not (stopped and all(each.done for each in clients.values())):
            now = time.perf_counter() - began
            for name, record in records.items():
                record.samples.append(Sample(now, servers[name].private_bytes()))
                record.outcomes = list(clients[name].outcomes)
                record.events = _events(servers[name])
            enough = min(len(records["guarded"].reloads()), len(records["isolated"].replaced())) >= reloads
            if not stopped and now >= seconds + (0 if enough else EXTRA):
                stopped = True
                for each in clients.values():
                    each.stop(now)
            if now >= shown:
                shown = now + PACE
                _show(f"{now:3.0f} s, ever-new words to all servers{''.join(map(_sentence, records.values()))}")
            time.sleep(LOOK)
    finally:
        for each in clients.values():
            each.stop(0)
    for name, record in records.items():
        record.outcomes = clients[name].outcomes
    return records


def _events(server: Server) -> list[dict[str, object]]:
    complete = server.log.rpartition("\n")[0]
    return [json.loads(line) for line in complete.splitlines() if line.startswith(serve.EVENT)]


def _sentence(record: Record) -> str:
    figures = record.figures()
    return (
        f"; {record.name}: {megabytes(record.samples[-1].private)}, {figures['requests']} requests, "
        f"p99 {report.milliseconds(figures['p99'])}, {len(figures['reloads']) + len(figures['replaced'])} times renewed"
    )


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
