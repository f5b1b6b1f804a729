"""From text to micro-batches: tokenize once, memory-map, index, blend, load.

The only rank here is the rank in the data-parallel group. All tensor-parallel ranks and both ends of a pipeline read
the same memory map, so there is no broadcast.

Notation: `s` sequence length, `b` micro-batch size, `N` samples, `T` tokens in one epoch of a split.
"""
