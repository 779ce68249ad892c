"""Renderings: what each format quotes, leaves out and rejects, read back by its own parser where there is one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from modelguard import presets
from modelguard.environment import _presets
from modelguard.environment._knobs import Knob, When
from modelguard.errors import InvalidOption
from modelguard.presets import Preset

NASTY = [
    "plain",
    "two words",
    "a,b:c=d;e",
    "it's",
    'say "hi"',
    "back\\slash \\n \\",
    "$HOME and $(HOSTNAME) and $$",
    "%h %% %",
    "#no comment",
    "a #b",
    "`date` & | > < ! * ? [x] ~",
    "ü 銀座",
    "",
]


def knob(value: str, name: str = "A", read_at: When = "any time") -> Knob:
    return Knob(name, value, read_at, "it", "does", "costs", "source")


def preset_of(*values: str) -> Preset:
    return Preset("mine", "Mine.", tuple(knob(value, f"V{number}") for number, value in enumerate(values)))


def expected(*values: str) -> dict[str, str]:
    return {f"V{number}": value for number, value in enumerate(values)}


def systemd_environment(unit: str) -> dict[str, str]:
    """Read a unit's variables by the rules of systemd.syntax(7) and systemd.exec(5)."""
    found = {}
    section = ""
    for line in unit.splitlines():
        if line.startswith(("#", ";")) or not line:
            continue
        if line.startswith("["):
            section = line
            continue
        assert "[Service]" == section
        directive, assignment = line.split("=", 1)
        assert "Environment" == directive
        assert assignment[0] == assignment[-1] == '"'
        # Inside quotes a backslash takes the next sign as it is (of those used here), and no bare quote may follow.
        assert re.fullmatch(r'(?:[^"\\]|\\["\\])*', assignment[1:-1])
        unquoted = re.sub(r"\\(.)", r"\1", assignment[1:-1])
        assert re.fullmatch(r"(?:[^%]|%%)*", unquoted)  # no specifier is left to expand
        name, value = unquoted.replace("%%", "%").split("=", 1)
        found[name] = value
    return found


def test_an_env_file_is_read_back() -> None:
    """python-dotenv reads every value back."""
    dotenv = pytest.importorskip("dotenv")
    import io

    text = preset_of(*NASTY).render("env")
    assert expected(*NASTY) == dict(dotenv.dotenv_values(stream=io.StringIO(text)))


def test_an_env_file_quotes_no_more_than_needed() -> None:
    """Docker's --env-file treats quotes as part of the value, so the presets' own values have none."""
    for name in presets.names():
        lines = presets.get(name, cpus=2).render("env").splitlines()
        assert [] == [line for line in lines if not line.startswith("#") and re.search(r"['\"\s]", line)]


def test_what_an_env_file_cannot_hold_is_refused() -> None:
    """Its readers expand ${...} within any quotes."""
    with pytest.raises(InvalidOption, match="Use another format") as raised:
        preset_of("${HOME}").render("env")
    assert "V0=${HOME}" in str(raised.value)


def test_gunicorn_reads_it_back(tmp_path: Path) -> None:
    """Gunicorn's own loader runs the file, and sets every value unchanged."""
    base = pytest.importorskip("gunicorn.app.base")
    config = tmp_path / "gunicorn.conf.py"
    config.write_text(preset_of(*NASTY).render("gunicorn"), encoding="utf-8")
    application = base.Application.__new__(base.Application)
    application.usage = application.prog = application.callable = None
    application.load_default_config()
    application.load_config_from_file(str(config))
    assert expected(*NASTY) == application.cfg.env


def test_gunicorn_is_not_given_what_counts_only_at_the_start() -> None:
    """raw_env is set inside the running server, where such a variable has no effect; a comment says so."""
    text = presets.get("low-memory").render("gunicorn")
    namespace: dict[str, object] = {}
    exec(compile(text, "gunicorn.conf.py", "exec"), namespace)
    assert [] == namespace["raw_env"]
    for left_out in presets.get("low-memory").knobs:
        assert f"# left out: {left_out.name} is read only when a program starts" in text


