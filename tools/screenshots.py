#!/usr/bin/env python3
"""Look at every page in a real browser: the site's (build-docs/html) and those that koila writes.

    python tools/screenshots.py [--out build-docs/screenshots] [--only how]
    python tools/screenshots.py --pictures      draw docs/pictures from koila's own pages

Each page is opened at 400 and 1,280 pixels, light and dark, saved as a picture and checked: nothing
is wider than the window, no picture or drawing is empty, nothing is asked of the network, no script
fails. Exit status 1 if something is found.

Needs playwright (requirements-docs.txt) and a Chromium of the system, `CHROMIUM` or on the path.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
SITE = ROOT / "build-docs/html"
WIDTHS, SCHEMES = (400, 1280), ("light", "dark")
PICTURE_WIDTH, PICTURE_HEIGHT = 900, 670  # of a picture in docs/pictures, at most

# A program whose pages are looked at. Its file is train.py, wherever it runs.
PROGRAM = """
import torch
from torch import nn
from torch.nn import functional as F

import koila
from koila import _pages, memlab

memlab.start(trace=True)
torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU()),
    *(nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU()),
    *(nn.Flatten(), nn.Linear(32 * 64, 10)),
)
optimizer = torch.optim.Adam(model.parameters())
images, labels = torch.randn(1024, 1, 8, 8), torch.randint(10, (1024,))


def step(x, y):
    scores = model(x)
    loss = F.cross_entropy(scores, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


step(images, labels)
with memlab.timeline(model, optimizer) as timeline:
    step(images, labels)
    step(images, labels)
timeline.save("timeline.html")
with memlab.LineProfiler(step) as profiler:
    step(images, labels)
columns = ("hits", "time", "rise", "delta", "alloc", "backward")
profiler.display(columns=columns).save("lines.html")
memlab.snapshot(model, optimizer).save("tensors.html")
with koila.budget("16MiB"):
    step(*koila.lazy(images, labels))
koila.last_plan().save("plan.html")

# A cell as a notebook shows it: what was typed, and the result's own HTML.
from IPython.core.interactiveshell import InteractiveShell

CELL = "a = torch.ones(1000, 1000)\\nb = a + 1\\ndel a"
shell = InteractiveShell.instance()
shell.user_ns["torch"] = torch
shell.run_line_magic("load_ext", "koila.memlab")
OPTIONS = "-D -c hits -c rise -c delta -c alloc -c freed"
result = shell.run_cell_magic("mlrun", OPTIONS, CELL)
typed = f'<pre class="wide">%%mlrun {OPTIONS}\\n{CELL}</pre>'
with open("cell.html", "w", encoding="utf-8") as page:
    page.write(_pages.page("In [1]", [typed, result._repr_html_()]))
"""

# What is wrong with the page that is open, as texts.
LOOK = """
() => {
  const wrong = [], width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width)
    wrong.push(`${document.documentElement.scrollWidth} pixels wide in a window of ${width}`);
  if (document.body.innerText.trim().length < 40) wrong.push('no text');
  for (const p of document.querySelectorAll('pre'))
    if (p.offsetParent && !p.innerText.trim()) wrong.push('an empty block of code');
  for (const i of document.images)
    if (i.offsetParent && !(i.naturalWidth && i.width && i.height)) wrong.push(`empty: ${i.src}`);
  for (const s of document.querySelectorAll('svg[viewBox][role=img]')) {
    const box = s.getBoundingClientRect();
    if (!box.width || !box.height || !s.children.length) wrong.push('an empty drawing');
  }
  return wrong;
}
"""


def chromium() -> str | None:
    """The path of a Chromium; None: there is none."""
    named = [os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"]
    return next((path for name in named if name and (path := shutil.which(name))), None)


def pages_of_koila(folder: pathlib.Path) -> list[pathlib.Path]:
    """The pages that koila writes of a small program: a plan, a timeline, lines, tensors, and a
    notebook's cell."""
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    subprocess.run([sys.executable, "train.py"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    files = [folder / f"{name}.html" for name in ("plan", "timeline", "lines", "tensors", "cell")]
    for file in files:  # where the program lay is nobody's matter
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(f"{folder.resolve()}/", ""), encoding="utf-8")
    return files


def looked_at(page: Any, url: str) -> list[str]:
    """Open a page of a browser at a file; what is wrong with it."""
    wrong: list[str] = []

    def on_request(request: Any) -> None:
        if not request.url.startswith(("file:", "data:")):
            wrong.append(f"asks the network for {request.url}")

    def on_error(error: Any) -> None:
        wrong.append(f"a script fails: {error}")

    page.on("request", on_request)
    page.on("pageerror", on_error)
    page.goto(url, wait_until="load")
    wrong += page.evaluate(LOOK)
    page.remove_listener("request", on_request)
    page.remove_listener("pageerror", on_error)
    return wrong


def contexts(browser: Any) -> Iterator[tuple[int, str, Any]]:
    """A page of the browser for each width and scheme."""
    for width in WIDTHS:
        for scheme in SCHEMES:
            context = browser.new_context(
                viewport={"width": width, "height": 900}, color_scheme=scheme
            )
            yield width, scheme, context.new_page()
            context.close()


def look(browser: Any, files: dict[str, pathlib.Path], out: pathlib.Path) -> list[str]:
    """Look at files by name, and save their pictures; what is wrong."""
    findings = []
    for width, scheme, page in contexts(browser):
        for name, file in files.items():
            wrong = looked_at(page, file.as_uri())
            findings += [f"{name}, {width} pixels, {scheme}: {text}" for text in wrong]
            picture = out / f"{name.replace('/', '_')}-{width}-{scheme}.png"
            page.screenshot(path=picture, full_page=True)
    return findings


def draw_pictures(browser: Any, folder: pathlib.Path) -> None:
    context = browser.new_context(
        viewport={"width": PICTURE_WIDTH, "height": 900}, color_scheme="light"
    )
    page = context.new_page()
    for file in pages_of_koila(folder):
        page.goto(file.as_uri())
        height = page.evaluate("document.body.getBoundingClientRect().bottom")
        shown = {"x": 0, "y": 0, "width": PICTURE_WIDTH, "height": min(height, PICTURE_HEIGHT)}
        page.screenshot(path=ROOT / f"docs/pictures/{file.stem}.png", clip=shown, full_page=True)
    context.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build-docs/screenshots")
    parser.add_argument("--only", default="", help="pages whose name has this text")
    parser.add_argument("--pictures", action="store_true")
    args = parser.parse_args()
    path = chromium()
    if path is None:
        print("screenshots.py: there is no Chromium here (CHROMIUM names one)")
        return 2
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play, tempfile.TemporaryDirectory() as folder:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        if args.pictures:
            draw_pictures(browser, pathlib.Path(folder))
            return 0
        args.out.mkdir(parents=True, exist_ok=True)
        files = {f"koila/{f.stem}": f for f in pages_of_koila(pathlib.Path(folder))}
        files |= {
            f.relative_to(SITE).with_suffix("").as_posix(): f for f in sorted(SITE.rglob("*.html"))
        }
        files = {name: file for name, file in files.items() if args.only in name}
        findings = look(browser, files, args.out)
        browser.close()
    print(*findings, f"{len(files)} pages, {len(findings)} findings, in {args.out}", sep="\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
