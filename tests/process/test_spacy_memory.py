"""Story 1 on a real pipeline: ever-new words, and memory that stays flat."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("spacy")

pytestmark = [
    pytest.mark.timeout(300),  # about half a minute on one core
    pytest.mark.skipif(sys.platform != "linux", reason="reads private memory through /proc"),
]

# Prints the growth of private memory in MB at each checkpoint, the lexemes left, and the reloads. Only pages that were
# written to count: shared libraries become private when the last other process that maps them ends.
SCRIPT = """
import random, string, threading
import spacy
from modelguard import guard, telemetry
from modelguard.adapters.spacy import IndexGrowth, zoned
from modelguard import Swap, memory

nlp = guard(lambda: spacy.blank("en"), reload_on=IndexGrowth("4 MB"), swap=Swap(defer=0), name="en")
released = threading.Event()
telemetry.set_hooks([lambda event: isinstance(event, telemetry.GenerationReleased) and released.set()])
draw = random.Random(0)

@zoned(nlp)
def words(nlp, text):
    return [token.text for token in nlp(text)]

def call():
    unseen = ["".join(draw.choices(string.ascii_lowercase, k=9)) for _ in range(300)]
    assert unseen == words(" ".join(unseen))

for _ in range(50):
    call()
start = memory.usage().private_dirty
for number in range(1, 3001):
    call()
    if number % 250 == 0:
        print((memory.usage().private_dirty - start) / 1e6)
assert released.wait(60)
print(nlp.status().reloads)
"""


def test_private_memory_stays_flat_through_unseen_words() -> None:
    """3,000 texts of 300 new words: without zones some 430 MB, with zones and reloads a few, and no more at the end."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=280, check=False)
    assert 0 == done.returncode, done.stderr
    *growth, reloads = map(float, done.stdout.split())
    assert 12 == len(growth)
    assert 2 <= reloads
    first, second = growth[4:8], growth[8:]
    assert max(growth) < 40, growth
    # The index grows and is given back in turns: what must not rise is what is left after a reload.
    assert min(second) < min(first) + 10, growth
