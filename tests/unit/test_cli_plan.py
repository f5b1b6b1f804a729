"""The output, the files and the exit codes of `megatron-lite plan`."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_lite.config.load import load_config
from megatron_lite.config.schema import Config
from megatron_lite.config.validate import validate
from megatron_lite.plan.calibrate import REFERENCES
from megatron_lite.plan.devices import device_of, shared
from megatron_lite.plan.measure import MESSAGES
from tests.helpers.command import ROOT, run_here
from tests.helpers.traces import shared_traces  # noqa: F401

PAGE = ROOT / "docs" / "planning.md"
SIZES = {
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_heads": 4,
    "model.max_position_embeddings": 32,
    "model.hidden_dropout": 0,
    "model.attention_dropout": 0,
    "data.seq_length": 32,
    "train.global_batch_size": 4,
}
WITHOUT_VOCABULARY = [f"{name}={value}" for name, value in SIZES.items()]
TINY = [*WITHOUT_VOCABULARY, "model.vocab_size=64"]
PARAMETERS = 128 * 32 + 32 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32  # padded vocabulary, positions, blocks, norm
TWO, FOUR = ["--nproc-per-node", "2"], ["--nproc-per-node", "4"]
RATES = {
    "products": {"64": 5e10, "512": 1e11},
    "attention": [4e10, 3e10],
    "memory": 2e10,
    "cache": 8e10,
}
ENTRY = {
    **RATES,
    "factors": {"product": 1.0, "attention": 1.0, "memory": 1.0, "start": 1e-5},
    "link": 1e9,
    "latency": 2e-4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the profile of a machine and with files that are not profiles."""
    path = tmp_path_factory.mktemp("plan")
    (path / "machine.json").write_text(json.dumps({"format": 1, "fp32 of 1": ENTRY, "fp32 of 4": ENTRY}))
    (path / "words.json").write_text("rates")
    (path / "later.json").write_text(json.dumps({"format": 2, "fp32 of 1": ENTRY}))
    return path


def printed(folder: Path, *arguments: str) -> str:
    """The standard output of a plan of the tiny model."""
    done = run_here("plan", *TINY, *arguments, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def loaded(folder: Path, *arguments: str) -> dict[str, Any]:
    return json.loads(printed(folder, *arguments, "--json"))


def error_of(folder: Path, *arguments: str) -> str:
    """The message of a mistake."""
    done = run_here("plan", *arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


def test_a_plan_prints_layout_memory_time_and_communication(folder):
    """A wrong rank, size or group would send a user to the wrong part of a job."""
    lines = printed(folder, *FOUR, "parallel.pipeline=2", "--tokens", "1B", "--price", "2").splitlines()
    assert lines[0] == (
        "layout        pp 2, dp 2; 1f1b; ddp local; 2 micro-batches of 1 x 32 tokens; recomputation none; "
        "4 ranks on 1 machine (h100)"
    )
    assert lines[1].startswith(f"model         {PARAMETERS:,} parameters with padding; ")
    assert lines[2] == "memory        fits in 80.0 GB: 1.0 GB on the fullest (ranks 0 to 1)"
    assert re.fullmatch(
        r"step +\S+ m?s: kernels .*, bubble .*, end of the step .*; 0\.\d+ of the pipeline is idle", lines[3]
    )
    assert re.match(r"speed +[\d,]+ tokens/s, [\d,]+ on each GPU; MFU 0\.000, with recomputed FLOPs 0\.000", lines[4])
    assert re.match(r"training +1e\+09 tokens take \S+ days, \d+ dollars; [\d.e+]+ tokens for each parameter", lines[5])
    assert lines[6] == "checkpoint    367.1 kB with the optimizer"
    assert re.fullmatch(r"start +\S+ s: processes \S+ s, connections .*, store .*", lines[7])
    assert re.fullmatch(r"save +\S+ m?s; 367.1 kB: .*", lines[8])
    assert re.fullmatch(r"resume +\S+ s; 367.1 kB: processes .*", lines[9])
    assert lines[11].split() == ["GB", "ranks", "0", "to", "1", "ranks", "2", "to", "3"]
    kinds = ["parameters", "gradients", "optimizer", "activations", "temporary", "messages", "reserved", "together"]
    assert [line.split()[0] for line in lines[12:20]] == kinds
    assert lines[21] == "communication of ranks 0 to 1 in a step:"
    rows = [line.split() for line in lines[23:]]
    assert [row[:4] for row in rows] == [["dp_cp", "2", "all_reduce", "2"], ["embd", "2", "all_reduce", "1"]]
    assert all((ROOT / "megatron_lite" / row[-1].partition(":")[0]).exists() for row in rows)


def test_a_table_of_the_documentation_has_the_keys_of_the_json_object(folder):
    """A script that reads a documented key would fail, or a user would not find a key."""
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("| key | value |") :].partition("\n\n")[0]
    documented = re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)
    plan = loaded(folder, *FOUR, "parallel.pipeline=2")
    assert sorted(documented) == sorted(plan)
    inner = [*plan["layout"], *plan["memory_bytes"], *plan["flops"], *plan["communication"][0]]
    assert [key for key in inner if f"`{key}`" not in text] == []


