"""A model as operations: tracing, costs, where it may be cut, and the partition into stages."""
