"""Tensor parallelism: layers sharded over workers, by a plan found from the model's operations."""
