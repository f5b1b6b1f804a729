"""BERT and T5 against transformers with the same weights: logits, losses and gradients, on any tensor-parallel size."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.config.schema import Config, ParallelConfig
from megatron_lite.convert.huggingface import read, recipes
from megatron_lite.convert.recipe import full_table
from megatron_lite.model.build import get_model, named_params, param_table
from megatron_lite.model.masks import Mask
from megatron_lite.parallel.collectives import all_gather, all_reduce
from megatron_lite.parallel.random import seed_everything
from tests.helpers.huggingface import ENCODERS, VOCAB
from tests.helpers.model_runs import context

LENGTHS = [20, 13, 7]


def inputs() -> dict[str, Tensor]:
    random = np.random.RandomState(5)
    drawn = {name: random.randint(VOCAB, size=(3, 20)) for name in ("tokens", "labels", "decoder_tokens")}
    drawn["token_types"] = (np.arange(20)[None] >= [[8], [5], [3]]).astype(int)
    drawn["exchanged"] = np.array([0, 1, 1])
    found = {name: torch.from_numpy(values) for name, values in drawn.items()}
    mask = torch.arange(20)[None] < torch.tensor(LENGTHS)[:, None]
    return found | {"loss_mask": (mask & (torch.arange(20) % 3 == 1)).double(), "attention_mask": mask.long()}


def of_transformers(name: str, folder: str) -> dict[str, Any]:
    """Logits, loss and gradients; saves the model."""
    model = ENCODERS[name]().double()
    model.save_pretrained(folder)
    given = inputs()
    common = {"input_ids": given["tokens"], "attention_mask": given["attention_mask"]}
    if "t5" in name:
        out = model(**common, decoder_input_ids=given["decoder_tokens"], use_cache=False)
        logits, order = out.logits, None
    else:
        out = model(**common, token_type_ids=given["token_types"])
        logits, order = out[0], out[1] if "without" not in name else None
    loss = (F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten(), reduction="none").view(3, 20)
            * given["loss_mask"]).sum()  # fmt: skip
    if order is not None:
        loss = loss + F.cross_entropy(order, given["exchanged"], reduction="sum")
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"logits": logits.detach(), "order": order, "loss": loss.item(), "grads": grads}


def of_ours(folder: str, tp: int, sequence: bool) -> dict[str, Any]:
    """The same of our model on this rank, with full tensors."""
    ctx, checkpoint, given = context(tp), read(Path(folder), {}), inputs()
    parallel = ParallelConfig(tensor=tp, sequence=sequence)
    config = Config(model=checkpoint.model, parallel=parallel)
    chunks = get_model(config, ctx, seed_everything(5, ctx), dtype=torch.float64)
    params, table = named_params(chunks), param_table(chunks)
    with torch.no_grad():
        for name, parameter in params.items():
            parameter.copy_(table[name].shard.split(checkpoint.read(name), ctx.tp.rank, ctx.tp.size))
    model = chunks[0].eval()
    options: dict[str, Any] = {"mask": Mask(causal=False, lengths=torch.tensor(LENGTHS, dtype=torch.int32))}
    name = "token_types" if config.model.architecture == "encoder" else "decoder_tokens"
    options[name] = given[name]

    def called(labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        found = model(given["tokens"], labels, **options)
        return found if isinstance(found, tuple) else (found, None)

    logits = all_gather(called(None)[0].detach(), ctx.tp, dim=-1)[..., :VOCAB].transpose(0, 1)
    losses, order = called(given["labels"])
    loss = (losses * given["loss_mask"].t()).sum()
    if order is not None:
        loss = loss + F.cross_entropy(order, given["exchanged"], reduction="sum")
    loss.backward()
    grads = {}
    for name, parameter in params.items():
        grad = parameter.grad
        assert grad is not None, name
        grad = all_reduce(grad.clone(), ctx.tp) if table[name].sequence_parallel else grad
        grads[name] = table[name].shard.join(list(all_gather(grad[None], ctx.tp, dim=0)))
    return {"logits": logits, "order": None if order is None else order.detach(), "loss": loss.item(), "grads": grads}


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("tp, sequence", [(1, False), (2, False), (2, True), (4, True)])
def test_logits_losses_and_gradients_equal_those_of_transformers(ranks, tmp_path, name, tp, sequence):
    """In fp64 only constants that transformers keeps in fp32, such as its mask and T5's buckets, are rounded.

    Rows have unequal lengths and two token types.
    """
    want = of_transformers(name, str(tmp_path))
    model = read(tmp_path, {}).model
    ours = recipes("t5" if "t5" in name else "bert", model, full_table(model))
    for got in ranks(tp, of_ours, str(tmp_path), tp, sequence):
        torch.testing.assert_close(got["logits"], want["logits"], rtol=0, atol=1e-5)
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-6)
        if want["order"] is not None:
            torch.testing.assert_close(got["order"], want["order"], rtol=0, atol=1e-5)
        compared = 0
        for parameter, recipe in ours.items():
            for theirs, part in zip(recipe.names, recipe.split(got["grads"][parameter]), strict=True):
                reference = want["grads"][theirs]
                assert (part - reference).abs().max() <= 1e-4 * reference.abs().max() + 1e-9, theirs
                compared += 1
        assert compared >= len(want["grads"]) - 2  # without the pooler of a BERT that has no binary head
