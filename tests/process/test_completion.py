"""``modelguard completion``: the scripts, sourced and used in real shells."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelguard import cli
from modelguard.cli import SHELLS

pytest.importorskip("shtab")
pytestmark = pytest.mark.timeout(120)

#: Seconds that a shell may take to answer a key.
PATIENCE = 60.0


def script(shell: str) -> str:
    """What the command writes."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert 0 == cli.main(["completion", shell])
    return out.getvalue()


def in_bash(folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words, as readline calls the function."""
    (folder / "modelguard.bash").write_text(script("bash"))
    line = " ".join(map(shlex.quote, ["modelguard", *words]))
    program = f"""
        set -u
        source ./modelguard.bash
        COMP_WORDS=({line}); COMP_CWORD={len(words)}; COMPREPLY=()
        called=$(complete -p modelguard); called=${{called##*-F }}
        ${{called%% *}} modelguard {shlex.quote(words[-1])} {shlex.quote(words[-2] if len(words) > 1 else "modelguard")}
        (( ${{#COMPREPLY[@]}} == 0 )) || printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    command = ["bash", "--norc", "--noprofile", "-c", program]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout.split()


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@needs_bash
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["di"], {"diagnose"}),
        (["--v"], {"--version"}),
        (["ctl", "1", "re"], {"reload", "resume"}),
        (["ctl", "--timeout", "5s", "1", "p"], {"pause"}),
        (["ctl", "--no"], {"--no-wait"}),
        (["run", "--preset", "torch-cp"], {"torch-cpu", "torch-cpu-dynamic"}),
        (["presets", "torch-cpu", "low"], {"low-memory"}),
        (["docs", "polic"], {"policies"}),
        (["completion", ""], {"bash", "zsh", "fish"}),
        (["run", "--workers", ""], set()),
        (["nothing", "x"], set()),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else None,
)
def test_bash_offers(tmp_path: Path, words: list[str], expected: set[str]) -> None:
    """Commands, options, values of options, and arguments by their place."""
    assert expected == set(in_bash(tmp_path, *words))


@needs_bash
def test_bash_offers_what_comes_after_two_dashes(tmp_path: Path) -> None:
    """A command that is started is completed as a command; a process id as one."""
    assert "bash" in in_bash(tmp_path, "run", "--preset", "prefork", "--", "bas")
    assert str(os.getpid()) in in_bash(tmp_path, "ctl", str(os.getpid()))


class Zsh:
    """An interactive zsh without anybody's configuration, with the script sourced."""

    def __init__(self, folder: Path) -> None:
        (folder / "modelguard.zsh").write_text(script("zsh"))
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            environment = {**os.environ, "TERM": "dumb", "HOME": str(folder), "PS1": "", "LC_ALL": "C.UTF-8"}
            os.execvpe("zsh", ["zsh", "-f", "-i"], environment)
        self._read = ""
        self.type("PROMPT= ; unsetopt prompt_sp zle_bracketed_paste 2>/dev/null; LISTMAX=9999\n")
        self.type('autoload -Uz compinit && compinit -u -D; setopt no_beep; eval "$(<./modelguard.zsh)"\n')
        self.type("print begi''nning\n")
        self.until("beginning")

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def until(self, text: str) -> str:
        """Read until the shell shows a text; returns all since the last time."""
        deadline = time.monotonic() + PATIENCE
        while text not in self._read:
            assert time.monotonic() < deadline, self._read
            if select.select([self._fd], [], [], 1.0)[0]:
                self._read += os.read(self._fd, 65_536).decode(errors="replace")
        seen, self._read = self._read, ""
        return seen

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._fd)


@pytest.fixture
def zsh(tmp_path: Path) -> Iterator[Zsh]:
    if shutil.which("zsh") is None:
        pytest.skip("needs zsh")
    shell = Zsh(tmp_path)
    yield shell
    shell.end()


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("modelguard dia", "modelguard diagnose "),
        ("modelguard --v", "modelguard --version "),
        ("modelguard ctl 1 pa", "modelguard ctl 1 pause "),
        ("modelguard ctl --timeout 5s 1 st", "modelguard ctl --timeout 5s 1 status "),
        ("modelguard ctl --no", "modelguard ctl --no-wait "),
        ("modelguard run --preset pre", "modelguard run --preset prefork "),
        ("modelguard docs polic", "modelguard docs policies "),
        ("modelguard completion z", "modelguard completion zsh "),
    ],
)
def test_zsh_completes(zsh: Zsh, typed: str, completed: str) -> None:
    """A tab after the beginning of a word gives the word."""
    zsh.type("zle-show() { print -r -- \"<$BUFFER>\" }; zle -N zle-show; bindkey '^X' zle-show\n")
    zsh.type(f"{typed}\t\x18")
    assert f"<{completed}>" in zsh.until(f"<{completed}>")


def test_zsh_lists_commands_with_what_they_do(zsh: Zsh) -> None:
    """Two tabs at an empty word show each command."""
    zsh.type("modelguard \t\t")
    shown = zsh.until("Sends a command")
    assert "ctl" in shown


def test_fish_knows_every_command_and_option() -> None:
    """Fish is rarely installed where tests run: the words are there."""
    text = script("fish")
    assert all(word in text for word in ("ctl", "no-wait", "preset", "status", "unload", "pause"))
    if shutil.which("fish"):
        subprocess.run(["fish", "--no-execute"], input=text, text=True, timeout=60, check=True)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what to install."""
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert 2 == cli.main(["completion", "bash"])
    assert "modelguard-lifecycle[cli]" in capsys.readouterr().err


@pytest.mark.parametrize("shell", sorted(SHELLS))
def test_every_command_is_there(shell: str) -> None:
    """What is added to the command line is completed without another line of code."""
    text = script(shell)
    assert all(name in text for name in ("completion", "ctl", "diagnose", "docs", "doctor", "presets", "run", "top"))


@pytest.mark.parametrize("words", [["completion"], ["completion", "tcsh"]])
def test_another_shell_is_rejected(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With the names of those that are known."""
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert 2 == end.value.code
    assert "SHELL" in capsys.readouterr().err
