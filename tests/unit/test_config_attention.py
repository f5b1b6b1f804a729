"""The choice of an implementation of attention, and the reasons against it."""

import re
from dataclasses import replace

import pytest

from megatron_lite.config.attention import Request, check, obstacles, request_of, select
from megatron_lite.config.load import load_config
from megatron_lite.config.validate import failures
from megatron_lite.errors import ConfigError

FLASH_2 = ["flash_attn", "flash_attn.flash_attn_interface"]
PLAIN = Request(2048, 64, ("causal",), dropout=0.0, softcap=0.0, precision="bf16", device="cpu", trains=True)


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """`packages` has the names of the optional packages that Python can import; at first none."""
    found: set[str] = set()
    monkeypatch.setattr("megatron_lite.config.attention.find_spec", lambda name: name if name in found else None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return found


@pytest.mark.parametrize(
    ("changes", "installed", "name", "why"),
    [
        ({}, [], "sdpa", "auto on a CPU, mask: causal"),
        ({"mask": ("causal", "documents")}, [], "sdpa", "auto on a CPU, mask: causal, documents"),
        ({"mask": ("causal", "window"), "tokens": 1024}, [], "sdpa", "auto on a CPU, mask: causal, window"),
        (
            {"mask": ("causal", "window")},
            [],
            "tiled",
            "auto on a CPU, mask: causal, window; not sdpa: a window needs a "
            "mask of s x s elements, which is made up to 1,024 tokens; got 2,048",
        ),
        ({"softcap": 30.0}, [], "tiled", "auto on a CPU, mask: causal; not sdpa: torch's kernels have no softcap"),
        (
            {"dropout": 0.1},
            [],
            "tiled",
            "auto on a CPU, mask: causal; not sdpa: with dropout torch's CPU kernel stores "
            "all scores, which is allowed up to 1,024 tokens; got 2,048",
        ),
        (
            {"device": "cuda", "dropout": 0.1},
            [],
            "sdpa",
            "auto on a GPU, mask: causal; not flash: Python cannot import "
            "flash_attn (pip install flash-attn) or flash_attn_interface",
        ),
        ({"device": "cuda"}, FLASH_2, "flash", "auto on a GPU, mask: causal"),
        (
            {"device": "cuda", "precision": "fp32"},
            FLASH_2,
            "sdpa",
            "auto on a GPU, mask: causal; not flash: FlashAttention computes in bf16 or fp16, not in fp32",
        ),
        ({"device": "cuda", "mask": ("causal", "documents")}, [], "flex", None),
        ({"device": "cuda", "mask": ("causal", "documents"), "dropout": 0.1}, ["triton"], "triton", None),
        ({"device": ""}, [], "sdpa", "auto, mask: causal"),
    ],
)
def test_auto_takes_the_first_implementation_that_computes_the_request(packages, changes, installed, name, why):
    """The start line says which one runs and why the faster ones do not."""
    packages.update(installed)
    got, reason = select("auto", replace(PLAIN, **changes))
    assert got == name and (why is None or reason == why)


def test_a_named_implementation_is_not_replaced():
    """A run must not be slower, or different in its last bits, than the config says."""
    assert select("math", PLAIN) == ("math", "model.attention is math")
    with pytest.raises(ConfigError, match=r"model.attention is triton: .*; use math or tiled or sdpa$"):
        select("triton", PLAIN)


def test_auto_without_any_implementation_lists_every_reason():
    """On a GPU the tiled loops would be a silent slow path."""
    message = r"no fast implementation computes this model here \(flash: .*; sdpa: .* no softcap.*; change one"
    with pytest.raises(ConfigError, match=message):
        select("auto", replace(PLAIN, device="cuda", mask=("causal", "window"), dropout=0.1, softcap=1.0))


@pytest.mark.parametrize(
    ("name", "changes", "installed", "reason"),
    [
        ("triton", {"device": "cuda"}, [], "Python cannot import triton (pip install triton)"),
        ("triton", {}, ["triton"], "it needs a GPU (TRITON_INTERPRET=1 runs it in Triton's slow interpreter)"),
        (
            "triton",
            {"device": "cuda", "head_size": 8},
            ["triton"],
            "our kernels need a head size of 16 to 256; it is 8",
        ),
        (
            "triton",
            {"device": "cuda", "head_size": 320},
            ["triton"],
            "our kernels need a head size of 16 to 256; it is 320",
        ),
        (
            "triton",
            {"device": "cuda", "precision": "fp64"},
            ["triton"],
            "our kernels compute in fp32, bf16 or fp16, not in fp64",
        ),
        ("flex", {"device": "cuda", "dropout": 0.1}, [], "flex_attention has no dropout, and it is 0.1"),
        ("flex", {"device": "cuda", "precision": "fp64"}, [], "flex_attention does not compute in fp64"),
        ("flex", {}, [], "on a CPU flex_attention has no backward"),
        ("flash", {}, FLASH_2, "it needs a GPU"),
        ("flex", {"device": "cuda", "head_size": 8}, [], "flex_attention needs a head size of at least 16; it is 8"),
        (
            "flash",
            {"device": "cuda", "dropout": 0.1},
            ["flash_attn_interface"],
            "FlashAttention 3 has no softcap, dropout or window through torch (pip install flash-attn)",
        ),
        (
            "flash",
            {"device": "cuda", "mask": ("causal", "window")},
            ["flash_attn"],
            "FlashAttention 4 has no softcap, dropout or window through torch (pip install flash-attn)",
        ),
        (
            "flash",
            {"device": "cuda", "head_size": 320},
            FLASH_2,
            "FlashAttention needs a head size up to 256; it is 320",
        ),
        (
            "flash",
            {"device": "cuda", "softcap": 1.0, "dropout": 0.1},
            FLASH_2,
            "FlashAttention has no dropout with a softcap",
        ),
        ("flash", {"device": "cuda", "mask": ("causal", "lengths")}, FLASH_2, "FlashAttention has no padding"),
        (
            "flash",
            {"device": "cuda", "context_mode": "ring"},
            FLASH_2,
            "with parallel.context_mode: ring it has no backward for some of the keys (ulysses needs none)",
        ),
        (
            "flex",
            {"device": "cuda", "context_mode": "all_gather"},
            [],
            "with parallel.context_mode: all_gather it has no backward for some of the keys (ulysses needs none)",
        ),
        (
            "sdpa",
            {"context_mode": "ring", "mask": ("causal", "window"), "tokens": 1024},
            [],
            "with parallel.context_mode: ring torch's kernels have no window",
        ),
        (
            "sdpa",
            {"context_mode": "ring", "device": "cuda", "precision": "fp32"},
            [],
            "with parallel.context_mode: ring torch's kernel computes in bf16 or fp16, not in fp32",
        ),
        (
            "sdpa",
            {"context_mode": "ring", "device": "cuda", "head_size": 36},
            [],
            "with parallel.context_mode: ring torch's kernel needs a head size that is a multiple of 8; it is 36",
        ),
    ],
)
def test_each_reason_against_an_implementation_is_given(packages, name, changes, installed, reason):
    """A wrong result or a late failure inside a kernel would be the alternative."""
    packages.update(installed)
    request = replace(PLAIN, **changes)
    assert list(obstacles(name, request)) == [reason]
    with pytest.raises(ConfigError, match=re.escape(f"model.attention is {name}: {reason}; use math or ")):
        check(name, request)


def test_the_interpreter_of_triton_needs_no_gpu_and_refuses_bf16(packages, monkeypatch):
    """Its results in bf16 are silently wrong."""
    packages.add("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert list(obstacles("triton", replace(PLAIN, precision="fp32"))) == []
    assert list(obstacles("triton", PLAIN)) == ["Triton's interpreter computes wrong results in bf16"]


@pytest.mark.parametrize("name", ["triton", "flash"])
def test_the_packages_of_a_login_node_do_not_matter(name):
    """A job is submitted, and a checkpoint converted, on machines without the packages of the nodes."""
    assert list(obstacles(name, replace(PLAIN, device=""))) == []


def test_a_request_follows_from_the_config():
    """A window as long as the sequence hides nothing."""
    words = ["model.window_size=100", "data.seq_length=64", "model.attention_dropout=0.2", "train.precision=bf16"]
    config = load_config(None, words)
    assert request_of(config, "meta", trains=False) == Request(
        64, 64, ("causal",), dropout=0.2, softcap=0.0, precision="bf16", device="", trains=False
    )
    config = load_config(None, [*words, "model.window_size=8", "data.reset_attention_mask=true"])
    assert request_of(config, "cuda", trains=True).mask == ("causal", "window", "documents")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.attention=flex", "run.device=cpu", "model.attention_dropout=0"], "model.attention is flex: on a CPU"),
        (
            ["model.attention=sdpa", "model.attention_softcap=30"],
            "model.attention is sdpa: torch's kernels have no soft",
        ),
        (
            ["model.window_attn_skip_freq=2"],
            "model.window_attn_skip_freq is 2 without model.window_size, so there is no",
        ),
        (
            ["model.window_attn_skip_freq=1", "model.window_size=8"],
            "model.window_attn_skip_freq is 1, so no block has a window; use at least 2, or model.window_size: 0",
        ),
        (["data.reset_position_ids=true"], "data.reset_position_ids needs the end-of-document token of data.tokenizer"),
        (["data.reset_attention_mask=true"], "data.reset_attention_mask needs the end-of-document token of data.token"),
        (
            ["train.recompute=uniform:13"],
            "train.recompute is uniform:13, but no pipeline stage has more than 12 layers; use uniform:12, or stage",
        ),
        (
            ["train.recompute=stage", "train.offload_activations=true"],
            "train.offload_activations has nothing to move with train.recompute: stage; use only one of them",
        ),
    ],
)
def test_the_config_is_checked_before_any_rank_starts(words, message):
    """Otherwise a job would wait in the queue of a cluster first."""
    (found,) = failures(load_config(None, words), 1)
    assert found.startswith(message)
