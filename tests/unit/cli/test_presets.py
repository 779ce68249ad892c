"""``modelguard presets``: its output, and its errors."""

from __future__ import annotations

import pytest

from modelguard import presets
from modelguard.cli import main


def run(*words: str) -> int:
    """Run the command as ``modelguard`` does."""
    return main(["presets", *words])


def test_the_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a name every preset is listed with its purpose."""
    assert 0 == run()
    printed = capsys.readouterr().out
    for name in presets.names():
        assert f"{name} " in printed
        assert presets.describe(name) in printed


def test_a_preset_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """With a name everything that the preset sets is explained."""
    assert 0 == run("torch-cpu-dynamic", "--workers", "2", "--distinct-shapes", "3", "--cpus", "4.5")
    expected = presets.get("torch-cpu-dynamic", workers=2, distinct_shapes=3, cpus=4.5).explain()
    assert expected + "\n" == capsys.readouterr().out


def test_names_are_put_together(capsys: pytest.CaptureFixture[str]) -> None:
    """Several names are composed; where both set a variable, the later one wins."""
    assert 0 == run("torch-cpu", "prefork")
    expected = (presets.get("torch-cpu") | presets.get("prefork")).explain()
    assert expected + "\n" == capsys.readouterr().out


def test_a_format_is_written_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    """The output can be redirected into a file."""
    assert 0 == run("low-memory", "--format", "dockerfile")
    assert presets.get("low-memory").render("dockerfile") == capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["torch-gpu"], "Did you mean 'torch-cpu'?"),
        (["nothing-like-it"], "Write one of 'torch-cpu', 'torch-cpu-dynamic', 'torch-cuda-dynamic', "),
        (["torch-cpu", "--workers", "0"], "--workers='0': must be a whole number of at least 1"),
        (["torch-cpu", "--workers", "two"], "--workers='two': must be a whole number of at least 1"),
        (["torch-cpu", "--cpus", "nan"], "--cpus=nan: must be a number above 0"),
        (["torch-cpu", "--distinct-shapes", "0"], "--distinct-shapes='0': must be a whole number of at least 1"),
        (["torch-cpu", "--format", "toml"], "Write one of 'shell', 'env', 'gunicorn', 'dockerfile',"),
        (["--format", "shell"], "--format='shell': requires the name of a preset. Add one"),
        (["--workers", "2"], "--workers='2': requires the name of a preset. Add one"),
        (["--distinct-shapes", "2"], "--distinct-shapes='2': requires the name of a preset. Add one"),
        (["--cpus", "2"], "--cpus='2': requires the name of a preset. Add one"),
    ],
)
def test_errors(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr has the fix, with status 2, and stdout is empty."""
    assert 2 == run(*words)
    captured = capsys.readouterr()
    assert "" == captured.out
    assert said in captured.err
    assert 1 == len(captured.err.splitlines())
