"""The command line starts fast, and errors have a message and the right exit code."""

import re
import sys

import pytest
from typer.testing import CliRunner

import megatron_lite
from megatron_lite.cli import app
from megatron_lite.cli.pretrain import check
from megatron_lite.config.load import load_config
from megatron_lite.config.presets import PRESETS
from megatron_lite.errors import ConfigError
from megatron_lite.launch import launcher
from megatron_lite.launch.launcher import launched_world_size
from megatron_lite.launch.nodes import Nodes
from megatron_lite.launch.reports import resolve
from tests.helpers.cases import all_cases
from tests.helpers.command import ROOT, make_corpus, run_here, run_listing_modules, tiny_yaml


@pytest.mark.parametrize(
    "arguments", [["--help"], ["pretrain", "--help"], ["generate", "--help"], ["inspect", "--help"]]
)
def test_help_loads_nothing_heavy(arguments):
    """Loading torch takes seconds."""
    done = run_listing_modules(*arguments)
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout
    assert done.stdout.splitlines()[-1] == "loaded []"


def test_a_dry_run_does_not_load_torch():
    done = run_listing_modules("pretrain", "--config", str(ROOT / "configs/gpt.yaml"), "--dry-run", "optim.lr=1e-3")
    assert "lr: 0.001" in done.stdout
    assert done.stdout.splitlines()[-1] == "loaded ['numpy']"


def test_a_dry_run_prints_resolved_values_that_load_again(tmp_path):
    """Unresolved zeros would hide a wrong size until training starts."""
    config = tiny_yaml(tmp_path, make_corpus(tmp_path), optim={"lr": 0.003, "schedule": "wsd"})
    done = run_here("pretrain", "--config", str(config), "--dry-run", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    first, second, *_ = done.stdout.splitlines()
    assert first == (
        "# 52,512 parameters, padding included; the training state takes 0.00084 GB on the largest of 1 rank"
    )
    assert second == "# 128 tokens per step, 8 steps, 1,024 tokens"
    (tmp_path / "printed.yaml").write_text(done.stdout)
    again = load_config(tmp_path / "printed.yaml")
    assert again.model.vocab_size == 257 and again.model.padded_vocab_size == 384
    assert (again.model.ffn_hidden_size, again.model.head_dim, again.model.num_query_groups) == (128, 8, 4)
    assert (again.optim.decay_iterations, again.optim.wsd_decay_iterations) == (8, 1)
    repeated = run_here("pretrain", "--config", "printed.yaml", "--dry-run", cwd=tmp_path)
    assert repeated.stdout == done.stdout


@pytest.mark.parametrize("option", ["--dry-run", "--nproc-per-node=2"])
def test_missing_data_exits_with_2_before_any_rank_starts(tmp_path, option):
    """One process reports all missing files, instead of every rank after seconds."""
    fields = ["data.paths=[nosuch,other]", "data.tokenizer=hf:gone.json", "model.vocab_size=0"]
    done = run_here("pretrain", "--config", str(ROOT / "configs/gpt.yaml"), option, *fields, cwd=tmp_path)
    assert done.returncode == 2
    starts = [line.partition(";")[0] for line in done.stderr.splitlines()]
    assert starts == [
        "data.paths: nosuch.idx: no such file",
        "data.paths: other.idx: no such file",
        "data.tokenizer: gone.json: no such tokenizer file",
    ]
    text = "# the number of parameters depends on the tokenizer\n"
    assert done.stdout.startswith(text) == (option == "--dry-run")


def test_on_several_machines_ranks_report_missing_data(tmp_path, monkeypatch):
    """A machine that exits before the rendezvous leaves the others waiting."""
    reached = []
    monkeypatch.setattr(launcher, "run_ranks", lambda *given: reached.append(given) or 0)
    place = ["--nproc-per-node", "1", "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"]
    done = run_here("pretrain", *place, "data.paths=nosuch", "data.tokenizer=bytes", cwd=tmp_path)
    assert (done.returncode, len(reached)) == (0, 1), done.stderr


def test_a_wrong_config_exits_with_2_and_every_message_before_any_rank_starts(tmp_path):
    config = tmp_path / "gpt.yaml"
    config.write_text("model:\n  hidden_sise: 3\n")
    done = run_listing_modules("pretrain", "--config", str(config), "--nproc-per-node", "2", "optim.lr=x")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"{config}:2: unknown field model.hidden_sise; did you mean model.hidden_size?",
        "command line: optim.lr is 'x'; it must be a number above 0",
    ]
    assert done.stdout == "loaded []\n"


