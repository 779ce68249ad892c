"""What one page says stands on another one stands there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("benchmarks/*.md")}
)

FENCED = re.compile(r"^ *(```+).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\((?P<to>[^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(?P<words>.+?) *$", re.MULTILINE)


def name_of(page: Path) -> str:
    """Give the page's path inside the project."""
    return page.relative_to(ROOT).as_posix()


def links(text: str) -> list[str]:
    """Find what a page links to, less what leaves the project."""
    prose = CODE.sub("", FENCED.sub("", text))
    return [to for to in (match["to"] for match in LINK.finditer(prose)) if "://" not in to and ":" not in to]


def anchors(text: str) -> set[str]:
    """Find the places of a page that can be linked to: its headings, as the sites that show Markdown name them."""
    found: Counter[str] = Counter()
    names = set()
    for match in HEADING.finditer(FENCED.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match["words"]).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        names.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return names


def broken(page: Path) -> list[str]:
    """List the links of a page that lead nowhere."""
    wrong = []
    for to in links(page.read_text(encoding="utf-8")):
        path, _, place = to.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            wrong.append(f"{to}: there is no such file")
        elif place and (target.suffix != ".md" or place not in anchors(target.read_text(encoding="utf-8"))):
            wrong.append(f"{to}: there is no such heading")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    """A reader who follows a link finds the page, and the heading on it."""
    assert [] == broken(page)


def test_every_page_of_the_documentation_is_listed() -> None:
    """docs/README.md links to each page of the folder."""
    front = ROOT / "docs" / "README.md"
    listed = {to.partition("#")[0] for to in links(front.read_text(encoding="utf-8"))}
    assert set() == {page.name for page in front.parent.glob("*.md")} - {front.name} - listed


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    """The check sees missing files and missing headings, and takes code for what it is."""
    (tmp_path / "there.md").write_text("# One `thing`, or two\n\n## Same\n\n## Same\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md#one-thing-or-two) [b](there.md#same-1) [c](gone.md) [d](there.md#gone) [e](https://example.org)\n"
        "`[f](gone.md)`\n\n```python\nx[0](gone)\n```\n"
    )
    assert ["gone.md: there is no such file", "there.md#gone: there is no such heading"] == broken(page)
