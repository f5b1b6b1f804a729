"""Checkpoints that explain themselves: what is in one is in `layout.py`, writing and reading in `store.py`."""
