"""``modelguard docs``: prints the pages of the documentation, which are installed with the package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path

import modelguard
from modelguard.errors import InvalidOption

#: The front page, which only lists the others.
_FRONT = "README"


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "docs",
        usage="modelguard docs [NAME[#SECTION]]",
        help="print a page of the documentation, or one section of it",
        description="Without a name, list the pages. With a name, print the page; with NAME#SECTION, print one section "
        "of it, as named in the doctor's findings: modelguard docs doctor#mg101.",
        epilog="exit status: 0 success, 2 there is no such page or section",
    )
    parser.add_argument("page", nargs="?", metavar="NAME[#SECTION]", help="a page from the list, and a heading on it")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    text = contents() if options.page is None else read(options.page)
    sys.stdout.buffer.write(text.encode())  # the pages are UTF-8, independent of the terminal's locale
    return 0


def contents() -> str:
    known = pages()
    width = max(map(len, known))
    lines = [f"{name:{width}}  {_title(page)}" for name, page in known.items()]
    return "\n".join([*lines, "", "modelguard docs NAME prints a page.\n"])


def read(reference: str) -> str:
    name, has_section, section = reference.partition("#")
    known = pages()
    page = known.get(name.removesuffix(".md"))
    if page is None:
        raise _unknown_section(name, known) or _unknown("page", name, known)
    text = page.read_text(encoding="utf-8")
    sections = _sections(text)
    if has_section and section.lower() not in sections:
        raise _unknown("section", section, sections)
    return sections[section.lower()] if has_section else text


def folder() -> Path:
    """The folder of the pages: in the installed package, or in the source tree."""
    package = Path(modelguard.__file__).parent
    for candidate in (package / "docs", package.parents[1] / "docs"):
        if (candidate / f"{_FRONT}.md").is_file():
            return candidate
    why = "has no pages of the documentation"
    raise InvalidOption("docs", str(package), why=why, fix="Install the wheel, or run from a source tree.")


def pages() -> dict[str, Path]:
    return {page.stem: page for page in sorted(folder().glob("*.md")) if page.stem != _FRONT}


def _title(page: Path) -> str:
    lines = page.read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), page.stem)


def _sections(text: str) -> dict[str, str]:
    """The sections of a page by their anchors, each with those below it."""
    lines, fenced, headings = text.splitlines(keepends=True), False, list[tuple[int, int, str]]()
    seen: dict[str, int] = {}
    for number, line in enumerate(lines):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        marks = line.partition(" ")[0]
        if not fenced and set(marks) == {"#"}:
            anchor = _anchor(line[len(marks) :])
            count = seen[anchor] = seen.get(anchor, -1) + 1
            headings.append((number, len(marks), f"{anchor}-{count}" if count else anchor))
    found = {}
    for place, (start, rank, anchor) in enumerate(headings):
        end = next((line for line, other, _ in headings[place + 1 :] if other <= rank), len(lines))
        found[anchor] = "".join(lines[start:end]).rstrip("\n") + "\n"
    return found


def _anchor(heading: str) -> str:
    """A heading's anchor as on GitHub: its words in lower case, joined by hyphens."""
    words = heading.strip().lower().replace(" ", "-")
    return "".join(char for char in words if char.isalnum() or char in "-_")


def _unknown_section(name: str, pages: Mapping[str, Path]) -> InvalidOption | None:
    """The error for the name of a section that was given without its page; None if no page has such a section."""
    for title, page in pages.items():
        if name and name.lower() in _sections(page.read_text(encoding="utf-8")):
            fix = f"Write modelguard docs {title}#{name.lower()}."
            return InvalidOption("page", name, why=f"is a section of the page {title}", fix=fix)
    return None


def _unknown(what: str, name: str, known: Iterable[str]) -> InvalidOption:
    choices = list(known)
    near = get_close_matches(name.lower(), choices, n=3, cutoff=0.5)
    listed = " or ".join(map(repr, near))
    fix = f"Did you mean {listed}?" if near else f"The {what}s are: {', '.join(choices)}."
    return InvalidOption(what, name, why=f"is not a known {what}", fix=fix)
