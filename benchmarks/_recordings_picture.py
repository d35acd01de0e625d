"""Draws the column `need` of `recordings.py` as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

WIDTH, HEIGHT, SIDE = 760, 330, 20
BAR, STEP, FLOOR, FULL = 24, 26, 268, 170

COLORS = {
    "no guard": ("#cbd5e1", "#566173"),
    "ADK compaction, keeps 6": ("#f3c08f", "#b98150"),
    "ADK compaction, keeps 6, at half": ("#d97c2b", "#e89a52"),
    "Threshold": ("#0f766e", "#4fb8aa"),
}
"""The rows that are drawn, each with its color on light and on dark paper."""

TITLE = "Of the values that the next tool call needs, how many the request holds"


def draw(figures: Mapping[str, Any]) -> str:
    """Draws a group of bars for each set, on paper of its own: the page may be dark."""
    space = (WIDTH - 2 * SIDE) / len(figures)
    lines = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" class="paper"/>',
        f'<text x="{SIDE}" y="30" font-weight="600">{TITLE}</text>',
        f'<path d="M{SIDE} {FLOOR}.5H{WIDTH - SIDE}" stroke="#94a3b8"/>',
    ]
    for number, name in enumerate(COLORS):
        x = SIDE + (0, 110, 310, 570)[number]
        lines.append(f'<rect x="{x}" y="46" width="13" height="13" class="c{number}"/>')
        lines.append(f'<text x="{x + 19}" y="57">{escape(name)}</text>')
    for number, group in enumerate(figures.values()):
        lines += _draw_group(group, SIDE + space * (number + 0.5))
    light, dark = (
        f".paper {{ fill: {paper} }} text {{ fill: {ink} }} "
        + " ".join(f".c{n} {{ fill: {c[i]} }}" for n, c in enumerate(COLORS.values()))
        for i, (paper, ink) in enumerate((("#fff", "#1f2937"), ("#1b212c", "#e6e9ef")))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="13">\n'
        f"<title>{TITLE}</title>\n<style>\n.m {{ text-anchor: middle }}\n{light}\n"
        f"@media (prefers-color-scheme: dark) {{ {dark} }}\n</style>\n"
        + "".join(f"{line}\n" for line in lines)
        + "</svg>\n"
    )


def _draw_group(group: Mapping[str, Any], middle: float) -> Iterator[str]:
    names = [name for name in COLORS if name in group["ways"]]
    for number, name in enumerate(names):
        center = round(middle + STEP * (number - (len(names) - 1) / 2))
        need = group["ways"][name]["need"] or 0
        height, style = round(FULL * need), [*COLORS].index(name)
        box = f'y="{FLOOR - height}" width="{BAR}" height="{height}" class="c{style}"'
        yield f'<rect x="{center - BAR // 2}" {box}/>'
        place = f'x="{center}" y="{FLOOR - height - 5}" class="m" font-size="11"'
        yield f"<text {place}>{need:.2f}</text>"
    for number, words in enumerate(group["title"].split(", ")):
        place = f'x="{middle:.0f}" y="{FLOOR + 20 + 17 * number}" class="m"'
        yield f'<text {place} font-size="12">{escape(words)}</text>'
