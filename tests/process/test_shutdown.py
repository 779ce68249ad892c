"""A process that ends while a model loads or a batch is computed neither crashes nor hangs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest

from modelguard.runtime import fork_hooks
from modelguard.runtime.host_lock import HostLock, private_folder

pytestmark = pytest.mark.timeout(90)

#: Whoever comes back from torch's C++ while the interpreter ends is ended by pthread_exit, which aborts the process.
RELOADS = """
    import threading, time, torch
    from modelguard import guard

    def load():
        if guarded.status().generation:
            loading.set()
            until = time.monotonic() + 1
            while time.monotonic() < until:
                torch.ones(300, 300) @ torch.ones(300, 300)
        return torch.nn.Linear(4, 4)

    loading = threading.Event()
    guarded = guard(load, reload_on=None, swap="load_first")
    guarded.load()
    guarded.reload(wait=False)
    assert loading.wait(20)
    print("the end")
"""
BATCHES = """
    import threading, time, torch
    from modelguard import batched

    @batched(max_size=1)
    def total(items):
        computing.set()
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            torch.ones(300, 300) @ torch.ones(300, 300)
        return items

    computing = threading.Event()
    for n in range(3):
        total.submit(n).add_done_callback(lambda future: print(future.result(), flush=True))
    assert computing.wait(20)
"""
HANGS = """
    import threading
    from modelguard import batched, guard

    def load():
        if guarded.status().generation:
            loading.set()
            threading.Event().wait()
        return "model"

    @batched(max_size=1)
    def echo(items):
        computing.set()
        threading.Event().wait()

    loading, computing = threading.Event(), threading.Event()
    guarded = guard(load, reload_on=None, swap="load_first")
    guarded.load()
    guarded.reload(wait=False)
    waiting = [echo.submit(n) for n in range(2)]
    assert loading.wait(20) and computing.wait(20)
    waiting[1].add_done_callback(lambda future: print(type(future.exception()).__name__, flush=True))
"""

UNLOADS = """
    import os, warnings
    from modelguard import guard, pool

    warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, from 3.12 on

    class Model:
        def __init__(self, name):
            self.name = name

    def unload(model):
        print("unloaded", model.name, flush=True)
        if model.name == "bad":
            raise OSError("disk full")

    bad, good, closed = (
        guard(lambda name=name: Model(name), reload_on=None, unload=unload, name=name)
        for name in ("bad", "good", "closed")
    )
    models = pool(Model, max_memory="1 GB", unload=unload)
    for one in (bad, good, closed):
        one.load()
    closed.close()
    with models.lease("pooled"):
        pass
    if (child := os.fork()) == 0:
        raise SystemExit  # by way of its exit handlers
    os.waitpid(child, 0)
    print("the end", flush=True)
"""
BUSY = """
    import threading
    from modelguard import guard

    nlp = guard(lambda: "model", reload_on=None, unload=lambda model: print("unloaded"))

    def stay():
        with nlp.lease():
            inside.set()
            threading.Event().wait()

    inside = threading.Event()
    threading.Thread(target=stay, daemon=True).start()
    assert inside.wait(20)
    print("the end")
"""

UNFINISHED = """
    from modelguard import guard

    class Model:
        pass

    nlp = guard(Model, reload_on=None, swap="load_first")

    @nlp
    def words(model):
        yield "one"
        yield "two"

    unfinished = words()
    next(unfinished)
    nlp.reload()
    print("the end")
"""

FINALIZERS = """
    import sys
    import threading
    import time

    from modelguard import guard, replicas

    end = threading.Event()
    hung = guard(end.wait, reload_on=None)
    hung.reload(wait=False)
    loaded = replicas(guard(list, reload_on=None), 2)
    loaded.load()
    calls = hung(id), hung.load, hung.reload, hung.unload, loaded.reload, loaded.unload

    class Last:
        def __del__(self, calls=calls):
            for call in calls:
                try:
                    call()
                except RuntimeError as error:
                    print(error, flush=True)
                else:
                    print("done", flush=True)

    sys.modules["last"] = Last()
    time.sleep(0.2)
"""


#: The exit handler is registered first, so it runs last.
DUE = """
    import atexit, time
    ended = []
    atexit.register(lambda: print("soon" if time.monotonic() < ended[0] + 3 else "late"))
    from modelguard import TTL, Swap, guard

    class Model:
        def __init__(self):
            time.sleep(0.2)

    def unload(_):
        print("unloaded")

    guards = [guard(Model, reload_on=TTL("0.5s"), swap=Swap(defer=0), unload=unload, name=name) for name in "abc"]
    for one in guards:
        one.load()
    until = time.monotonic() + 20
    while not all("reloading" == one.status().state for one in guards):
        assert time.monotonic() < until
        time.sleep(0.01)
    print("the end", flush=True)
    ended.append(time.monotonic())
