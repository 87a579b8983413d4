"""Tensor parallelism: plans found from the graph, sharded layers, a rule per operation."""
