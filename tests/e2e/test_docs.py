"""The commands and scripts of README.md and docs/ run, and their outputs are those of the program.

Every `sh` block of a page runs, in order, in a folder that looks like a checkout with a .venv. A `python` block runs as
a script there. Comments directly above a block change this:

    <!-- not run: REASON -->         the block cannot run here
    <!-- exit code 2 -->             the block fails with this code; without the comment a failure is an error
    <!-- not compared: REASON -->    the `text` block below a command differs in each run

A block with a title, such as ```python title="mine.py", becomes that file and is not run. A `text` block directly below
a command is its output: each line must be a line of the real output, in this order. Numbers may differ, `...` stands
for any text, and a line of `...` for any lines. The drawing of a schedule must be equal.

Pages that do not create `tour.yaml` start in a copy of the folder that README's tour leaves. Trainings are shortened:
see `shortened`.
"""

import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import warm_commands
from tests.helpers.command import ROOT, environment
from tests.helpers.limits import PATIENCE

README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
EXTENDING = ROOT / "docs" / "extending.md"  # tests/e2e/test_extending.py executes its recipes
# The parts of a checkout that commands of the pages name. Other pages' folders would be written into.
CHECKOUT = ("README.md", "Makefile", "configs", "constraints.txt", "launch.sh", "megatron_lite", "tools")
FIRST_READ = (README, ROOT / "docs" / "quickstart.md")  # `make soak` runs the other pages
MAKES_THE_TOUR = "cat > tour.yaml"
DRAWING = "rank 0 |"

# Output of a page in which a number is the point, and which the comparison with its text blocks would not notice.
EXACT_OUTPUT = {
    "docs/quickstart.md": (
        "layout: 2 ranks on cpu (tensor 2, pipeline 1, context 1, data 1), precision fp32",
        "tp=1 cp=1 dp=1 pp=2",
    ),
    "docs/converting.md": (
        "verified: logits of 2 x 64 random tokens differ by at most 0 ",
        "(megatron-lite, tp=2 pp=1): 27 tensors",
    ),
    "docs/tensor-parallelism.md": (
        "columns, rows, forward: 2 products, 1 all-reduce of 64 values",
        "rows, columns, forward: 1 product, 1 all-reduce of 256 values, 1 product, 1 all-gather of 64 values",
        "attention, backward: 3 products, 1 all-reduce of 64 values, 1 product",
        "loss, forward: 3 all-reduces of 8 values",
        "gathered logits: 1 all-gather of 384 values",
    ),
    "docs/data-parallelism.md": (
        "divided by all targets, summed: off by 6e-08",
        "29 products, 1 all-reduce of 229,760 values",
    ),
    "docs/checkpoints.md": (
        "verified: all 6 files",
        "loading checkpoint from runs/tour/checkpoints at iteration 20\n",
        "saved checkpoint from iteration 22 to runs/branch/checkpoints",
        "81 values of 27 tensors: 81 identical, 0 not",
    ),
}


@dataclass(frozen=True)
class Block:
    """A fenced block, with the comment above it. `is_directly_below`: only blank lines are between it and the last."""

    language: str
    title: str
    text: str
    comment: str
    is_directly_below: bool

    @property
    def is_run(self) -> bool:
        return self.language in ("sh", "python") and not self.title and not self.comment.startswith("not run: ")

    @property
    def exit_code(self) -> int:
        return int(self.comment.removeprefix("exit code ")) if self.comment.startswith("exit code ") else 0


FENCE = re.compile(
    r"(?P<comment><!-- [^\n]* -->\n+)?^```(?P<language>\w*)(?P<options>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S
)


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    content, blocks, end = page.read_text(), [], 0
    for match in FENCE.finditer(content):
        title = re.search(r'title="([^"]+)"', match["options"])
        comment = (match["comment"] or "").strip().removeprefix("<!-- ").removesuffix(" -->")
        is_directly_below = not content[end : match.start()].strip()
        blocks.append(Block(match["language"], title[1] if title else "", match["text"], comment, is_directly_below))
        end = match.end()
    return blocks


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


PAGES = [page for page in (README, *DOCS) if page != EXTENDING]
WITH_COMMANDS = [page for page in PAGES if any(block.is_run for block in blocks_of(page))]


def shortened(text: str) -> str:
    """The commands with a tenth of the iterations and an eighth of the batch, which need seconds."""
    scaled = re.sub(
        r"((?:iterations?|interval|keep_every)[:=] ?|--iteration )([1-9]\d*)",
        lambda match: f"{match[1]}{max(1, int(match[2]) // 10)}",
        text,
    )
    scaled = scaled.replace("micro_batch_size: 16", "micro_batch_size: 2")
    return scaled.replace(
        "train.micro_batch_size=8 train.global_batch_size=16", "train.micro_batch_size=1 train.global_batch_size=2"
    )


