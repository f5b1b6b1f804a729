"""One rank's arithmetic of a transformer: GPT, CodeGeeX and Llama from the same blocks, by config fields.

Notation for shapes, in every docstring of this package: `s` sequence, `b` micro-batch, `h` hidden, `n` heads,
`g` key/value groups, `d` head size, `f` MLP width, `v` padded vocabulary, `/tp` this rank's share. Activations
are `[s, b, h]`: the sequence comes first, so that cutting it over ranks is a cut into contiguous pieces. `s'` is what
a rank has of the sequence between tensor-parallel regions: s/tp under sequence parallelism, otherwise s. An all-reduce
of a docstring is then a reduce-scatter and, later, an all-gather; `parallel/linear.py` says what comes on top.
"""
