"""Pages and notebook cells in one look: style, facts, tables, a curve over a step.

A page is one file, has no script and loads nothing. All text is escaped here, so callers pass plain
text. Light and dark follow the system, in Jupyter its theme.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence

_DARK = (
    "--ink: #e6e9ef; --dim: #98a2b3; --page: #14171d; --card: #1c2129; --line: #323a46; "
    "--mark: #6ea2ff; --limit: #fb923c;"
)
_LIGHT = (
    "--ink: #1d2330; --dim: #667085; --page: #fff; --card: #f6f7f9; --line: #d9dde4; "
    "--mark: #2f6fde; --limit: #c2410c;"
)
_JUPYTER = "body[data-jp-theme-light"
STYLE = f"""
.koila {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ .koila {{ {_DARK} }} }}
{_JUPYTER}="true"] .koila {{ color-scheme: light; {_LIGHT} }}
{_JUPYTER}="false"] .koila {{ color-scheme: dark; {_DARK} }}
.koila {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 70rem; }}
body.koila {{ background: var(--page); margin: 2rem auto; padding: 0 1rem; }}
.koila h1 {{ font-size: 1.4rem; }} .koila h2 {{ font-size: 1.05rem; margin: 2rem 0 .5rem; }}
.koila p {{ color: var(--dim); margin: .3rem 0; max-width: 45rem; }}
.koila dl {{ display: flex; flex-wrap: wrap; gap: .75rem; margin: 0; }}
.koila dl div {{ background: var(--card); padding: .6rem .9rem; border-radius: .5rem; }}
.koila dt {{ color: var(--dim); font-size: .85rem; font-weight: 400; }}
.koila dd {{ margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }}
.koila .wide {{ overflow-x: auto; }}
.koila table {{ border-collapse: collapse; width: 100%; margin: 0; }}
.koila th {{ text-align: left; color: var(--dim); font-weight: 500; }}
.koila th, .koila td {{
  padding: .3rem .8rem .3rem 0; border: 0; border-bottom: 1px solid var(--line);
  white-space: nowrap; text-align: left; font-variant-numeric: tabular-nums; font-size: .9rem;
}}
.koila th + th, .koila td + td {{ padding-left: .4rem; }}
.koila td:nth-child(n+2) {{ font-family: ui-monospace, monospace; font-size: .85rem; }}
.koila .plot {{ display: grid; grid-template-columns: 5rem minmax(0, 1fr); gap: .3rem .5rem; }}
.koila .y, .koila .x {{
  display: flex; justify-content: space-between; color: var(--dim); font-size: 12px; gap: 1rem;
}}
.koila .y {{ flex-direction: column; text-align: right; }}
.koila .x {{ overflow-wrap: anywhere; }} .koila .x span:last-child {{ text-align: right; }}
.koila .plot svg {{
  display: block; width: 100%; height: 320px; background: var(--card); border-radius: .5rem;
}}
.koila .over {{ position: relative; font-size: 12px; color: var(--dim); }}
.koila .over span {{ position: absolute; right: 0; white-space: nowrap; }}
.koila .tick {{ transform: translateY(-50%); }}
.koila .limit {{ transform: translateY(-105%); margin-right: .3rem; }}
.koila .curve * {{ vector-effect: non-scaling-stroke; }}
.koila .curve path:hover {{ fill-opacity: .75; }}
.koila .at rect {{ fill: var(--mark); fill-opacity: 0; }}
.koila .at:hover rect {{ fill-opacity: .4; }}
.koila .flames {{ position: relative; margin: 1em 0; overflow: hidden; }}
.koila .box {{
  position: absolute; box-sizing: border-box; height: 25px; overflow: hidden; text-indent: 3px;
  white-space: nowrap; font: 12px/24px ui-monospace, monospace; color: #000;
  border: 0 solid var(--page); border-width: 0 1px 1px 0;
}}
.koila .box:hover {{ overflow: visible; width: auto !important; z-index: 1; }}
"""


def page(title: str, body: Iterable[str]) -> str:
    """One self-contained page. body: what the functions below return."""
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{html.escape(title)}</title><style>{STYLE}</style>'
        f'</head><body class="koila"><h1>{html.escape(title)}</h1>'
    )
    return "\n".join([head, *body, "</body></html>\n"])


def fragment(body: Iterable[str]) -> str:
    """The same for the output of a notebook's cell."""
    return "\n".join([f'<div class="koila"><style>{STYLE}</style>', *body, "</div>"])


def heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def note(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """[(name, value)] as cards."""
    cards = (f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in rows)
    return "<dl>" + "\n".join(cards) + "</dl>"


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in row) + "</tr>"

    lines = [cells("th", names), *(cells("td", row) for row in rows)]
    return '<div class="wide"><table>' + "\n".join(lines) + "</table></div>"


# ---- a curve

_MOST_POINTS, _MOST_TITLES = 2000, 400
_WIDTH, _HEIGHT = 1000, 320  # of the drawing, which is stretched to the width that there is


def round_step(most: float) -> int:
    """The step between the lines of an axis from 0 to `most` bytes: 1, 2 or 5 times a power of two
    ten times over, so that labels are round; at most six lines."""
    step = 1
    while True:
        for factor in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
            if step * factor * 6 >= most:
                return step * factor
        step *= 1024


