"""The pages that koila writes, and the pictures of the docs, without a browser: nothing can be
wider than a window of 400 pixels, and all text is readable, light and dark. `tools/screenshots.py`
looks at them in Chromium."""

import colorsys
import html.parser
import pathlib
import re
import sys
import xml.etree.ElementTree

import pytest

from koila import _pages

ROOT = pathlib.Path(__file__).resolve().parents[2]
PICTURES = sorted((ROOT / "docs").rglob("*.svg"))
sys.path.insert(0, str(ROOT / "tools"))
import screenshots  # noqa: E402

pytestmark = pytest.mark.about_the_cpu("the program of the pages runs there")
NAMES = ("plan", "timeline", "lines", "tensors", "cell")
WINDOW = 400  # pixels


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    pytest.importorskip("IPython")
    found = screenshots.pages_of_koila(tmp_path_factory.mktemp("pages"))
    return {file.stem: file.read_text(encoding="utf-8") for file in found}


# ---- widths


class Wide(html.parser.HTMLParser):
    """What may be wider than the window: a table or code outside of a box that scrolls, and a
    drawing that has no size of its own to be scaled from, or text in it that is scaled too."""

    VOID = {"meta", "line", "polyline", "polygon", "rect", "br"}

    def __init__(self, text):
        super().__init__()
        self.open, self.wrong = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        style, kind = given.get("style") or "", (given.get("class") or "").split()
        scrolls = "wide" in kind or "overflow-x: auto" in style
        if tag in ("table", "pre") and not (scrolls or any(scrolls for _, scrolls in self.open)):
            self.wrong.append(f"a {tag} outside of a box that scrolls")
        if tag == "svg" and "viewbox" not in given:
            self.wrong.append("a drawing without viewBox")
        if tag == "text":
            self.wrong.append("text in a drawing that is scaled")
        if tag not in self.VOID:
            self.open.append((tag, scrolls))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop()[0] == tag


def too_wide(text):
    """What of a page, and of its style, can be wider than the window."""
    wrong = Wide(text).wrong
    style = re.sub(r"max-width: [^;}]*", "", text.partition("<style>")[2].partition("</style>")[0])
    pixels = {"px": 1, "rem": 16, "em": 16}
    for number, unit in re.findall(r"width: ([\d.]+)(px|rem|em)", style):
        if float(number) * pixels[unit] > WINDOW:
            wrong.append(f"as wide as {number}{unit}")
    for rule in (".koila .wide { overflow-x: auto; }", "max-width: 70rem"):
        if rule not in text:
            wrong.append(f"no {rule}")
    return wrong


@pytest.mark.parametrize("name", NAMES)
def test_no_page_is_wider_than_a_narrow_window(pages, name):
    text = pages[name]
    assert too_wide(text) == [] and "<table" in text
    faults = (
        ('class="wide"', 'class="table"'),
        ("overflow-x: auto", "overflow-x: visible"),
        ("viewBox", "data-box"),
        ("</svg>", "<text>0 B</text></svg>"),
        ("max-width: 45rem", "min-width: 45rem"),
    )
    for right, wrong in faults:
        if right in text:
            assert too_wide(text.replace(right, wrong)) != [], wrong


# ---- colours


def luminance(rgb):
    def linear(c):
        return c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4

    return sum(w * linear(c) for w, c in zip((0.2126, 0.7152, 0.0722), rgb, strict=True))


