"""Tensors as collectives need them: detached and contiguous."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.errors import InvalidCall

Tensors = list[torch.Tensor]


def in_one_piece(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a tensor; itself if it is contiguous."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def put_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Copies the result of `in_one_piece` back to its tensor, unless they share memory."""
    if flat.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without autograd's version counter, which other backends do not raise either."""
    if not tensor.is_cpu:
        raise InvalidCall(f"the process group 'paceline' is for CPU tensors; this one is on {tensor.device}")
    return tensor.data


def given(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is only read, contiguous."""
    return in_one_piece(plain(tensor))


def pieces(whole: torch.Tensor, count: int) -> Tensors:
    """Equal parts of a contiguous tensor."""
    flat = whole.view(-1)
    length = flat.numel() // count
    return [flat[length * number : length * (number + 1)] for number in range(count)]


class Filled:
    """Output tensors: themselves where they are contiguous, else copies, which `back` copies back."""

    def __init__(self, tensors: Sequence[torch.Tensor], keep: bool = False) -> None:
        self.parts: Tensors = []
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor in tensors:
            own = plain(tensor)
            if own.is_contiguous() and not own.is_conj() and not own.is_neg():
                self.parts.append(own)
                continue
            copy = in_one_piece(own) if keep else torch.empty(own.shape, dtype=own.dtype)
            self.parts.append(copy)
            self.copies.append((own, copy))

    def back(self) -> None:
        for own, copy in self.copies:
            own.copy_(copy)
