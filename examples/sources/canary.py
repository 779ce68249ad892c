"""A canary that rejects a bad model, and a rollback: a program that checks itself, for docs/recipes.md."""

import contextlib

from stand_ins import Model

from modelguard import Loaded, Swap, guard
from modelguard.errors import ModelRejected, NoPreviousModel

SAMPLES = ["a text", "another one"]
published = [b"good", b"good too", b"b", b"quietly bad"]


def load_next() -> Loaded[Model]:
    weights = published.pop(0)
    return Loaded(Model(weights), version=weights.decode())


def close_enough(new: Model, old: Model | None) -> bool:
    """Rejects a model whose answers are much longer or shorter than those of the old one."""
    if old is None:
        return True
    lengths = [(len(new(text)), len(old(text))) for text in SAMPLES]
    return all(abs(now - before) <= 8 for now, before in lengths)


nlp = guard(load_next, reload_on=None, validate=close_enough, swap=Swap(keep_previous=True), name="nlp")
nlp.load()
nlp.reload()
assert nlp.version == "good too"

published[0] = b"a very long and bad answer"
try:
    nlp.reload()
except ModelRejected as error:
    assert error.reason == "validate returned False"
assert nlp.version == "good too"  # the canary has rejected it, and calls have seen nothing of it

nlp.reload()
assert nlp.version == "quietly bad"
nlp.rollback()  # from an admin route, or a hook on your own measure
assert nlp.version == "good too"

with contextlib.suppress(NoPreviousModel):  # one is kept, and it was used
    nlp.rollback()
nlp.close()
