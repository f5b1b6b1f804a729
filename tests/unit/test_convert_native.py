"""A run's checkpoint in another layout on the disk is the same run: its weights, moments, counters and config."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_lite.checkpoint.directory import resolve
from megatron_lite.checkpoint.layout import LAYOUT_FILE, Layout, dump_layout, read_layout
from megatron_lite.checkpoint.store import verify
from megatron_lite.checkpoint.tensor_file import write_tensors
from megatron_lite.config.load import load_config
from megatron_lite.config.schema import Config
from megatron_lite.convert import native
from megatron_lite.convert.driver import Request, convert
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.training.checkpointing import save_run
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import train_step
from tests.helpers.checkpoints import listed, newest_tensor_files
from tests.helpers.tiny import model_with_biases, next_microbatches, tiny_config

MODELS = {"gpt": "fp32", "codegeex": "bf16", "llama": "fp16"}


def quiet(line: str) -> None:
    """Discards what `convert` prints."""


def train(folder: Path, model: str, **changes) -> Path:
    """A run of two steps with its checkpoint."""
    config = tiny_config(model, run__dir=str(folder), model__num_layers=4, **changes)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng, model_with_biases)
    for _ in range(2):
        train_step(run, next_microbatches(run))
    save_run(run, quiet)
    finalize_megatron()
    return folder


@pytest.fixture(scope="module", params=MODELS)
def run(request, tmp_path_factory):
    return train(tmp_path_factory.mktemp("run"), request.param, train__precision=MODELS[request.param])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return train(tmp_path_factory.mktemp("run"), "gpt", train__precision="bf16")


def edited(folder: Path, **changes) -> None:
    """Changes fields of a layout.json, with the right checksum."""
    newest = resolve(folder)
    layout = read_layout(newest).model_copy(update=changes)
    (newest / LAYOUT_FILE).write_text(dump_layout(layout))


def config_of(folder: Path) -> dict:
    return read_layout(resolve(folder)).config


def test_there_and_back_is_the_same_to_the_byte(run, tmp_path):
    """Masters and moments too: one that was lost, or cut across query, key and value, would not come back."""
    convert(Request(run, tmp_path / "wide", tensor=4, pipeline=2), quiet)
    assert verify(resolve(tmp_path / "wide"), read_layout(resolve(tmp_path / "wide"))) == []
    convert(Request(tmp_path / "wide", tmp_path / "odd", tensor=2, pipeline=3), quiet)
    convert(Request(tmp_path / "odd", tmp_path / "back"), quiet)
    assert newest_tensor_files(tmp_path / "back") == newest_tensor_files(run)
    before, after = read_layout(resolve(run)), read_layout(resolve(tmp_path / "back"))
    assert (after.iteration, after.state, after.tensors) == (before.iteration, before.state, before.tensors)
    assert not list(resolve(tmp_path / "back").glob("*/rng*"))


def test_files_are_those_that_ranks_of_the_layout_would_write(run, tmp_path):
    """Each rank's file has its cut of every tensor of its stage, the tied copy on the last one too."""
    convert(Request(run, tmp_path / "wide", tensor=2, pipeline=2), quiet)
    newest, layout = resolve(tmp_path / "wide"), read_layout(resolve(run))
    whole = load_file(resolve(run) / "mp_rank_00" / "model.safetensors")
    held = {path.name: load_file(path / "model.safetensors") for path in newest.glob("mp_rank_*")}
    assert sorted(held) == ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]
    for place, tensors in held.items():
        for name, tensor in tensors.items():
            source = name if name in whole else "embedding.word_embeddings.weight"
            cut = layout.tensors[source].shard.split(whole[source], int(place[8:10]), 2)
            assert torch.equal(tensor, cut), (place, name)
    assert "decoder.layers.1.mlp.linear_fc2.weight" in held["mp_rank_00_000"]
    assert "decoder.layers.2.mlp.linear_fc2.weight" in held["mp_rank_00_001"]
    assert all(("output_layer.weight" in tensors) == place.endswith("1") for place, tensors in held.items())


