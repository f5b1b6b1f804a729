"""From text to micro-batches: tokenize once, memory-map, index, blend, hand out.

Nothing here knows of ranks beyond a place in the data-parallel group, given as two plain integers, so every
tensor-parallel rank and both ends of a pipeline read the same memory map and nothing is broadcast.

Notation: `s` sequence length, `b` micro-batch size, `N` samples, `T` tokens in one epoch of a split.
"""