def curve(
    points: Sequence[tuple[str, int]],
    readable: Callable[[float], str],
    along: str,
    limit: int | None = None,
) -> str:
    """Bytes over a step: an area with axes; each point tells itself under the pointer.

    points: (label, bytes), at equal distances. along: the name of the horizontal axis. limit: a
    budget, drawn as a line where it is near.
    """
    points = points or [("", 0)]
    peak = max(n for _, n in points)
    near = limit if limit is not None and limit <= 3 * max(peak, 1) else None
    scale = max(peak, near or 0, 1) * 1.1

    def y(n: float) -> float:
        return _HEIGHT * (1 - n / scale)

    told = html.escape(f"bytes that torch holds, along the {along}")
    out = [f'<div class="plot"><div></div><div class="x">{told}</div>']
    ticks = range(0, int(scale) + 1, round_step(scale))
    out += ['<div class="over">', *(_label("tick", y(n), readable(n)) for n in ticks)]
    out.append('</div><div class="over">')
    out.append(
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        'aria-label="memory over the step" class="curve">'
    )
    out += [_line(y(n), 'stroke="var(--line)"') for n in ticks]
    out += _area(points, y, readable)
    if near is not None:
        out.append(_line(y(near), 'stroke="var(--limit)" stroke-dasharray="6 4"'))
    out.append("</svg>")
    if near is not None:
        out.append(_label("limit", y(near), f"budget {readable(near)}"))
    first, last = html.escape(points[0][0]), html.escape(points[-1][0])
    out.append(f'</div><div></div><div class="x"><span>{first}</span><span>{last}</span></div>')
    out.append("</div>")
    return "\n".join(out)


def _area(
    points: Sequence[tuple[str, int]], y: Callable[[float], float], readable: Callable[[float], str]
) -> list[str]:
    """The elements of the area below the points, and what each tells under the pointer."""

    def x(i: int) -> float:
        return _WIDTH * i / max(len(points) - 1, 1)

    step = max(1, len(points) // _MOST_POINTS)  # each group of points shows its highest
    shown = [
        max(range(i, min(i + step, len(points))), key=lambda j: points[j][1])
        for i in range(0, len(points), step)
    ]
    path = " ".join(f"{x(i):.1f},{y(points[i][1]):.1f}" for i in shown)
    ends = f"{x(shown[0]):.1f},{y(0):.1f} {path} {x(shown[-1]):.1f},{y(0):.1f}"
    out = [f'<polygon points="{ends}" fill="var(--mark)" fill-opacity=".15"/>']
    out.append(f'<polyline points="{path}" fill="none" stroke="var(--mark)" stroke-width="1.5"/>')
    told = shown[:: max(1, len(shown) // _MOST_TITLES)]
    band = _WIDTH / len(told)
    for i in told:
        label, n = points[i]
        out.append(
            f'<g class="at"><rect x="{x(i) - band / 2:.1f}" y="0" width="{band:.1f}" '
            f'height="{_HEIGHT}"/><title>{html.escape(f"{label}: {readable(n)}")}</title></g>'
        )
    return out


def _label(kind: str, y: float, text: str) -> str:
    return f'<span class="{kind}" style="top:{100 * y / _HEIGHT:.1f}%">{html.escape(text)}</span>'


def _line(y: float, look: str) -> str:
    return f'<line x1="0" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" {look}/>'


# ---- a flame graph

_LEAST_PART = 0.002  # of the width: narrower boxes are left out
_ROW = 25  # pixels


class _Flame:
    def __init__(self) -> None:
        self.n_bytes = 0
        self.above: dict[str, _Flame] = {}


def flames(stacks: Iterable[tuple[Sequence[str], int]], readable: Callable[[float], str]) -> str:
    """Call stacks as boxes, as wide as their bytes; a line is below the one that called it.
    stacks: ([line, the outermost first], bytes)."""
    root = _Flame()
    for lines, n in stacks:
        flame = root
        flame.n_bytes += n
        for line in lines:
            flame = flame.above.setdefault(line, _Flame())
            flame.n_bytes += n
    boxes: list[str] = []
    depth = _add_boxes(boxes, root, "all", 0.0, root.n_bytes or 1, 0, readable)
    return f'<div class="flames" style="height:{_ROW * depth}px">' + "\n".join(boxes) + "</div>"


def _add_boxes(
    boxes: list[str],
    flame: _Flame,
    label: str,
    left: float,
    all_bytes: int,
    row: int,
    readable: Callable[[float], str],
) -> int:
    """Adds the box of a flame, whose left edge is at that part of the width, and those below it.
    Returns the rows that are used."""
    text = f"{label}: {readable(flame.n_bytes)}"
    file = label.rpartition("/")[2]
    hue = sum(map(ord, file.rpartition(":")[0])) * 47 % 360
    boxes.append(
        f'<div class="box" style="left:{100 * left:.3f}%;width:'
        f"{100 * flame.n_bytes / all_bytes:.3f}%;top:{_ROW * row}px;"
        f'background:hsl({hue} 55% 78%)" title="{html.escape(text)}">'
        f"{html.escape(file)} {readable(flame.n_bytes)}</div>"
    )
    depth = row + 1
    for name, above in sorted(flame.above.items(), key=lambda item: -item[1].n_bytes):
        part = above.n_bytes / all_bytes
        if part >= _LEAST_PART:
            below = _add_boxes(boxes, above, name, left, all_bytes, row + 1, readable)
            depth = max(depth, below)
        left += part
    return depth


# ---- text


def columns(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines of text."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    return [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in (names, *rows)
    ]
