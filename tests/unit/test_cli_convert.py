"""`megatron-lite convert`, and the tool with Megatron's flags: arguments, output and exit codes."""

import runpy
import sys
from pathlib import Path

import pytest

from megatron_lite.checkpoint.layout import read_layout
from megatron_lite.cli import main
from tests.helpers.command import ROOT, run_listing_modules
from tests.helpers.huggingface import copy, edit_config, gpt2

TOOL = ROOT / "tools" / "convert_checkpoint.py"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    gpt2().save_pretrained(folder)
    return folder


def exit_code(monkeypatch, *arguments: str | Path) -> int:
    """The exit code of `convert`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["megatron-lite", "convert", *map(str, arguments)])
    with pytest.raises(SystemExit) as raised:
        main()
    return int(raised.value.code or 0)


def test_help_loads_nothing_heavy():
    done = run_listing_modules("convert", "--help")
    assert done.returncode == 0 and "SECTION.FIELD=VALUE" in done.stdout
    assert done.stdout.splitlines()[-1] == "loaded []"


def test_convert_converts_and_prints_a_summary(source, tmp_path, monkeypatch, capsys):
    """Every option has its effect."""
    options = ["--from", "huggingface", "--to", "megatron-lite", "--tensor", "2", "--pipeline", "3", "--dtype", "bf16"]
    assert exit_code(monkeypatch, source, tmp_path / "out", *options, "--verify", "data.tokenizer=bytes") == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith("verified: logits of 2 x 24 random tokens differ by at most ")
    assert out.splitlines()[1].startswith(f"{source} (huggingface) -> {tmp_path}/out (megatron-lite, tp=2 pp=3): ")
    assert "B/s" not in err  # no progress bar without a terminal
    layout = read_layout(tmp_path / "out" / "checkpoints" / "iter_0000000")
    assert (layout.grid.tp, layout.grid.pp, layout.config["data"]["tokenizer"]) == (2, 3, "bytes")
    assert {value.dtype for tensor in layout.tensors.values() for value in tensor.values.values()} == {"BF16"}
    assert exit_code(monkeypatch, tmp_path / "out", tmp_path / "moved", "--weights-only") == 0


def test_a_terminal_shows_a_progress_bar_in_bytes(source, tmp_path, monkeypatch, capsys):
    """The conversion of a large model takes minutes."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert exit_code(monkeypatch, source, tmp_path / "out") == 0
    assert "B/s]" in capsys.readouterr().err


def test_failures_exit_with_1_and_wrong_usage_with_2(source, tmp_path, monkeypatch, capsys):
    """Scripts read the exit code."""
    assert exit_code(monkeypatch, tmp_path, tmp_path / "out") == 1
    assert "is not a checkpoint of" in capsys.readouterr().err
    assert exit_code(monkeypatch, source, tmp_path / "out", "--tensor", "3") == 2
    assert "parallel.tensor is 3" in capsys.readouterr().err
    assert exit_code(monkeypatch, source) == 2
    assert exit_code(monkeypatch, source, tmp_path / "out", "--tensor", "0") == 2


def use_tool(monkeypatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", [str(TOOL), "--model-type", "GPT", *map(str, arguments)])
    runpy.run_path(str(TOOL), run_name="__main__")


def test_the_tool_takes_megatrons_flags(source, tmp_path, monkeypatch, capsys):
    """Scripts for Megatron's tool need no change."""
    sizes = ["--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "1"]
    places = ["--load-dir", source, "--save-dir", tmp_path / "out"]
    use_tool(monkeypatch, "--loader", "llama_mistral", "--saver", "megatron-lite", *places, *sizes)
    assert "(huggingface) -> " in capsys.readouterr().out
    assert read_layout(tmp_path / "out" / "checkpoints" / "iter_0000000").grid.tp == 2
    places = ["--load-dir", tmp_path / "out", "--save-dir", tmp_path / "back"]
    use_tool(monkeypatch, "--loader", "megatron-lite", "--saver", "hf", *places)
    assert (tmp_path / "back" / "model.safetensors").exists()
    places[-1] = tmp_path / "mcore"
    use_tool(monkeypatch, "--loader", "megatron-lite", "--saver", "mcore", *places)
    assert len(list((tmp_path / "mcore").glob("*/mp_rank_*"))) == 2  # the source's sizes are the defaults
    vocabulary = ["--true-vocab-size", "250"]
    places = ["--load-dir", tmp_path / "mcore", "--save-dir", tmp_path / "again"]
    use_tool(monkeypatch, "--loader", "mcore", "--saver", "megatron-lite", *places, *vocabulary)
    layout = read_layout(tmp_path / "again" / "checkpoints" / "iter_0000000")
    assert (layout.grid.tp, layout.config["model"]["vocab_size"]) == (2, 250)
    places = ["--load-dir", tmp_path / "out", "--save-dir", tmp_path / "back"]
    capsys.readouterr()
    for size in ("--target-tensor-parallel-size", "--target-pipeline-parallel-size"):
        with pytest.raises(SystemExit):
            use_tool(monkeypatch, "--loader", "megatron-lite", "--saver", "megatron", *places, size, "0")
        assert f"argument {size}: invalid count value: '0'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as raised:
        use_tool(monkeypatch, "--loader", "megatron-lite", "--saver", "hf", *places)
    assert raised.value.code == 2 and "back: exists already" in capsys.readouterr().err


def test_ignore_field_leaves_out_a_field_that_is_known_to_be_harmless(source, tmp_path, monkeypatch, capsys):
    """Only the user can know it, so an unknown field alone is an error."""
    folder = copy(source, tmp_path / "src")
    edit_config(folder, a_new_field=3)
    assert exit_code(monkeypatch, folder, tmp_path / "out") == 1
    assert "has the unknown a_new_field = 3; give --ignore-field" in capsys.readouterr().err
    assert exit_code(monkeypatch, folder, tmp_path / "out", "--ignore-field", "a_new_field") == 0
    assert exit_code(monkeypatch, folder, tmp_path / "other", "--ignore-field", "another") == 2
    assert "has no another, which --ignore-field names; leave it out" in capsys.readouterr().err
    assert exit_code(monkeypatch, tmp_path / "out", tmp_path / "other", "--ignore-field", "a_new_field") == 2
    assert "--ignore-field is for huggingface's config.json, and" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_model_in_the_cache_of_the_hub_is_read(source, tmp_path, monkeypatch, capsys):
    """`models--NAME` has the branches' commits in refs/ and links to the files in snapshots/."""
    cache = tmp_path / "models--org--gpt2"
    copy(source, cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    assert exit_code(monkeypatch, cache, tmp_path / "out", "--verify") == 0
    (cache / "refs" / "main").unlink()
    assert exit_code(monkeypatch, cache, tmp_path / "out2") == 0  # of its only snapshot
    copy(source, cache / "snapshots" / "def")
    assert exit_code(monkeypatch, cache, tmp_path / "out3", "--from", "huggingface") == 1
    assert "has no refs/main and 2 snapshots (abc and def); give the folder of one" in capsys.readouterr().err
    (cache / "refs" / "main").write_text("../../other")
    assert exit_code(monkeypatch, cache, tmp_path / "out4", "--from", "huggingface") == 1
    assert "its refs/main is '../../other', not a commit; fetch it again" in capsys.readouterr().err
