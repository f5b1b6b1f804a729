"""The training run: joins configuration, model, data, gradients, optimizer and checkpoints. Start at `step.py`."""
