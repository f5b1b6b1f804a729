"""Losses of corpora and results of tasks, for a checkpoint or a model in training."""
