"""Draws the tiles of attention that four masks leave, and the order in which FlashAttention 1 and 2 visit tiles.

Both come from `TileGrid`, which the loops of megatron_lite/model/flash_tiled.py read.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_lite.cli.picture import picture_at, write_picture
from megatron_lite.model.flash_tiled import TileGrid
from megatron_lite.model.masks import CAUSAL, Mask

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TILE, LENGTH, ORDER_LENGTH = 64, 1024, 384
PACKED = Mask(documents=torch.repeat_interleave(torch.arange(3), torch.tensor([330, 90, 604]))[None])
MASKS = {
    "causal": CAUSAL,
    "causal, window of 200": CAUSAL.with_window(200),
    "causal, documents": PACKED,
    "causal, documents, window of 200": PACKED.with_window(200),
}
COLOURS = {"full": "#0072b2", "partial": "#f0b429", "skipped": "#e9e9e9"}
LABELS = {"full": "all pairs are visible", "partial": "some pairs are visible", "skipped": "not computed"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the picture, .png or .svg")
    picture = picture_at(parser.parse_args().out)
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 8), dpi=100, layout="constrained")
    axes = figure.subplots(2, 3)
    for place, (title, mask) in zip(axes[:, :2].flat, MASKS.items(), strict=True):
        draw_kinds(place, title, mask)
    grid = tiles(CAUSAL, ORDER_LENGTH)
    by_keys = [(i, j) for j in range(len(grid.columns)) for i, _ in grid.rows_of(j)]
    by_queries = [(i, j) for i in range(len(grid.rows)) for j, _ in grid.columns_of(i)]
    draw_order(axes[0, 2], "version 1: outer loop over keys", grid, by_keys)
    draw_order(axes[1, 2], "version 2: outer loop over queries", grid, by_queries)
    boxes = [Patch(color=COLOURS[kind], label=label) for kind, label in LABELS.items()]
    figure.legend(handles=boxes, loc="outside lower center", ncols=3, frameon=False, fontsize=12)
    write_picture(figure, picture)


def tiles(mask: Mask, length: int) -> TileGrid:
    return TileGrid(mask, length, length, TILE, TILE, torch.device("cpu"))


def draw_kinds(axes: "Axes", title: str, mask: Mask) -> None:
    """Draw each tile in the colour of its kind."""
    grid, count = tiles(mask, LENGTH), LENGTH // TILE
    kinds = {(i, j): grid.kind(i, j) for i in range(count) for j in range(count)}
    for (i, j), kind in kinds.items():
        add_tile(axes, i, j, kind)
    computed = sum(kind != "skipped" for kind in kinds.values()) / len(kinds)
    frame(axes, f"{title}\n{computed:.0%} of {len(kinds)} tiles computed", count)


def draw_order(axes: "Axes", title: str, grid: TileGrid, order: list[tuple[int, int]]) -> None:
    """Number the tiles in the order of the forward loops."""
    for number, (i, j) in enumerate(order, start=1):
        add_tile(axes, i, j, grid.kind(i, j))
        colour = "white" if grid.kind(i, j) == "full" else "black"
        axes.text(j + 0.5, i + 0.5, str(number), ha="center", va="center", size=12, color=colour)
    frame(axes, f"order of the tiles in forward\n{title}", len(grid.rows))


def add_tile(axes: "Axes", i: int, j: int, kind: str) -> None:
    axes.broken_barh([(j, 1)], (i, 1), facecolor=COLOURS[kind], edgecolor="white", linewidth=0.8)


def frame(axes: "Axes", title: str, count: int) -> None:
    axes.set(xlim=(0, count), ylim=(count, 0), aspect="equal", xticks=[], yticks=[])
    axes.set_title(title, size=12)
    axes.set_xlabel("tiles of keys", size=12)
    axes.set_ylabel("tiles of queries", size=12)
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    main()
