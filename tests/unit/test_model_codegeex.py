"""CodeGeeX against a plain transcription of its forward pass."""

import torch
from torch.testing import assert_close

from megatron_lite.model.codegeex import TopQueryEmbeddings
from tests.helpers.model_runs import (
    assert_grads_close,
    layer_options,
    random_tokens,
    random_weights,
    run_model,
    tiny,
)
from tests.helpers.plain_codegeex import CODEGEEX, run_plain_codegeex


def test_codegeex_equals_its_plain_transcription():
    """In fp64, up to rounding. A missing norm or a residual from before the final norm is off by 0.01."""
    config = tiny(**CODEGEEX)
    weights = random_weights(config, torch.float64)
    tokens, labels = random_tokens(config)
    logits, loss, grads = run_plain_codegeex(config, weights, tokens, labels)
    run = run_model(config, weights, tokens, labels, tp=1)
    assert_close(run.logits[..., :101].transpose(0, 1), logits, rtol=0, atol=1e-11)
    assert_close(run.loss, loss, rtol=0, atol=1e-11)
    assert_grads_close(run.grads, grads, 1e-11)


def test_each_sequence_has_its_own_dropout_of_query_vectors():
    config = tiny(**CODEGEEX, hidden_dropout=0.5)
    table = TopQueryEmbeddings(config.model, layer_options(torch.float32))
    torch.nn.init.ones_(table.weight)
    queries = table.train().queries(6, 3, None)
    assert queries.shape == (6, 3, 32)
    assert not torch.equal(queries[:, 0], queries[:, 1])
    assert set(queries.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(table.eval().queries(6, 3, None), torch.ones(6, 1, 32))