def test_the_config_is_the_runs_in_the_new_layout(small, tmp_path):
    """What settings.yaml says is what layout.json says, and pretrain takes it."""
    convert(Request(small, tmp_path / "out", tensor=2, pipeline=2), quiet)
    config = load_config(tmp_path / "out" / "settings.yaml")
    assert config.model_dump(mode="json") == config_of(tmp_path / "out")
    assert "beta1" not in (tmp_path / "out" / "settings.yaml").read_text()  # the default
    before = Config.model_validate(config_of(small), strict=False)
    assert (config.parallel.tensor, config.parallel.pipeline, config.run.dir) == (2, 2, str(tmp_path / "out"))
    assert (config.model, config.optim, config.data) == (before.model, before.optim, before.data)


def test_settings_that_only_the_old_layout_could_have_are_taken_back(tmp_path):
    """Interleaved chunks, uneven stages, sequence parallelism of a length that does not divide, a batch that follows
    from the number of replicas: as they were, the new layout would not start or would not be the same run."""
    folder = train(tmp_path / "run", "gpt", data__seq_length=15, train__global_batch_size=0)
    fields = config_of(folder)
    fields["parallel"] |= {"pipeline": 2, "virtual_pipeline": 2, "schedule": "interleaved"}
    fields["parallel"] |= {"pipeline_layout": [1, 1, 1, 1], "sequence": True}
    layout = read_layout(resolve(folder))
    edited(folder, config=fields, grid=type(layout.grid)(dp=3))
    convert(Request(folder, tmp_path / "out", tensor=2, pipeline=2), quiet)
    after = Config.model_validate(config_of(tmp_path / "out"), strict=False)
    assert (after.parallel.virtual_pipeline, after.parallel.schedule) == (1, "1f1b")
    assert (after.parallel.pipeline_layout, after.parallel.sequence) == ("even", False)
    assert after.train.global_batch_size == 3


def test_fields_of_the_config_can_be_set(small, tmp_path):
    """A run that moves to another machine has its data elsewhere."""
    folder = copied(small, tmp_path)
    fields = config_of(folder)
    fields["data"]["paths"] = ["here/x"]
    edited(folder, config=fields)
    convert(Request(folder, tmp_path / "out", overrides=["data.paths=[there/x]", "model.hidden_dropout=0.5"]), quiet)
    config = config_of(tmp_path / "out")
    assert config["data"]["paths"] == ["there/x"] and config["model"]["hidden_dropout"] == 0.5


@pytest.mark.parametrize(
    "override, message",
    [
        ("model.activation=gelu_tanh", r"model.activation \(checkpoint: gelu, config: gelu_tanh\)"),
        ("model.num_heads=8", r"model.num_heads \(checkpoint: 4, config: 8\)"),
        ("run.seed=5", r"run.seed \(checkpoint: 1234, config: 5\)"),
        ("data.seq_length=8", r"data.seq_length \(checkpoint: 16, config: 8\)"),
        ("data.split=[1,1,1]", r"data.split \("),
        ("data.paths=[x]", r"data.paths \(checkpoint: \[\], config: \['x'\]\)"),
        ("sync.mode=delayed sync.delay=1", r"sync.mode \(checkpoint: every_step, config: delayed\)"),
        ("train.precision=fp32", r"train.precision \(checkpoint: bf16, config: fp32\)"),
    ],
)
def test_optimizer_state_is_not_converted_into_another_run(small, tmp_path, override, message):
    """Training compares the checkpoint with the config in it, which would hide the change."""
    with pytest.raises(
        ConfigError, match=message + r".*: the optimizer state .*; restore them, or convert with --weights-only"
    ):
        convert(Request(small, tmp_path / "out", overrides=override.split()), quiet)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1)])
def test_gradients_that_wait_keep_their_way_of_summing(tmp_path, before, after):
    """Both ends of a pipeline hold a part of a tied embedding's gradient: copied to both, it would count twice. With
    sequence parallelism each tensor-parallel rank has a part of a norm's."""
    folder = train(tmp_path / "run", "gpt", sync__mode="delayed", sync__delay=1)
    fields = config_of(folder)
    fields["parallel"]["pipeline"] = before
    edited(folder, config=fields)
    message = (
        rf"parallel.pipeline \(checkpoint: {before}, config: {after}\): the sums that sync.delay .* --weights-only"
    )
    with pytest.raises(ConfigError, match=message):
        convert(Request(folder, tmp_path / "out", pipeline=after), quiet)
    convert(Request(folder, tmp_path / "same", pipeline=before, tensor=2), quiet)
    fields["parallel"]["sequence"] = True
    edited(folder, config=fields)
    with pytest.raises(ConfigError, match=r"parallel.sequence \(checkpoint: True, config: False\): the sums that"):
        convert(Request(folder, tmp_path / "out", pipeline=before, overrides=["parallel.sequence=false"]), quiet)
    convert(Request(folder, tmp_path / "out", pipeline=after, weights_only=True), quiet)


