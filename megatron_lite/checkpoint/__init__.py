"""Checkpoints: `layout.py` describes their format, `store.py` saves and loads them."""
