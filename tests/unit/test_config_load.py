"""Configs from files and the command line: accepted forms, and the message of each mistake."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.config.load import FIELDS, dump_config, dump_settings, load_config, other_names
from megatron_lite.config.presets import PRESETS
from megatron_lite.config.schema import Config, DataConfig, LogConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from megatron_lite.errors import ConfigError
from tests.helpers.cases import all_cases


def write(folder: Path, text: str) -> Path:
    path = folder / "gpt.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def messages_of(path: Path | None, *overrides: str) -> list[str]:
    """The lines of the error, without the folder of the file."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{path.parent}/" if path else "\0", "").splitlines()


def test_file_and_overrides_make_a_config(tmp_path):
    path = write(tmp_path, "model:\n  num_layers: 4\noptim:\n  lr: 3e-4\n  min_lr: 1E-5\nparallel:\n  sequence: true\n")
    config = load_config(path, ["model.num_layers=6", "data.paths=[a,b]", "run.dir=runs/x"])
    assert config.model.num_layers == 6, "the command line wins"
    assert (config.optim.lr, config.optim.min_lr) == (3e-4, 1e-5), "3e-4 is a number, unlike in YAML 1.1"
    assert config.parallel.sequence is True
    assert config.data.paths == ("a", "b")
    assert config.run.dir == "runs/x"
    assert config.model.hidden_size == ModelConfig().hidden_size


def test_without_a_file_a_config_has_the_defaults():
    assert load_config(None) == Config()


@pytest.mark.parametrize("given_text", ["969,30,1", "[969, 30, 1]", '"969,30,1"', "969.0,30,1"])
def test_split_is_read_in_megatrons_form(given_text):
    assert load_config(None, [f"data.split={given_text}"]).data.split == (969.0, 30.0, 1.0)


@pytest.mark.parametrize(
    "given_text", ["1,2", "1,2,3,4", "1,2,-3", "a,b,c", "[1,2]", "[1,2,x]", "5", "", "true", "1,2,nan"]
)
def test_a_split_that_is_not_three_numbers_is_an_error(given_text):
    (line,) = messages_of(None, f"data.split={given_text}")
    assert line.startswith("command line: data.split ")
    assert line.endswith("it must be exactly three non-negative numbers, such as 969,30,1")


def test_every_mistake_is_reported_at_once_with_its_line(tmp_path):
    """In a queue, fixing one mistake per job would take days."""
    path = write(
        tmp_path,
        "model:\n"
        "  hidden_sise: 768\n"
        "  num_layers: twelve\n"
        "  num_heads: 12\n"
        "  num_heads: 16\n"
        "  lr: 1e-3\n"
        "trian:\n"
        "  iterations: 5\n"
        "train:\n"
        "  precision: bf15\n"
        "  iterations: true\n"
        "optim:\n"
        "  lr: -1\n"
        "  min_lr:\n"
        "  beta1: 1.0\n"
        "  clip_grad: .inf\n"
        "data:\n"
        "  paths: [[a]]\n"
        "log:\n"
        "  - interval\n",
    )
    assert messages_of(path, "parallel.tensor=two", "log.interval=0") == [
        "gpt.yaml:2: unknown field model.hidden_sise; did you mean model.hidden_size?",
        "gpt.yaml:3: model.num_layers is 'twelve'; it must be an integer above 0",
        "gpt.yaml:5: model.num_heads is given twice, on line 4 already; keep one",
        "gpt.yaml:6: unknown field model.lr; did you mean optim.lr?",
        "gpt.yaml:7: unknown section trian; did you mean train?; sections are "
        "run, model, parallel, data, train, optim, deepspeed, sync, checkpoint, faults, log",
        "gpt.yaml:10: train.precision is 'bf15'; it must be one of fp32, bf16, fp16, fp64; did you mean bf16?",
        "gpt.yaml:11: train.iterations is true; it must be an integer above 0",
        "gpt.yaml:13: optim.lr is -1; it must be a number above 0",
        "gpt.yaml:14: optim.min_lr is empty; it must be a number of at least 0",
        "gpt.yaml:15: optim.beta1 is 1.0; it must be a number of at least 0 and below 1",
        "gpt.yaml:16: optim.clip_grad is '.inf'; it must be a number of at least 0",
        "gpt.yaml:18: data.paths is [...]; it must be a list of path prefixes, without control characters",
        "gpt.yaml:20: log must hold indented fields such as `interval`",
        "command line: parallel.tensor is 'two'; it must be an integer above 0",
        "command line: log.interval is 0; it must be an integer above 0",
    ]