def test_the_error_of_a_layout_that_needs_more_processes_names_the_command():
    done = run_listing_modules(
        "pretrain", "--config", str(ROOT / "configs/quickstart.yaml"), "run.dir=a b", "optim.min_lr=1"
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "this layout needs 2 processes, or a multiple of 2; got 1. Start 2 with: megatron-lite pretrain "
        f"--config {ROOT}/configs/quickstart.yaml 'run.dir=a b' optim.min_lr=1 --nproc-per-node 2",
        "optim.min_lr is 1, more than optim.lr (0.0025)",
    ]


def test_a_layout_that_does_not_divide_the_processes_is_an_error():
    done = run_listing_modules("pretrain", "--nproc-per-node", "3", "parallel.tensor=2")
    assert done.returncode == 2
    assert "does not divide the number of processes (3)" in done.stderr


def test_an_error_names_the_rank_under_torchrun():
    """Under torchrun all ranks read the same wrong config."""
    done = run_listing_modules("pretrain", "parallel.tensor=3", RANK="1", WORLD_SIZE="2")
    assert done.returncode == 2
    assert done.stderr.startswith("[rank 1] parallel.tensor * parallel.pipeline * parallel.context is 3")


@pytest.mark.parametrize(
    "arguments", [["pretrain", "--no-such-option"], ["no-such-command"], ["pretrain", "--nproc-per-node", "0"]]
)
def test_wrong_usage_exits_with_2(arguments):
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_processes_come_from_the_option_or_the_launcher_but_not_both(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launched_world_size(None) == 1
    assert launched_world_size(Nodes(4)) == 4
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert launched_world_size(None) == 8
    with pytest.raises(ConfigError, match=r"--nproc-per-node 2 was given .* one of 8 already .* leave it out"):
        launched_world_size(Nodes(2))


@pytest.mark.parametrize("word", ["test", "help"])
def test_an_unknown_command_lists_the_commands(word, tmp_path):
    done = run_here(word, cwd=tmp_path)
    assert done.returncode == 2
    assert f"No such command '{word}'. The commands are pretrain, preprocess, " in done.stderr


def test_version_prints_the_version_of_the_package(tmp_path):
    done = run_here("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"megatron-lite {megatron_lite.__version__}\n")


def test_shell_completion_can_be_printed(tmp_path, monkeypatch):
    # The name of the program would be pytest's.
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)
    monkeypatch.setattr(sys, "argv", ["megatron-lite"])
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done = run_here("--show-completion", "bash", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "_MEGATRON_LITE_COMPLETE" in done.stdout


@pytest.mark.parametrize(
    "given, wanted",
    [
        (["--lr", "3e-4"], "No such option: --lr; give a field of the config without dashes: optim.lr=3e-4"),
        (
            ["--num-layers=4", "--dry-run"],
            "--num-layers; give a field of the config without dashes: model.num_layers=4",
        ),
        (["--optim.lr", "--dry-run"], "--optim.lr; give a field of the config without dashes: optim.lr=VALUE"),
        (["--interval", "5"], "without dashes: sync.interval=5 or checkpoint.interval=5 or log.interval=5"),
        (["--no-such-option"], "No such option: --no-such-option"),
        (["tiny.yaml"], "'tiny.yaml' is not of the form section.field=value; a file is given as --config tiny.yaml"),
        (["tiny"], "'tiny' is not of the form section.field=value\n"),
    ],
)
def test_a_field_or_file_in_the_wrong_form_gets_a_hint(given, wanted, tmp_path):
    """Users of other frameworks type --lr 3e-4."""
    done = run_here("pretrain", *given, cwd=tmp_path)
    assert done.returncode == 2
    assert wanted in done.stderr


@pytest.mark.parametrize("name", ["pretrain", "run", "submit", "presets", "doctor", "generate", "schedule", "convert"])
def test_help_has_no_python_types(name, tmp_path):
    """`<list[Path]>` and `<int range>` mean nothing to users."""
    done = run_here(name, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert not re.search(r"<\w|\(dynamic\)", done.stdout), done.stdout


def test_presets_are_listed_with_their_sizes(tmp_path):
    done = run_here("presets", cwd=tmp_path)
    rows = {row.split()[0]: row.split()[1:] for row in done.stdout.splitlines()}
    assert list(rows) == ["preset", *PRESETS]
    assert rows["llama-70b"] == ["80", "8,192", "64", "8", "28,672", "4,096", "32,000", "68,976.6M"]
    assert rows["codegeex-mini"][-4:] == ["+", "256", "per", "token"]


def test_the_fields_of_every_preset_are_a_config(tmp_path):
    """A user who changes a printed preset would train another model."""
    with all_cases() as case:
        for name in PRESETS:
            with case(name):
                done = run_here("presets", name, cwd=tmp_path)
                (tmp_path / "a.yaml").write_text(done.stdout)
                config, preset = load_config(tmp_path / "a.yaml"), load_config(None, [f"model.preset={name}"])
                assert config.model.model_copy(update={"preset": name}) == preset.model


def test_an_unknown_preset_lists_all_presets(tmp_path):
    done = run_here("presets", "gpt-9", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"unknown preset gpt-9; use one of {', '.join(PRESETS)}\n")


@pytest.mark.parametrize("given", ["abc", "", "0", "-1", "2.5"])
def test_a_wrong_world_size_variable_is_an_error(given):
    done = run_listing_modules("pretrain", WORLD_SIZE=given)
    assert done.returncode == 2
    assert f"the environment variable WORLD_SIZE is {given!r}; a launcher such as torchrun sets it" in done.stderr
    assert "Traceback" not in done.stderr


def messages_of(world_sizes: list[int], *overrides: str) -> list[str]:
    """The messages of `check` for a config with a bytes tokenizer and these overrides."""
    given = ["data.paths=corpus", "data.tokenizer=bytes", "train.global_batch_size=12", *overrides]
    try:
        check(load_config(None, given), world_sizes, command="megatron-lite pretrain")
    except ConfigError as error:
        return str(error).splitlines()
    return []


def test_a_valid_config_has_no_error_for_several_numbers_of_processes():
    assert messages_of([1]) == messages_of([6]) == messages_of([6, 4, 2]) == []


def test_an_error_for_fewer_machines_names_the_number_of_processes():
    """The error would stop an elastic run at the first lost machine."""
    three, one = messages_of([4, 3, 2, 1], "parallel.tensor=2")
    start = "parallel.tensor * parallel.pipeline * parallel.context is 2 (2 * 1 * 1), which does not divide"
    assert three.startswith(f"with 3 processes: {start} the number of processes (3)")
    assert one.startswith(f"with 1 process: {start} the number of processes (1)")
    (message,) = messages_of([12, 8, 4])
    assert message.startswith("with 8 processes: train.global_batch_size is 12")


def test_an_error_for_every_number_of_machines_appears_once():
    assert messages_of([4, 3, 2], "optim.lr=1e-4", "optim.min_lr=1") == [
        "optim.min_lr is 1, more than optim.lr (0.0001)"
    ]


def test_a_varying_number_of_machines_needs_a_global_batch_size():
    assert messages_of([4, 2], "train.global_batch_size=0") == [
        "train.global_batch_size is not given, so it would change with the number of machines (--nnodes); give it"
    ]
    assert messages_of([4], "train.global_batch_size=0") == []


def test_missing_data_is_reported_with_the_other_errors():
    assert messages_of([1], "data.paths=[]", "data.tokenizer=", "optim.lr=1e-4", "optim.min_lr=1") == [
        "optim.min_lr is 1, more than optim.lr (0.0001)",
        "data.paths is empty; give the prefix of a .bin/.idx pair that `megatron-lite preprocess` writes",
        "data.tokenizer and model.vocab_size are both missing; give one of them",
    ]


def test_a_command_line_with_a_range_of_machines_is_checked_for_each(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    place = ["--nproc-per-node", "1", "--nnodes", "1:2", "--master-addr", "127.0.0.1"]
    done = CliRunner().invoke(app, ["pretrain", *place, "data.paths=corpus", "data.tokenizer=bytes", "--dry-run"])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith("train.global_batch_size is not given, so it would change")


def test_resolve_finds_a_function_by_its_name():
    assert resolve("megatron_lite.config.load:load_config").__name__ == "load_config"


def test_public_names_resolve_lazily():
    """The package promises these names; importing it loads no torch."""
    assert set(megatron_lite.__all__) <= set(dir(megatron_lite))
    for name in megatron_lite.__all__:
        assert getattr(megatron_lite, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'megatron_lite' has no attribute 'no_such_name'"):
        megatron_lite.no_such_name  # noqa: B018
