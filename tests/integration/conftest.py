"""What tests of several rooms share."""

import pytest
import torch
from helpers.training import adafactor, adamw, plain, sgd


@pytest.fixture(scope="session")
def warm() -> None:
    """What torch loads at its first step is loaded once, here, and not by every worker that is forked."""
    for make in (sgd, adamw, adafactor):
        plain(make, torch.float32, 1)
