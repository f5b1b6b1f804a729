"""The samples of a data-parallel rank: arithmetic on `consumed_samples`, no state.

Resume, batch ramp-up and another data-parallel size need no loader state: the next global batch is the next range of
sample numbers, divided first by micro-batch, then by rank.
Source: Megatron-LM's `single` data loader order, megatron/training/datasets/data_samplers.py.
"""


def microbatch_indices(
    consumed_samples: int, num_microbatches: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> list[list[int]]:
    """Sample numbers of each micro-batch of one step on data-parallel rank `dp_rank`.

    All ranks together read `consumed_samples .. consumed_samples + num_microbatches * micro_batch_size * dp_size`,
    each number once, so a global batch holds the same samples for every `dp_size` and micro-batch size.
    """
    stride = micro_batch_size * dp_size
    first = consumed_samples + dp_rank * micro_batch_size
    return [
        list(range(start, start + micro_batch_size))
        for start in range(first, first + num_microbatches * stride, stride)
    ]