class Checkout:
    """A folder that looks like a checkout, and the commands that ran in it with their output."""

    def __init__(self, folder: Path, address: Path):
        self.folder = folder
        self.outputs: dict[str, str] = {}
        for name in CHECKOUT:
            (folder / name).symlink_to(ROOT / name)
        commands = folder / ".venv" / "bin"
        commands.mkdir(parents=True)
        warm_commands.install(commands, address)
        (commands / "activate").write_text(f"export PATH={commands}:$PATH\n")
        self._environment = environment()
        self._environment["PATH"] = f"{commands}:{self._environment['PATH']}"

    def run(self, block: Block) -> str:
        """Run a block once, and return its standard output and standard error."""
        if block.text not in self.outputs:
            text = shortened(block.text)
            if block.language == "python":
                (self.folder / "script.py").write_text(text)
                text = "python script.py"
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=PATIENCE,
            )
            assert done.returncode == block.exit_code, f"{block.text}\n{done.stdout}"
            self.outputs[block.text] = done.stdout
        return self.outputs[block.text]


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("server") / "socket"
    with warm_commands.server(path):
        yield path


@pytest.fixture(scope="module")
def tour(tmp_path_factory, address) -> tuple[Path, Block, str]:
    """The folder that README's tour leaves, the block of the tour and its output; made once for all test processes."""
    (block,) = [block for block in blocks_of(README) if MAKES_THE_TOUR in block.text]
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder, output = base / "tour", base / "tour.txt"
    with (base / "tour.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            output.write_text(Checkout(folder, address).run(block))
    return folder, block, output.read_text()


@pytest.fixture
def checkout(request, tmp_path, address) -> Checkout:
    """The folder in which the commands of `request.param`, a page, run."""
    checkout = Checkout(tmp_path, address)
    if request.param == README or not any(MAKES_THE_TOUR in block.text for block in blocks_of(request.param)):
        folder, block, output = request.getfixturevalue("tour")
        shutil.copy(folder / "tour.yaml", tmp_path)
        shutil.copytree(folder / "runs", tmp_path / "runs")
        checkout.outputs[block.text] = output
    return checkout


@pytest.mark.parametrize(
    ("checkout", "page"),
    [pytest.param(page, page, marks=() if page in FIRST_READ else pytest.mark.soak) for page in WITH_COMMANDS],
    ids=name_of,
    indirect=["checkout"],
)
def test_the_commands_of_a_page_run_and_print_what_it_shows(checkout, page):
    """A reader who types the commands of a page in order would get an error, or another output than the page has."""
    output = ""
    all_output = ""
    for block in blocks_of(page):
        if block.title:
            (checkout.folder / block.title).write_text(shortened(block.text))
        elif block.is_run:
            output = checkout.run(block)
            all_output += output
        elif block.language == "text" and block.is_directly_below and not block.comment.startswith("not compared: "):
            check_output(block.text, output)
        if not block.is_run:
            output = ""
    for words in EXACT_OUTPUT.get(name_of(page), ()):
        assert words in all_output


def check_output(shown: str, output: str) -> None:
    """Assert that the lines that a page shows are lines of the output, in this order."""
    if DRAWING in shown:
        assert shown in output
        return
    lines = iter(output.splitlines())
    for expected in [line for line in shown.splitlines() if line.strip() != "..."]:
        pattern = re.compile(".*".join(re.escape(masked(part)) for part in expected.split("...")))
        assert any(pattern.fullmatch(masked(line)) for line in lines), f"{expected}\nis not in\n{output}"


def masked(line: str) -> str:
    """The line without its numbers, hashes and alignment."""
    without_hashes = re.sub(r"\b(?=[a-f]*\d)[0-9a-f]{8,}\b", "#", line)
    without_numbers = re.sub(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", "#", without_hashes, flags=re.I)
    return re.sub(r"\s+", " ", without_numbers).strip()


def test_masked_lines_differ_in_words_but_not_in_numbers():
    """With a mask that is too wide, a page could show the output of another version."""
    first, second = "lm loss: 3.020688E+00 | 12 steps", "lm loss:   2.5E-01 | 1,002 steps"
    assert masked(first) == masked(second) == "lm loss: # | # steps"
    assert masked("saved") != masked("saves")


@pytest.mark.parametrize(
    "shown",
    ["saved 3 files\nloading", "loading 3 files", "loading ... bytes", "rank 0 |F0F1|\nrank 1 |  F1|"],
    ids=["order", "word", "part", "drawing"],
)
def test_a_page_that_shows_another_output_is_found(shown):
    """The comparison ignores numbers; without this test it could ignore everything."""
    output = "loading 12 tensors\nsaved 12 files\nrank 0 |F0F1|\nrank 1 |  F0|\n"
    check_output("loading ... tensors\n...\nsaved 3 files\n", output)
    with pytest.raises(AssertionError):
        check_output(shown, output)