def test_an_untied_model_changes_its_stages_while_gradients_wait(tmp_path):
    """Its tables are on one stage each."""
    folder = train(tmp_path / "run", "llama", sync__mode="delayed", sync__delay=1)
    convert(Request(folder, tmp_path / "out", pipeline=2), quiet)


def test_what_only_deepspeed_reads_goes_with_it(small, tmp_path):
    """The config would be refused for a stage that the user never gave."""
    folder = copied(small, tmp_path)
    fields = config_of(folder)
    fields["parallel"]["ddp"], fields["deepspeed"]["zero_stage"] = "deepspeed", 3
    edited(folder, config=fields)
    convert(Request(folder, tmp_path / "out", overrides=["parallel.ddp=local"]), quiet)
    assert config_of(tmp_path / "out")["deepspeed"] == Config().deepspeed.model_dump()


@pytest.mark.parametrize("name", ["out", "out_trained"])
def test_a_run_that_starts_from_weights_has_a_folder_of_its_own(small, tmp_path, monkeypatch, name):
    """README's place for both is runs/: in the folder of the weights, training would find what it cannot go on from."""
    monkeypatch.chdir(tmp_path)
    convert(Request(small, Path("runs") / name, weights_only=True), quiet)
    assert Path(load_config(Path("runs") / name / "settings.yaml").run.dir).resolve() != (tmp_path / "runs" / name)


def test_weights_alone_are_a_start_for_another_run(small, tmp_path):
    """Without --weights-only an optimizer's state would not fit the new precision."""
    convert(Request(small, tmp_path / "out", weights_only=True, dtype="fp32", tensor=2), quiet)
    layout, config = read_layout(resolve(tmp_path / "out")), load_config(tmp_path / "out" / "settings.yaml")
    assert layout.state == {} and {kind for tensor in layout.tensors.values() for kind in tensor.values} == {"weight"}
    assert config.train.precision == "fp32" and config.checkpoint.load_weights == str(tmp_path / "out")
    assert config.run.dir != str(tmp_path / "out")
    first, second = native.read(small, {}), native.read(tmp_path / "out", {})
    assert all(torch.equal(first.read(name).float(), second.read(name)) for name in first.tensors)
    convert(Request(tmp_path / "out", tmp_path / "again", dtype="bf16"), quiet)  # there is no state to be lost
    assert newest_tensor_files(tmp_path / "again").keys() == {"mp_rank_00/model.safetensors"}


def test_a_number_format_that_does_not_fit_the_optimizer_is_bad_usage(small, tmp_path):
    with pytest.raises(ConfigError, match=r"--dtype cannot change weights with optimizer state.* add --weights-only"):
        convert(Request(small, tmp_path / "out", dtype="fp32"), quiet)


def test_a_layout_that_cannot_run_is_bad_usage(small, tmp_path):
    """The message is the one that pretrain would give."""
    with pytest.raises(ConfigError, match=r"parallel.tensor is 3, which does not divide model.num_heads \(4\)"):
        convert(Request(small, tmp_path / "out", tensor=3), quiet)
    with pytest.raises(ConfigError, match=r"parallel\.pipeline_layout is even, and 4 layers, .* do not fill 8 stages"):
        convert(Request(small, tmp_path / "out", pipeline=8), quiet)


@pytest.mark.parametrize("path", ["", "checkpoints", "checkpoints/iter_0000002"])
def test_it_is_recognised_by_any_of_its_folders(small, path):
    assert native.recognise(small / path) and native.read(small / path, {}).iteration == 2


def test_other_folders_are_not_ours(small, tmp_path):
    assert not native.recognise(tmp_path) and not native.recognise(small / "nothing")
    assert not native.recognise(small / "checkpoints" / "iter_0000002" / LAYOUT_FILE)


