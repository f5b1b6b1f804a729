"""ddp/local.py in one process: the sums of gradients over micro-batches, and the start of buckets."""

import pytest
import torch
from torch import nn

from megatron_lite.ddp import local
from megatron_lite.ddp.buffer import ALIGNMENT
from megatron_lite.ddp.local import LocalDDP
from megatron_lite.engines.delayed import DelayedDDP
from megatron_lite.errors import TrainingError
from megatron_lite.parallel.context import solo
from megatron_lite.parallel.embedding import VocabParallelEmbedding
from megatron_lite.parallel.linear import ColumnParallelLinear, column_parallel_linear
from megatron_lite.parallel.shard import ParamMeta, Shard
from megatron_lite.parallel.weight_grads import has_product_into

ONE_PARAMETER_PER_BUCKET = 1e-9  # MiB


class Tied(nn.Module):
    """A model that uses its embedding twice, as a language model with a tied head does."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embedding = nn.Parameter(torch.randn(7, 4, generator=generator).to(dtype))
        self.weight = nn.Parameter(torch.randn(4, 4, generator=generator).to(dtype))
        self.bias = nn.Parameter(torch.randn(4, generator=generator).to(dtype))
        self.unused = nn.Parameter(torch.randn(3, generator=generator).to(dtype))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.embedding[tokens] @ self.weight + self.bias)
        return (hidden @ self.embedding.t()).logsumexp(-1).sum()


MICROBATCHES = [torch.tensor([0, 1, 1]), torch.tensor([3, 6, 2]), torch.tensor([5, 0, 3])]


def wrap(model: nn.Module, grad_dtype: torch.dtype = torch.float32, bucket_mb: float = ONE_PARAMETER_PER_BUCKET):
    return engine_of([model], dict(model.named_parameters()), bucket_mb, grad_dtype)


def engine_of(chunks, params, bucket_mb: float = 25.0, grad_dtype: torch.dtype = torch.float32, kind=LocalDDP, **more):
    table = {name: ParamMeta(tuple(parameter.shape), Shard(), "normal") for name, parameter in params.items()}
    return kind(chunks, params, table, solo(), bucket_mb=bucket_mb, grad_dtype=grad_dtype, **more)


def run_step(ddp: LocalDDP, microbatches: list[torch.Tensor]) -> None:
    ddp.zero_grad()
    for number, tokens in enumerate(microbatches):
        ddp.begin_backward(0, is_last=number == len(microbatches) - 1)
        ddp.module(0)(tokens).backward()
    ddp.finish_grad_sync()


@pytest.mark.parametrize("bucket_mb", [ONE_PARAMETER_PER_BUCKET, 25.0])
def test_accumulated_main_grads_equal_autograd(bucket_mb):
    """Bitwise, because both add in the same order. The second step finds values that zero_grad did not reset."""
    model, plain = Tied(torch.float64), Tied(torch.float64)
    ddp = wrap(model, torch.float64, bucket_mb)
    for _ in range(2):
        run_step(ddp, MICROBATCHES)
        plain.zero_grad()
        for tokens in MICROBATCHES:
            plain(tokens).backward()
        for name, parameter in plain.named_parameters():
            expected = torch.zeros_like(parameter) if name == "unused" else parameter.grad
            assert torch.equal(ddp.main_grads[name], expected), name


def test_gradients_are_freed_and_main_grad_is_a_view_of_the_buffer():
    """Otherwise a step would need the memory of the gradients twice."""
    model = Tied(torch.bfloat16)
    ddp = wrap(model)
    run_step(ddp, MICROBATCHES)
    assert all(parameter.grad is None for parameter in model.parameters())
    ddp.grad_memory()[0].fill_(3.0)
    for name, parameter in model.named_parameters():
        assert parameter.main_grad is ddp.main_grads[name]  # type: ignore[attr-defined]
        assert parameter.main_grad.dtype == torch.float32 and (parameter.main_grad == 3.0).all()  # type: ignore


def test_a_parameter_that_stops_being_used_has_a_zero_gradient():
    """A step does not start with zeros, so the gradient of the previous step could remain."""
    model = nn.ParameterDict({"a": torch.tensor([2.0]), "b": torch.tensor([3.0])})
    ddp = wrap(model)
    ddp.zero_grad()
    ddp.begin_backward(0, is_last=True)
    (model["a"] * model["b"]).backward()
    ddp.finish_grad_sync()
    assert [ddp.main_grads[name].item() for name in "ab"] == [3.0, 2.0]
    ddp.zero_grad()
    ddp.begin_backward(0, is_last=True)
    model["a"].square().backward()
    ddp.finish_grad_sync()
    assert [ddp.main_grads[name].item() for name in "ab"] == [4.0, 0.0]


def test_bf16_gradients_are_summed_in_fp32():
    """In bf16, 256 + 1 is 256: most of hundreds of micro-batches would change nothing."""
    weight = nn.ParameterDict({"w": torch.ones(2, dtype=torch.bfloat16)})
    ddp = wrap(weight)
    ddp.zero_grad()
    for number, size in enumerate([256.0, 1.0, 1.0, 1.0]):
        ddp.begin_backward(0, is_last=number == 3)
        (weight["w"] * torch.tensor(size, dtype=torch.bfloat16)).sum().backward()
    ddp.finish_grad_sync()
    assert ddp.main_grads["w"].tolist() == [259.0, 259.0]


@pytest.fixture
def events(monkeypatch):
    """A log of the test: each started bucket's size in units of the alignment, each wait, and entries of the test."""
    log: list[object] = []

    def record(flat, group):
        log.append(flat.numel() / ALIGNMENT)
        return flat, lambda: log.append("waited")

    monkeypatch.setattr(local, "all_reduce_async", record)
    return log


