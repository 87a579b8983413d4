"""Data that are read one sample after the other: an `IterableDataset`, or samples whose sampler has no length."""