def contrast(a, b):
    """As WCAG 2.2 defines it; text of this size needs 4.5 (level AA)."""
    lighter, darker = sorted((luminance(a), luminance(b)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def rgb_of(text):
    """(red, green, blue, alpha), each 0 to 1, of `#rgb`, `#rrggbb`, `#rrggbbaa`, `hsl(h s% l%)`."""
    if text.startswith("hsl"):
        h, s, light = map(float, re.findall(r"[\d.]+", text))
        return (*colorsys.hls_to_rgb(h / 360, light / 100, s / 100), 1.0)
    digits = text[1:] if len(text) > 4 else "".join(2 * c for c in text[1:])
    values = [int(digits[i : i + 2], 16) / 255 for i in range(0, len(digits), 2)]
    return (*values, 1.0)[:4]


def over(colour, ground):
    *rgb, alpha = colour
    return [alpha * c + (1 - alpha) * g for c, g in zip(rgb, ground, strict=True)]


def schemes(style):
    """{"light" or "dark": {"ink": (r, g, b), ...}} of a page's style."""
    light, dark = re.findall(r"\.koila \{[^{}]*?(--ink[^{}]*?)\}", style)[:2]
    found = {}
    for scheme, text in (("light", light), ("dark", dark)):
        pairs = re.findall(r"--(\w+): (#\w+)", text)
        found[scheme] = {name: rgb_of(colour)[:3] for name, colour in pairs}
    return found


def unreadable(text):
    """Text of a page with too little contrast, in either scheme."""
    wrong = []
    style = text.partition("<style>")[2].partition("</style>")[0]
    bars = set(re.findall(r"linear-gradient\(90deg, (#\w+)", text))
    boxes = set(re.findall(r'class="box"[^>]*background:(#\w+|hsl\([^)]*\))', text))
    box_ink = rgb_of(re.search(r"\.box \{[^}]*color: (#\w+)", style)[1])[:3]
    for scheme, colours in schemes(style).items():
        grounds = {"page": colours["page"], "card": colours["card"]}
        grounds |= {bar: over(rgb_of(bar), colours["page"]) for bar in bars}
        for name, ground in grounds.items():
            inks = ("ink", "dim") if name in ("page", "card") else ("ink",)
            wrong += [(scheme, ink, name) for ink in inks if contrast(colours[ink], ground) < 4.5]
    wrong += [("box", box) for box in boxes if contrast(box_ink, rgb_of(box)[:3]) < 4.5]
    return wrong


@pytest.mark.parametrize("name", NAMES)
def test_all_text_of_a_page_is_readable_light_and_dark(pages, name):
    text = pages[name]
    assert unreadable(text) == []
    assert ("dark", "dim", "page") in unreadable(text.replace("--dim: #98a2b3", "--dim: #4a5160"))
    bar = re.search(r"linear-gradient\(90deg, (#\w+)", text)
    if name in ("lines", "cell"):
        assert ("dark", "ink", "#cfe2f3") in unreadable(text.replace(bar[1], "#cfe2f3"))
    if name == "timeline":
        assert unreadable(text.replace("hsl(", "hsl(240 100% 20%) none, hsl(")) != []


def test_contrast_is_that_of_the_standard():
    assert contrast((0, 0, 0), (1, 1, 1)) == pytest.approx(21)
    assert contrast(rgb_of("#777")[:3], (1, 1, 1)) == pytest.approx(4.48, abs=0.01)
    assert set(schemes(_pages.STYLE)) == {"light", "dark"}


# ---- pictures drawn by tools/draw_memory.py


SVG = "{http://www.w3.org/2000/svg}"


def crossed(svg):
    """Texts of a drawing that stand where its curves are: in the rectangle they are clipped to."""
    clip = svg.find(f".//{SVG}clipPath/{SVG}rect")
    left, top = float(clip.get("x")), float(clip.get("y"))
    right, bottom = left + float(clip.get("width")), top + float(clip.get("height"))
    found = []
    for text in svg.iter(f"{SVG}text"):
        moved = re.search(r"translate\(([-\d.]+) ([-\d.]+)\)", text.get("transform") or "")
        x, y = map(float, moved.groups() if moved else (text.get("x"), text.get("y")))
        if left <= x <= right and top <= y <= bottom:
            found.append("".join(text.itertext()))
    return found


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_no_curve_of_a_picture_crosses_a_text(path):
    svg = xml.etree.ElementTree.parse(path).getroot()
    assert svg.get("viewBox") and crossed(svg) == []
    clip = svg.find(f".//{SVG}clipPath/{SVG}rect")
    planted = xml.etree.ElementTree.SubElement(svg, f"{SVG}text")
    planted.text = "plain"
    planted.set("x", str(float(clip.get("x")) + 9)), planted.set("y", str(float(clip.get("y")) + 9))
    assert crossed(svg) == ["plain"]
