"""Reports of a pipelined run on its pipeline: the line at its start, `log.trace` and `train.debug`."""

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
from megatron_lite.plan.layout_lines import layout_lines
from megatron_lite.plan.trace import traced_step
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.pretrain import pretrain
from megatron_lite.training.run import Hooks
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import train_step
from tests.helpers.printed import unwrapped
from tests.helpers.runs import counting_splits
from tests.helpers.tiny import next_microbatches, tiny_config

PIPELINE = {"parallel__pipeline": 2, "model__num_layers": 3, "train__micro_batch_size": 2}


def printed(folder: Path, **changes) -> str:
    """Train; returns the output of this rank."""
    config = tiny_config("gpt", run__dir=str(folder), log__trace="true", **PIPELINE, **changes)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        pretrain(
            config, datasets_provider=counting_splits, hooks=Hooks(traced_step=traced_step, layout_lines=layout_lines)
        )
    return out.getvalue()


def test_a_pipelined_run_prints_its_schedule_and_traces_one_iteration(ranks, tmp_path):
    text, text_of_rank_1 = ranks(2, printed, tmp_path, train__iterations=4)
    assert text_of_rank_1 == ""
    assert (
        "pipeline schedule 1f1b with 4 micro-batches, layers of each stage: 2 1; bubble 0.200 if stages were equal"
        in unwrapped(text)
    )
    found = re.search(
        r"pipeline of iteration 3, 1f1b, 4 micro-batches: bubble (0\.\d{3}) measured, (0\.\d{3}) predicted from the "
        r"mean time of each stage's actions, 0\.200 with equal stages; timeline in (\S+)",
        unwrapped(text),
    )
    assert found and text.count("pipeline of iteration") == 1
    trace = json.loads(Path(found[3]).read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for rank, last in ((0, "B3.0"), (1, "B3.0")):
        events_of_rank = [event for event in events if event["pid"] == rank]
        names = [event["name"] for event in events_of_rank]
        actions = [name for name in names if name[0] in "FB"]
        assert actions[0] == "F0.0" and actions[-1] == last
        assert sorted(actions) == sorted(f"{op}{number}.0" for op in "FB" for number in range(4))
        assert names.index("finalize_grads") > names.index(last) and names[-1] == "optimizer"
        assert set(names) - set(actions) == {"finalize_grads", "optimizer", "loss over all ranks", "pipeline wait"}
        for event, following in pairwise(events_of_rank):
            assert event["dur"] > 0 and event["ts"] >= 0
            assert event["ts"] + event["dur"] <= following["ts"]
    start = {(event["pid"], event["name"]): event["ts"] for event in events}
    end = {(event["pid"], event["name"]): event["ts"] + event["dur"] for event in events}
    # Ranks of one machine share a clock, so the order of events on different ranks is known.
    assert start[1, "F0.0"] > end[0, "F0.0"] and start[0, "B0.0"] > end[1, "B0.0"]


def test_a_run_shorter_than_the_traced_iteration_traces_its_last_one(ranks, tmp_path):
    text, _ = ranks(2, printed, tmp_path, train__iterations=2, parallel__schedule="zb-h1")
    assert "pipeline of iteration 2, zb-h1" in text


def test_the_core_alone_raises_for_a_trace(tmp_path):
    """Otherwise a user would notice the missing trace only at the end of the run."""
    config = tiny_config("gpt", run__dir=str(tmp_path), log__trace="true")
    with pytest.raises(ConfigError, match=r"log\.trace is true, .*; call megatron_lite\.pretrain"):
        pretrain(config, datasets_provider=counting_splits)


def train_with_a_broken_copy(break_it: bool, **changes) -> None:
    """Take two steps; if `break_it`, change one element of the last stage's embedding copy before the second."""
    config = tiny_config("gpt", train__debug="true", **changes)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng)
    train_step(run, next_microbatches(run))
    if break_it and ctx.pp.is_last:
        run.params["output_layer.weight"].data.view(-1)[7] += 1e-6
    train_step(run, next_microbatches(run))
    finalize_megatron()


@pytest.mark.parametrize("pipeline", [2, 4])
def test_debug_raises_on_all_ranks_if_copies_of_the_embedding_differ(ranks, pipeline):
    """Middle stages have no copy, but must raise too. A rank that continued would wait for the others."""
    changes = {"parallel__pipeline": pipeline, "model__num_layers": 4}
    ranks(pipeline, train_with_a_broken_copy, False, **PIPELINE | changes)
    with pytest.raises(RanksFailed, match=r"word embedding .* and its copy on the last stage.* differ") as caught:
        ranks(pipeline, train_with_a_broken_copy, True, **PIPELINE | changes)
    assert f"failed on {pipeline} of {pipeline} ranks" in str(caught.value)


def custom_model(config, ctx, rng, **options):
    """A model whose weights are drawn from another random stream on each rank, as in a custom script."""
    chunks = get_model(config, ctx, rng, **options)
    torch.manual_seed(100 + ctx.rank)
    for chunk in chunks:
        for parameter in chunk.parameters():
            torch.nn.init.normal_(parameter)
    return chunks


def initial_embedding() -> torch.Tensor:
    """The initial values of this stage's copy of the word embedding."""
    config = tiny_config("gpt", **PIPELINE)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng, custom_model)
    name = "embedding.word_embeddings.weight" if ctx.pp.is_first else "output_layer.weight"
    values = run.params[name].detach().clone()
    finalize_megatron()
    return values


def test_tied_copies_start_equal_in_a_custom_model(ranks):
    """Copies with different initial values would stay different, because only their gradients are summed."""
    first, last = ranks(2, initial_embedding)
    assert torch.equal(first, last)