def test_the_values_of_the_json_object_fit_together(folder):
    """Each is computed at its own place, and a cluster may be booked with any of them."""
    plan = loaded(folder, *FOUR, "parallel.pipeline=2", "--tokens", "1.5e6", "--price", "2.5")
    assert plan["layout"] == {"tp": 1, "cp": 1, "dp": 2, "pp": 2, "ranks": 4}
    assert plan["parameters"] == PARAMETERS
    assert sum(plan["parameters_by_rank"][::2]) == PARAMETERS + 128 * 32  # the last stage has a copy of the embedding
    *kinds, total, rank = plan["memory_bytes"].values()
    assert total == sum(kinds) == max(plan["memory_bytes_by_rank"]) == plan["memory_bytes_by_rank"][rank]
    assert plan["fits"] and plan["memory_limit_bytes"] == 80e9
    assert plan["checkpoint_bytes"] == 12 * PARAMETERS
    assert plan["tokens_per_step"] == 4 * 32 == plan["num_microbatches"] * 2 * 32
    assert plan["tokens_per_second"] == pytest.approx(128 / plan["step_seconds"])
    assert sum(plan["step_parts_seconds"].values()) == pytest.approx(plan["step_seconds"])
    assert plan["hfu"] / plan["mfu"] == pytest.approx(plan["flops"]["hardware"] / plan["flops"]["model"])
    assert plan["tokens_per_parameter"] == pytest.approx(1.5e6 / PARAMETERS)
    assert plan["training_days"] == pytest.approx(1.5e6 / plan["tokens_per_second"] / 86400)
    assert plan["training_dollars"] == pytest.approx(2.5 * 4 * 24 * plan["training_days"])
    sent = sum(
        row["sent_bytes"] for row in plan["communication"] if (row["group"], row["pipeline_rank"]) == ("dp_cp", 0)
    )
    assert plan["communication_bytes"]["dp_cp"] == sent > 0


def test_without_tokens_the_iterations_count_and_without_a_price_there_are_no_dollars(folder):
    plan = loaded(folder, *TWO, "train.iterations=7")
    assert plan["training_tokens"] == 7 * 128
    assert plan["training_dollars"] is None
    ramp = loaded(folder, *TWO, "train.iterations=7", "train.micro_batch_size=1", "train.ramp_up=[2,2,4]")
    assert ramp["training_tokens"] == (2 + 2 + 5 * 4) * 32


def test_several_machines_share_a_network(folder):
    """With the links of one machine between all ranks, the plan of a cluster would be too fast."""
    one, two = loaded(folder, *TWO), loaded(folder, "--nnodes", "2", "--nproc-per-node", "1")
    assert one["layout"] == two["layout"]
    assert one["step_seconds"] < two["step_seconds"]


@pytest.mark.parametrize(("size", "limit"), [("2", 2e9), ("0.5TB", 5e11), ("1500 MB", 1.5e9), ("1gib", 2.0**30)])
def test_a_memory_size_may_have_a_unit(folder, size, limit):
    assert loaded(folder, *TWO, "--max-memory", size)["memory_limit_bytes"] == limit


