"""A plan as a picture: domains with their ranks, and the memory of a rank by kind."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from shoal.plan.memory import AT_REST, Kind
from shoal.plan.plan import Plan
from shoal.plan.sheet import bytes_text
from shoal.topology import Axis, Coordinates

WIDTH = 1272
MARGIN = 24
CELL_WIDTH, CELL_HEIGHT, GAP = 144, 76, 8
MOST_DOMAINS = 32
"""Domains that are drawn; a line says how many more there are."""

_SHARED_AXES = (Axis.PIPELINE, Axis.CONTEXT, Axis.EXPERT)
_MESH_AXES = (Axis.OUTER, Axis.INNER)
_WORDS = {Axis.PIPELINE: "stage"}

_BARS = "Bars: bytes at peak, the dark part of them at rest."

_COLORS = {
    Kind.MAIN_WEIGHTS: "#1f4e79",
    Kind.COMPUTE_WEIGHTS: "#2e86c1",
    Kind.GRADIENTS: "#17a589",
    Kind.MOMENTS: "#7d3c98",
    Kind.BUFFERS: "#5d6d7e",
    Kind.WHOLE_WEIGHTS: "#85c1e9",
    Kind.CONTRIBUTIONS: "#76d7c4",
    Kind.ACCUMULATION: "#a2d9ce",
    Kind.ACTIVATIONS: "#f5b041",
    Kind.HEAD: "#dc7633",
    Kind.EXCHANGE: "#af601a",
    Kind.UPDATE: "#c39bd3",
}


def draw_plan(plan: Plan) -> str:
    """The picture as an SVG document."""
    height, mesh = _mesh(plan, top=MARGIN + 40)
    bottom, memory = _memory(plan, top=height + 24)
    title = f"{plan.name}: {plan.model_type}, {plan.num_parameters:,} parameters"
    ranks = f"{plan.topology.world_size} ranks on {plan.device}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom + MARGIN}" '
        f'viewBox="0 0 {WIDTH} {bottom + MARGIN}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{bottom + MARGIN}" fill="white"/>',
        _text(MARGIN, MARGIN + 8, title, size=16),
        _text(MARGIN, MARGIN + 26, f"{ranks}, {plan.batches.tokens:,} tokens a step. {_BARS}"),
        *mesh,
        *memory,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _mesh(plan: Plan, top: int) -> tuple[int, list[str]]:
    """The domains as boxes of ranks, and where they end."""
    topology, lines, y = plan.topology, [], top
    most = max(memory.peak for memory in plan.memory)
    per_row = max((WIDTH - 2 * MARGIN - GAP) // (CELL_WIDTH + GAP), 1)
    for domain in range(min(topology.num_domains, MOST_DOMAINS)):
        ranks = range(domain * topology.domain, (domain + 1) * topology.domain)
        rows = -(-len(ranks) // per_row)
        height = rows * (CELL_HEIGHT + GAP) + GAP + 16
        width = min(len(ranks), per_row) * (CELL_WIDTH + GAP) + GAP
        lines.append(_box(MARGIN, y, width, height, "#f4f6f7", "#aab7b8"))
        lines.append(_text(MARGIN + GAP, y + 14, f"domain {domain}"))
        for index, rank in enumerate(ranks):
            row, column = divmod(index, per_row)
            x = MARGIN + GAP + column * (CELL_WIDTH + GAP)
            lines.extend(_rank(plan, rank, x, y + 20 + row * (CELL_HEIGHT + GAP), most))
        y += height + GAP
    hidden = topology.num_domains - MOST_DOMAINS
    if hidden > 0:
        lines.append(_text(MARGIN, y + 12, f"and {hidden} more domains like these"))
        y += 20
    return y, lines


def _rank(plan: Plan, rank: int, x: int, y: int, most: int) -> Iterator[str]:
    """One rank: its place, and its bytes as a bar of which the dark part rests."""
    memory, at = plan.memory[rank], plan.topology.coordinates(rank)
    bar = CELL_WIDTH - 2 * GAP
    yield _box(x, y, CELL_WIDTH, CELL_HEIGHT, "white", "#5d6d7e")
    yield _text(x + GAP, y + 16, f"rank {rank}")
    for line, axes in enumerate((_SHARED_AXES, _MESH_AXES)):
        yield _text(x + GAP, y + 31 + 14 * line, _places(plan, at, axes), size=9)
    yield _box(x + GAP, y + 52, bar * memory.peak // most, 8, _COLORS[Kind.ACTIVATIONS])
    yield _box(x + GAP, y + 52, bar * memory.at_rest // most, 8, _COLORS[Kind.MAIN_WEIGHTS])
    yield _text(x + GAP, y + 71, f"{bytes_text(memory.peak)} at peak", size=10)


def _places(plan: Plan, at: Coordinates, axes: tuple[Axis, ...]) -> str:
    """Where a rank stands on those of ``axes`` that have more than one."""
    named = ((axis, _WORDS.get(axis, axis.value)) for axis in axes)
    return ", ".join(
        f"{word} {at.along(axis)}" for axis, word in named if plan.topology.size(axis) > 1
    )


def _memory(plan: Plan, top: int) -> tuple[int, list[str]]:
    """The fullest rank's bytes as one bar with a legend, and where they end."""
    fullest = plan.fullest
    sums = f"{bytes_text(fullest.at_rest)} at rest, {bytes_text(fullest.peak)} at peak"
    lines = [_text(MARGIN, top + 12, f"Memory of rank {fullest.rank}, the fullest: {sums}")]
    x, y, bar = float(MARGIN), top + 22, WIDTH - 2 * MARGIN
    for kind, num_bytes in fullest.num_bytes.items():
        width = bar * num_bytes / max(fullest.peak, 1)
        lines.append(_box(x, y, width, 24, _COLORS[kind]))
        x += width
    y += 36
    for index, (kind, num_bytes) in enumerate(fullest.num_bytes.items()):
        row, column = divmod(index, 3)
        left, line = MARGIN + column * (bar // 3), y + row * 20
        when = "at rest" if kind in AT_REST else "in a step"
        words = f"{kind.value.replace('_', ' ')} ({when}): {bytes_text(num_bytes)}"
        lines.append(_box(left, line, 12, 12, _COLORS[kind]))
        lines.append(_text(left + 18, line + 11, words))
    return y + 20 * -(-len(fullest.num_bytes) // 3), lines


def _text(x: float, y: float, words: str, *, size: int = 12) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}">{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:.6g}" height="{height:g}" '
        f'fill="{fill}" stroke="{stroke}"/>'
    )
