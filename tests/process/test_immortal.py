"""Immortal objects in processes of their own: what forked readers copy, and how the interpreter ends."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.process.harness import run_python, write_app

from modelguard import prefork

UNSUPPORTED = prefork.immortalize_unsupported()
pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.skipif(UNSUPPORTED is not None, reason=str(UNSUPPORTED)),
]

MODEL = """
import gc, json, os, pickle, sys, threading
from modelguard.prefork import immortalize

class Entry:
    def __init__(self, number):
        self.name = f"entry {number}"
        self.weight = number + 0.5
        self.parts = [number, (number, str(number)), {f"key {number}": number + 0.25}, None]
        self.parts[3] = self.parts
    def __del__(self):
        dead.append(self.name)

dead = []

def build(size):
    return {f"entry {number}": Entry(number) for number in range(size)}

def read(model):
    return sum(len(entry.name) + entry.weight + len(entry.parts[1][1]) + sum(entry.parts[2].values())
               for key, entry in model.items() if key.startswith("entry"))
"""

SHARED = """
def pss(pid):
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))

model = MAKE
gc.collect()
gc.freeze()
if IMMORTAL:
    assert immortalize(model).complete
alone = pss("self")
done, tell = os.pipe()
wait, leave = os.pipe()
children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        try:
            os.close(leave)
            for _ in range(3):
                read(model)
                gc.collect()
            os.write(tell, b"x")
            os.read(wait, 1)
        finally:
            os._exit(0)
    children.append(child)
for _ in children:
    os.read(done, 1)
together = sum(map(pss, [os.getpid(), *children]))
os.close(leave)
for child in children:
    os.waitpid(child, 0)
