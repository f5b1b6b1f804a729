"""Ranks, groups, the communication between them and the layers that are split over them. Knows no transformer.

Notation for shapes, everywhere in this package and in `model`: `s` sequence, `b` micro-batch, `h` hidden,
`n` heads, `g` key/value groups, `d` head size, `f` MLP width, `v` padded vocabulary, `/tp` this rank's share.
"""
