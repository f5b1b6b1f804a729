"""Data parallelism: how the gradients of one optimizer step become `main_grads`, the same on every rank of dp."""