print(json.dumps([alone, together / alone]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of processes from /proc")
@pytest.mark.parametrize("make", ["build(60_000)", "pickle.loads(pickle.dumps(build(60_000)))"], ids=["made", "loaded"])
def test_forked_readers_share_an_immortal_model(make: str) -> None:
    """Two children that read a whole 60 MB graph, and collect, copy almost nothing; with freezing alone, much."""
    program = MODEL + SHARED.replace("MAKE", make)
    alone, frozen = run_python(program.replace("IMMORTAL", "False"), 60)
    assert 50_000 < alone
    assert 1.6 < frozen
    assert run_python(program.replace("IMMORTAL", "True"), 60)[1] <= 1.15


USES = """
import copy, datetime, ipaddress, pathlib, sqlite3

class Word(str):
    pass

def build(size):
    return [(Entry(number), f"日本語の単語 {number}", Word(f"слово {number}"), frozenset([number, number + 1]),
             datetime.datetime(2000, 1, 1) + datetime.timedelta(seconds=number), pathlib.PurePath(f"/srv/{number}"),
             ipaddress.IPv4Network((number << 8, 24))) for number in range(size)]

def read(model):
    connection = sqlite3.connect(":memory:")
    for entry, japanese, russian, *hashed in model:
        connection.execute("select ?, ?", (japanese, russian))
        assert vars(entry) and copy.copy(entry) and [hash(one) for one in (japanese, russian, *hashed)]
        assert str(hashed[-2]) and hashed[-1].num_addresses
    dead.clear()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of processes from /proc")
def test_forked_readers_share_what_the_first_use_would_have_written() -> None:
    """Native code reads texts that are not ASCII, hashes are computed, instances copied: next to nothing is copied."""
    program = MODEL + USES + SHARED.replace("MAKE", "build(40_000)")
    _, frozen = run_python(program.replace("IMMORTAL", "False"), 60)
    assert 1.6 < frozen
    assert run_python(program.replace("IMMORTAL", "True"), 60)[1] <= 1.15


ISOLATED = """
import os, time
from modelguard import TTL, Changed, Modified, guard, isolate, pool

def load(*_):
    return {f"entry {number}": [number, str(number), number + 0.5] for number in range(150_000)}

@isolate(workers=2, timeout="60s", scope="SCOPE")
@SOURCE
def read(model, key):
    assert all(parts[0] + len(parts[1]) + parts[2] + len(name) for name, parts in model.items())
    time.sleep(0.2)  # so that a second call goes to the other worker
    return os.getpid()
"""

READ_BY_ALL = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, FOLDER)
import app

def private(pid):
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))

readers = set()
while len(readers) < 2:
    with ThreadPoolExecutor(2) as threads:
        readers.update(threads.map(app.read, ["one", "one"]))
print(json.dumps([private(pid) for pid in readers]))
app.read.close()
"""

RENEWED = {
    "TTL": ("process", "guard(load, reload_on=TTL('1h'))"),
    "Modified": ("process", "guard(load, reload_on=Modified(__file__))"),
    "Changed": ("process", "guard(load, reload_on=Changed(lambda: 'one', every='1h'))"),
    "a pool's ttl": ("process", "pool(load, max_memory='2 GB', reload_on=TTL('1h'))(key='key')"),
    "TTL for the host": ("host", "guard(load, reload_on=TTL('1h'))"),
}


@pytest.mark.parametrize(("scope", "source"), RENEWED.values(), ids=RENEWED)
def test_isolated_workers_share_a_model_that_is_renewed(scope: str, source: str, tmp_path: Path) -> None:
    """A mold ends with its generation, so its 40 MB of objects are immortal whatever policy renews them."""
    write_app(tmp_path, ISOLATED.replace("SCOPE", scope).replace("SOURCE", source))
    program = READ_BY_ALL.replace("FOLDER", repr(str(tmp_path)))
    assert all(private < 10_000 for private in run_python(program, 60, MODELGUARD_RUNTIME_DIR=str(tmp_path / "run")))


USED_BY_CHILDREN = """
import asyncio, email.message, gc, http.server, json, os, sqlite3, ssl, sys, unittest.mock, xml.dom.minidom
from modelguard import guard, prefork

nlp = guard(dict, reload_on=None, name="nlp")
prefork.prepare(nlp, immortalize=IMMORTAL)

def private():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))

def use_all():
    for module in list(sys.modules.values()):
        for one in list(vars(module).values()):
            isinstance(one, dict)

reader, writer = os.pipe()
child = os.fork()
if child == 0:
    before = private()
    use_all()
    os.write(writer, str(private() - before).encode())
    os._exit(0)
os.waitpid(child, 0)
print(json.dumps(int(os.read(reader, 100))))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of processes from /proc")
def test_forked_children_share_the_program() -> None:
    """References to functions and classes are not counted: a child that uses all of them copies half at most."""
    counted, shared = (run_python(USED_BY_CHILDREN.replace("IMMORTAL", text), 60) for text in ("False", "'auto'"))
    assert 1000 < counted
    assert shared < counted / 2, (shared, counted)


def ends_cleanly(program: str, **variables: str) -> None:
    """Run ``program`` to the end of its interpreter, memory debugging on, and let nothing be said on stderr."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", MODEL + textwrap.dedent(program)],
        env={**os.environ, "PYTHONMALLOC": "debug", **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (0, "") == (done.returncode, done.stderr[-3000:])


ENDINGS = {
    "kept": "",
    "deleted": "del model; gc.collect()",
    "emptied": "for entry in model.values(): entry.__dict__.clear()\nmodel.clear(); gc.collect()",
    "changed": """
        for entry in list(model.values()):
            entry.name, entry.new = "new", [entry]
            entry.parts.append({})
            entry.parts[2].popitem()
        model.update({number: Entry(number) for number in range(500)})
        gc.collect()
    """,
    "frozen": "gc.freeze(); gc.unfreeze(); gc.collect(); gc.freeze()",
    "interned": """
        late = [sys.intern(entry.name) for entry in model.values()]
        assert all(sys.intern("ent" + name[3:]) is name for name in late)
    """,
    "in a class": "class Holder: inside = model\nmodel['holder'] = Holder()\nimmortalize(model)\ndel Holder",
    "in a module": "sys.model = model; import builtins; builtins.model = model",
    "in a circle with its class": """
        class Own:
            pass
        Own.me = Own()
        immortalize(Own.me)
    """,
    "pickled": "import copy; again = pickle.loads(pickle.dumps(model)), copy.deepcopy(model); del again",
    "in threads": """
        threads = [threading.Thread(target=read, args=(model,)) for _ in range(4)]
        [thread.start() for thread in threads]
        immortalize(build(1000))
        [thread.join() for thread in threads]
    """,
    "collected": "for _ in range(100): gc.collect(_ % 3); junk = []; junk.append(junk); del junk",
    "forked": """
        child = os.fork()
        read(model); gc.collect()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """,
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_the_interpreter_ends_cleanly(ending: str) -> None:
    """Whatever became of an immortal model, the process exits with 0 and without output, under PYTHONMALLOC=debug."""
    start = "model = build(2000)\nearly = [sys.intern(entry.name) for entry in list(model.values())[:1000]]\n"
    ends_cleanly(start + "immortalize(model)\nread(model)\n" + textwrap.dedent(ending))


def test_immortal_objects_die_with_their_process_only() -> None:
    """Their finalizers do not run, neither when the last reference goes nor at exit; those of others do."""
    ends_cleanly("""
        model = build(3)
        immortalize(model)
        model.clear()
        del model
        gc.collect()
        assert dead == []
        build(1).clear()
        gc.collect()
        assert dead == ["entry 0"]
    """)


def test_thread_pools_of_the_models_own_go_on() -> None:
    """A model with locks and a pool of threads still works, and its pool ends with the interpreter."""
    ends_cleanly("""
        from concurrent.futures import ThreadPoolExecutor
        class Model:
            def __init__(self):
                self.lock, self.pool, self.entries = threading.Lock(), ThreadPoolExecutor(2), build(100)
            def predict(self):
                with self.lock:
                    return self.pool.submit(read, self.entries).result()
        model = Model()
        before = model.predict()
        report = immortalize(model)
        assert ["lock", "thread"] == sorted(entry.kind for entry in report.skipped)
        assert before == model.predict()
    """)


PREPARED = """
    import asyncio, contextlib, email.message, http.server, logging, sqlite3, ssl, tempfile, weakref
    from concurrent.futures import ThreadPoolExecutor
    from modelguard import guard, prefork

    class Closed:
        def __del__(self):
            dead.append(len(name))

    name, TABLE = "closed", [Closed()]
    file, pool = tempfile.NamedTemporaryFile(), ThreadPoolExecutor(1)
    file.close()
    pool.submit(len, "").result()
    pool.shutdown()
    nlp = guard(lambda: build(1000), reload_on=None, name="nlp")
    prefork.prepare(nlp, immortalize=IMMORTAL)
"""

PREPARED_ENDINGS = {
    "at once": "",
    "its data dies": """
        TABLE.clear()
        assert dead == [6]
        seen = weakref.ref(Closed())
        assert seen() is None and dead == [6, 6]
    """,
    "what is defined later dies": """
        class Later:
            def use(self):
                return [Later]
        seen = weakref.ref(Later), weakref.ref(lambda: Later)
        del Later
        gc.collect()
        assert [None, None] == [one() for one in seen]
    """,
    "its functions change": """
        def read(model):
            return 0
        Entry.new, Closed.__del__ = read, lambda self: None
        with nlp.lease() as model:
            assert 0 == read(model)
        del Entry.new, Closed
        gc.collect()
    """,
    "a child ends": """
        child = os.fork()
        with nlp.lease() as model:
            read(model)
        asyncio.run(asyncio.sleep(0))
        gc.collect()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """,
}


@pytest.mark.parametrize("ending", PREPARED_ENDINGS.values(), ids=PREPARED_ENDINGS)
@pytest.mark.parametrize("immortal", ["'auto'", "True"])
def test_a_prepared_program_goes_on_and_ends_cleanly(ending: str, immortal: str) -> None:
    """With its functions and classes immortal, its data and what it defines later still die."""
    text = textwrap.dedent(PREPARED.replace("IMMORTAL", immortal))
    ends_cleanly(text + textwrap.dedent(ending))
