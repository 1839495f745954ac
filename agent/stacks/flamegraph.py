# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A flame graph as one SVG file: root at the bottom, width by value, a tooltip on each frame.

A static picture that needs nothing; where scripts run, a click on a frame zooms and a double click goes back. Names
come from other people's programs: they are escaped, and never part of the script.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from agent.stacks.report import Report

_WIDTH, _ROW, _MARGIN, _LETTER = 1200, 18, 10, 6.6
_NARROWEST = 0.1  # a frame narrower than that is not drawn
_STYLE = "text{font:11px monospace;pointer-events:none}rect{stroke:#fff;stroke-width:.4}g:hover rect{stroke:#000}"
_SCRIPT = """
var all = Array.from(document.querySelectorAll('g.frame'));
var width = %d, margin = %d, letter = %s;
function show(left, span) {
  all.forEach(function (g) {
    var x = (+g.dataset.x - left) / span * width, w = +g.dataset.w / span * width;
    var from = Math.max(0, x), to = Math.min(width, x + w);
    g.style.display = to - from < 0.1 ? 'none' : '';
    var rect = g.querySelector('rect'), text = g.querySelector('text');
    rect.setAttribute('x', margin + from); rect.setAttribute('width', Math.max(0, to - from));
    text.setAttribute('x', margin + from + 3);
    var name = g.dataset.name, fits = Math.floor((to - from - 6) / letter);
    text.textContent = fits < 3 ? '' : name.length <= fits ? name : name.slice(0, fits - 1) + '…';
  });
}
all.forEach(function (g) { g.addEventListener('click', function () { show(+g.dataset.x, +g.dataset.w); }); });
document.documentElement.addEventListener('dblclick', function () { show(0, 1); });
"""


@dataclass(slots=True)
class _Node:
    value: int = 0
    children: dict[str, _Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Box:
    """A frame: where it begins and how wide it is, as ratios of the whole, and how many frames are below it."""

    name: str
    value: int
    left_ratio: float
    width_ratio: float
    depth: int


def boxes(report: Report) -> list[Box]:
    """All frames that are wide enough to be drawn, the root first."""
    root = _Node()
    for frames, value in report.stacks.items():
        node = root
        node.value += value
        for name in frames:
            node = node.children.setdefault(name, _Node())
            node.value += value
    return list(_boxes(root, root.value)) if root.value else []


def _boxes(root: _Node, total: int) -> Iterator[Box]:
    waiting = [("all", root, 0.0, 0)]
    while waiting:
        name, node, left, depth = waiting.pop()
        width = node.value / total
        if width * _WIDTH < _NARROWEST:
            continue
        yield Box(name, node.value, left, width, depth)
        for child_name in sorted(node.children):
            child = node.children[child_name]
            waiting.append((child_name, child, left, depth + 1))
            left += child.value / total


def draw(report: Report) -> str:
    """The file's text."""
    found = boxes(report)
    depth = 1 + max((box.depth for box in found), default=0)
    head = [report.headline, *report.notes()]
    top = _ROW * (len(head) + 1)
    height = top + depth * _ROW + _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 2 * _MARGIN}" height="{height}" '
        f'viewBox="0 0 {_WIDTH + 2 * _MARGIN} {height}">',
        f"<style>{_STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    lines += [f'<text x="{_MARGIN}" y="{_ROW * (row + 1)}">{_safe(text)}</text>' for row, text in enumerate(head)]
    lines += [_frame(box, height - _MARGIN - (box.depth + 1) * _ROW, report.unit) for box in found]
    script = _SCRIPT % (_WIDTH, _MARGIN, _LETTER)
    return "\n".join([*lines, f"<script><![CDATA[{script}]]></script>", "</svg>", ""])


def _frame(box: Box, y: int, unit: str) -> str:
    x, width = _MARGIN + box.left_ratio * _WIDTH, box.width_ratio * _WIDTH
    title = f"{box.name}: {box.value} {unit}, {box.width_ratio:.1%}"
    return (
        f'<g class="frame" data-x="{box.left_ratio:.6f}" data-w="{box.width_ratio:.6f}" data-name="{_safe(box.name)}">'
        f"<title>{_safe(title)}</title>"
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 1}" fill="{_colour(box.name)}"/>'
        f'<text x="{x + 3:.2f}" y="{y + 13}">{_safe(_cut(box.name, width))}</text></g>'
    )


def _cut(name: str, width: float) -> str:
    fits = int((width - 6) / _LETTER)
    if fits < 3:
        return ""
    return name if len(name) <= fits else name[: fits - 1] + "…"


def _colour(name: str) -> str:
    """Warm, and the same for the same name in every picture."""
    seed = zlib.crc32(name.encode(errors="replace"))
    return f"rgb({205 + seed % 50},{90 + (seed >> 8) % 110},{40 + (seed >> 16) % 50})"


def _safe(text: str) -> str:
    """XML has no way to write most control characters: they become a mark."""
    legal = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return escape(legal, {'"': "&quot;"})