def test_every_suggestion_for_a_foreign_name_is_a_field():
    """A field that is renamed would be suggested under its old name."""
    assert set(other_names().values()) <= set(FIELDS)


@pytest.mark.parametrize(
    "override, message",
    [
        ("optim.lr", "'optim.lr' is not of the form section.field=value"),
        ("hidden_size=5", "unknown section hidden_size; did you mean model.hidden_size?; sections are run,"),
        ("optim=5", "optim is a section; name one of its fields, such as optim.lr"),
        ("modl.hidden_size=5", "unknown section modl in modl.hidden_size; did you mean model.hidden_size?"),
        ("train.epochs=3", "unknown field train.epochs; did you mean train.iterations?"),
        ("learning_rate=3", "unknown field learning_rate; did you mean optim.lr?"),
        ("trian.max_steps=3", "unknown field trian.max_steps; did you mean train.iterations?"),
        ("optim.eta=3", "unknown field optim.eta; did you mean optim.beta2?"),
        ("data.shuffle=3", "unknown field data.shuffle; data has paths, split,"),
        ("model.zzz=5", "unknown field model.zzz; model has preset, architecture, num_layers,"),
        ("parallel.tensor=[", "parallel.tensor=[: not valid YAML:"),
        ("parallel.tensor=", "parallel.tensor is empty; it must be an integer above 0"),
        ("parallel.tensor=2.0", "parallel.tensor is 2.0; it must be an integer above 0"),
        ("parallel.sequence=yes", "parallel.sequence is 'yes'; it must be true or false"),
        ("model.preset=5", "model.preset is '5'; it must be one of gpt-125m, gpt-345m, gpt-1.3b,"),
        ("model.preset=[{a: 1}]", "model.preset is '[{a: 1}]'; it must be one of gpt-125m,"),
        ("train.ramp_up=[1,2]", "train.ramp_up is [1, 2]; it must be three integers [start, increment, samples]"),
        ("run.dir=", "run.dir is empty; it must be the path of a folder"),
        ("run.dir=''", "run.dir is ''; it must be the path of a folder"),
        ("run.seed=4294967296", "run.seed is 4294967296; it must be an integer of at least 0 and below 4294967296"),
        ("train.iterations=1__0", "train.iterations is '1__0'; it must be an integer above 0"),
        ("model.num_heads=1_", "model.num_heads is '1_'; it must be an integer above 0"),
        ("optim.lr=1_.5", "optim.lr is '1_.5'; it must be a number above 0"),
        ("optim.lr=1_000", "optim.lr is '1_000'; it must be a number above 0"),
        (f"train.iterations={'9' * 5000}", "train.iterations is inf; it must be an integer above 0"),
        (
            f"data.paths={'[' * 5000}",
            f"data.paths={'[' * 5000}: not valid YAML: brackets or sections are nested too deeply",
        ),
        ("optim.lr={a: 1}", "optim.lr is a section; it must be a number above 0"),
    ],
)
def test_the_error_of_a_wrong_override_names_the_mistake(override, message):
    (line,) = messages_of(None, override)
    assert line.startswith(f"command line: {message}")


