"""The page, as a browser shows it on a telephone, a small and a large screen, in light and in dark."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelguard.diagnosis import Cause, GrowthReport, Measured, Spread, Trial, Trials, _growth_page
from modelguard.facts._holders import Held

pytestmark = pytest.mark.timeout(120)

BROWSER = shutil.which("chromium")
WIDTHS, HEIGHT = (390, 900, 1400), 3000
#: Pictures of the page, for people.
PICTURES = Path(__file__).parents[2] / "build" / "pages"
ENDLESS = "処理するとても長い名前の関数" * 6
NAMES = ("jemalloc", "tcmalloc", "mimalloc", "low-memory", "preset and jemalloc", "isolate", "zoned", ENDLESS)
#: Shows the page in a frame for each width and colour, and writes what it measures in them into the document: what lies
#: beyond a frame's edge, texts that overlap, the background, and the least contrast of a text.
MEASURE = """<!doctype html><style>body{margin:0;display:flex;align-items:start}iframe{border:0;flex:none}</style>
FRAMES<pre id=found></pre><script>
const light = colour => { const [r, g, b] = colour.match(/[\\d.]+/g).map(
  one => (one /= 255) <= .04045 ? one / 12.92 : ((one + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b };
const behind = element => { for (; element; element = element.parentElement) {
  const colour = getComputedStyle(element).backgroundColor; if (!colour.endsWith(', 0)')) return colour } };
const look = frame => {
  const page = frame.contentDocument, width = frame.clientWidth, texts = [], beyond = []; let contrast = 21;
  for (const walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT); walker.nextNode();) {
    const node = walker.currentNode, range = page.createRange(); range.selectNodeContents(node);
    if (!node.data.trim()) continue;
    const rectangles = [...range.getClientRects()].filter(one => one.width > 0);
    if (!rectangles.length) continue;
    rectangles.forEach(one => { if (one.left < 0 || one.right > width + .5) beyond.push(node.data) });
    const two = [getComputedStyle(node.parentElement).color, behind(node.parentElement)].map(light).sort();
    contrast = Math.min(contrast, (Math.max(...two) + .05) / (Math.min(...two) + .05));
    texts.push([node.data, rectangles]);
  }
  const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
  const overlaps = texts.flatMap(([one, first], at) => texts.slice(at + 1)
    .filter(([, second]) => first.some(a => second.some(b => meet(a, b)))).map(([other]) => [one, other]));
  if (page.documentElement.scrollWidth > width) beyond.push('the page: ' + page.documentElement.scrollWidth);
  return {width, dark: frame.style.colorScheme === 'dark', left: frame.offsetLeft, beyond, overlaps, contrast,
    height: page.body.getBoundingClientRect().bottom + 24, background: behind(page.body),
    texts: texts.map(([one]) => one)};
};
onload = () => { found.textContent = JSON.stringify([...document.querySelectorAll('iframe')].map(look)) };
</script>"""


def shown(page: str, folder: Path, name: str) -> list[dict[str, Any]]:
    """What a browser without a network measures in the page, which it shows in all widths and colours at once."""
    frames = "".join(
        f'<iframe srcdoc="{html.escape(page)}" style="width:{width}px;height:{HEIGHT}px;color-scheme:{scheme}">'
        "</iframe>"
        for scheme in ("light", "dark")
        for width in WIDTHS
    )
    outer, picture = folder / f"{name}.html", folder / f"{name}.png"
    outer.write_text(MEASURE.replace("FRAMES", frames), encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--window-size={2 * sum(WIDTHS)},{HEIGHT}", "--proxy-server=127.0.0.1:1", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", f"--screenshot={picture}", outer.as_uri()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    written = re.search(r"<pre id=\"found\">(.*?)</pre>", done.stdout, re.DOTALL)
    assert written is not None, done.stderr[-500:]
    found: list[dict[str, Any]] = json.loads(html.unescape(written[1]))
    keep_pictures(picture, found, name)
    return found


def keep_pictures(picture: Path, found: list[dict[str, Any]], name: str) -> None:
    """Cut the picture of all frames into one of each, if Pillow is there."""
    try:
        from PIL import Image
    except ImportError:
        return
    PICTURES.mkdir(parents=True, exist_ok=True)
    with Image.open(picture) as whole:
        for one in found:
            box = (one["left"], 0, one["left"] + one["width"], min(HEIGHT, int(one["height"])))
            whole.crop(box).save(PICTURES / f"{name}-{one['width']}-{'dark' if one['dark'] else 'light'}.png")


def trial(name: str, growth: float, cpu: float, *, stopped: str = "", front: bool = False) -> Trial:
    spread = Spread(cpu, cpu * 0.9, cpu * 1.3)
    return Trial(
        name,
        ("use it",),
        3,
        Spread(growth, growth / 2, growth * 1.1),
        spread,
        spread,
        10**8,
        0.012,
        0.3,
        stopped,
        front,
    )


def held(path: str, of: str = "transformers.cache_utils.DynamicCache -> torch.Tensor") -> Held:
    return Held(path, "dict", 691, of, 43_000_000)


MEASURED = Measured(
    calls=tuple(range(0, 1_250_000, 50_000)), private=tuple(10**8 + 2_000_000 * number for number in range(25))
)
SMALL = GrowthReport(
    "app:predict",
    "grows",
    (Cause("retention", 1.0, "a trim gave 50 MB back", "Use another allocator."),),
    measured=MEASURED,
    trials=Trials(300, trial("nothing", 3e8, 1.0), (trial("jemalloc", 3e8, 1.0),)),
)
LARGE = GrowthReport(
    f"app.{ENDLESS}:{ENDLESS}",
    "grows",
    (
        Cause("unbounded cache", 0.7, f"held by {ENDLESS * 2}; allocated at {'a/long/path/' * 20}x.py:3", ENDLESS),
        Cause("native memory", 0.004, "nothing else", "Give it a bound, as cachetools.LRUCache(maxsize=1024) has."),
    ),
    0.296,
    Measured(
        calls=MEASURED.calls,
        private=tuple(int(one + 8e7 * (at > 11)) for at, one in enumerate(MEASURED.private)),
        judged_from=4,
        held=(
            held("app.Chat.sessions"),
            held("the closure of app.handler[...].history"),
            held("", "tuple"),
            held(f"app.{ENDLESS}.{'sessions_of_users_' * 10}[...].{ENDLESS}", " -> ".join(["torch.Tensor"] * 6)),
        ),
    ),
    (f"3 of 1,250,000 calls failed ({ENDLESS})", "memory rose by 80 MB in one step, after 600,000 calls"),
    Trials(
        300,
        trial("nothing", 3e8, 1.0),
        (
            *(trial(name, 3e8 - 1e5 * at, 1 + at / 50, front=at % 2 == 0) for at, name in enumerate(NAMES)),
            trial("reload_on", 1e6, 14.0, stopped=f"it takes three times as long as {ENDLESS}"),
        ),
        "jemalloc",
        (f"{ENDLESS}: it cannot be imported",),
        contains=True,
    ),
    {"command": f"modelguard diagnose app:{ENDLESS}", "kernel": "Linux 6.1.0-0.deb12.21-cloud-amd64"},
)


def driven(folder: Path) -> str:
    """The page of a real run, with a module whose name is Japanese."""
    source = "kept = {}\ndef 会話を要約する(text='x'):\n    kept[len(kept)] = ['履歴' * 5000 + str(len(kept))]\n"
    (folder / "app_顧客対応.py").write_text(source, encoding="utf-8")
    words = ["diagnose", "app_顧客対応:会話を要約する", "--calls", "480", "--try", "1s", "--report", "out"]
    command = [sys.executable, "-m", "modelguard", *words]
    assert 1 == subprocess.run(command, cwd=folder, capture_output=True, check=False, timeout=100).returncode
    return (folder / "out" / "report.html").read_text(encoding="utf-8")


@pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
@pytest.mark.parametrize("name", ["small", "large", "real"])
def test_every_screen_shows_all_of_it(name: str, tmp_path: Path) -> None:
    """No text leaves the page or meets another, and each can be read: at three widths, in light and in dark."""
    page = driven(tmp_path) if name == "real" else _growth_page.as_html({"small": SMALL, "large": LARGE}[name])
    found = shown(page, tmp_path, name)
    assert [(width, dark) for dark in (False, True) for width in WIDTHS] == [
        (one["width"], one["dark"]) for one in found
    ]
    for one in found:
        assert ([], []) == (one["beyond"], one["overlaps"]), (one["width"], one["dark"])
        assert one["contrast"] > 4.5, (one["width"], one["dark"], one["contrast"])
        assert one["background"] == ("rgb(22, 24, 27)" if one["dark"] else "rgb(255, 255, 255)")
    if name == "real":
        assert {"Python", "calls", ".kept"} <= set(found[0]["texts"])