def chain(events: list[object]) -> tuple[nn.Module, LocalDDP]:
    """A model of layers with 1, 2 and 3 units of the alignment, which log their backward, and its engine."""

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList([torch.ones(ALIGNMENT * size) for size in (1, 2, 3)])

        def forward(self):
            x = torch.ones(1, requires_grad=True)
            for layer, weight in enumerate(self.weights):
                x = (x * weight).sum().reshape(1)
                x.register_hook(lambda _, layer=layer: events.append(f"backward of {layer}"))
            return x

    model = Chain()
    return model, wrap(model)


def test_a_bucket_starts_before_the_backward_of_earlier_layers(events):
    """If buckets started after backward, no computation would hide their communication."""
    model, ddp = chain(events)
    ddp.begin_backward(0, is_last=True)
    model().backward()
    assert events == ["backward of 2", 3, "backward of 1", 2, "backward of 0", 1]
    ddp.finish_grad_sync()
    assert events[6:] == ["waited"] * 3


def test_only_the_last_microbatch_communicates_and_a_second_finish_reduces_nothing(events):
    """A second reduction would multiply the gradient by dp."""
    model, ddp = chain(events)
    ddp.begin_backward(0, is_last=False)
    model().backward()
    assert [event for event in events if isinstance(event, float)] == []
    ddp.begin_backward(0, is_last=True)
    model().backward()
    ddp.finish_grad_sync()
    ddp.finish_grad_sync()
    assert [event for event in events if isinstance(event, float)] == [3, 2, 1]


def test_buckets_start_in_buffer_order_when_gradients_arrive_in_another(events):
    """Otherwise ranks whose gradients arrive in different orders would sum different buckets."""
    model = nn.ParameterDict({"first": torch.ones(1), "second": torch.ones(ALIGNMENT + 1)})
    ddp = wrap(model)
    ddp.begin_backward(0, is_last=True)
    model["first"].sum().backward()  # "second" is before it in the buffer
    assert events == []
    model["second"].sum().backward()
    assert events == [2, 1]


def test_a_gradient_after_the_last_one_is_an_error():
    """It would be added to memory that a collective may be summing."""
    model = Tied(torch.float32)
    ddp = wrap(model)
    ddp.begin_backward(0, is_last=True)
    model(MICROBATCHES[0]).backward()
    with pytest.raises(TrainingError, match=r"another gradient after its last one.*call begin_backward before"):
        model(MICROBATCHES[1]).backward()


def test_each_chunk_has_its_own_buffer_and_the_last_chunk_starts_first(events):
    """The last chunk's backward runs first, so its buckets are complete first."""
    first, second = nn.Linear(2, 1), nn.Linear(ALIGNMENT, 2)
    params = {f"first.{n}": p for n, p in first.named_parameters()}
    params |= {f"second.{n}": p for n, p in second.named_parameters()}
    ddp = engine_of([first, second], params)
    ddp.finish_grad_sync()
    assert events[:2] == [3, 2]


def test_chunks_may_have_their_last_backward_at_different_times(events):
    """In an interleaved schedule, one chunk has finished its last backward while another chunk still runs some."""
    chunks = [nn.ParameterDict({"w": torch.ones(size)}) for size in (1, ALIGNMENT + 1)]
    params = {f"{number}.w": chunk["w"] for number, chunk in enumerate(chunks)}
    ddp = engine_of(chunks, params)
    for chunk, is_last, started in ((1, False, []), (0, False, []), (1, True, [2]), (0, False, [2]), (0, True, [2, 1])):
        ddp.begin_backward(chunk, is_last=is_last)
        chunks[chunk]["w"].sum().backward()
        assert events == started
    ddp.finish_grad_sync()
    assert (ddp.main_grads["0.w"] == 3.0).all() and (ddp.main_grads["1.w"] == 2.0).all()