"""


#: The exit handler is registered first, so it runs last.
SERVES_ON = """
    import atexit, os, time, warnings
    warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, from 3.12 on

    def serve():
        if child := os.fork():
            os.waitpid(child, 0)
            return
        until = time.monotonic() + 20
        while model.status().generation < 2 and time.monotonic() < until:
            with model.lease():
                time.sleep(0.01)
        print("replaced" if model.status().generation > 1 else "not replaced", flush=True)
        os._exit(0)

    atexit.register(serve)
    from modelguard import TTL, Swap, guard

    model = guard(dict, reload_on=TTL("0.5s"), swap=Swap(defer=0))
    model.load()
"""


CLOSES = """
import sys
from modelguard import guard, replicas
both = guard(dict, reload_on=None, name="one"), replicas(guard(dict, reload_on=None, name="two"), 2)
for one in both:
    one.load()

class Service:
    def __del__(self, both=both, sys=sys, write=sys.stdout.write, flush=sys.stdout.flush):
        for one in both:
            one.close()
            write(f"{sys.meta_path}\\n")
        flush()

service = Service()
service.itself = service
"""

SHOWN = """
import sys
from modelguard import guard, pool, replicas
one, two = (guard(dict, reload_on=None, name=name) for name in ("one", "two"))
one.load()
shown = one, pool(dict, max_memory="1 GB", name="models"), replicas(two, 2)

class Service:
    def __del__(self, shown=shown, sys=sys, write=sys.stdout.write, flush=sys.stdout.flush):
        write(f"{sys.meta_path} {shown}\\n")
        flush()

service = Service()
service.itself = service
"""


def ended(program: str) -> str:
    """What a program printed, which has come to a good end."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60 + fork_hooks.GRACE,
        check=False,
    )
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout


def test_a_load_of_torch_may_be_under_way() -> None:
    """The end waits for a reload that computes in native code, and does not crash in it."""
    pytest.importorskip("torch")
    assert "the end\n" == ended(RELOADS)


def test_what_was_submitted_is_computed() -> None:
    """As with an executor: whatever waits for its batch at the end gets it."""
    pytest.importorskip("torch")
    assert ["0", "1", "2"] == ended(BATCHES).split()


def test_what_hangs_does_not_keep_the_interpreter() -> None:
    """A loader or a batch that never ends is abandoned after a grace period; waiting callers get an error."""
    assert "GuardClosed\n" == ended(HANGS)


def test_models_are_unloaded_at_exit_by_the_process_that_loaded_them() -> None:
    """Each once, those of a pool too; a closed guard's not again, and a forked child's not. An error stops no other."""
    lines = ended(UNLOADS).splitlines()
    assert ["unloaded closed", "the end"] == lines[:2]
    assert ["unloaded bad", "unloaded good", "unloaded pooled"] == sorted(lines[2:])


def test_an_exit_waits_for_no_reload_that_a_policy_has_yet_to_begin() -> None:
    """Such as one that waits for its turn, while another process loads. Models are unloaded all the same."""
    lock = HostLock(private_folder)
    with lock.held(sleep=time.sleep, clock=time.monotonic, cancelled=lambda: False) as held:
        assert "host" == held
        assert ["the end", *3 * ["unloaded"], "soon"] == ended(DUE).splitlines()


def test_policies_go_on_in_a_child_that_is_forked_by_an_exit() -> None:
    """As of an application that serves on in the background. Its parent's exit is not its own."""
    assert ["replaced"] == ended(SERVES_ON).splitlines()


def test_a_model_with_a_call_on_it_is_not_unloaded_at_exit() -> None:
    """The hook could crash the call; the exit waits for it, but not for ever."""
    assert ["the end"] == ended(BUSY).splitlines()


def test_a_generator_that_is_not_finished_does_not_keep_the_interpreter() -> None:
    """An old model waits for its end, which comes when no thread can be started any more to release that model."""
    assert "the end\n" == ended(UNFINISHED)


def test_finalizers_wait_for_no_thread() -> None:
    """None runs any more then: neither one that loads, nor one that waits for work."""
    assert 5 * ["the interpreter is shutting down"] + ["done"] == ended(FINALIZERS).splitlines()


def test_finalizers_may_close_what_has_a_model() -> None:
    """Nothing can be imported any more then, which figures, the trim and the first event of a release need."""
    assert ["None", "None"] == ended(CLOSES).splitlines()


def test_finalizers_may_show_what_has_a_model() -> None:
    """As where an error names it: nothing is imported for that."""
    shown = "(<ModelGuard 'one' ready>, <ModelPool 'models': 0 models, 0 B>, <ModelReplicas 'two', 2 of them>)"
    assert f"None {shown}\n" == ended(SHOWN)
