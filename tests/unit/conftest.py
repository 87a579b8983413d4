"""Tests of single rooms, in one process."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("unit", deadline=None, database=None, derandomize=True)
settings.load_profile("unit")