def test_changes_that_fit_are_printed_and_fit(folder):
    """A user applies the first line and books the machines."""
    alone = ["--device", "machine.json", "--nproc-per-node", "1", "train.recompute=full"]
    needed = [loaded(folder, *alone, f"train.micro_batch_size={size}")["memory_bytes"]["total"] for size in (2, 4)]
    alone += ["--max-memory", f"{sum(needed) / 2e6:.3f}MB"]
    lines = printed(folder, *alone, "train.micro_batch_size=4").splitlines()
    assert re.fullmatch(r"memory +does not fit in .*: .* on the fullest \(rank 0\), .* too much", lines[2])
    at = lines.index("smallest changes that fit, with the change of the step's time:")
    assert lines[at + 1].split() == ["change", "GB", "step"]
    rows = [line.split() for line in lines[at + 2 :]]
    assert [row[0] for row in rows] == ["train.micro_batch_size=2", "train.micro_batch_size=1"]
    assert all(re.fullmatch(r"\+\d+\.\d%", row[-1]) for row in rows)
    again = loaded(folder, *alone, rows[0][0])
    assert again["fits"] and again["memory_bytes"]["total"] <= again["memory_limit_bytes"]
    assert not loaded(folder, *alone, "train.micro_batch_size=4")["fits"]


def test_where_nothing_fits_more_gpus_are_named(folder):
    """An empty table would look like an error of the program."""
    lines = printed(folder, "--nproc-per-node", "1", "--max-memory", "0.9", "train.recompute=full").splitlines()
    assert lines[2] == "memory        does not fit in 0.9 GB: 1.0 GB on the fullest (rank 0), 0.1 GB too much"
    assert lines[-1] == "no layout that differs in up to three fields fits; use more GPUs, or a shorter sequence"


def test_saves_in_the_background_do_not_change_a_plan(folder):
    """They need no process group of their own, which one process could not connect."""
    assert printed(folder, *TWO, "checkpoint.async_save=true") == printed(folder, *TWO)


