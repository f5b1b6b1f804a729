"""Conversion writes a complete target or none, recognises the source, and deletes a target that differs."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from megatron_lite import tokenizer_files
from megatron_lite.checkpoint.directory import resolve
from megatron_lite.checkpoint.layout import LAYOUT_FILE, dump_layout, read_layout
from megatron_lite.checkpoint.match import MODEL_TYPE, STARTS_TEXTS
from megatron_lite.checkpoint.tensor_file import Spec
from megatron_lite.config.load import load_config
from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert import huggingface, native, verify
from megatron_lite.convert.driver import FORMATS, Request, convert, recognised
from megatron_lite.convert.recipe import Checkpoint, full_table
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.files import MARKER
from megatron_lite.preprocess.train_tokenizer import train_sentencepiece
from megatron_lite.tokenizer_files import files_in, files_of
from tests.helpers.huggingface import VOCAB, gpt2, llama


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    gpt2().save_pretrained(folder)
    return folder


def lines_of(request: Request) -> list[str]:
    lines: list[str] = []
    convert(request, lines.append)
    return lines


def test_the_summary_names_source_target_and_the_next_command(source, tmp_path):
    """One line that grep can find, with the recognised format; then the next command."""
    recognised_line, copied, summary, next_step = lines_of(Request(source, tmp_path / "out", tensor=2))
    assert copied == f"copied generation_config.json of {source}"
    assert recognised_line == f"{source} is a checkpoint of huggingface"
    parameters = read_parameters(source)
    assert summary == (
        f"{source} (huggingface) -> {tmp_path}/out (megatron-lite, tp=2 pp=1): 40 tensors, {parameters:,} parameters, "
        f"{4 * parameters:,} bytes; the vocabulary of 251 is padded with 5 rows of zeros"
    )
    command = f"megatron-lite pretrain --config {tmp_path}/out/settings.yaml --nproc-per-node 2 data.paths=[PREFIX]"
    assert next_step == f"train from it: {command}"
    *_, summary = lines_of(Request(tmp_path / "out", tmp_path / "back", "megatron-lite", "huggingface"))
    assert "(megatron-lite) -> " in summary and "(huggingface, " in summary


def read_parameters(folder: Path) -> int:
    """The number of parameters after the conversion of a model, five rows of padding included."""
    return sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values()) + 5 * 32


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "a killed conversion", "missing parents"])
def test_conversion_leaves_the_target_and_no_temporary_folder(source, tmp_path, there):
    """A temporary folder of a killed conversion would otherwise prevent all later ones."""
    target = tmp_path / ("a/b/out" if there == "missing parents" else "out")
    if there == "an empty folder":
        target.mkdir()
    if there == "a killed conversion":
        (tmp_path / ".new-out" / "checkpoints").mkdir(parents=True)
        (tmp_path / ".new-out" / "junk").write_text("")
        (tmp_path / ".new-out" / MARKER).write_text("")
    lines_of(Request(source, target))
    assert sorted(path.name for path in target.parent.iterdir()) == ["out"]
    assert sorted(path.name for path in target.iterdir()) == ["checkpoints", "settings.yaml", "tokenizer"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), RuntimeError("?")])
def test_a_failed_conversion_leaves_no_target(source, tmp_path, error):
    """An incomplete target would look like a complete checkpoint."""
    with mock.patch.object(native, "write_grid", side_effect=error), pytest.raises(BaseException) as raised:
        lines_of(Request(source, tmp_path / "out"))
    assert raised.value is error and list(tmp_path.iterdir()) == []


def test_an_unwritable_target_is_an_error(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"/file: creating the folder failed: File exists"):
        lines_of(Request(source, tmp_path / "file" / "out"))


@pytest.mark.parametrize("there", ["a file", "a folder"])
def test_an_existing_target_is_never_overwritten(source, tmp_path, there):
    target = tmp_path / "out"
    (target if there == "a file" else tmp_path / "x").write_text("precious")
    if there == "a folder":
        target.mkdir()
        (tmp_path / "x").rename(target / "x")
    with pytest.raises(ConfigError, match=f"{target}: exists already; give a new folder, or an empty one"):
        lines_of(Request(source, target))
    assert (target if there == "a file" else target / "x").read_text() == "precious"


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (
            {"source_format": "coreml"},
            ConfigError,
            "the format 'coreml' is unknown; use one of megatron-lite,",
        ),
        ({"target_format": "coreml"}, ConfigError, "the format 'coreml' is unknown"),
        ({"dtype": "int8"}, ConfigError, "--dtype is 'int8'; use one of fp32, bf16, fp16"),
        ({"source_format": "megatron-lite"}, CheckpointError, "looks like huggingface, but --from is megatron-lite"),
        (
            {"source": Path("/nonexistent")},
            CheckpointError,
            "/nonexistent: does not exist; give the folder or the file",
        ),
        ({"overrides": ["parallel.tensor=2"]}, ConfigError, "parallel.tensor cannot be given; use --tensor and"),
        (
            {"overrides": ["data.seq_length=2"], "target_format": "huggingface"},
            ConfigError,
            "data.seq_length cannot be given: huggingface has no such config",
        ),
        ({"overrides": ["model.hidden_sise=2"]}, ConfigError, "unknown field model.hidden_sise"),
    ],
)
def test_wrong_usage_is_an_error_before_anything_is_written(source, tmp_path, changes, error, message):
    with pytest.raises(error) as raised:
        lines_of(Request(**{"source": source, "target": tmp_path / "out", **changes}))
    assert message in str(raised.value) and list(tmp_path.iterdir()) == []


def test_an_unrecognised_source_is_an_error_and_a_given_format_names_the_missing_file(tmp_path):
    """With --from, the reader's error names the missing file."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty: is not a checkpoint of megatron-lite, huggingface"):
        lines_of(Request(tmp_path / "empty", tmp_path / "out"))
    with pytest.raises(CheckpointError, match="empty: has no checkpoint"):
        lines_of(Request(tmp_path / "empty", tmp_path / "out", source_format="megatron-lite"))
    (tmp_path / "config.json").write_text("[")
    assert recognised(tmp_path) == recognised(tmp_path / "config.json") == ""


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("dtype", ["", "bf16", "fp16"])
def test_verify_compares_logits_with_transformers(tmp_path, build, dtype):
    """In both directions; rounding to 16 bits is not a difference."""
    build().save_pretrained(tmp_path / "hf")
    for request in (
        Request(tmp_path / "hf", tmp_path / "ours", tensor=2, pipeline=2, verify=True, dtype=dtype),
        Request(tmp_path / "ours", tmp_path / "back", target_format="huggingface", verify=True),
        Request(tmp_path / "ours", tmp_path / "moved", verify=True),
    ):
        summary = lines_of(request)[1]
        assert summary.startswith("verified: logits of 2 x 24 random tokens differ by at most ")
        assert re.search(r"; all \d+ tensors are equal to the bit$", summary)


