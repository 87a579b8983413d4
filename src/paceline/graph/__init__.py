"""A model as operations: tracing, costs, the positions where it may be cut, and its partition into stages."""
