"""`megatron-lite generate`: text from a checkpoint."""
