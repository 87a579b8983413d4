"""What trainers share that announce gradients over machines while the backward pass runs."""

from __future__ import annotations

import time
from typing import Any

from paceline.events import Send
from paceline.parameters.announcements import BucketAnnouncer, Header
from paceline.parameters.elastic_reduction import ElasticReduction
from paceline.parameters.gradient_state import GradientState
from paceline.parameters.machines_reduction import MachinesReduction
from paceline.strategies.step_table import WRONG, StepAgreement, weigh_headers
from paceline.strategies.synchronous import SynchronousTrainer


class AnnouncingTrainer(SynchronousTrainer):
    """A synchronous trainer whose workers may be on several machines."""

    _machines: MachinesReduction | ElasticReduction | None = None
    _announcer: BucketAnnouncer | None = None
    _waits = False
    """True while this worker, which is passive, offers the gradient of batches before."""

    def _announce(self) -> None:
        """Announce gradients from now on, if there are several machines; all workers call it."""
        if self._machines is not None:
            self._announcer = self._machines.announce(self._header, weigh_headers).announcer
            self._announcer.early = len(self._distinct) == 1

    def enter_backward(self, loss: Any) -> bool:
        runs = super().enter_backward(loss)
        if runs and self._announcer is not None and not self._accumulating:
            self._announcer.enter()
        return runs

    def _expose_gradients(self) -> None:
        super()._expose_gradients()
        if self._announcer is not None:
            self._announcer.doubt()

    def _expose_to_hook(self) -> None:
        super()._expose_to_hook()
        if self._announcer is not None:  # what a hook does to a gradient, it may do after that was announced
            self._announcer.early = False
            self._announcer.doubt()

    def _header(self) -> Header:
        weight = self._making.weight
        return Header(weight.weight, weight.loss.kind, weight.loss.items)

    def _offer(self, state: GradientState, *, in_place: bool) -> tuple[bytes, bool]:
        announcer = self._announcer
        if announcer is None or not in_place:
            return super()._offer(state, in_place=in_place)
        if self._waits:  # the others may make no update any more
            return state.gradients.collect(), announcer.begun
        used, wrong = announcer.finish(self._header() if announcer.early else None)
        return (used if announcer.early else state.gradients.used()), wrong

    def _pending_note(self) -> int:
        self._waits = True
        try:
            length = super()._pending_note()
        finally:
            self._waits = False
        if not length and self._announcer is not None and self._announcer.begun:
            self._barrier.note[: len(WRONG)] = WRONG
            return len(WRONG)
        return length

    def _record_sent(self) -> None:
        """Record the exchange that is over."""
        start, size = (0.0, 0) if self._machines is None else self._machines.sent
        if start:
            self._recorder.add(Send(self._rank, start, time.perf_counter() - start, size))

    def _pass_over(self, agreed: StepAgreement) -> int:
        if self._announcer is None or self._reduced or self._making.clip_factor is not None:
            return 0
        return self._reduce(agreed)  # a part of it is on its way already

    def close(self) -> None:
        super().close()
        if self._announcer is not None:
            self._announcer.close()

    @property
    def _reduced(self) -> bool:
        """True if `.grad` is the team's gradient."""
        return False