def test_a_dockerfile_is_read_back(tmp_path: Path) -> None:
    """dockerfile-parse reads every value back, except those with backslashes and $, which it does not unquote."""
    parse = pytest.importorskip("dockerfile_parse")
    plain = [value for value in NASTY if not {"$", "\\"} & set(value)]
    parser = parse.DockerfileParser(str(tmp_path))
    parser.content = "FROM scratch\n" + preset_of(*plain).render("dockerfile")
    assert expected(*plain) == dict(parser.envs)


def test_a_dockerfile_quotes_as_docker_reads() -> None:
    """Within double quotes, a backslash makes Docker read a quote, $ or backslash literally."""
    lines = preset_of(*NASTY, "${HOME}").render("dockerfile").splitlines()
    found = {}
    for line in lines:
        if not line.startswith("#"):
            name, value = line.removeprefix("ENV ").split("=", 1)
            assert re.fullmatch(r'"(?:[^"\\$]|\\["\\$])*"', value)
            found[name] = re.sub(r'\\(["\\$])', r"\1", value[1:-1])
    assert expected(*NASTY, "${HOME}") == found


def test_a_systemd_unit_is_read_back() -> None:
    """Quotes, backslashes and specifiers are read back."""
    assert expected(*NASTY, "${HOME}") == systemd_environment(preset_of(*NASTY, "${HOME}").render("systemd"))


def test_a_kubernetes_manifest_is_read_back() -> None:
    """PyYAML reads a container's env; Kubernetes then reads $$ as $ and finds nothing to expand."""
    yaml = pytest.importorskip("yaml")
    env = yaml.safe_load(preset_of(*NASTY, "${HOME}").render("kubernetes"))["env"]
    assert all(isinstance(entry["value"], str) for entry in env)
    assert all(re.fullmatch(r"(?:[^$]|\$\$)*", entry["value"]) for entry in env)
    found = {entry["name"]: entry["value"].replace("$$", "$") for entry in env}
    assert expected(*NASTY, "${HOME}") == found


@pytest.mark.parametrize("value", ["true", "1", "null", "1e3", "0x10", "- a", "{a: b}"])
def test_a_kubernetes_value_stays_text(value: str) -> None:
    """Kubernetes rejects a variable whose value YAML reads as a number or a boolean."""
    yaml = pytest.importorskip("yaml")
    assert value == yaml.safe_load(preset_of(value).render("kubernetes"))["env"][0]["value"]


@pytest.mark.parametrize("name", presets.names())
@pytest.mark.parametrize("format", get_args(_presets.Format))
def test_every_preset_has_every_format(name: str, format: str) -> None:  # noqa: A002
    """Each variable has a comment that says what it does, and the text ends with one newline."""
    preset = presets.get(name, cpus=2)
    text = preset.render(format)  # type: ignore[arg-type]
    assert text.startswith(f"# modelguard preset {name}\n")
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    for part in preset.knobs:
        assert part.name in text
        assert f"# {part.reader}: {part.does}" in text


@pytest.mark.parametrize("format", get_args(_presets.Format))
def test_a_comment_stays_a_comment(format: str) -> None:  # noqa: A002
    """A custom knob cannot break out of its comment with a newline."""
    broken = Knob("A", "1", "any time", "it\nC=3", "does\nB=2", "costs", "source")
    text = Preset("mine", "Mine.", (broken,)).render(format)  # type: ignore[arg-type]
    assert "# it C=3: does B=2\n" in text


@pytest.mark.parametrize("format", ["toml", "", "Shell"])
def test_an_unknown_format(format: str) -> None:  # noqa: A002
    """The error lists all formats."""
    with pytest.raises(
        InvalidOption, match="Write one of 'shell', 'env', 'gunicorn', 'dockerfile', 'systemd', 'kubernetes'"
    ):
        presets.get("low-memory").render(format)  # type: ignore[arg-type]
