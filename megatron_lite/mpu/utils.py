"""Megatron's helpers for slices of tensors and of the vocabulary, the random streams, the head and its loss."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from megatron_lite.errors import MegatronLiteError
from megatron_lite.mpu.groups import context, rng_tracker
from megatron_lite.mpu.regions import gather_from_tensor_model_parallel_region
from megatron_lite.parallel import loss
from megatron_lite.parallel.linear import column_parallel_linear

_FORK = "model-parallel-rng"  # Megatron's name of the tensor-parallel stream


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise MegatronLiteError where the denominator does not divide the numerator."""
    if numerator % denominator:
        raise MegatronLiteError(
            f"{numerator} is not divisible by {denominator}; choose sizes that divide over the ranks"
        )


def divide(numerator: int, denominator: int) -> int:
    """The quotient. Raises MegatronLiteError where there is a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """[..., h] to `num_partitions` views [..., h / num_partitions], or contiguous copies."""
    chunks = tensor.split(divide(tensor.shape[-1], num_partitions), dim=-1)
    return tuple(chunk.contiguous() for chunk in chunks) if contiguous_split_chunks else tuple(chunks)


class VocabUtility:
    """The half-open range of token ids whose embeddings a rank holds."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        start = rank * per_partition_vocab_size
        return start, start + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        size = divide(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(size, rank, world_size)


class _CudaRngTracker:
    """Megatron's interface to the streams of `parallel/random.py`, on a CPU too."""

    @contextmanager
    def fork(self, name: str = _FORK) -> Iterator[None]:
        """Inside, torch draws from the tensor-parallel stream, which differs between tensor-parallel ranks."""
        if name != _FORK:
            raise MegatronLiteError(f"there is no random stream {name!r}; the one to fork is {_FORK!r}")
        with rng_tracker().fork():
            yield

    def get_states(self) -> dict[str, Tensor]:
        return rng_tracker().state_dict()

    def set_states(self, states: dict[str, Tensor]) -> None:
        rng_tracker().load_state_dict(states)


_tracker = _CudaRngTracker()


def get_cuda_rng_tracker() -> _CudaRngTracker:
    """The random streams of this rank. Raises MegatronLiteError before they are seeded."""
    rng_tracker()
    return _tracker


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
    """The loss of every token [s, b] in fp32 nats, from logits [s, b, v/tp] and token ids [s, b]."""
    return loss.vocab_parallel_cross_entropy(vocab_parallel_logits, target, context().tp)


def parallel_lm_logits(
    input_: Tensor, word_embeddings_weight: Tensor, parallel_output: bool, bias: Tensor | None = None
) -> Tensor:
    """The logits of a head that shares the word embedding: [s, b, v/tp], or [s, b, v] without `parallel_output`.

        input_                  [s, b, h]   the same on every rank of tp
        word_embeddings_weight  [v/tp, h]
        bias                    [v/tp] or None

    Communicates: backward, an all-reduce of the input's gradient over tp; without `parallel_output` an all-gather of
    the logits in forward.
    """
    logits = column_parallel_linear(input_, word_embeddings_weight, bias, context().tp)
    return logits if parallel_output else gather_from_tensor_model_parallel_region(logits)