@pytest.mark.parametrize("between", ["megatron-lite", "huggingface", "megatron", "torch_dist"])
def test_every_format_is_recognised_and_converts_to_every_other(source, tmp_path, between):
    """Exactly one reader may recognise a folder."""
    lines_of(Request(source, tmp_path / "between", target_format=between, verify=True))
    assert [name for name, module in FORMATS.items() if module.recognise(tmp_path / "between")] == [between]
    for target_format in ("megatron-lite", "huggingface", "megatron", "torch_dist"):
        lines_of(Request(tmp_path / "between", tmp_path / target_format, target_format=target_format, verify=True))
    lines_of(Request(tmp_path / "megatron", tmp_path / "back", target_format="huggingface"))
    back, first = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", source))
    assert back.keys() == first.keys() and all(torch.equal(back[name], first[name]) for name in first)


def test_conversion_to_codegeex_and_back_keeps_the_weights(tmp_path):
    """CodeGeeX's files lack the number of heads, which the user gives; --verify uses it."""
    model = ModelConfig(
        num_layers=2, hidden_size=32, num_heads=4, vocab_size=VOCAB, activation="quick_gelu", top_query_layer=True
    )
    tensors = {name: Spec(torch.float32, meta.shape) for name, meta in full_table(model).items()}
    checkpoint = Checkpoint(model, tensors, lambda name: 0.2 * torch.randn(tuple(tensors[name].shape)))
    (tmp_path / "ours").mkdir()
    options: dict = {"tensor": 1, "pipeline": 1, "progress": lambda count: None}
    native.write(tmp_path / "ours", checkpoint, home=tmp_path / "ours", settings={}, **options)
    lines_of(Request(tmp_path / "ours", tmp_path / "theirs", target_format="codegeex", tensor=2, verify=True))
    request = Request(tmp_path / "theirs", tmp_path / "back", verify=True, overrides=["model.num_heads=4"])
    assert lines_of(request)[0] == f"{tmp_path}/theirs is a checkpoint of codegeex"
    first, second = native.read(tmp_path / "ours", {}), native.read(tmp_path / "back", {})
    assert all(torch.equal(first.read(name), second.read(name)) for name in tensors)


