"""What a pipelined run says about its pipeline: the line at its start, `log.trace` and `train.debug`."""

import contextlib
import io
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from megatron_lite.errors import ConfigError
from megatron_lite.launch.pool import RanksFailed
from megatron_lite.model.build import get_model
from megatron_lite.plan.trace import traced_step
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.pretrain import pretrain
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import train_step
from tests.helpers.runs import counting_splits
from tests.helpers.tiny import portion, tiny_config

PIPELINE = {"parallel__pipeline": 2, "model__num_layers": 3, "train__micro_batch_size": 2}


def printed(folder: Path, **changes) -> str:
    """What this rank prints while it trains."""
    config = tiny_config("gpt", run__dir=str(folder), log__trace="true", **PIPELINE, **changes)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        pretrain(config, datasets_provider=counting_splits, traced_step=traced_step)
    return out.getvalue()


def test_a_pipelined_run_tells_its_schedule_and_records_one_iteration(ranks, tmp_path):
    text, silent = ranks(2, printed, tmp_path, train__iterations=4)
    assert silent == ""
    assert (
        " > pipeline schedule 1f1b with 4 micro-batches, layers of each stage: 2 1; bubble 0.200 if stages were equal"
        in text
    )
    found = re.search(
        r"pipeline of iteration 3, 1f1b, 4 micro-batches: bubble (0\.\d{3}) measured, (0\.\d{3}) predicted from the "
        r"mean time of each stage's actions, 0\.200 with equal stages; timeline in (\S+)",
        text,
    )
    assert found and text.count("pipeline of iteration") == 1
    trace = json.loads(Path(found[3]).read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for rank, last in ((0, "B3.0"), (1, "B3.0")):
        own = [event for event in events if event["pid"] == rank]
        names = [event["name"] for event in own]
        assert names[0] == "F0.0" and names[-3:] == [last, "finalize_grads", "optimizer"]
        assert sorted(names[:-2]) == sorted(f"{op}{number}.0" for op in "FB" for number in range(4))
        for event, following in pairwise(own):
            assert event["dur"] > 0 and event["ts"] >= 0
            assert event["ts"] + event["dur"] <= following["ts"]
    start = {(event["pid"], event["name"]): event["ts"] for event in events}
    end = {(event["pid"], event["name"]): event["ts"] + event["dur"] for event in events}
    # Ranks of one machine share a clock, so the file shows who waits for whom.
    assert start[1, "F0.0"] > end[0, "F0.0"] and start[0, "B0.0"] > end[1, "B0.0"]


def test_a_run_shorter_than_the_traced_iteration_traces_its_last(ranks, tmp_path):
    text, _ = ranks(2, printed, tmp_path, train__iterations=2, parallel__schedule="zb-h1")
    assert "pipeline of iteration 2, zb-h1" in text


def test_the_core_alone_raises_for_a_trace(tmp_path):
    """A run without its trace would be noticed only when it has ended."""
    config = tiny_config("gpt", run__dir=str(tmp_path), log__trace="true")
    with pytest.raises(ConfigError, match=r"log\.trace is true, .*; call megatron_lite\.pretrain"):
        pretrain(config, datasets_provider=counting_splits)


def train_with_a_broken_copy(break_it: bool, **changes) -> None:
    """Two steps, with one bit of the last stage's copy changed before the second."""
    config = tiny_config("gpt", train__debug="true", **changes)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng)
    train_step(run, portion(run))
    if break_it and ctx.pp.is_last:
        run.params["output_layer.weight"].data.view(-1)[7] += 1e-6
    train_step(run, portion(run))
    finalize_megatron()


@pytest.mark.parametrize("pipeline", [2, 4])
def test_debug_refuses_copies_of_the_embedding_that_differ_in_one_bit(ranks, pipeline):
    """On every rank, the middle stages that hold no copy too: a rank that went on would wait for the others."""
    changes = {"parallel__pipeline": pipeline, "model__num_layers": 4}
    ranks(pipeline, train_with_a_broken_copy, False, **PIPELINE | changes)
    with pytest.raises(RanksFailed, match=r"word embedding .* and its copy on the last stage.* differ") as caught:
        ranks(pipeline, train_with_a_broken_copy, True, **PIPELINE | changes)
    assert f"failed on {pipeline} of {pipeline} ranks" in str(caught.value)


def own_model(config, ctx, rng, **options):
    """Draws its weights from the rank's own stream, as a script may."""
    chunks = get_model(config, ctx, rng, **options)
    torch.manual_seed(100 + ctx.rank)
    for chunk in chunks:
        for parameter in chunk.parameters():
            torch.nn.init.normal_(parameter)
    return chunks


def first_values() -> torch.Tensor:
    config = tiny_config("gpt", **PIPELINE)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng, own_model)
    name = "embedding.word_embeddings.weight" if ctx.pp.is_first else "output_layer.weight"
    values = run.params[name].detach().clone()
    finalize_megatron()
    return values


def test_a_tied_copy_starts_as_the_original_in_a_model_that_draws_at_random(ranks):
    """Copies that start apart never meet: only their gradients are summed."""
    first, last = ranks(2, first_values)
    assert torch.equal(first, last)
