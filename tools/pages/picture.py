"""The picture of the idea on README.md: two ways from hidden states to tokens, as an SVG."""

from __future__ import annotations

from itertools import pairwise

from pages.blocks import ROOT

PATH = ROOT / "plots" / "idea.svg"
WIDTH, HEIGHT = 820, 276

Box = tuple[int, int, str, str]
"""Left edge, width, text and colour of a box."""

STORED: tuple[Box, ...] = (
    (20, 150, "LM head [V, D]", "memory"),
    (200, 130, "matmul", "chip"),
    (360, 170, "logits [B, V]", "memory"),
    (560, 130, "sampler", "chip"),
    (720, 80, "token", "memory"),
)
FUSED: tuple[Box, ...] = (
    (20, 150, "LM head [V, D]", "memory"),
    (200, 490, "matmul, noise and argmax of each tile, on chip", "chip"),
    (720, 80, "token", "memory"),
)
FILL = {"memory": "#dde7f3", "chip": "#fbe3cf"}
STROKE = {"memory": "#4a6f9c", "chip": "#b8651b"}


def _row(top: int, title: str, boxes: tuple[Box, ...]) -> list[str]:
    """A title, and below it boxes with arrows between neighbours."""
    parts = [f'<text x="20" y="{top}" font-weight="bold">{title}</text>']
    middle = top + 42
    for left, width, text, kind in boxes:
        parts.append(
            f'<rect x="{left}" y="{top + 16}" width="{width}" height="52" rx="6" '
            f'fill="{FILL[kind]}" stroke="{STROKE[kind]}"/>'
        )
        parts.append(
            f'<text x="{left + width / 2:g}" y="{middle + 5}" text-anchor="middle">{text}</text>'
        )
    for (left, width, _, _), (end, *_) in pairwise(boxes):
        parts.append(
            f'<path d="M{left + width + 2} {middle} H{end - 4}" stroke="#333" '
            'marker-end="url(#tip)"/>'
        )
    return parts


def svg() -> str:
    """The picture."""
    legend = [
        f'<rect x="{left}" y="246" width="16" height="16" rx="3" fill="{FILL[kind]}" '
        f'stroke="{STROKE[kind]}"/><text x="{left + 24}" y="259">{text}</text>'
        for left, kind, text in (
            (20, "memory", "in GPU memory"),
            (180, "chip", "a kernel; what is inside stays on the chip"),
        )
    ]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        'font-family="sans-serif" font-size="15" fill="#111">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="4" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#333"/></marker></defs>',
        *_row(30, "Usual: the logits are written to memory and read again", STORED),
        *_row(140, "FlashSampling: one candidate per row leaves each program", FUSED),
        *legend,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