@pytest.mark.parametrize("dtype", ["", "bf16", "fp16"])
@pytest.mark.parametrize("wrong", ["a number", "nan", "a little"])
@pytest.mark.parametrize("target_format", ["megatron-lite", "huggingface"])
def test_a_target_with_other_logits_is_deleted(source, tmp_path, wrong, target_format, dtype):
    """Generated text would not show a transposed matrix."""
    read = huggingface.read

    def spoiled(path: Path, overrides):
        checkpoint = read(path, overrides)
        bring = checkpoint.read
        object.__setattr__(checkpoint, "read", lambda name: spoil(bring(name)) if "fc2.weight" in name else bring(name))
        return checkpoint

    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flip(0) if wrong == "a number" else tensor * {"nan": float("nan"), "a little": 1.01}[wrong]

    with mock.patch.object(huggingface, "read", spoiled), pytest.raises(CheckpointError) as raised:
        lines_of(Request(source, tmp_path / "out", target_format=target_format, dtype=dtype, verify=True))
    assert "is rounding; the target was removed" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_every_weight_is_compared_to_the_bit(source):
    """The logits of 128 tokens do not depend on every value, and hardly on small ones."""
    first, second = (huggingface.read(source, {}) for _ in range(2))
    assert verify.check_weights(first, second) == f"all {len(first.tensors)} tensors are equal to the bit"
    words, bias = "embedding.word_embeddings.weight", "decoder.layers.1.mlp.linear_fc1.bias"

    def spoiled(name: str) -> torch.Tensor:
        tensor = second.read(name)
        if name in (words, bias):
            tensor.view(-1)[-1] += 1  # a row of padding in the embedding
        return tensor

    with pytest.raises(CheckpointError, match=rf"^{bias}: the target differs from the source and was removed"):
        verify.check_weights(first, replace(second, read=spoiled))
    fewer = {name: spec for name, spec in second.tensors.items() if name != words}
    with pytest.raises(CheckpointError, match=f"^{words}: the target differs"):
        verify.check_weights(first, replace(second, tensors=fewer))


@pytest.mark.parametrize("target_format", ["megatron-lite", "huggingface", "megatron"])
def test_the_error_of_a_value_outside_the_dtype_names_the_tensor(source, tmp_path, target_format):
    """The value would become infinite, and every logit NaN."""
    file = Path(shutil.copytree(source, tmp_path / "hf")) / "model.safetensors"
    tensors = load_file(file)
    tensors["transformer.h.1.mlp.c_fc.bias"][3] = -70000.0
    save_file(tensors, file)
    request = Request(tmp_path / "hf", tmp_path / "out", target_format=target_format, dtype="fp16")
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.linear_fc1.bias has values up to 7e\+04, .* use bf16 or"):
        lines_of(request)
    assert not (tmp_path / "out").exists()
    lines_of(replace(request, dtype="bf16"))
    tensors["transformer.h.1.mlp.c_fc.bias"][3] = float("inf")  # infinite in the source
    save_file(tensors, file)
    lines_of(replace(request, target=tmp_path / "inf"))


def test_verify_without_transformers_is_wrong_usage(source, tmp_path):
    with mock.patch.dict(sys.modules, {"transformers": None}):
        with pytest.raises(ConfigError, match=r"compares with transformers, which cannot be imported .*pip install"):
            lines_of(Request(source, tmp_path / "out", verify=True))
        lines_of(Request(source, tmp_path / "out"))


def test_an_error_of_transformers_is_reported(source, tmp_path):
    shutil.copytree(source, tmp_path / "hf")
    save_file({}, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="hf: transformers cannot load it: "):
        verify.of_transformers(tmp_path / "hf", None, ModelConfig())