def test_the_error_of_an_unknown_preset_suggests_a_similar_one():
    (line,) = messages_of(None, "model.preset=gpt-120m")
    assert line.startswith("command line: model.preset is 'gpt-120m'; it must be one of gpt-125m, gpt-345m,")
    assert line.endswith("; did you mean gpt-125m?")


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "gpt.yaml: the file is empty; add sections such as model: and train:"),
        ("# only a comment\n", "gpt.yaml: the file is empty;"),
        ("model\n", "gpt.yaml:1: the file must hold sections such as `model:`"),
        ("model: 5\n", "gpt.yaml:1: model must hold indented fields such as `preset`"),
        ("model:\n\tnum_layers: 4\n", "gpt.yaml:2: not valid YAML:"),
        ("model: {num_layers: 4\n", "gpt.yaml:2: not valid YAML:"),
        ("model: {}\n---\nmodel: {}\n", "gpt.yaml:2: not valid YAML:"),
        ("model: {}\nmodel: {}\n", "gpt.yaml:2: model is given twice, on line 1 already; keep one"),
        ("model: {preset: [{a: 1}]}\n", "gpt.yaml:1: model.preset is [...]; it must be one of gpt-125m,"),
        (
            "data: &a\n  paths: *a\n",
            "gpt.yaml:2: data.paths is a section; it must be a list of path prefixes, without control characters",
        ),
        (
            "data:\n  paths: &a [*a]\n",
            "gpt.yaml:2: data.paths is [...]; it must be a list of path prefixes, without control characters",
        ),
    ],
)
def test_a_file_that_is_not_a_config_is_an_error(tmp_path, text, message):
    assert messages_of(write(tmp_path, text))[0].startswith(message)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert messages_of(Path("no.yaml")) == [
        f"no.yaml: no such file in {tmp_path}; --config needs a YAML file",
    ]
    assert messages_of(tmp_path)[0].endswith(f"Is a directory: '{tmp_path.name}'")
    (tmp_path / "latin.yaml").write_bytes(b"run:\n  dir: caf\xe9\n")
    assert "latin.yaml: cannot be read as a text file: 'utf-8' codec" in messages_of(tmp_path / "latin.yaml")[0]


def test_a_yaml_tag_is_an_error_and_runs_no_code(tmp_path):
    """A config from another author must not run code."""
    path = write(tmp_path, f"run:\n  dir: !!python/object/apply:os.mkdir ['{tmp_path}/made']\n")
    assert messages_of(path)[0].startswith("gpt.yaml:2: run.dir is [")
    assert not (tmp_path / "made").exists()


def test_an_empty_section_has_the_defaults(tmp_path):
    """A user may comment out all lines of a section."""
    assert load_config(write(tmp_path, "model:\n  num_layers: 3\noptim:\n#  lr: 1e-3\n")).optim == OptimConfig()


@pytest.mark.parametrize("given_text", ["on", "1e5", "007", "2024-01-01", "1:30", "true", "a: b", "[x"])
def test_text_fields_keep_the_given_text(given_text):
    """YAML would read these names of folders as numbers, dates or booleans."""
    assert load_config(None, [f"run.dir={given_text}"]).run.dir == given_text


def test_yaml_booleans_are_accepted_as_words_where_a_field_lists_them(tmp_path):
    """`on` is a boolean in YAML 1.1."""
    assert load_config(write(tmp_path, "model:\n  fusion: on\n")).model.fusion == "on"


def test_a_preset_sets_only_fields_that_are_not_given(tmp_path):
    path = write(tmp_path, "model:\n  num_layers: 2\n")
    model = load_config(path, ["model.preset=llama-70b", "model.ffn_hidden_size=512"]).model
    assert (model.num_layers, model.ffn_hidden_size) == (2, 512)
    assert (model.hidden_size, model.num_query_groups, model.norm) == (8192, 8, "rmsnorm")


def test_a_config_of_a_checkpoint_is_read_back_with_tuples():
    """Checkpoints store the config as JSON, which has no tuples."""
    config = load_config(None, ["data.paths=[a]", "train.ramp_up=[2,2,8]"])
    assert Config.model_validate(json.loads(json.dumps(config.model_dump(mode="json")))) == config


text = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), max_size=20)
numbers = st.floats(min_value=0, max_value=1e300, exclude_min=True)


@settings(max_examples=100, deadline=None)
@given(
    directory=text.filter(bool),
    paths=st.lists(text, max_size=3),
    lr=numbers,
    scale=numbers,
    preset=st.sampled_from(["", "llama-7b"]),
)
def test_a_dumped_config_is_read_back_exactly(tmp_path_factory, directory, paths, lr, scale, preset):
    """A user repeats a run with its `resolved.yaml`."""
    config = Config(
        run=RunConfig(dir=directory),
        model=ModelConfig(preset=preset),
        data=DataConfig(paths=tuple(paths)),
        train=TrainConfig(ramp_up=(2, 2, 100)),
        optim=OptimConfig(lr=lr, initial_loss_scale=scale),
        log=LogConfig(tensorboard=False),
    )
    for dump in (dump_config, dump_settings):
        path = write(tmp_path_factory.mktemp("dump"), dump(config))
        assert load_config(path) == config


def settings_of(*overrides: str) -> dict[str, Any]:
    return yaml.safe_load(dump_settings(load_config(None, overrides)))


def test_settings_are_the_fields_that_a_user_gave(tmp_path):
    """Also those that equal a default: another version may have another one. A preset stays a name."""
    assert settings_of() == {}
    assert settings_of("optim.schedule=cosine", "optim.lr=0.1") == {"optim": {"lr": 0.1, "schedule": "cosine"}}
    fields = ["model.preset=llama-7b", "model.num_layers=2", "model.hidden_dropout=0.1", "train.ramp_up=[2,2,8]"]
    expected = {"preset": "llama-7b", "num_layers": 2, "hidden_dropout": 0.1}  # the default, which the preset changes
    assert settings_of(*fields) == {"model": expected, "train": {"ramp_up": [2, 2, 8]}}


def test_settings_of_a_full_config_are_those_that_differ_from_the_defaults(tmp_path):
    """A run that starts from the resolved.yaml of another one would otherwise have no short settings."""
    config = load_config(None, ["model.preset=llama-7b", "optim.lr=0.1", "optim.schedule=cosine", "run.dir=a"])
    full = load_config(write(tmp_path, dump_config(config)))
    short = {"run": {"dir": "a"}, "model": {"preset": "llama-7b"}, "optim": {"lr": 0.1}}
    assert full == config and yaml.safe_load(dump_settings(full)) == short
    assert yaml.safe_load(dump_settings(Config.model_validate(config.model_dump()))) == short
    changed = config.model_copy(update={"optim": config.optim.model_copy(update={"eps": 1e-6})})
    assert yaml.safe_load(dump_settings(changed))["optim"] == {"lr": 0.1, "schedule": "cosine", "eps": 1e-6}


@pytest.mark.parametrize("preset", PRESETS)
def test_the_settings_of_a_preset_are_its_name(preset):
    assert settings_of(f"model.preset={preset}") == {"model": {"preset": preset}}


def test_a_path_with_a_control_character_is_an_error(tmp_path):
    """NUL would cause a traceback in the file system hours later; a newline would end a line of a job script."""
    fields = ("run.dir", "data.cache_dir", "data.tokenizer", "data.paths", "checkpoint.load", "checkpoint.load_weights")
    with all_cases() as case:
        for field, character in product(fields, ("\0", "\n", "\x1b", "\x7f", "\x85")):
            section, name = field.split(".")
            (tmp_path / "a.yaml").write_text(yaml.safe_dump({section: {name: f"runs/a{character}b"}}))
            message = rf"a.yaml:2: {field} is .*; it must be .* without control characters"
            with case(field, repr(character)), pytest.raises(ConfigError, match=message):
                load_config(tmp_path / "a.yaml")
