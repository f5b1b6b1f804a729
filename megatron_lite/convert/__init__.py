"""Checkpoints of others: Hugging Face, Megatron-LM, CodeGeeX. What they are to us is in `recipe.py`."""
