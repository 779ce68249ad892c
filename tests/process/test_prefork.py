"""``prefork``: real forks, real hazards."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tests.process.harness import run_python

from modelguard import prefork

JEMALLOC = next(Path("/usr/lib").glob("*/libjemalloc.so.2"), None)

#: A model of Python objects, its guard, and a way to ask a forked child.
SETTING = """
    import json, os, signal, sys, threading, time, warnings
    from modelguard import Uses, errors, guard, telemetry
    from modelguard import prefork

    telemetry.set_hooks([])
    warmed = []

    class Model(dict):
        pass

    def load():
        return Model({f"feature-{n}": [n, str(n)] for n in range(1000)})

    def warm(model):
        warmed.append(os.getpid())

    def in_child(ask):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            try:
                answer = ask()
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(writer, json.dumps(answer).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            told = pipe.read()
        os.waitpid(pid, 0)
        return json.loads(told) if told else "died"
"""


def told(program: str, seconds: float = 60) -> Any:
    """The last line that a program prints after the setup."""
    return run_python(textwrap.dedent(SETTING) + textwrap.dedent(program), seconds)


@pytest.mark.timeout(90)
def test_a_warm_up_in_a_child_finds_what_the_application_restores_there() -> None:
    """Whatever is registered until ``prepare()`` runs first, also if ``prefork`` was imported before."""
    program = """
        restored = [os.getpid()]
        guarded = guard(load, reload_on=None, warmup=lambda model: warmed.append(restored[0]))
        os.register_at_fork(after_in_child=lambda: restored.__setitem__(0, os.getpid()))
        prefork.prepare(guarded)
        print(json.dumps(in_child(lambda: warmed[-1] == os.getpid())))
    """
    assert told(program) is True


@pytest.mark.timeout(90)
def test_children_share_the_parents_generation_and_are_warm_before_their_first_request() -> None:
    """A child has the parent's very model, has warmed it up by itself, and counts from zero."""
    assert [True, True, 1, 0] == told(
        """
        nlp = guard(load, reload_on=None, warmup=warm, prefork=True, name="nlp")
        report = prefork.prepare()
        assert ("nlp",) == report.guards and "nlp" in report.tried and report.frozen > 1000, report
        parents = id(nlp.engine.state.current.model)

        def ask():
            status = nlp.status()
            same = id(nlp.engine.state.current.model) == parents
            return [same, os.getpid() in warmed, status.generation, status.uses]

        print(json.dumps(in_child(ask)))
        """
    )


@pytest.mark.timeout(90)
def test_in_child_is_the_hooks_own_work_done_once() -> None:
    """``in_child`` after the fork hook repeats nothing, and raises the error of the warm-up."""
    assert [1, "OSError: no disk"] == told(
        """
        broken = []

        def warm(model):
            warmed.append(os.getpid())
            if broken and os.getpid() != parent:
                raise OSError("no disk")

        parent = os.getpid()
        nlp = guard(load, reload_on=None, warmup=warm, name="nlp")
        prefork.prepare(nlp)

        def ask():
            prefork.in_child()
            prefork.in_child()
            return warmed.count(os.getpid())

        first = in_child(ask)
        broken.append(True)
        print(json.dumps([first, in_child(ask)]))
        """
    )


@pytest.mark.timeout(90)
def test_a_warm_up_that_raises_in_a_child_is_found_before_the_first_worker() -> None:
    """The trial child's error has the guard and the traceback, and the parent continues to serve."""
    refusal, serves = told(
        """
        parent = os.getpid()

        def warm(model):
            if os.getpid() != parent:
                raise OSError("no disk")

        nlp = guard(load, reload_on=None, warmup=warm, name="nlp")
        try:
            prefork.prepare(nlp)
        except errors.ForkUnsafe as error:
            with nlp.lease() as model:
                print(json.dumps([str(error), len(model)]))
        """
    )
    assert "guard 'nlp'" in refusal
    assert "OSError: no disk" in refusal
    assert 1000 == serves


@pytest.mark.timeout(90)
def test_what_a_trial_counts_leaves_nothing(tmp_path: Path) -> None:
    """Files of prometheus_client stay in its sums: a warm-up counts in the workers, and not in the trial child."""
    pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    program = f"""
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = {str(tmp_path)!r}
        from prometheus_client import Counter, Gauge
        counted, serving = Counter("counted", "Warm-ups."), Gauge("serving", "Processes.", multiprocess_mode="livesum")

        def count(model):
            counted.inc()
            serving.set(1)

        prefork.prepare(guard(load, reload_on=None, warmup=count))
        worker = in_child(lambda: (prefork.in_child(), os.getpid())[1])
        ours = {{f"_{{os.getpid()}}.db", f"_{{worker}}.db"}}
        names = os.listdir(os.environ["PROMETHEUS_MULTIPROC_DIR"])
        print(json.dumps([len(names), [name for name in names if not name.endswith(tuple(ours))]]))
    """
    assert [4, []] == told(program)


@pytest.mark.timeout(90)
def test_a_warm_up_that_hangs_in_a_child_is_told_with_its_stack() -> None:
    """A lock that a thread of the parent holds is never released in a child: the report shows who waits for it."""
    refusal = told(
        """
        parent, lock = os.getpid(), threading.Lock()
        held, over = threading.Event(), threading.Event()

        def holder():
            with lock:
                held.set()
                over.wait()

        def warm_with_the_lock(model):
            if os.getpid() != parent:
                with lock:
                    pass

        threading.Thread(target=holder, name="holder", daemon=True).start()
        held.wait()
        nlp = guard(load, reload_on=None, warmup=warm_with_the_lock, name="nlp")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                prefork.prepare(nlp, warm_timeout=2)
            except errors.ForkUnsafe as error:
                named = [(str(one.message), one.filename) for one in caught if one.category is errors.ForkHazard]
                print(json.dumps([str(error), named]))
        """
    )
    assert "hang of guard 'nlp'" in refusal[0]
    assert "warm_with_the_lock" in refusal[0]
    assert any("holder" in text for text, _ in refusal[1])
    assert not any("modelguard" in file for _, file in refusal[1])  # the warnings show the line that prepares


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        ("prefork.prepare()", "InvalidOption", "guards=(): must not be empty, and no guard has prefork=True"),
        ("prefork.prepare(load)", "InvalidOption", "Give what modelguard.guard() returned"),
        ("prefork.prepare(nlp(len))", "InvalidOption", "prepare(guard_of(function))"),
        ("prefork.prepare([nlp])", "InvalidOption", "prepare(*guards)"),
        ("prefork.prepare(nlp, freeze='no')", "InvalidOption", "freeze='no': must be True or False"),
        ("prefork.prepare(nlp, on_hazard='ignore')", "InvalidOption", "on_hazard='ignore'"),
        ("prefork.prepare(nlp, immortalize='yes')", "InvalidOption", "immortalize='yes'"),
        ("prefork.prepare(nlp, immortalize=0)", "InvalidOption", "immortalize=0: must be True, False or 'auto'"),
        ("prefork.prepare(nlp, warm_timeout=0)", "InvalidOption", "warm_timeout"),
        ("(prefork.prepare(nlp), prefork.prepare(nlp))", "ForkOrder", "this process is already prepared"),
        ("(prefork.prepare(nlp), prefork.in_child())", "ForkOrder", "this is the parent"),
        ("prefork.in_child()", "ForkOrder", "the parent was not prepared"),
        ("asyncio.run(on_a_loop())", "ForkUnsafe", "an event loop runs"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(call: str, error: str, says: str) -> None:
    """Each misuse has its error, and the guard continues to serve."""
    kind, text, size = told(
        f"""
        import asyncio

        async def on_a_loop():
            prefork.prepare(nlp)

        nlp = guard(load, reload_on=None, name="nlp")
        try:
            {call}
        except errors.ModelGuardError as error:
            with nlp.lease() as model:
                print(json.dumps([type(error).__name__, str(error), len(model)]))
        """
    )
    assert error == kind
    assert says in text
    assert 1000 == size


@pytest.mark.timeout(90)
def test_preparing_in_a_child_is_refused() -> None:
    """A worker does not prepare: its parent did."""
    assert told(
        """
        nlp = guard(load, reload_on=None, name="nlp")
        prefork.prepare(nlp)
        print(json.dumps(in_child(lambda: prefork.prepare(nlp))))
        """
    ).startswith("ForkOrder: prefork.prepare() cannot be called here: this is a child")


@pytest.mark.timeout(90)
def test_preparing_another_guard_keeps_the_first_one_prepared() -> None:
    """Each part of a program may prepare its own guards: children warm up all of them."""
    assert ["one", "two"] == told(
        """
        for name in ("one", "two"):
            prefork.prepare(guard(load, reload_on=None, warmup=lambda _, name=name: warmed.append(name), name=name))
        warmed.clear()
        print(json.dumps(in_child(lambda: warmed)))
        """
    )


@pytest.mark.timeout(90)
def test_what_could_not_be_tried_can_be_prepared_later() -> None:
    """Where no child can be started, the process stays as it was, without an open pipe, and the next attempt counts."""
    assert ["OSError", True, ["nlp"]] == told(
        """
        import errno
        nlp = guard(load, reload_on=None, warmup=warm, name="nlp")
        nlp.load()
        before, fork = os.listdir("/proc/self/fd"), os.fork

        def no_fork():
            raise OSError(errno.EAGAIN, "no more processes")

        os.fork = no_fork
        try:
            prefork.prepare(nlp)
        except OSError as error:
            kind = type(error).__name__.replace("BlockingIOError", "OSError")
        os.fork = fork
        same = before == os.listdir("/proc/self/fd")
        print(json.dumps([kind, same, list(prefork.prepare(nlp).tried)]))
        """
    )


@pytest.mark.timeout(90)
def test_preparing_again_after_a_reload_gives_back_what_was_frozen() -> None:
    """Of five models with a cycle each, only the last one stays frozen, since each preparation unfreezes first."""
    alive = told(
        """
        import weakref

        class Cycle:
            def __init__(self):
                self.me = self

        made = []

        def load():
            made.append(weakref.ref(model := Cycle()))
            return model

        nlp = guard(load, reload_on=None, name="nlp")
        prefork.prepare(nlp, immortalize=False)
        for _ in range(4):
            nlp.reload()
            prefork.prepare(nlp, immortalize=False)
        print(json.dumps(sum(ref() is not None for ref in made)))
        """
    )
    assert 1 == alive


needs_immortals = pytest.mark.skipif(
    prefork.immortalize_unsupported() is not None, reason=str(prefork.immortalize_unsupported())
)


@needs_immortals
@pytest.mark.timeout(90)
@pytest.mark.parametrize("count", [1_000, 150_000], ids=["small", "20 MB"])
def test_auto_weighs_a_model_that_was_made_at_import(count: int) -> None:
    """A load that only hands out what exists adds no memory; its objects count, and 16 MB of them are worth it."""
    why, objects = told(
        f"""
        MADE = Model({{f"feature {{n}}": [n, str(n)] for n in range({count})}})
        nlp = guard(lambda: MADE, reload_on=None, name="nlp")
        report = prefork.prepare(nlp)
        print(json.dumps([report.why_mortal, report.immortal and report.immortal.objects]))
        """
    )
    if count == 1_000:
        assert "the models take only" in why
    else:
        assert None is why
        assert 450_000 < objects


@needs_immortals
@pytest.mark.timeout(90)
def test_auto_leaves_models_that_are_renewed_mortal() -> None:
    """An immortal model would stay for ever after its renewal; others that are prepared with it are made immortal."""
    why, objects, insisting = told(
        """
        from modelguard import TTL

        def load_much():
            return Model({f"feature {n}": [n, str(n)] for n in range(150_000)})

        renewed = guard(load_much, reload_on=TTL("1h") | Uses(5), name="renewed")
        stays = guard(load_much, reload_on=Uses(5), name="stays")
        report = prefork.prepare(renewed, stays)
        also = prefork.prepare(renewed, immortalize=True)
        print(json.dumps([report.why_mortal, report.immortal.objects, also.immortal.objects]))
        """
    )
    assert "renewed: old models could never be freed after TTL, Modified or Changed" == why
    assert 450_000 < objects < 700_000
    assert 450_000 < insisting


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("made", "warned"),
    [("Model({f'feature {n}': [n, str(n)] for n in range(150_000)})", True), ("[bytes(40_000_000)]", False)],
    ids=["objects", "a buffer"],
)
def test_a_renewed_model_that_children_will_copy_is_warned_of(made: str, *, warned: bool) -> None:
    """Objects that stay mortal end the sharing as they are read: a warning says so and names the way out."""
    texts, hazards = told(
        f"""
        from modelguard import TTL

        renewed = guard(lambda: {made}, reload_on=TTL("1h"), name="renewed")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            report = prefork.prepare(renewed)
        print(json.dumps([[str(one.message) for one in seen], [str(one) for one in report.hazards]]))
        """
    )
    assert texts == hazards
    assert ([True] if warned else []) == [
        "guard 'renewed'" in text and "up to N + 1 copies" in text and "@isolate(scope='host')" in text
        for text in texts
    ]


@needs_immortals
@pytest.mark.timeout(90)
def test_data_that_only_code_leads_to_is_in_the_report() -> None:
    """What is printed of a preparation says which table stays mortal, and where it is."""
    printed = told(
        """
        class Shop:
            TABLE = [f"row {n}" for n in range(100_000)]

        nlp = guard(Shop, reload_on=None, name="nlp")
        print(json.dumps(str(prefork.prepare(nlp, immortalize=True))))
        """
    )
    assert "mortal: attribute 'TABLE' of class __main__.Shop: 100,001 objects" in printed


@needs_immortals
@pytest.mark.timeout(90)
def test_the_release_of_an_immortal_model_says_that_its_memory_stays() -> None:
    """Each roll of an immortal model adds its size to the parent, which its event and its log line say."""
    immortal, alive, freed, line = told(
        """
        from modelguard.telemetry import GenerationReleased

        seen = []
        telemetry.set_hooks([seen.append])
        nlp = guard(lambda: Model({f"feature {n}": [n] for n in range(100_000)}), reload_on=None, name="nlp")
        prefork.prepare(nlp, immortalize=True)
        nlp.reload()
        while not (released := [event for event in seen if isinstance(event, GenerationReleased)]):
            time.sleep(0.01)
        (event,) = released
        print(json.dumps([event.immortal, event.alive, event.freed, telemetry.describe(event)]))
        """
    )
    assert [True, True] == [immortal, alive]
    assert freed < 5_000_000
    assert "stays in memory until the process ends: prefork.prepare() made its objects immortal" in line


@pytest.mark.timeout(90)
def test_children_of_children_and_other_forks_are_left_alone() -> None:
    """A child of a worker does not warm up."""
    assert [1, 1] == told(
        """
        nlp = guard(load, reload_on=None, warmup=warm, name="nlp")
        prefork.prepare(nlp)
        count = len(warmed)
        print(json.dumps(in_child(lambda: [len(warmed) - count, in_child(lambda: len(warmed) - count)])))
        """
    )


@pytest.mark.parametrize("scope", ["process", "host"])
@pytest.mark.timeout(90)
def test_what_isolated_functions_have_open_is_no_hazard(tmp_path: Path, scope: str) -> None:
    """Each child closes its copies by itself, and nobody is told to."""
    (tmp_path / "app.py").write_text(
        f"from modelguard import isolate\n@isolate(scope={scope!r}, workers=1)\ndef doubled(x): return 2 * x\n"
    )
    assert [2, [], 4] == told(
        f"""
        sys.path.insert(0, {str(tmp_path)!r})
        import app
        warnings.simplefilter("error")
        with app.doubled as doubled:
            before, nlp = doubled(1), guard(load, reload_on=None, name="nlp")
            report = prefork.prepare(nlp)
            print(json.dumps([before, [str(one) for one in report.hazards], doubled(2)]))
        """
    )


@pytest.mark.timeout(90)
def test_multiprocessing_children_by_fork_are_whole_too() -> None:
    """The fork context of multiprocessing goes through the same hooks."""
    assert told(
        """
        import multiprocessing

        nlp = guard(load, reload_on=None, warmup=warm, name="nlp")
        prefork.prepare(nlp)

        def child(queue):
            queue.put(os.getpid() in warmed)

        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        answer = queue.get(timeout=30)
        process.join(30)
        print(json.dumps(answer))
        """
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("parent", ["quiet", "ran with two threads"])
def test_torch_in_children_does_not_hang(parent: str) -> None:
    """Inference in the parent leaves the children a pool without threads, which they repair."""
    pytest.importorskip("torch")
    hazards, answer = told(
        f"""
        import torch
        torch.set_num_threads(2)

        def load():
            torch.manual_seed(0)
            return torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048)).eval()

        def warm(model):
            with torch.inference_mode():
                return model(torch.ones(256, 2048)).sum().item()

        nlp = guard(load, reload_on=None, warmup=lambda model: warm(model), name="net")
        nlp.load()
        if {parent != "quiet"}:
            with nlp.lease() as model:
                warm(model)
        report = prefork.prepare(nlp, warm_timeout=60)

        def ask():
            prefork.in_child()
            with nlp.lease() as model:
                warm(model)
            return torch.rand(1).item()

        print(json.dumps([[hazard.kind for hazard in report.hazards], [in_child(ask), in_child(ask)]]))
        """,
        100,
    )
    assert parent == "quiet" or "thread pool" in hazards
    assert all(isinstance(number, float) for number in answer)
    assert answer[0] != answer[1], "each child draws numbers of its own"


@pytest.mark.skipif(JEMALLOC is None, reason="libjemalloc2 is not installed")
@pytest.mark.timeout(90)
def test_jemallocs_threads_are_started_again_in_children() -> None:
    """background_thread:true is silently off in a forked child; there it is switched on again."""
    program = textwrap.dedent(SETTING) + textwrap.dedent(
        """
        from modelguard import allocator
        def running():
            return any(problem.kind == "background threads" for problem in allocator.detect().problems)
        nlp = guard(load, reload_on=None, name="nlp")
        plain = in_child(running)
        report = prefork.prepare(nlp)
        print(json.dumps([running(), plain, in_child(running), [hazard.kind for hazard in report.hazards]]))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LD_PRELOAD": str(JEMALLOC), "MALLOC_CONF": "background_thread:true"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert 0 == done.returncode, done.stderr[-2000:]
    assert '[true, false, true, ["allocator threads"' in done.stdout


@pytest.mark.timeout(90)
def test_a_signal_to_end_ends_a_child_that_warms_up() -> None:
    """The parent's handler would note it for a loop that the child does not run; afterwards the handler is back."""
    assert [-15, "noted"] == told(
        """
        def warm(model):
            if os.getpid() != parent and slow:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(20)

        parent, slow, noted = os.getpid(), [], []
        signal.signal(signal.SIGTERM, lambda *_: noted.append("noted"))
        nlp = guard(load, reload_on=None, warmup=warm, name="nlp")
        prefork.prepare(nlp)

        def ask():
            os.kill(os.getpid(), signal.SIGTERM)
            return noted[0]

        served = in_child(ask)
        slow.append(True)
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), served]))
        """
    )


@pytest.mark.timeout(90)
@pytest.mark.parametrize("step", ["prepare", "fork"])
def test_no_fork_in_the_middle_of_the_load_of_another_guard(step: str) -> None:
    """Locks that the loading thread holds would stay locked in the child, so preparing and forking wait for it."""
    assert True is told(
        f"""
        lock = threading.Lock()
        begun = threading.Event()

        def load_slowly():
            with lock:
                begun.set()
                time.sleep(2)
            return Model()

        def warm(model):
            if os.getpid() != parent:
                assert lock.acquire(timeout=10), "still locked"
                lock.release()

        parent = os.getpid()
        nlp = guard(load, reload_on=None, warmup=warm, prefork=True, name="nlp")
        other = guard(load_slowly, reload_on=None, name="other")
        if {step!r} == "fork":
            prefork.prepare(nlp)
        threading.Thread(target=other.load, name="modelguard-test", daemon=True).start()
        begun.wait()
        if {step!r} == "prepare":
            prefork.prepare(nlp)
        print(json.dumps(in_child(lambda: prefork.in_child() or True)))
        """
    )


@pytest.mark.timeout(90)
def test_a_failed_trial_that_only_warns_is_in_the_report() -> None:
    """With ``on_hazard="warn"`` a server's log shows the report, not the warnings."""
    assert ["warm-up"] == told(
        """
        def warm(model):
            if os.getpid() != parent:
                raise OSError("no disk")

        parent = os.getpid()
        nlp = guard(load, reload_on=None, warmup=warm, name="nlp")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = prefork.prepare(nlp, on_hazard="warn")
        print(json.dumps([hazard.kind for hazard in report.hazards if hazard.severity == "fatal"]))
        """
    )