def test_a_page_is_written_beside_the_tables(folder):
    lines = printed(folder, *TWO, "--html", "plan.html").splitlines()
    assert lines[0].startswith("layout ") and lines[-1] == "page in plan.html"
    assert (folder / "plan.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_the_operations_of_a_rank_are_listed_in_order(folder):
    """The list is for debugging a hang. Rank 3 receives before it sends, and sums gradients after its last pass."""
    lines = printed(folder, *FOUR, "parallel.pipeline=2", "--rank", "3").splitlines()
    assert lines[0] == "one step of rank 3 (tp 0, cp 0, dp 1, pp 1), in order:"
    assert lines[1].split()[:4] == ["group", "ranks", "operation", "number"]
    rows = [line.split()[:4] for line in lines[2:] if not re.match(r"\w+: |equal", line)]
    names = [(row[0], row[2]) for row in rows]
    assert names[:3] == [("dp", "all_reduce"), ("pp", "recv"), ("pp", "send")]
    assert names.index(("pp", "recv")) < names.index(("dp_cp", "all_reduce")) < names.index(("embd", "all_reduce"))
    assert "recv: 2, 8,192 bytes of tensors" in lines  # two micro-batches of [32, 1, 32] in fp32
    assert lines[-1] == "equal to the plan's table"


def test_the_operations_of_a_rank_as_json(folder):
    found = loaded(folder, *FOUR, "parallel.pipeline=2", "--rank", "3")
    assert set(found) == {"rank", "place", "operations", "totals"}  # as docs/planning.md says
    assert (found["rank"], found["place"]) == (3, {"tp": 0, "cp": 0, "dp": 1, "pp": 1})
    assert found["totals"]["recv"] == [2, 8192]
    assert sum(int(each["number"]) for each in found["operations"]) == sum(
        count for count, _ in found["totals"].values()
    )


def test_a_step_that_differs_from_the_table_is_an_error_of_the_program(folder, monkeypatch):
    """`equal to the plan's table` must not be a constant."""
    from megatron_lite.plan import communication

    record_step = communication.record_step
    monkeypatch.setattr(communication, "record_step", lambda *given, **sizes: record_step(*given, **sizes)[:-1])
    with pytest.raises(AssertionError, match=r"the table of the plan has .*, and the recorded step "):
        run_here("plan", *TINY, *TWO, "--rank", "1", cwd=folder)


def test_a_search_prints_ten_layouts_and_writes_the_best(folder):
    """The written config is what a user starts."""
    lines = printed(folder, *TWO, "--search", "--out", "best.yaml").splitlines()
    assert re.fullmatch(r"\d+ layouts; the fastest that fit into 80\.0 GB:", lines[0])
    assert re.fullmatch("step +GB +layout.*  slower by  because of", lines[1])
    rows = [re.split("  +", line) for line in lines[2:12]]
    assert rows[0][3:] in (["0.0%"], ["0.0%", ""]) and len(rows) == 10
    assert all(re.match(r"(kernels|waits for tp and cp|bubble|sums and optimizer) [+-]", row[4]) for row in rows[1:])
    slower = [float(row[3].rstrip("%")) for row in rows]
    assert slower == sorted(slower)
    assert lines[12:] == ["use: optim.distributed=true train.micro_batch_size=2", "config in best.yaml"]
    best = load_config(folder / "best.yaml")
    validate(best, 2)
    written = yaml.safe_load((folder / "best.yaml").read_text()).items()
    default = Config().model_dump(mode="json")
    assert all(default[section][key] != value for section, fields in written for key, value in fields.items())
    assert best.optim.distributed and best.train.micro_batch_size == 2
    assert (best.model.hidden_size, best.train.global_batch_size) == (32, 4)  # nothing else has changed
    again = run_here("plan", "--config", "best.yaml", *TWO, cwd=folder).stdout
    assert "ddp local with a distributed optimizer; 1 micro-batch of 2 x 32 tokens; recomputation none" in again


def test_a_search_as_json_prints_nothing_else_on_stdout(folder):
    """Its reader is a script."""
    fields = ["parallel.tensor=2", "train.recompute=full"]  # a search starts from the model, not from its layout
    done = run_here("plan", *TINY, *fields, *TWO, "--search", "--json", "--out", "best.yaml", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "config in best.yaml\n")
    found = json.loads(done.stdout)
    assert set(found) == {"layouts", "best"}  # as docs/planning.md says
    assert len(found["best"]) == 10 <= found["layouts"]
    best = found["best"][0]
    assert (best["tensor"], best["recompute"], best["engine"], best["micro_batch"]) == (1, "none", "zero1", 2)
    assert 0 < best["step_seconds"] <= found["best"][1]["step_seconds"]


def test_a_search_without_a_layout_that_fits_is_an_error(folder):
    message = error_of(folder, *TINY, *TWO, "--device", "machine.json", "--search", "--max-memory", "0.001MB")
    assert message.startswith("no layout of 2 ranks needs at most 0.0 GB; use more ranks (--nnodes) or devices")


def test_a_profile_gives_the_rates_of_a_cpu(folder):
    """Twice the time for each kernel is twice the time of a rank alone."""
    entry = {**ENTRY, "factors": {name: 2 * value for name, value in ENTRY["factors"].items()}}
    (folder / "slow.json").write_text(json.dumps({"format": 1, "fp32 of 1": entry}))
    alone = ["--nproc-per-node", "1"]
    fast, slow = (loaded(folder, *alone, "--device", name) for name in ("machine.json", "slow.json"))
    assert (fast["device"], fast["memory_bytes"]["reserved"]) == ("cpu", 0)
    assert slow["step_parts_seconds"]["kernels"] == pytest.approx(2 * fast["step_parts_seconds"]["kernels"])
    assert " on each process; MFU " in printed(folder, *alone, "--device", "machine.json")


def test_the_listed_tensor_of_a_sum_is_the_whole_one(folder):
    """A reduce-scatter also has a small tensor, its result."""
    rows = loaded(folder, *TWO, "--rank", "0", "optim.distributed=true")["operations"]
    (row,) = (row for row in rows if row["operation"] == "reduce_scatter")
    assert row["tensor"] == f"float32 [{PARAMETERS}]"


def test_lines_of_the_command_itself_are_not_listed(folder):
    """torch's FSDP starts its collectives, so no line of a model does."""
    rows = loaded(folder, *TWO, "parallel.ddp=fsdp")["communication"]
    files = {row["line"].partition(":")[0] for row in rows}
    assert "" in files
    assert not any(file.startswith(("__main__", "cli/", "plan/")) for file in files)


def test_ranks_share_the_memory_of_a_cpu(folder):
    alone, four = (
        loaded(folder, "--device", "machine.json", "--nproc-per-node", ranks, "train.global_batch_size=4")
        for ranks in ("1", "4")
    )
    assert four["memory_limit_bytes"] == alone["memory_limit_bytes"] / 4


def test_ranks_share_the_cores_of_a_cpu_without_a_profile():
    device = shared(device_of("h100"), 16)
    crowd = 16 * torch.get_num_threads() / (os.cpu_count() or 1)
    assert device.product == pytest.approx(device_of("h100").product / max(1, crowd))
    assert device.memory_bytes == 5e9


def test_a_price_is_finite(folder):
    assert "--price" in error_of(folder, *TINY, "--price", "inf")


class FakeRanks:
    """Ranks that answer with rates and times of steps at once."""

    def __init__(self, timeout_seconds: float):
        self.closed = False

    def __call__(self, ranks: int, work, precision: str) -> list[dict[str, Any]]:
        answer: dict[str, Any] = {**RATES, "steps": [0.01] * len(REFERENCES)}
        if ranks > 1:
            answer["collectives"] = {str(size): 1e-4 + size / 1e9 for size in MESSAGES}
        return [answer] * ranks

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fake_ranks(monkeypatch) -> None:
    """One core, whose ranks answer at once; traces of the small models, which take seconds, are left out."""
    monkeypatch.setattr("megatron_lite.launch.pool.Ranks", FakeRanks)
    monkeypatch.setattr("megatron_lite.plan.calibrate.fitted", lambda *given: ENTRY["factors"])
    monkeypatch.setattr("os.cpu_count", lambda: 1)


def calibrated(folder: Path, *arguments: str) -> str:
    done = run_here("plan", "--calibrate", *arguments, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_calibrate_writes_a_profile_that_device_cpu_reads(folder, fake_ranks, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    path = folder / "cache" / "megatron-lite" / "machine.json"
    lines = calibrated(folder).splitlines()
    assert lines[0] == "fp32, 1 rank alone: 100 GFLOP/s in products, 20.0 GB/s"
    assert lines[1] == "fp32, 2 ranks at once, each: 100 GFLOP/s in products, 20.0 GB/s, 1.00 GB/s in sums"
    assert [line.partition(":")[0] for line in lines[2:4]] == ["bf16, 1 rank alone", "bf16, 2 ranks at once, each"]
    assert lines[4] == f"profile in {path}; megatron-lite plan --device cpu reads it"
    profile = json.loads(path.read_text())
    assert list(profile)[:3] == ["format", "machine", "torch"]
    assert list(profile)[3:] == [f"{precision} of {ranks}" for precision in ("fp32", "bf16") for ranks in (1, 2)]
    assert "link" not in profile["fp32 of 1"] and profile["fp32 of 2"]["link"] == pytest.approx(1e9)
    path.write_text(json.dumps({"format": 1, "fp32 of 1": {**ENTRY, "memory": 1.0, "cache": 1.0}}))
    assert loaded(folder, "--nproc-per-node", "1", "--device", "cpu")["step_seconds"] > 1e5


def test_calibrate_writes_the_file_of_out(folder, fake_ranks):
    out = calibrated(folder, "--out", "profiles/mine.json")
    assert out.endswith("profile in profiles/mine.json; megatron-lite plan --device profiles/mine.json reads it\n")
    assert loaded(folder, *TWO, "train.precision=bf16", "--device", "profiles/mine.json")["device"] == "cpu"


REMEDY = "write one with: megatron-lite plan --calibrate"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "h800"], "--device h800 is unknown; use h100, h200, b200, mi300x, a100, l40s, 4090, v100 or cpu"),
        (["--device", "gone.json"], f"gone.json: not a profile of a machine ([Errno 2] No such file .*); {REMEDY}"),
        (["--device", "words.json"], f"words.json: not a profile of a machine (Expecting value: .*); {REMEDY}"),
        (["--device", "later.json"], f"later.json: not a profile of a machine (its format is not 1); {REMEDY}"),
        (
            ["--device", "machine.json", "train.precision=bf16"],
            f"machine.json has no rates for train.precision bf16; {REMEDY}",
        ),
        (["train.precision=fp64"], "--device h100 has no profile for train.precision fp64; use bf16, fp16, fp32 or .*"),
        (["parallel.tensor=3"], "parallel.tensor * parallel.pipeline * parallel.context is 3 .*"),
        (["train.micro_batch_size=3"], "train.global_batch_size is 4, not a multiple of train.micro_batch_size .*"),
        (["--search", "--html", "x.html"], "--html has no effect with --search; leave it out"),
        (
            ["--calibrate", "--rank", "0"],
            "section.field=value and --rank have no effect with --calibrate; leave them out",
        ),
        (["--rank", "0", "--price", "2"], "--price has no effect with --rank; leave it out"),
        (["--tokens", "x"], "--tokens x is not a number above 0; use for example 3e11 or 300B"),
        (["--tokens", "-3B"], "--tokens -3B is not a number above 0; use for example 3e11 or 300B"),
        (["--tokens", "nan"], "--tokens nan is not a number above 0; use for example 3e11 or 300B"),
        (["--html", "."], "--html . is a folder; give the name of a file"),
        (["--search", "--out", "words.json/best.yaml"], "--out words.json/best.yaml: its folder cannot be created .*"),
        (["--search", "sync.mode=diloco"], "--search compares layouts of sync.mode: every_step, not of diloco; .*"),
        (["--max-memory", "x"], "--max-memory x is not a size; use for example 80GB"),
        (["--max-memory", "0"], "--max-memory 0 is not a size; use for example 80GB"),
        (["--max-memory", "80PB"], "--max-memory 80PB is not a size; use for example 80GB"),
        (["--out", "x.yaml"], "--out is for --search and --calibrate; use --json or --html for a plan"),
        (["--nnodes", "1000000"], "--nnodes 1000000 --nproc-per-node 2: 2,000,000 ranks; use at most 1,048,576"),
        (["model.hidden_size=4000000000"], "a tensor has more values or bytes than torch can count (Storage size .*"),
        (["--rank", "2"], "--rank 2: this job has ranks 0 to 1; choose one of them"),
        (
            ["--search", "train.global_batch_size=0"],
            "train.global_batch_size is 0, so it would change with the layout; give the sequences of a step",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_explained(folder, arguments, message):
    words = [re.escape(part) for part in message.split(".*")]
    assert re.match(".*".join(words) + "\n", error_of(folder, *TINY, *TWO, *arguments))


def test_a_plan_needs_a_vocabulary(folder):
    message = error_of(folder, *WITHOUT_VOCABULARY)
    assert message == "data.tokenizer and model.vocab_size are both missing; give one of them\n"
    done = run_here("plan", *WITHOUT_VOCABULARY, "data.tokenizer=bytes", *TWO, "--json", cwd=folder)
    assert json.loads(done.stdout)["parameters"] == PARAMETERS + (384 - 128) * 32


@pytest.mark.parametrize("option", ["--nnodes", "--nproc-per-node"])
def test_a_job_has_ranks(folder, option):
    assert "greater than or equal to 1" in error_of(folder, *TINY, option, "0")


def test_a_model_with_dropout_gets_changes_that_fit(folder):
    """Context parallelism with dropout is not legal. Its attention raises an error, so it must not be traced."""
    fields = ["model.num_heads=1", "model.attention_dropout=0.1", "train.recompute=full", "--device", "machine.json"]
    needed = [
        loaded(folder, *TWO, *fields, f"train.micro_batch_size={size}")["memory_bytes"]["total"] for size in (1, 2)
    ]
    limit = ["--max-memory", f"{sum(needed) / 2e6:.3f}MB"]
    lines = printed(folder, *TWO, *fields, "train.micro_batch_size=2", *limit).splitlines()
    assert "smallest changes that fit, with the change of the step's time:" in lines


def test_json_beside_a_page_is_all_of_stdout(folder):
    done = run_here("plan", *TINY, *TWO, "--json", "--html", "pages/plan.html", cwd=folder)
    assert json.loads(done.stdout)["fits"] and done.stderr == "page in pages/plan.html\n"
    assert (folder / "pages" / "plan.html").exists()


@pytest.mark.parametrize("engine", [["parallel.ddp=torch"], ["parallel.ddp=deepspeed", "deepspeed.zero_stage=3"]])
def test_a_rank_of_an_engine_that_cannot_be_traced_has_the_operations_of_the_plan(folder, engine):
    """Torch's DDP and DeepSpeed do not run on tensors without memory."""
    assert printed(folder, *TWO, *engine, "--rank", "1").endswith("equal to the plan's table\n")


def test_a_config_with_the_fastest_layout_needs_no_change(folder):
    lines = printed(folder, "--nproc-per-node", "1", "--search", "train.micro_batch_size=4").splitlines()
    assert lines[-1] == "the config has the fastest layout"


def test_an_incomplete_profile_is_explained(folder):
    (folder / "part.json").write_text(json.dumps({"format": 1, "fp32 of 2": {"memory": 1e9}}))
    message = error_of(folder, *TINY, *TWO, "--device", "part.json")
    assert message == f"part.json: the rates of fp32 of 2 are wrong (products: Field required); {REMEDY}\n"


def test_a_profile_of_calibrate_has_a_name_that_device_reads(folder, fake_ranks):
    message = error_of(folder, "--calibrate", "--out", "mine.profile")
    assert message.startswith("--out mine.profile: --device reads profiles whose names end in .json; use one, ")