def test_the_last_weight_gradients_may_come_after_other_last_gradients(events):
    """In zero-bubble schedules, norms have their last gradient before the weight gradients of earlier micro-batches."""
    model = nn.ParameterDict({"norm": torch.ones(1), "weight": torch.ones(ALIGNMENT + 1)})
    ddp = wrap(model)
    for name, is_last in (("norm", False), ("norm", True), ("weight", False), ("weight", True)):
        ddp.begin_backward(0, is_last=is_last)
        model[name].sum().backward()
    assert events == [2, 1]
    assert (ddp.main_grads["norm"] == 2.0).all() and (ddp.main_grads["weight"] == 2.0).all()


def test_a_delayed_gradient_is_applied_that_many_steps_later():
    """An engine that mixed up its buffers would add the gradients of two steps, or apply one twice."""
    model = nn.ParameterDict({"w": torch.ones(2)})
    ddp = engine_of([model], dict(model.named_parameters()), kind=DelayedDDP, delay=2)
    found = []
    for step in range(6):
        ddp.zero_grad()
        for microbatch in range(2):
            ddp.begin_backward(0, is_last=microbatch == 1)
            (model["w"] * 10.0**step).sum().backward()
        ddp.finish_grad_sync()
        found.append(ddp.main_grads["w"][0].item() if ddp.has_grads else None)
    assert found == [None, None, 2.0, 20.0, 200.0, 2000.0]
    assert [grads["w"][0].item() for grads in ddp.pending_grads()] == [20000.0, 200000.0]


class WithLayers(nn.Module):
    """An embedding whose table a head of the given kind shares, around a parallel layer that runs `times` times."""

    def __init__(self, head: str, times: int):
        super().__init__()
        memory = {"dtype": torch.float64, "device": torch.device("cpu")}
        self.head, self.times = head, times
        self.embedding = VocabParallelEmbedding(7, 4, tp=solo(), init_std=1.0, **memory)
        self.layer = ColumnParallelLinear(4, 4, tp=solo(), bias=True, init_std=1.0, **memory)
        for number, parameter in enumerate(self.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for _ in range(self.times):
            x = torch.tanh(self.layer(x)[0])
        if self.head == "parallel":
            logits = column_parallel_linear(x, self.embedding.weight, None, solo())
        elif self.head == "plain":
            logits = x @ self.embedding.weight.t()
        else:  # the layer's weight, by another operation
            logits = x @ self.layer.weight.t()
        return logits.logsumexp(-1).sum()


@pytest.mark.parametrize(("head", "times"), [("parallel", 1), ("plain", 1), ("parallel", 3)])
def test_gradients_that_layers_write_into_main_grad_equal_autograd(head, times):
    """A tied table has the gradients of the lookup and of any head; a layer may run several times."""
    model, plain = WithLayers(head, times), WithLayers(head, times)
    ddp = wrap(model, torch.float64)
    assert all(hasattr(parameter, "add_grad") for parameter in (model.embedding.weight, model.layer.weight))
    for _ in range(2):
        run_step(ddp, MICROBATCHES)
        plain.zero_grad()
        for tokens in MICROBATCHES:
            plain(tokens).backward()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(ddp.main_grads[name], parameter.grad, rtol=1e-13, atol=1e-13)


def test_a_layers_weight_in_another_operation_is_an_error():
    """Autograd would add its gradient to memory without values."""
    ddp = wrap(WithLayers("of the layer", 1), torch.float64)
    with pytest.raises(TrainingError, match=r"layer\.weight belongs to a parallel layer, and another"):
        run_step(ddp, MICROBATCHES)


def test_on_the_cpu_products_of_bf16_go_through_autograd():
    """torch's product into fp32 exists on GPUs only; the meta device stands for one."""
    weight = torch.zeros(2, 2, dtype=torch.bfloat16)
    assert not has_product_into(torch.float32, weight)
    assert has_product_into(torch.float32, weight.to("meta"))
    assert has_product_into(torch.bfloat16, weight)


def test_a_tied_head_without_a_lookup_in_its_chunk_keeps_its_gradient():
    """On the last stage of a custom model, nothing else uses the weight."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(
                torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            )

        def forward(self, x):
            return column_parallel_linear(x, self.weight, None, solo()).square().sum()

    model, plain, x = Head(), Head(), torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    ddp = wrap(model, torch.float64)
    run_step(ddp, [x, x])
    (2 * plain(x)).backward()
    torch.testing.assert_close(ddp.main_grads["weight"], plain.weight.grad, rtol=1e-13, atol=0)


def test_a_step_that_an_error_has_ended_leaves_nothing_for_the_next_one():
    """A script may catch the error of one batch, such as one without memory, and train on."""
    model, plain = WithLayers("parallel", 1), WithLayers("parallel", 1)
    ddp = wrap(model, torch.float64)
    ddp.zero_grad()
    ddp.begin_backward(0, is_last=False)
    handle = model.embedding.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ddp.module(0)(MICROBATCHES[0]).backward()
    handle.remove()
    run_step(ddp, MICROBATCHES[1:])
    for tokens in MICROBATCHES[1:]:
        plain(tokens).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ddp.main_grads[name], parameter.grad, rtol=1e-13, atol=1e-13)
