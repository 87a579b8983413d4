"""What a pipeline of p stages and m microbatches takes, with forward and backward times per stage and microbatch."""

from __future__ import annotations

from paceline.errors import UsageError


def _check(stages: int, microbatches: int) -> None:
    if stages < 1 or microbatches < 1:
        raise UsageError(f"a pipeline needs at least one stage and one microbatch; it has {stages} and {microbatches}")


def one_forward_one_backward(stages: int, microbatches: int, forward: float, backward: float) -> float:
    """GPipe and 1F1B alike: they differ in what they keep, not in how long they take."""
    _check(stages, microbatches)
    return (microbatches + stages - 1) * (forward + backward)


gpipe = one_forward_one_backward


def interleaved(stages: int, microbatches: int, chunks: int, forward: float, backward: float) -> float:
    """Every device has so many chunks of the model, so its bubble is that much shorter."""
    _check(stages, microbatches)
    return (microbatches + (stages - 1) / chunks) * (forward + backward)


def zero_bubble_1p(stages: int, microbatches: int, forward: float, backward: float, weight: float) -> float:
    """ZB1P: the gradients of weights fill the bubble as far as 1F1B's memory allows."""
    _check(stages, microbatches)
    return microbatches * (forward + backward + weight) + (stages - 1) * max(0.0, forward + backward - weight)


def zero_bubble_2p(stages: int, microbatches: int, forward: float, backward: float, weight: float) -> float:
    """ZB2P and ZBV, with equal times: no bubble at all."""
    _check(stages, microbatches)
    return microbatches * (forward + backward + weight)


def bubble(stages: int, microbatches: int) -> float:
    """The idle share of the time, of GPipe and 1F1B."""
    _check(stages, microbatches)
    return (stages - 1) / (microbatches + stages - 1)


def bubble_over_ideal(stages: int, microbatches: int, chunks: int = 1) -> float:
    """The idle time over the busy time, also interleaved."""
    _check(stages, microbatches)
    return (stages - 1) / (chunks * microbatches)


def in_flight_gpipe(microbatches: int) -> int:
    """Microbatches whose activations a stage keeps."""
    return microbatches


def in_flight_1f1b(stages: int, microbatches: int, stage: int) -> int:
    return min(microbatches, stages - stage)


def tensor_all_reduces(layers: int) -> int:
    """Of a transformer's training step, split inside its layers (Megatron): two forward and two backward each."""
    return 4 * layers
