"""Draws `need` and cost of `recordings.py` as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

WIDTH = 760
HEIGHT = 470
SIDE = 20
BAR = 24
STEP = 28
FULL = 120
FLOORS = 206, 374
"""Where the bars of need stand, and those of cost."""

COLORS = {
    "no guard": ("#cbd5e1", "#566173"),
    "ADK compaction, keeps 6": ("#d97c2b", "#e89a52"),
    "Threshold": ("#0f766e", "#4fb8aa"),
}
"""The rows that are drawn, each with its color on light and on dark paper."""

TITLES = (
    "Of the values that the next tool call needs, how many the request holds",
    "Cost in thousands of uncached prompt tokens, each group on its own scale; "
    "dashed: lost turns",
)


def draw(figures: Mapping[str, Any]) -> str:
    """Draws bars for each set, on paper of its own: the page may be dark."""
    lines = [f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" class="paper"/>']
    for floor, title in zip(FLOORS, TITLES, strict=True):
        y = floor - FULL - 26
        lines.append(f'<text x="{SIDE}" y="{y}" font-weight="600">{title}</text>')
        lines.append(f'<path d="M{SIDE} {floor}.5H{WIDTH - SIDE}" stroke="#94a3b8"/>')

    for number, name in enumerate(COLORS):
        x = SIDE + (0, 110, 330)[number]
        lines.append(f'<rect x="{x}" y="22" width="13" height="13" class="c{number}"/>')
        said = "Threshold (this package)" if name == "Threshold" else name
        lines.append(f'<text x="{x + 19}" y="33">{escape(said)}</text>')

    space = (WIDTH - 2 * SIDE) / len(figures)
    for number, group in enumerate(figures.values()):
        lines += _draw_group(group, SIDE + space * (number + 0.5))

    light = _write_style("#fff", "#1f2937", [color[0] for color in COLORS.values()])
    dark = _write_style("#1b212c", "#e6e9ef", [color[1] for color in COLORS.values()])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="13">\n'
        f"<title>{TITLES[0]}, and what it costs</title>\n<style>\n"
        ".m { text-anchor: middle }\n"
        f".lost {{ fill-opacity: 0.15; stroke-dasharray: 3 2 }}\n{light}\n"
        f"@media (prefers-color-scheme: dark) {{ {dark} }}\n</style>\n"
        + "".join(f"{line}\n" for line in lines)
        + "</svg>\n"
    )


def _write_style(paper: str, ink: str, colors: Sequence[str]) -> str:
    """The rules for paper, ink and the bars of each strategy."""
    bars = [
        f".c{number} {{ fill: {color}; stroke: {color} }}"
        for number, color in enumerate(colors)
    ]
    return f".paper {{ fill: {paper} }} text {{ fill: {ink} }} " + " ".join(bars)


def _draw_group(group: Mapping[str, Any], middle: float) -> Iterator[str]:
    rows = {name: row for name, row in group["ways"].items() if name in COLORS}
    highest = max(row["cost_tokens"] for row in rows.values())

    for number, (name, row) in enumerate(rows.items()):
        center = round(middle + STEP * (number - (len(rows) - 1) / 2))
        need = row["need"] or 0
        cost = row["cost_tokens"]
        bars = (need, f"{need:.2f}"), (cost / highest, f"{cost // 1_000:,}")
        for floor, (part, said) in zip(FLOORS, bars, strict=True):
            height = round(FULL * part)
            color = f"c{[*COLORS].index(name)}"
            is_lost = floor == FLOORS[1] and row["lost_turns"]
            style = f"{color} lost" if is_lost else color
            box = f'y="{floor - height}" width="{BAR}" height="{height}"'
            yield f'<rect x="{center - BAR // 2}" {box} class="{style}"/>'
            place = f'x="{center}" y="{floor - height - 5}" class="m" font-size="11"'
            yield f"<text {place}>{said}</text>"

    words = [*group["title"].split(", "), f"{group['turns']} turns"]
    for number, word in enumerate(words):
        place = f'x="{middle:.0f}" y="{FLOORS[1] + 20 + 17 * number}" class="m"'
        yield f'<text {place} font-size="12">{escape(word)}</text>'
