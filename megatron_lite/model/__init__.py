"""One rank's arithmetic of a transformer: GPT, CodeGeeX, Llama, BERT and T5 from the same blocks.

Notation for shapes, in every docstring of this package: `s` sequence, `b` micro-batch, `h` hidden, `n` heads,
`g` key/value groups, `d` head size, `f` MLP width, `v` padded vocabulary, `/tp` this rank's share. Activations are
`[s, b, h]`, so a shard of the sequence is contiguous. `s'` is its length on a rank between tensor-parallel regions:
s/tp under sequence parallelism, else s. An all-reduce of a docstring is then a reduce-scatter and an all-gather, and
`parallel/linear.py` lists further collectives.
"""
