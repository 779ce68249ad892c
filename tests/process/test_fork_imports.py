"""What other threads import, and what has been imported, when a process forks."""

from __future__ import annotations

import os

import pytest
from tests.process.harness import run_python

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork"),
]

IMPORTING = """
    import os, sys, threading, time
    import modelguard

    begun = threading.Event()

    class Slow:
        def find_spec(self, name, path, target=None):
            if name == "modelguard.{module}":
                begun.set()
                time.sleep(1)

    nlp = modelguard.guard(dict, reload_on=None)
    sys.meta_path.insert(0, Slow())
    threading.Thread(target=lambda: {use}).start()  # imports it
    begun.wait()
    child = os.fork()
    if child == 0:
        nlp.load()
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_while_another_thread_imports_a_part_of_modelguard() -> None:
    """The child can load: it does not wait for an import that nobody ends there."""
    assert 7 == run_python(IMPORTING.format(module="environment._linker", use="nlp.load()"), 20)


def test_a_fork_while_another_thread_first_uses_a_part_that_takes_part_in_forks() -> None:
    """The fork waits for that import, which does not wait for the fork."""
    assert 7 == run_python(IMPORTING.format(module="isolation.status", use="modelguard.isolate"), 20)


LATE = """
    import os, threading

    loading, made = threading.Event(), []

    def make():
        if not made:
            made.append(guard(load, reload_on=None))
            made[0].load()

    def load():
        if os.getpid() == me:
            loading.set()
            threading.Event().wait()
        return {}

    def make_one_meanwhile():
        if not made:
            threading.Thread(target=make, daemon=True).start()
            loading.wait(1)

    me = os.getpid()
    os.register_at_fork(before=make_one_meanwhile)  # runs after what comes later
    from modelguard import guard

    other = guard(dict, reload_on=None)
    child = os.fork()
    if child == 0:
        with made[0].lease():
            os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os._exit(0)
"""


def test_a_guard_that_is_made_while_the_process_forks_loads_in_the_child() -> None:
    """The thread that loads it in the parent is not there."""
    assert 7 == run_python(LATE, 20)


FIRST_EXECUTOR = """
    import os, sys, threading
    from modelguard import guard

    def use_an_executor():
        from concurrent.futures import ThreadPoolExecutor
        ThreadPoolExecutor(1).submit(int).result()

    def in_another_thread():
        thread = threading.Thread(target=use_an_executor)
        thread.start()
        thread.join()

    nlp = guard(dict, reload_on=None)
    os.register_at_fork(before=in_another_thread)
    errors = []
    sys.unraisablehook = lambda found: errors.append(found.exc_value)
    child = os.fork()
    if child == 0:
        os._exit(7)
    os.waitpid(child, 0)
    print(len(errors))
"""


def test_a_fork_while_another_thread_uses_its_first_executor() -> None:
    """The lock of all executors stays as it is, so that no ``asyncio.to_thread`` fails."""
    assert 0 == run_python(FIRST_EXECUTOR, 20)


FORKING_BESIDE_MODULES = """
    import os, sys, types
    from modelguard import guard, memory

    class Spec:
        __slots__ = tuple(f"unused_{number}" for number in range(600))  # fills a page of its own

    for number in range(2_000):
        sys.modules[f"module_{number}"] = module = types.ModuleType(f"module_{number}")
        module.__spec__ = Spec()

    def forked():
        ready, told = os.pipe()
        go_on, end = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(told, b".")
            os.read(go_on, 1)
            os._exit(0)
        os.read(ready, 1)
        return child, end

    nlp = guard(dict, reload_on=None)
    nlp.load()
    memory.usage(os.getpid())  # imports what it needs
    first, end = forked()
    before = memory.usage(first).uss
    others = [forked() for _ in range(2)]
    print((memory.usage(first).uss - before) / 1_000_000)  # what the parent writes to becomes the child's alone
    for child, end in [(first, end), *others]:
        os.write(end, b".")
        os.waitpid(child, 0)
"""


def test_a_fork_writes_to_no_other_modules() -> None:
    """Children share the pages on which all that the parent has imported lies."""
    assert 4 > run_python(FORKING_BESIDE_MODULES, 60)  # MB; 12 if each module were looked at


LOADING_AFTER_A_FORK = """
    import json, os, sys
    from modelguard import MemoryGrowth, Swap, Uses, allocator, guard, memory

    class Model:
        def __call__(self, text):
            return text.split()

    nlp = guard(Model, reload_on=Uses(3) | MemoryGrowth("1 GB"), swap=Swap(defer=0))
    memory.trim_every("1m")

    @nlp
    def words(model, text):
        return model(text)

    os.waitpid(os.fork() or os._exit(0), 0)
    before = set(sys.modules)
    for _ in range(10):
        words("a text")
    nlp.reload()
    nlp.check()
    allocator.trim()
    nlp.unload()
    print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_loads_import_nothing_after_a_fork() -> None:
    """What a thread imports for its first load, trim or event has been imported by then: no fork can interrupt it."""
    assert [] == run_python(LOADING_AFTER_A_FORK, 60)


FORKING_BESIDE_AN_IMPORT = """
    import json, sys, threading
    from modelguard.runtime import fork_hooks

    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        def find_spec(self, name, path, target=None):
            if name == "modelguard.late":
                begun.set()
                go_on.wait(30)

    def late():
        try:
            import modelguard.late
        except ImportError:
            pass

    sys.meta_path.insert(0, Slow())
    thread = threading.Thread(target=late)
    thread.start()
    begun.wait(30)
    during = fork_hooks._unfinished()
    go_on.set()
    thread.join()
    print(json.dumps([during, fork_hooks._unfinished()]))
"""


def test_what_another_thread_is_importing_is_known() -> None:
    """On each interpreter, whose import system is asked."""
    assert [["modelguard.late"], []] == run_python(FORKING_BESIDE_AN_IMPORT, 60)


WAITING_AT_A_FORK = """
    import os, threading, time
    from modelguard import guard
    from modelguard.lifecycle import _engine

    begun, over = threading.Event(), threading.Event()

    def load():
        begun.set()
        over.wait(30)
        return object()

    model = guard(load, reload_on=None)
    waiting = threading.Thread(target=model.load)
    waiting.start()
    begun.wait(30)
    while not _engine.waits:
        time.sleep(0.01)
    pid = os.fork()
    if pid == 0:
        os._exit(len(list(_engine.waits)))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    over.set()
    waiting.join()
"""


def test_nobody_waits_in_a_child() -> None:
    """What the parent's threads wait for does not matter in a forked child, whose threads may get their identities."""
    assert 0 == run_python(WAITING_AT_A_FORK, 60)