def test_the_files_of_a_gpt2_tokenizer_are_copied(source, tmp_path):
    """Without the tokenizer, the text of the model cannot be decoded."""
    folder = tmp_path / "hf"
    shutil.copytree(source, folder)
    (folder / "vocab.json").write_text(json.dumps({"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "generation_config.json").unlink()
    lines_of(Request(folder, tmp_path / "ours"))
    spec = load_config(tmp_path / "ours" / "settings.yaml").data.tokenizer
    home = tmp_path / "ours" / "tokenizer"
    assert spec == f"gpt2:{home}/vocab.json,{home}/merges.txt"
    assert read_layout(resolve(tmp_path / "ours")).config["data"]["tokenizer"] == spec
    lines_of(Request(tmp_path / "ours", tmp_path / "back", target_format="huggingface"))
    assert (tmp_path / "back" / "merges.txt").read_bytes() == (folder / "merges.txt").read_bytes()
    for name in ("config.json", "generation_config.json"):  # transformers' generate() reads the second
        assert json.loads((tmp_path / "back" / name).read_text())["eos_token_id"] == 0


def test_an_export_without_tokenizer_files_names_its_end_token(tmp_path):
    """The tokenizer of bytes has no file; without the end token, transformers' generate() would never stop early."""
    gpt2(vocab_size=260).save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "generation_config.json").unlink()
    for spec, end_token in (("bytes", 256), ("", None)):
        folder = tmp_path / f"ours {spec}"
        lines_of(Request(tmp_path / "source", folder, overrides=[f"data.tokenizer={spec}"]))
        lines_of(Request(folder, folder / "back", target_format="huggingface"))
        for name in ("config.json", "generation_config.json"):
            assert json.loads((folder / "back" / name).read_text())["eos_token_id"] == end_token


def test_a_start_from_weights_has_a_warm_up(source, tmp_path):
    """The first moments of a new optimizer are noise, which would damage trained weights."""
    for out, overrides, expected in (("a", [], 100), ("b", ["train.iterations=40"], 4)):
        lines_of(Request(source, tmp_path / out, overrides=overrides))
        assert load_config(tmp_path / out / "settings.yaml").optim.warmup_iterations == expected
    lines_of(Request(source, tmp_path / "c", overrides=["optim.warmup_iterations=7"]))
    assert load_config(tmp_path / "c" / "settings.yaml").optim.warmup_iterations == 7


def test_the_files_of_a_hugging_face_tokenizer_are_copied(source, tmp_path):
    """Most models have one. Its end token is in a second file."""
    folder = tmp_path / "hf"
    shutil.copytree(source, folder)
    model = Tokenizer(models.BPE(vocab={"x": 0, "a": 1, "[END]": 2}, merges=[]))
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[END]"}))
    lines_of(Request(folder, tmp_path / "ours"))
    spec = load_config(tmp_path / "ours" / "settings.yaml").data.tokenizer
    assert spec == f"hf:{tmp_path}/ours/tokenizer/tokenizer.json" and build_tokenizer(spec).eod == 2
    lines_of(Request(tmp_path / "ours", tmp_path / "back", target_format="huggingface"))
    names = {path.name for path in (tmp_path / "back").iterdir()}
    carried = {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names == {"config.json", "model.safetensors", *carried}
    assert all((tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes() for name in carried)


def test_the_config_names_a_copied_tokenizer_only_if_it_fits_the_model(source, tmp_path):
    """A config whose tokenizer has more tokens than the model is an error."""
    folder = tmp_path / "hf"
    shutil.copytree(source, folder)
    (tmp_path / "text").write_text("a b c d e f g\n" * 100)
    model = train_sentencepiece([tmp_path / "text"], tmp_path / "tokenizer", 270)
    shutil.copy(model, folder / "tokenizer.model")
    assert tokenizer_files.spec_in(folder) == f"sentencepiece:{folder}/tokenizer.model"
    lines = lines_of(Request(folder, tmp_path / "ours"))
    assert lines[-2].endswith("; the tokenizer is copied, but megatron_lite cannot read it for 251 tokens")
    assert (tmp_path / "ours" / "tokenizer" / "tokenizer.model").exists()
    assert load_config(tmp_path / "ours" / "settings.yaml").data.tokenizer == ""
    for name in ("vocab.json", "merges.txt", "added_tokens.json"):
        (folder / name).write_text("{}")
    assert tokenizer_files.spec_in(folder) == f"codegeex:{folder}"
    (folder / "tokenizer.json").write_text("{}")
    assert tokenizer_files.spec_in(folder) == f"hf:{folder}/tokenizer.json"
    assert tokenizer_files.readable(f"hf:{folder}/tokenizer.json", VOCAB) is None
    have = files_in(folder)
    assert files_of(f"hf:{folder}") == have == files_of(f"codegeex:{folder}")
    assert files_of(f"hf:{folder}/tokenizer.json") == have
    settings = {"tokenizer.model", "added_tokens.json", "generation_config.json"}
    assert set(files_of(f"sentencepiece:{folder}/tokenizer.model")) == settings
    (folder / "tokenizer.model").rename(folder / "other.model")
    only_model = {"tokenizer.model": folder / "other.model"}
    assert files_of(f"sentencepiece:{folder}/other.model") == only_model
    assert not files_of("bytes") and not files_of("")
    assert files_of("bytes") == {} == files_of("")


def test_fields_that_the_source_lacks_can_be_given(source, tmp_path):
    """Three tensor-parallel ranks of another program need the larger padding."""
    overrides = [
        "model.padded_vocab_size=384",
        "data.tokenizer=bytes",
        "data.seq_length=8",
        "model.hidden_dropout=0.25",
    ]
    lines_of(Request(source, tmp_path / "out", overrides=overrides))
    config = load_config(tmp_path / "out" / "settings.yaml")
    assert (config.data.tokenizer, config.data.seq_length, config.model.hidden_dropout) == ("bytes", 8, 0.25)
    assert native.read(tmp_path / "out", {}).read("embedding.word_embeddings.weight").shape == (384, 32)


@pytest.mark.parametrize("layouts", [1, 2])
def test_every_file_of_a_tokenizer_and_the_ids_of_special_tokens_come_back(source, tmp_path, layouts):
    """The way to our format and back must lose neither a tokenizer that we cannot read nor a chat template."""
    folder = tmp_path / "hf"
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    ids = {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config | ids))
    (folder / "additional_chat_templates").mkdir()
    names = {"tekken.json", "special_tokens_map.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"}
    for name in {*names, "generation_config.json", "vocab.txt", "tokenizer_config.json"}:
        (folder / name).write_text(json.dumps({"content of": name}))
    (folder / "README.md").write_text("not a file of the tokenizer")
    lines_of(Request(folder, tmp_path / "ours 1"))
    for number in range(1, layouts):
        lines_of(Request(tmp_path / f"ours {number}", tmp_path / f"ours {number + 1}", tensor=2))
        shutil.rmtree(tmp_path / f"ours {number}")
    lines_of(Request(tmp_path / f"ours {layouts}", tmp_path / "back", target_format="huggingface"))
    back = {str(path.relative_to(tmp_path / "back")) for path in (tmp_path / "back").rglob("*") if path.is_file()}
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert there - back == {"README.md"}
    for name in back - {"config.json", "model.safetensors"}:
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes(), name
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {name: written[name] for name in ids} == ids


def test_a_tokenizer_beside_a_run_moves_with_another_layout(source, tmp_path):
    """Else the run would need the folder that it was converted from."""
    folder = tmp_path / "hf"
    shutil.copytree(source, folder)
    model = Tokenizer(models.BPE(vocab={"x": 0, "a": 1, "</s>": 2}, merges=[]))
    model.save(str(folder / "tokenizer.json"))
    lines_of(Request(folder, tmp_path / "one"))
    lines_of(Request(tmp_path / "one", tmp_path / "two", tensor=2))
    assert (
        load_config(tmp_path / "two" / "settings.yaml").data.tokenizer == f"hf:{tmp_path}/two/tokenizer/tokenizer.json"
    )
    shutil.rmtree(tmp_path / "one")
    lines_of(Request(tmp_path / "two", tmp_path / "back", target_format="huggingface"))
    assert (tmp_path / "back" / "tokenizer.json").exists()


def test_the_note_of_an_export_names_a_token_that_its_documents_lack(source, tmp_path):
    """transformers would add <s> to each prompt of a model that never saw it."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    Tokenizer(models.BPE(vocab={"x": 0, "<s>": 1, "</s>": 2}, merges=[])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    lines_of(Request(source, tmp_path / "ours", overrides=[f"data.tokenizer=hf:{folder}"]))
    note = "; its documents start without token 1, which other programs may add to prompts"
    newest = resolve(tmp_path / "ours")
    layout = read_layout(newest)
    for number, origin in enumerate(({}, {STARTS_TEXTS: True}, {MODEL_TYPE: "gpt2"})):
        (newest / LAYOUT_FILE).write_text(dump_layout(layout.model_copy(update={"origin": origin})))
        lines = lines_of(Request(tmp_path / "ours", tmp_path / f"hf {number}", target_format="huggingface"))
        assert lines[-1].endswith(note) == (number == 0)
