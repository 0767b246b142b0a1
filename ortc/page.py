"""A self-contained HTML page: elements that escape what they are given, charts in SVG, and one look for light and dark.

Names in a model are anybody's text. They reach the page through :func:`tag` alone, which escapes; nothing is put into scripts,
and the page's own policy lets no other script run, and nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ortc.diff import printable

# With this a file says that it is a page of ours, which may be replaced.
MARK = "<!doctype html>\n<!-- made by ortc -->\n"

_VOID = frozenset({"meta", "input", "path", "rect", "line", "circle", "polyline"})


class Html(str):
    """Text that is HTML already."""


Child = str | None | Iterable["Child"]


def tag(name: str, /, *children: Child, **attributes: str | float | None) -> Html:
    """An element. Children that are no :class:`Html` are escaped, and so is every attribute.

    Args:
        name: of the element.
        children: text, elements, lists of them; None is left out.
        attributes: ``class_`` is ``class``, other underscores are hyphens, but in SVG's own names; None leaves one out.
    """
    texts = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(printable(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID and not children:
        return Html(f"<{name}{texts}>" if name in ("meta", "input") else f"<{name}{texts}/>")
    return Html(f"<{name}{texts}>{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Html:
    """Children one after the other."""
    found: list[str] = []
    for child in children:
        if isinstance(child, Html):
            found.append(child)
        elif isinstance(child, str):
            found.append(html.escape(printable(child)))
        elif child is not None:
            found.append(join(child))
    return Html("".join(found))


def page(title: str, sections: Sequence[tuple[str, str, Html]]) -> str:
    """The whole page.

    Args:
        title: of the page.
        sections: (identifier, heading, content) of each.
    """
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        Html(f"<style>{STYLE}</style>"),
    )
    links = tag("nav", [tag("a", heading, href=f"#{name}") for name, heading, _ in sections])
    parts = [tag("section", tag("h2", heading), content, id=name) for name, heading, content in sections]
    body = tag("body", tag("header", tag("h1", title), links), tag("main", parts), Html(f"<script>{SCRIPT}</script>"))
    return f'{MARK}<html lang="en">{head}{body}</html>\n'


# ---- text ------------------------------------------------------------------------------------------------------------


def table(
    head: Sequence[str], rows: Iterable[Sequence[Child]], numbers: Sequence[int] = (), *, filterable: bool = False
) -> Html:
    """A table that scrolls where it is wider than the page.

    Args:
        head: the columns.
        rows: the cells.
        numbers: which columns are aligned to the right.
        filterable: with a field that hides the rows that do not hold its text.
    """

    def cells(kind: str, row: Sequence[Child]) -> list[Html]:
        return [tag(kind, cell, class_="n" if i in numbers else None) for i, cell in enumerate(row)]

    body = [tag("tr", cells("td", row)) for row in rows]
    shown = tag("table", tag("thead", tag("tr", cells("th", head))), tag("tbody", body), style=f"--c:{len(head)}")
    field = tag("input", type="search", class_="filter", placeholder="filter", aria_label="filter the rows")
    return tag("div", field if filterable else None, tag("div", shown, class_="scroll"), class_="table")


def facts(pairs: Iterable[tuple[str, Child]]) -> Html:
    """What there is to know at a glance."""
    return tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs], class_="facts")


def share(part: float, of: float, kind: str = "") -> Html:
    """A bar as long as the part of something."""
    width = 100 * part / of if of > 0 else 0.0
    return tag("span", tag("span", "", style=f"width:{width:.1f}%", class_=f"fill {kind}".strip()), class_="bar")


def note(*children: Child) -> Html:
    """A remark."""
    return tag("p", *children, class_="note")


def legend(entries: Iterable[tuple[str, str]]) -> Html:
    """What the colours mean: (class, text) of each."""
    return tag("p", [tag("span", tag("i", "", class_=f"key {kind}"), text) for kind, text in entries], class_="legend")


# ---- charts ----------------------------------------------------------------------------------------------------------

_LEFT, _BOTTOM, _TOP, _RIGHT = 64, 22, 10, 12  # margins, in the chart's own units


@dataclass(frozen=True)
class Series:
    """A line of a chart: the class that colours it, its name, and its points."""

    kind: str
    name: str
    points: Sequence[tuple[float, float]]


def chart(
    series: Sequence[Series],
    y_text: Callable[[float], str],
    x_text: Callable[[float], str],
    *,
    filled: bool = False,
    steps: bool = False,
    from_zero: bool = True,
    label: str = "",
    mark: tuple[float, float, str] | None = None,
    bytes_: bool = False,
    width: int = 460,
    height: int = 180,
) -> Html:
    """Lines over an axis.

    Args:
        series: at least one point in all.
        y_text, x_text: how a number of an axis is written.
        filled: the area below the line is filled.
        steps: each value holds until the next.
        from_zero: the vertical axis begins at 0.
        label: what the picture is, for people who do not see it.
        mark: a point that is named: x, y, text.
        bytes_: the vertical axis is in bytes: round numbers are those of KiB, MiB, ….
        width, height: in units of the picture.
    """
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points]
    low, high = (0.0 if from_zero else min(ys)), max(ys)
    unit = 1024.0 ** math.floor(math.log(max(high, 1), 1024)) if bytes_ else 1.0
    marks = [unit * t for t in ticks(low / unit, high / unit)]
    low, high = min(low, marks[0]), max(high, marks[-1])
    first, last = min(xs), max(xs)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / (last - first) if last > first else 0.5
        up = (y - low) / (high - low) if high > low else 0.5
        return _LEFT + across * (width - _LEFT - _RIGHT), height - _BOTTOM - up * (height - _TOP - _BOTTOM)

    shapes: list[Html] = []
    for value in marks:
        y = at(first, value)[1]
        shapes.append(tag("line", x1=_LEFT, x2=width - _RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"))
        shapes.append(tag("text", y_text(value), x=_LEFT - 6, y=f"{y + 4:.1f}", class_="end"))
    for value, anchor in ((first, "start"), (last, "end")):
        x = at(value, low)[0]
        shapes.append(tag("text", x_text(value), x=f"{x:.1f}", y=height - 6, class_=anchor))
    for s in series:
        path = _path([at(x, y) for x, y in s.points], steps)
        if filled and path:
            base = height - _BOTTOM
            ends = (at(s.points[-1][0], low)[0], at(s.points[0][0], low)[0])
            shapes.append(tag("path", d=f"{path}L{ends[0]:.1f} {base}L{ends[1]:.1f} {base}Z", class_=f"area {s.kind}"))
        shapes.append(tag("path", d=path, class_=f"line {s.kind}"))
        if len(s.points) == 1:
            x, y = at(*s.points[0])
            shapes.append(tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3, class_=f"dot {s.kind}"))
    if mark is not None:
        x, y = at(mark[0], mark[1])
        side = "end" if x > width / 2 else "start"
        shapes.append(tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3.5, class_="dot mark"))
        shapes.append(
            tag("text", mark[2], x=f"{x + (-8 if side == 'end' else 8):.1f}", y=f"{y + 12:.1f}", class_=f"{side} strong")
        )
    return _picture(shapes, width, height, label)


@dataclass(frozen=True)
class Span:
    """A stretch of a row of a timeline: from, to, the class that colours it, its name, what is told of it."""

    start: float
    end: float
    kind: str
    name: str
    text: str = ""


UNNAMED = frozenset({"T"})  # kinds of stretches that are no work, and have no name in the picture
_NAMED = 4000  # stretches of a timeline; of more only the colours are shown, so that a browser can


def timeline(rows: Sequence[tuple[str, Sequence[Span]]], x_text: Callable[[float], str], label: str, width: int = 1000) -> Html:
    """Rows of stretches over one axis of time."""
    each, gap = (24, 5) if len(rows) <= 64 else (8, 1)
    height = _TOP + len(rows) * (each + gap) + _BOTTOM
    end = max((s.end for _, spans in rows for s in spans), default=0.0) or 1.0
    scale = (width - _LEFT - _RIGHT) / end
    shapes: list[Html] = []
    for value in ticks(0.0, end, 6):
        if value <= end:
            place = f"{_LEFT + value * scale:.1f}"
            shapes.append(tag("line", x1=place, x2=place, y1=_TOP, y2=height - _BOTTOM, class_="grid"))
            shapes.append(tag("text", x_text(value), x=place, y=height - 6, class_="middle"))
    named = sum(len(spans) for _, spans in rows) <= _NAMED
    areas: dict[str, list[str]] = {}
    for i, (name, spans) in enumerate(rows):
        top = _TOP + i * (each + gap)
        if each > 10 or i % 16 == 0:
            shapes.append(tag("text", name, x=_LEFT - 6, y=f"{top + each / 2 + 4:.1f}", class_="end"))
        shapes.append(tag("rect", x=_LEFT, y=top, width=f"{end * scale:.1f}", height=each, class_="idle"))
        for s in spans:
            x, long = _LEFT + s.start * scale, max((s.end - s.start) * scale, 0.2)
            if named:
                told = tag("title", f"{s.name}: {s.text}") if s.text else None
                text = tag("text", s.name, x=f"{x + long / 2:.1f}", y=f"{top + each / 2 + 4:.1f}", class_="middle on")
                box = tag("rect", x=f"{x:.2f}", y=top, width=f"{long:.2f}", height=each, class_=f"span {s.kind}")
                fits = long > 7.2 * len(s.name) + 4 and s.kind not in UNNAMED
                shapes.append(tag("g", told, box, text if fits else None))
            else:
                areas.setdefault(s.kind, []).append(f"M{x:.1f} {top}h{long:.1f}v{each}h-{long:.1f}z")
    shapes += [tag("path", d="".join(parts), class_=f"span {kind}") for kind, parts in sorted(areas.items())]
    return _picture(shapes, width, height, label)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About so many round numbers from ``low`` to ``high``."""
    spread = high - low
    if not math.isfinite(spread) or spread <= 0:
        return [low]
    raw = spread / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    return [k * step for k in range(first, math.ceil(high / step - 1e-9) + 1)]


