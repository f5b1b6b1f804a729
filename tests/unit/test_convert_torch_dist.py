"""Megatron-LM's torch_dist format: what megatron-core writes is read, and what we write it loads."""

import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.testing import assert_close

from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert import megatron, native, torch_dist, verify
from megatron_lite.convert.distributed_files import DistributedFiles
from megatron_lite.convert.driver import Request, convert, recognised
from megatron_lite.convert.huggingface import read as read_huggingface
from megatron_lite.convert.megatron_args import args_for
from megatron_lite.errors import CheckpointError, ConfigError, DamagedCheckpoint
from tests.helpers.huggingface import LLAMA_SIZES, gpt2, llama, of_family
from tests.helpers.megatron_core import logits_of_distributed, save_distributed

GPT = ModelConfig(
    num_layers=3,
    hidden_size=32,
    num_heads=4,
    vocab_size=250,
    activation="gelu",
    tie_embeddings=True,
    max_position_embeddings=32,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
LLAMA = GPT.model_copy(
    update={
        "num_query_groups": 2,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "ffn_hidden_size": 64,
        "position": "rotary",
        "bias": False,
        "tie_embeddings": False,
    }
)
MODELS = {"gpt": GPT, "llama": LLAMA}


def print_nothing(line: str) -> None:
    """Print nothing."""


def args_of(model: ModelConfig) -> dict:
    return vars(args_for(model, tensor=1, pipeline=1, iteration=7, dtype=torch.float32)) | {"padded_vocab_size": 256}


@pytest.fixture(scope="module", params=MODELS)
def saved(request, ranks, tmp_path_factory):
    """One model of megatron-core on two tensor-parallel ranks, in its two formats."""
    folder, model = tmp_path_factory.mktemp("core"), MODELS[request.param]
    args = {name: value for name, value in args_of(model).items() if name != "tensor_model_parallel_size"}
    ranks(2, save_distributed, model, str(folder), args, 2)
    return model, folder


def test_what_megatron_core_writes_on_two_ranks_is_read(saved, tmp_path):
    """The files of ranks hold the same weights in another form; their reader is tested on its own."""
    model, folder = saved
    assert recognised(folder / "dist") == "torch_dist"
    got, want = torch_dist.read(folder / "dist", {}), megatron.read(folder / "ranks", {})
    assert got.model == want.model
    assert got.model.model_copy(update={"head_dim": 0, "ffn_hidden_size": model.ffn_hidden_size}) == model.model_copy(
        update={"ffn_hidden_size": model.ffn_hidden_size, "num_query_groups": got.model.num_query_groups}
    )
    assert got.tensors == want.tensors and got.iteration == 7
    assert all(torch.equal(got.read(name), want.read(name)) for name in want.tensors)
    lines: list[str] = []
    convert(Request(folder / "dist", tmp_path / "ours", tensor=2, pipeline=3, verify=True), lines.append)
    assert any("equal to the bit" in line for line in lines)


@pytest.mark.parametrize("name", MODELS)
def test_megatron_core_loads_what_we_write(ranks, tmp_path, name):
    """1e-5: the order of fp32 sums on logits of about 2."""
    theirs = gpt2(activation_function="gelu") if name == "gpt" else llama()
    theirs.save_pretrained(tmp_path / "hf")
    convert(Request(tmp_path / "hf", tmp_path / "ours", tensor=2), print_nothing)
    convert(Request(tmp_path / "ours", tmp_path / "dist", target_format="torch_dist", verify=True), print_nothing)
    checkpoint = native.read(tmp_path / "ours", {})
    tokens = torch.randint(250, (2, 20), generator=torch.Generator().manual_seed(2))
    (got,) = ranks(1, logits_of_distributed, checkpoint.model, str(tmp_path / "dist" / "release"), tokens)
    assert_close(got, verify.ours(checkpoint)(tokens), rtol=0, atol=1e-4)


def test_a_layer_of_a_stacked_tensor_is_read_alone(saved):
    """A model of 100 layers would else need all of them in memory."""
    _, folder = saved
    files = DistributedFiles(folder / "dist" / "iter_0000007")
    name = "decoder.layers.mlp.linear_fc2.weight"
    full = files.read(name, (0, 0, 0), files.specs[name].shape)
    assert torch.equal(files.read(name, (1, 3, 5), (2, 7, 11)), full[1:3, 3:10, 5:16])


def test_a_plain_save_with_names_of_megatron_is_read(tmp_path):
    """torch.distributed.checkpoint saves any dict of tensors; `model.` before the names is left out."""
    theirs = llama()
    theirs.save_pretrained(tmp_path / "hf")
    source = read_huggingface(tmp_path / "hf", {})
    state = {f"model.{name}": source.read(name) for name in source.tensors}
    for name in [name for name in state if ".linear_qkv." in name]:
        q, k, v = state[name].split([32, 16, 16])
        groups = zip(q.split(8), k.split(4), v.split(4), strict=True)
        state[name] = torch.cat([part for group in groups for part in group])
    state["optimizer.state.exp_avg.output_layer.weight"] = torch.ones(3)
    dcp.save(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    fields = {"num_heads": 8, "num_query_groups": 4, "activation": "swiglu", "norm_eps": 1e-6, "vocab_size": 251}
    fields |= {"max_position_embeddings": 24, "rotary_base": 10000.0}
    got = torch_dist.read(tmp_path / "plain", fields)
    assert all(torch.equal(got.read(name), source.read(name)) for name in source.tensors)
    assert "its optimizer state is left out" in got.notes
    with pytest.raises(CheckpointError, match=r"neither its arguments nor its tensors have model.num_heads"):
        torch_dist.read(tmp_path / "plain", {})


def test_a_plain_save_with_names_of_hugging_face_is_read_with_its_config(tmp_path):
    """Training programs save the model of transformers so; its config.json says what the tensors are."""
    theirs = of_family("qwen3")
    theirs.save_pretrained(tmp_path / "hf")
    dcp.save(dict(theirs.state_dict()), checkpoint_id=tmp_path / "plain", no_dist=True)
    shutil.copy(tmp_path / "hf" / "config.json", tmp_path / "plain")
    assert recognised(tmp_path / "plain") == "huggingface"
    got, want = read_huggingface(tmp_path / "plain", {}), read_huggingface(tmp_path / "hf", {})
    assert got.tensors == want.tensors
    assert all(torch.equal(got.read(name), want.read(name)) for name in want.tensors)
    assert got.model.vocab_size == LLAMA_SIZES["vocab_size"]


class Surprise:
    """What a malicious file could have in place of a description."""

    def __reduce__(self):
        return (print, ("code of the file ran",))


def test_bad_folders_are_errors_that_name_the_file(saved, tmp_path, capsys):
    """Nothing of a file runs, and nothing is half-written."""
    _, source = saved
    folder = tmp_path / "src"

    def refused(message: str, error: type = CheckpointError) -> None:
        with pytest.raises(error, match=message):
            convert(Request(tmp_path / "src", tmp_path / "out", source_format="torch_dist"), print_nothing)
        assert not (tmp_path / "out").exists() and not (tmp_path / ".new-out").exists()
        shutil.rmtree(folder)

    shutil.copytree(source / "dist" / "iter_0000007", folder)
    (folder / "__0_1.distcp").unlink()
    refused(r"src: lacks __0_1.distcp, which .metadata names; fetch it again")
    shutil.copytree(source / "dist" / "iter_0000007", folder)
    data = (folder / "__1_0.distcp").read_bytes()
    (folder / "__1_0.distcp").write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    refused(r"src: .* cannot be read .*; fetch it again")
    shutil.copytree(source / "dist" / "iter_0000007", folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Surprise()))
    refused(r".metadata: is damaged \(TypeError: it does not describe a checkpoint\); fetch it again")
    assert "code of the file ran" not in capsys.readouterr().out
    shutil.copytree(source / "dist" / "iter_0000007", folder)
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:100])
    refused(r".metadata: is damaged \(.*\); fetch it again")
    shutil.copytree(source / "dist" / "iter_0000007", folder)
    content = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(content.storage_data.values())).relative_path = "../outside.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    refused(r"names '../outside.distcp', which is not a file of this folder")
    for change, message in (
        (lambda found: setattr(found.properties, "dtype", None), "a tensor has no dtype"),
        (lambda found: found.chunks.append(ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))), "a chunk has not"),
        (lambda found: setattr(found, "chunks", 7), "TypeError"),
        (
            lambda found: setattr(found, "size", torch.Size([10**9, *found.size[1:]])),
            r"has [\d,]+ values in chunks for [\d,]+,000,000,000, which overlap or leave a gap",
        ),
    ):
        shutil.copytree(source / "dist" / "iter_0000007", folder)
        content = pickle.loads((folder / ".metadata").read_bytes())
        change(content.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"])
        (folder / ".metadata").write_bytes(pickle.dumps(content))
        refused(message)
    dcp.save({"layers.0.attention.wq": torch.ones(2, 2)}, checkpoint_id=folder, no_dist=True)
    refused(r"has no word embeddings under a name of megatron-core.*layers.0.attention.wq. Put a config.json beside")


def test_tensors_of_wrong_forms_are_errors_that_name_them(tmp_path):
    words = {"embedding.word_embeddings.weight": torch.ones(128, 8)}
    for number, (extra, message) in enumerate(
        (
            ({"decoder.layers.mlp.linear_fc2.weight": torch.tensor(1.0)}, "is a single value, which no parameter is"),
            ({f"model.{name}": tensor for name, tensor in words.items()}, "is embedding.word_embeddings.weight, which"),
        )
    ):
        dcp.save(words | extra, checkpoint_id=tmp_path / str(number), no_dist=True)
        with pytest.raises(CheckpointError, match=message):
            torch_dist.read(tmp_path / str(number), {})


def test_a_part_without_all_its_values_is_an_error(saved):
    """A rank's file can be of another save."""
    _, folder = saved
    files = DistributedFiles(folder / "dist" / "iter_0000007")
    name = "decoder.layers.mlp.linear_fc2.weight"
    files._chunks[name].pop()
    with pytest.raises(DamagedCheckpoint, match=r"has 0 of the 64 values of a part of decoder.layers.mlp.linear_fc2"):
        files.read(name, (2, 0, files.specs[name].shape[2] - 2), (1, 32, 2))


def test_a_tracker_file_that_names_no_checkpoint_is_an_error(saved, tmp_path):
    _, folder = saved
    shutil.copytree(folder / "dist", tmp_path / "src")
    (tmp_path / "src" / "latest_checkpointed_iteration.txt").write_text("seven")
    with pytest.raises(CheckpointError, match="has 'seven'; expected an iteration or release"):
        torch_dist.read(tmp_path / "src", {})
    (tmp_path / "src" / "latest_checkpointed_iteration.txt").write_text("8")
    with pytest.raises(CheckpointError, match=r"iter_0000008/.metadata: cannot be read: No such file"):
        torch_dist.read(tmp_path / "src", {})


def test_a_layout_for_torch_dist_is_wrong_usage(saved, tmp_path):
    _, folder = saved
    with pytest.raises(ConfigError, match="--tensor is 2 and --pipeline 1, but torch_dist has no ranks; leave"):
        convert(Request(folder / "ranks", tmp_path / "out", target_format="torch_dist", tensor=2), print_nothing)
