"""A folder in the layout of the Hugging Face cache: a program that checks itself, for docs/recipes.md."""

from pathlib import Path

from stand_ins import Model, wait_until

from modelguard import Changed, Loaded, Swap, guard

cache = Path("models--example--nlp")


def publish(commit: str, weights: bytes) -> None:
    """What a download does, in this order: the files of the revision, then the reference."""
    snapshot = cache / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "model.bin").write_bytes(weights)
    (cache / "refs").mkdir(exist_ok=True)
    (cache / "refs" / "main.new").write_text(commit)
    (cache / "refs" / "main.new").replace(cache / "refs" / "main")


def revision() -> str:
    return (cache / "refs" / "main").read_text().strip()


def load_snapshot() -> Loaded[Model]:
    commit = revision()  # read once: all files are of this revision
    return Loaded(Model((cache / "snapshots" / commit / "model.bin").read_bytes()), version=commit)


publish("1f2e3d", b"revision one")
nlp = guard(load_snapshot, reload_on=Changed(revision, every="200ms"), swap=Swap(defer=0), name="nlp")
with nlp:
    assert nlp.version == "1f2e3d"
    publish("4c5b6a", b"revision two")
    wait_until(lambda: nlp.version == "4c5b6a")
