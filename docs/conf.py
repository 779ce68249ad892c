"""How Sphinx makes a site of these pages and of the docstrings: ``make docs``, and then build/docs/index.html.

The pages are written to be read as they are, as plain Markdown. What only a site needs (the tree of pages, links that
stay inside it) is added here.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx.util.nodes import make_refnode

import modelguard

if TYPE_CHECKING:
    from docutils.nodes import Element
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

project = "modelguard"
author = "modelguard contributors"
copyright = author  # noqa: A001 - Sphinx reads this name
version = release = modelguard.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
html_theme = "furo"
html_title = f"modelguard {release}"

myst_heading_anchors = 4  # as where Markdown is hosted: a link to a heading is its words, joined by hyphens

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # the attributes of a dataclass stand in its docstring, and are not written up twice

# Signatures name what has no place in this reference: other packages, whose sites no build should have to reach, type
# variables, and the words that stand for a union or a literal. The text says what they are; nothing links to them.
nitpick_ignore_regex = [
    ("py:obj", r"typing\.~P"),
    ("py:class", r"(.*\.)?(IsolationOptions|PoolSource|Source)"),
    ("py:class", r"(abc|collections\.abc|contextlib|datetime|os|pathlib|pytest|spacy|torch)\..*"),
    ("py:(class|obj)", r"(.*\.)?[A-Z](_co)?"),  # type variables
    ("py:class", r"(.*\.)?_\w+(\..*)?"),  # of private modules, and private names
    (
        "py:class",
        r"Duration|Size|Kind|How|Swap|SmallObjects|CallOptions|(.*\.)?((Model|Loading)?Handle|Forkable)",
    ),
    (
        "py:class",
        r"(.*\.)?(System|Settings|Options|BatchOptions|WebOptions|NextCheck|FileChange|ProbeAnswers|Value)",
    ),
    ("py:class", r"(.*\.)?(Jittered|Sized|GpuPolicy)"),
    (
        "py:class",
        r"(.*\.)?(Engine|GuardOptions|PoolEngine|ReasonKind|SwapMode|ThisProcess)",
    ),
    ("py:class", r"(.*\.)?(Bound|Changes|Decorator|Entered|Generation|Hook|Ready|Reloadable|State|TrimSchedule)"),
    ("py:class", r"(.*\.)?(Decorated|Request|StreamRequest)"),
    ("py:class", r"CollectorRegistry|MeterProvider|TracerProvider"),  # of the libraries for metrics
    ("py:class", r"concurrent\.futures\..*|tuple\[int|Path"),
]

#: A link that leaves docs/ points at a file of the repository, and a site has none of these. By how deep a page lies.
OUTWARDS = [re.compile(rf"\[(?P<words>[^\]]+)\]\((?:\.\./){{{depth}}}[^)]*\)") for depth in (1, 2)]

#: The modules of the reference.
MODULES = [
    name
    for page in sorted(Path(__file__).parent.glob("api/*.md"))
    for name in re.findall(r"automodule:: (\S+)", page.read_text(encoding="utf-8"))
]

#: Stands for a colon in between.
COVERED = "\N{NULL}"

#: Where a browser or a web server begins: it leads to the first page.
INDEX = f"""\
<!doctype html>
<meta charset="utf-8">
<title>{project}</title>
<meta http-equiv="refresh" content="0; url={root_doc}.html">
<a href="{root_doc}.html">{project}</a>
"""

#: The sidebar, in reading order. Sphinx reports a page that is missing here.
SECTIONS = {
    "Start": ["which-one", "tutorial"],
    "Lifecycle": ["guard", "policies", "pool", "recipes", "spacy"],
    "Environment": ["environment", "memory", "torch", "gpu"],
    "Sharing": ["sharing", "fork-safety"],
    "Isolation": ["isolation", "one-mold"],
    "Serving": ["serving", "overload", "frameworks", "scale-out"],
    "Operations": ["faq", "diagnosis", "doctor", "control", "metrics", "errors", "mistakes", "testing", "known-issues"],
    "Design": ["design/figures", "design/decisions", "releasing"],
    "API reference": [
        "api/modelguard",
        "api/environment",
        "api/sharing",
        "api/serving",
        "api/telemetry",
        "api/errors",
        "api/testing",
        "api/servers",
        "api/adapters",
    ],
}


def _tree() -> str:
    """The hidden trees of pages that make the sidebar."""
    pages = ((caption, "\n".join(names)) for caption, names in SECTIONS.items())
    return "".join(f"\n```{{toctree}}\n:caption: {caption}\n:hidden:\n\n{names}\n```\n" for caption, names in pages)


def prepare(_: Sphinx, page: str, source: list[str]) -> None:
    """Take the links out of docs/ off a page, and hang the tree of pages on the first."""
    text = OUTWARDS[page.count("/")].sub(r"\g<words>", source[0])
    source[0] = text + _tree() if page == root_doc else text


def cover(_: Sphinx, kind: str, *rest: Any) -> None:
    """Keep napoleon from taking "Bytes given back: ..." for a type and its description: types stand in signatures."""
    lines: list[str] = rest[-1]
    for place, line in enumerate(lines):
        if kind in {"attribute", "data", "property"} or lines[place - 1].strip() == "Returns:":
            lines[place] = line.replace(": ", COVERED)


def uncover(_: Sphinx, kind: str, *rest: Any) -> None:  # noqa: ARG001 - every listener gets it
    """Bring the colons back that :func:`cover` took away."""
    lines: list[str] = rest[-1]
    lines[:] = [line.replace(COVERED, ": ") for line in lines]


def resolve(app: Sphinx, env: BuildEnvironment, node: Element, contnode: Element) -> Element | None:
    """Find what is named by its last word, or by the module that it is written in instead of the public one."""
    domain = env.domains.python_domain
    if node.get("refdomain") != "py":
        return None
    word = node["reftarget"].rpartition(".")[2]
    homes = [(name, entry.docname) for name, entry in domain.objects.items() if name.rpartition(".")[2] == word]
    if len(homes) != 1:
        return None
    ((name, page),) = homes
    return make_refnode(app.builder, node["refdoc"], page, name, contnode, name)


def add_index(app: Sphinx, _: Exception | None) -> None:
    """Write index.html, which Sphinx makes only of a page of that name."""
    (Path(app.outdir) / "index.html").write_text(INDEX, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    for module in map(importlib.import_module, MODULES):
        for name in getattr(module, "__all__", ()):  # what comes in when it is asked for is not seen before
            setattr(module, name, getattr(module, name))
    app.connect("source-read", prepare)
    app.connect("autodoc-process-docstring", cover, priority=100)  # napoleon comes at 500
    app.connect("autodoc-process-docstring", uncover, priority=900)
    app.connect("missing-reference", resolve)
    app.connect("build-finished", add_index)
