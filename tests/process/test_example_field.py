"""Programs of other projects run cured as they do uncured."""

from __future__ import annotations

import json
import sys

import pytest
from examples.field import __main__ as field

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="isolated functions are for Linux"),
]

NAME = "litserve"
needs_environment = pytest.mark.skipif(
    not (field.OUT / NAME / "installed").exists(),
    reason=f"there is no {field.OUT / NAME}, which python -m examples.field {NAME} makes",
)


@pytest.mark.parametrize("name", field.PROGRAMS)
def test_a_cure_has_ten_lines(name: str) -> None:
    """Beside its imports, each cure has at most the ten lines that the page promises."""
    files = field.HERE.glob(f"cured_{name}*.py")
    code = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert 0 < sum(not line.startswith(("import ", "from ", '"""')) for line in code if line) <= 10


@needs_environment
def test_cured_litserve_answers_as_before_and_loses_nothing_in_a_reload() -> None:
    """The API says the same with its model in other processes, and a reload of them loses no request."""
    path, body = field.PROGRAMS[NAME].request("two qwzxv")
    for way in field.WAYS:
        with field.serving(NAME, way, workers=1) as server:
            answer = server.ask(path, body, headers={"Content-Type": "application/json"})
            assert {"words": ["two", "qwzxv"]} == answer.json
            if way == "after":
                figures = field.reload(server, NAME, field.texts(), 5, field.PROGRAMS[NAME].after)
                assert 0 == figures["lost"], server.log


def test_the_table_has_both_ways(figures: dict[str, object]) -> None:
    """A program has a line as it is and one cured, with growth, copies and the requests that were lost."""
    before, after = field.lines("presidio", figures)
    assert (
        "| presidio | as it is | 500, 3 lost | 100 MB, +50 MB | 400 MB, 4.00 | 10 ms, 2,000 ms | 7 of 600 |" == before
    )
    assert "|  | cured | 500 | 100 MB, -1 MB | 110 MB, 1.10 | 10 ms, 20 ms | 0 of 600 |" == after


@pytest.fixture
def figures() -> dict[str, object]:
    """What a run leaves in a file."""
    before = {"pss": 400e6, "lost_at_rest": 3, "curve": [(0, 100e6), (500, 150e6)], "p99": [0.01, 2], "lost": 7}
    after = {"pss": 110e6, "lost_at_rest": 0, "curve": [(0, 100e6), (500, 99e6)], "p99": [0.01, 0.02], "lost": 0}
    run = {"one": {"pss": 100e6}, "before": {**before, "around": 600}, "after": {**after, "around": 600}}
    read: dict[str, object] = json.loads(json.dumps(run))
    return read
