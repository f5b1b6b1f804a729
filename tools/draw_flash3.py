"""Draws how FlashAttention 3 hides waiting times: timelines of its schedules on one multiprocessor, by simulation.

A task runs on one unit (copies, tensor cores, exponentials), after the tasks that it needs. Of the tasks that can start
first, the first one in program order does. The unit of time is one product of a tile by a group of warps, 64 x 128 x
128 multiplications, 0.28 us at the peak of an H100. The 8,192 exponentials of the tile take as long, because an H100
computes 3.9 10^12 of them in a second. The maximum, the sum and the conversion of a softmax are assumed to take half of
that, and a copy of K or V from the L2 cache half a unit.
"""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lite.cli.picture import picture_at, write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COPY, TENSOR, EXP = "copies", "tensor cores", "exponentials"
SECONDS = {"K": 0.5, "V": 0.5, "S": 1.0, "P": 1.5, "O": 1.0}  # in units; S = Q K^T, P = softmax(S), O += P V
UNIT = {"K": COPY, "V": COPY, "S": TENSOR, "P": EXP, "O": TENSOR}
TILES, BUFFERS = 6, 2  # of keys; of K and of V in shared memory
COLOURS = ("#56b4e9", "#e69f00")  # of the two groups of warps
COPIES = "#bfbfbf"


@dataclass
class Task:
    """What a group of warps does with a tile."""

    kind: str
    tile: int
    group: int
    needs: list["Task"] = field(default_factory=list)
    start: float = -1.0

    @property
    def end(self) -> float:
        return self.start + SECONDS[self.kind]


class Program:
    """The tasks in program order."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def add(self, kind: str, tile: int, group: int, *needs: tuple[str, int, int]) -> None:
        """A task that needs others; those of a tile before the first one exist not and are left out."""
        self.tasks.append(Task(kind, tile, group, [found for key in needs if (found := self.find(*key))]))

    def find(self, kind: str, tile: int, group: int) -> Task | None:
        return next((task for task in self.tasks if (task.kind, task.tile, task.group) == (kind, tile, group)), None)


def simulate(program: Program) -> list[Task]:
    """Give each task its start, and return them."""
    waiting, free = list(program.tasks), dict.fromkeys(UNIT.values(), 0.0)
    while waiting:
        ready = [task for task in waiting if all(need.start >= 0 for need in task.needs)]
        starts = [max([free[UNIT[task.kind]], *(need.end for need in task.needs)]) for task in ready]
        chosen = ready[starts.index(min(starts))]
        chosen.start = min(starts)
        free[UNIT[chosen.kind]] = chosen.end
        waiting.remove(chosen)
    return program.tasks


def busy(tasks: list[Task]) -> float:
    """The share of time in which the tensor cores work, from the end of the second tile to that of the last but one."""
    ends = {tile: max(task.end for task in tasks if (task.kind, task.tile) == ("O", tile)) for tile in range(TILES)}
    first, last = ends[1], ends[TILES - 2]
    work = [min(task.end, last) - max(task.start, first) for task in tasks if UNIT[task.kind] == TENSOR]
    return sum(part for part in work if part > 0) / (last - first)


def alone() -> Program:
    """One group of warps does everything, one thing after another."""
    program = Program()
    for j in range(TILES):
        program.add("K", j, 0, ("O", j - 1, 0))
        program.add("S", j, 0, ("K", j, 0))
        program.add("P", j, 0, ("S", j, 0))
        program.add("V", j, 0, ("P", j, 0))
        program.add("O", j, 0, ("V", j, 0))
    return program


def with_producer(groups: int) -> Program:
    """A producer copies tiles ahead, as far as buffers are free; one or two groups of consumers compute."""
    program = Program()
    for j in range(TILES):
        program.add("K", j, 0, *(("S", j - BUFFERS, group) for group in range(groups)))
        program.add("V", j, 0, *(("O", j - BUFFERS, group) for group in range(groups)))
        for group in range(groups):
            program.add("S", j, group, ("K", j, 0), ("O", j - 1, group))
            program.add("P", j, group, ("S", j, group))
            program.add("O", j, group, ("P", j, group), ("V", j, 0))
    return program


def stages(count: int) -> Program:
    """One group of consumers, whose softmax runs beside products of `count` tiles."""
    program = Program()
    for j in range(TILES + 2):
        if j < TILES:
            program.add("K", j, 0, ("S", j - BUFFERS - 1, 0))
            program.add("V", j, 0, ("O", j - BUFFERS - 1, 0))
            # With two stages, the products of tile j begin after the softmax of j - 1; with three, after that of j - 2.
            program.add("S", j, 0, ("K", j, 0), ("P", j + 1 - count, 0))
            program.add("P", j, 0, ("S", j, 0), ("P", j - 1, 0))
        if 0 <= j - 1 < TILES:
            program.add("O", j - 1, 0, ("P", j - 1, 0), ("V", j - 1, 0), ("O", j - 2, 0))
    return program


SCHEDULES = {
    "one group of warps": alone,
    "a producer and a consumer": lambda: with_producer(1),
    "a producer and two consumers, ping-pong": lambda: with_producer(2),
    "two stages in one consumer": lambda: stages(2),
    "three stages in one consumer": lambda: stages(3),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the picture, .png or .svg")
    picture = picture_at(parser.parse_args().out)
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    runs = {name: simulate(build()) for name, build in SCHEDULES.items()}
    length = max(task.end for tasks in runs.values() for task in tasks)
    figure = Figure(figsize=(11, 9), dpi=100, layout="constrained")
    for axes, (name, tasks) in zip(figure.subplots(len(runs), 1), runs.items(), strict=True):
        draw(axes, f"{name}: tensor cores work in {busy(tasks):.0%} of the time", tasks, length)
    names = ("consumer 1, or the only group", "consumer 2", "copies")
    boxes = [Patch(color=colour, label=name) for colour, name in zip((*COLOURS, COPIES), names, strict=True)]
    figure.legend(handles=boxes, loc="outside lower center", ncols=3, frameon=False, fontsize=11)
    write_picture(figure, picture)


def draw(axes: "Axes", title: str, tasks: list[Task], length: float) -> None:
    """A row for each unit; a box has the kind and the tile of its task."""
    rows = [COPY, TENSOR, EXP]
    for task in tasks:
        row, colour = rows.index(UNIT[task.kind]), COPIES if UNIT[task.kind] == COPY else COLOURS[task.group]
        box = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.8}
        axes.broken_barh([(task.start, SECONDS[task.kind])], (row - 0.45, 0.9), **box)
        axes.text(task.start + SECONDS[task.kind] / 2, row, f"{task.kind}{task.tile}", ha="center", va="center", size=8)
    axes.set(xlim=(0, length), ylim=(2.5, -0.5), xticks=[])
    axes.set_yticks(range(3), rows, size=10)
    axes.set_title(title, size=11, loc="left")
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False)


if __name__ == "__main__":
    main()