def thinned(points: Sequence[tuple[float, float]], most: int = 400) -> list[tuple[float, float]]:
    """At most so many points, the highest of each stretch, in order."""
    size = math.ceil(len(points) / most) or 1
    return [max(points[i : i + size], key=lambda p: p[1]) for i in range(0, len(points), size)]


def _path(points: Sequence[tuple[float, float]], steps: bool) -> str:
    if not points:
        return ""
    text = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    return text + "".join(f"H{x:.1f}V{y:.1f}" if steps else f"L{x:.1f} {y:.1f}" for x, y in points[1:])


def _picture(shapes: Sequence[Html], width: int, height: int, label: str) -> Html:
    svg = tag("svg", shapes, viewBox=f"0 0 {width} {height}", role="img", aria_label=label)
    return tag("div", svg, class_="scroll")


STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1d2127;--muted:#59616d;--line:#dfe3e8;--card:#f6f7f9;--link:#1f5fbf;
--blue:#2f6fd0;--orange:#c4621a;--green:#1f8a5b;--purple:#7b4bc9;--grey:#9aa3ae;--red:#c5303c;--on:#fff}
@media (prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e4e7eb;--muted:#9aa4b1;--line:#2d333b;--card:#1c2127;--link:#79aef5;
--blue:#5a96ec;--orange:#e28b47;--green:#4bb583;--purple:#a583e6;--grey:#68727e;--red:#f0717b;--on:#10141a}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
header,main{max-width:1080px;margin:0 auto;padding:0 20px}
h1{font-size:1.5rem;line-height:1.25;margin:28px 0 8px;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:40px 0 10px;padding-top:4px}
h3{font-size:1rem;margin:18px 0 4px;overflow-wrap:anywhere}
nav{display:flex;flex-wrap:wrap;gap:2px 16px;border-bottom:1px solid var(--line);padding-bottom:10px}
a{color:var(--link);text-decoration:none}a:hover{text-decoration:underline}
nav a{padding:4px 0}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(200px,1fr));gap:10px;margin:0}
.facts div{background:var(--card);border-radius:8px;padding:9px 12px;min-width:0}
dt{color:var(--muted);font-size:.8rem}dd{margin:0;font-weight:600;overflow-wrap:anywhere}
.note{color:var(--muted);margin:6px 0 12px;max-width:75ch}
.warning{border-left:3px solid var(--orange);padding:4px 12px;margin:12px 0;overflow-wrap:anywhere}
.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;width:100%;font-size:.88rem}
th,td{text-align:left;padding:5px 12px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--muted);font-weight:600;white-space:nowrap}
td{overflow-wrap:anywhere;min-width:3.5rem}
.one{white-space:nowrap}
.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
code{font:.86rem/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.bar{display:block;min-width:80px;height:10px;margin-top:6px;background:var(--card);border-radius:5px}
.fill{display:block;height:10px;border-radius:5px;background:var(--blue)}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,470px),1fr));gap:8px 28px}
.pair>*{min-width:0}
.filter{font:inherit;color:inherit;background:var(--card);border:1px solid var(--line);border-radius:6px;padding:5px 10px;
width:min(100%,320px);margin:0 0 8px}
.chip{border:1px solid currentColor;border-radius:9px;padding:0 8px;font-size:.8rem;white-space:nowrap}
.trains{color:var(--green)}.frozen{color:var(--muted)}.buffer{color:var(--purple)}
.legend span{margin-right:16px;white-space:nowrap}.legend{color:var(--muted);margin:4px 0;font-size:.88rem}
.key{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;background:var(--grey)}
svg{display:block;width:100%;height:auto}
svg text{font:12px system-ui,sans-serif;fill:var(--muted)}
svg .end{text-anchor:end}svg .middle{text-anchor:middle}svg .strong{fill:var(--fg);font-weight:600;
paint-order:stroke;stroke:var(--bg);stroke-width:3px}
svg text.on{fill:var(--on)}
.grid{stroke:var(--line);stroke-width:1}.idle{fill:var(--card)}
.line{fill:none;stroke:var(--blue);stroke-width:1.8;stroke-linejoin:round}.area{fill:var(--blue);opacity:.18}
.span.T{opacity:.4}.key.T{opacity:.4}.key.none{background:var(--card);border:1px solid var(--line)}
.dot{fill:var(--blue)}.span{fill:var(--grey)}.mark{fill:var(--red)}
.span.F,.key.F{fill:var(--blue);background:var(--blue)}.span.B,.key.B{fill:var(--orange);background:var(--orange)}
.span.I,.key.I{fill:var(--purple);background:var(--purple)}.span.W,.key.W{fill:var(--green);background:var(--green)}
.line.b{stroke:var(--orange)}.dot.b{fill:var(--orange)}.key.a{background:var(--blue)}.key.b{background:var(--orange)}
.area.b{fill:var(--orange)}.fill.b{background:var(--orange)}
svg g rect{stroke:var(--bg);stroke-width:.6}
@media (max-width:600px){header,main{padding:0 14px}.facts{grid-template-columns:repeat(auto-fill,minmax(140px,1fr))}
.wide svg{min-width:720px}table{min-width:calc(var(--c)*88px)}td code{display:block;min-width:8rem}}
@media print{nav,.filter{display:none}}
"""

SCRIPT = """
for (const field of document.querySelectorAll('.filter')) {
  const rows = field.parentElement.querySelectorAll('tbody tr');
  field.addEventListener('input', () => {
    const wanted = field.value.toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
}
"""