def test_values_that_differ_between_replicas_are_an_error(small, tmp_path):
    """Local SGD: one of four Adam states is not the run's."""
    folder = copied(small, tmp_path)
    layout = listed(read_layout(resolve(folder)))
    name, tensor = next(iter(layout.tensors.items()))
    value = tensor.values["exp_avg"]
    slices = tuple(stored.model_copy(update={"dp": 0}) for stored in value.slices)
    own = {**tensor.values, "exp_avg": value.model_copy(update={"slices": slices})}
    changed = {**layout.tensors, name: tensor.model_copy(update={"values": own})}
    edited(folder, tensors=changed, grid=type(layout.grid)(dp=2))
    with pytest.raises(CheckpointError, match=r"exp_avg differs on 2 data-parallel ranks .* --weights-only"):
        convert(Request(folder, tmp_path / "out"), quiet)
    assert not (tmp_path / "out").exists()
    convert(Request(folder, tmp_path / "out", weights_only=True), quiet)


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target / "copy"))


def test_a_tensor_with_a_gap_is_an_error(small, tmp_path):
    """Memory that nobody filled would become weights."""
    folder = copied(small, tmp_path)
    layout = listed(read_layout(resolve(folder)))
    name, tensor = next(iter(layout.tensors.items()))
    value = tensor.values["weight"]
    slices = (value.slices[0].model_copy(update={"end": 8}),)
    values = {**tensor.values, "weight": value.model_copy(update={"slices": slices})}
    edited(folder, tensors={**layout.tensors, name: tensor.model_copy(update={"values": values})})
    with pytest.raises(CheckpointError, match=f"weight of {name} has 8 of its 8,192 elements"):
        convert(Request(folder, tmp_path / "out"), quiet)


def test_a_config_of_another_model_is_an_error(small, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"decoder.layers.4.* differ from the model section of the config; leave out"
    ):
        native.read(small, {"num_layers": 5})
    with pytest.raises(CheckpointError, match=r"linear_qkv.* differ from the model section"):
        convert(Request(small, tmp_path / "out", weights_only=True, overrides=["model.num_query_groups=2"]), quiet)


def test_a_config_with_unknown_fields_is_an_error(small, tmp_path):
    folder = copied(small, tmp_path)
    edited(folder, config={"model": {"colour": "blue"}})
    with pytest.raises(CheckpointError, match=r"config in layout.json: model.colour"):
        native.read(folder, {})


def test_the_tokenizer_of_a_run_is_found(small, tmp_path):
    """It goes along to Hugging Face, from the run's folder alone: anybody may have written the config."""
    folder = copied(small, tmp_path)
    for place, prefix in ((folder / "own", "own"), (tmp_path, str(tmp_path))):
        place.mkdir(exist_ok=True)
        (place / "vocab.json").write_text(json.dumps({"<|endoftext|>": 0}))
        (place / "merges.txt").write_text("#version: 0.2\n")
        fields = config_of(folder)
        fields["data"]["tokenizer"] = f"gpt2:{prefix}/vocab.json,{prefix}/merges.txt"
        edited(folder, config=fields)
        read = native.read(folder, {})
        if place == folder / "own":
            assert read.tokenizer == {name: place / name for name in ("vocab.json", "merges.txt")} and not read.notes
    assert not read.tokenizer and f"is not in {folder} and is not copied; give data.tokenizer=SPEC" in read.notes[0]


CUSTOM = {"model_provider": "mine.py:build"}


