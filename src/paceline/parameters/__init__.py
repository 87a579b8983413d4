"""Parameters as versions: their flat layout, the buffers that hold versions and gradients, optimizers on shards."""
