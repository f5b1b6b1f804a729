"""Ranks, groups, collectives and tensor-parallel layers. `megatron_lite.model` defines the letters of shapes."""