def custom(small: Path, tmp_path: Path, prefix: str) -> Path:
    """The checkpoint of a custom model, whose tensors have these names with a prefix."""
    folder = copied(small, tmp_path)
    newest = resolve(folder)
    content = json.loads(dump_layout(read_layout(newest)))

    def renamed(key: str) -> str:
        kind, slash, name = key.rpartition("/")
        return f"{kind}{slash}{prefix}{name}"

    for name in [name for name in content["files"] if prefix and "rng" not in name]:
        tensors = {
            renamed(key): tensor.clone() for key, tensor in load_file(newest / name).items()
        }  # not the mapped file
        content["files"][name] = write_tensors(newest / name, tensors).model_dump()
    del content["crc32"]
    content |= {"origin": CUSTOM, "tensors": {prefix + name: found for name, found in content["tensors"].items()}}
    (newest / LAYOUT_FILE).write_text(dump_layout(Layout.model_validate(content)))
    return folder


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("prefix", ["", "inner."])
def test_a_custom_model_keeps_its_tensors_and_its_name(small, tmp_path, prefix, weights_only):
    """Whatever it computes: its tensors are moved as layout.json describes them, and nobody takes it for get_model."""
    folder, lines = custom(small, tmp_path, prefix), []
    request = Request(folder, tmp_path / "wide", tensor=2, weights_only=weights_only, verify=True)
    convert(request, lines.append)
    assert lines[1].startswith("verified: all ") and lines[1].endswith(" tensors are equal to the bit")
    kind = "train from" if weights_only else "resume"
    command = f"megatron-lite pretrain --config {tmp_path}/wide/settings.yaml --model mine.py:build --nproc-per-node 2"
    assert lines[-1] == f"{kind} it: {command} data.paths=[PREFIX]"
    convert(Request(tmp_path / "wide", tmp_path / "back"), quiet)
    before, after = newest_tensor_files(folder), newest_tensor_files(tmp_path / "back")
    layout = read_layout(resolve(tmp_path / "back"))
    assert layout.origin == CUSTOM and all(name.startswith(prefix) for name in layout.tensors)
    if not prefix:
        assert after.items() <= before.items() and (weights_only or after == before)


def test_a_custom_model_is_not_converted_to_what_it_is_not(small, tmp_path):
    """Its stages are those of its provider, and another format has no place for its name."""
    folder = custom(small, tmp_path, "inner.")
    for changes, error, message in (
        (
            {"target_format": "huggingface"},
            CheckpointError,
            "is the custom model mine.py:build, which huggingface cannot hold; use --to",
        ),
        ({"pipeline": 2}, ConfigError, "--pipeline is 2, but the source is a custom model .*; use 1"),
    ):
        with pytest.raises(error, match=message):
            convert(Request(folder, tmp_path / "out", **changes), quiet)
    config = config_of(folder)
    config["model"] |= {"num_heads": 3, "num_query_groups": 3, "head_dim": 8, "ffn_hidden_size": 96}
    edited(folder, config={**config, "model": config["model"] | {"padded_vocab_size": 258}})
    with pytest.raises(ConfigError, match=r"--tensor is 3, but inner.* cannot be split"):
        convert(Request(folder, tmp_path / "out", tensor=3), quiet)


def test_the_paths_of_a_checkpoint_do_not_become_the_config_of_its_user(small, tmp_path):
    """The command that resumes the run would write to a folder, and train on a corpus, that somebody else names."""
    folder = tmp_path / "source"
    shutil.copytree(small, folder)
    config, names = config_of(folder), ["data.paths", "data.cache_dir", "checkpoint.load"]
    for name in names:
        section, field = name.split(".")
        config[section][field] = [f"{tmp_path}/x"] if field == "paths" else f"{tmp_path}/x"
    edited(folder, config=config)
    lines: list[str] = []
    convert(Request(folder, tmp_path / "out", pipeline=2, overrides=["data.cache_dir=mine"]), lines.append)
    told = "settings.yaml has no data.paths and checkpoint.load: give your own on the command line"
    assert told in lines
    found = load_config(tmp_path / "out" / "settings.yaml")
    assert (found.data.paths, found.data.cache_dir, found.checkpoint.load) == ((), "mine", "")


@pytest.mark.parametrize("name", ["o\n1", "o\x1b[31m", "o\udcff"])
def test_a_target_that_cannot_be_a_run_dir_is_an_error_before_the_work(small, tmp_path, name):
    with pytest.raises(ConfigError, match=r"a run\.dir cannot have this name"):
        convert(Request(small, tmp_path / name), quiet)


def test_a_run_in_another_layout_is_resumed(small, tmp_path):
    lines: list[str] = []
    convert(Request(small, tmp_path / "out", pipeline=2, overrides=["data.paths=[x]"], weights_only=True), lines.append)
    convert(Request(small, tmp_path / "again", overrides=["checkpoint.load_weights=elsewhere"]), lines.append)
    commands = [line for line in lines if "megatron-lite pretrain" in line]
    assert commands == [
        f"train from it: megatron-lite pretrain --config {tmp_path}/out/settings.yaml --nproc-per-node 2",
        f"resume it: megatron-lite pretrain --config {tmp_path}/again/settings.yaml data.paths=[PREFIX]",
    ]
