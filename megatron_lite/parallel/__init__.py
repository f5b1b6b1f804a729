"""Ranks, groups, collectives and the layers that tensor parallelism shards.

Notation for shapes, everywhere in this package and in `model`: `s` sequence, `b` micro-batch, `h` hidden,
`n` heads, `g` key/value groups, `d` head size, `f` MLP width, `v` padded vocabulary, `/tp` this rank's share.
"""
