"""Barriers and exchanges of values among whoever takes part at the moment."""

from __future__ import annotations

import msgspec

from paceline.errors import Mismatch
from paceline.server.messages import Meet, Met, receive_parts, send_parts
from paceline.server.seats import Seat, Seats, State
from paceline.transport import Intent
from paceline.transport.wire import Closed


class Meetings:
    """Of workers who may come and go; one who has joined takes part once it has trained on something."""

    def __init__(self, seats: Seats, patience: float) -> None:
        self._seats, self._patience = seats, patience

    def come(self, seat: Seat, message: Meet) -> None:
        data = receive_parts(seat.wire, self._patience)
        if data is None:
            raise Mismatch(f"rank {seat.rank} did not say what it brought", [seat.rank])
        if seat.fresh:
            self._answer([seat], {seat.rank: data})  # the others were through here before it came
            return
        seat.brought = (message.intent, data)
        seat.into(State.MEETING)
        self.settle()

    def settle(self) -> None:
        """If all are here who take part, let them go."""
        due = [self._seats[rank] for rank in self._seats.trained]
        if not due or any(seat.state is not State.MEETING for seat in due):
            return
        first = due[0]
        assert first.brought is not None
        for seat in due:
            assert seat.brought is not None
            if seat.brought[0] != first.brought[0]:
                raise Mismatch(
                    f"rank {seat.rank} is at {Intent(seat.brought[0]).spoken} while rank {first.rank} is at "
                    f"{Intent(first.brought[0]).spoken}: all workers must do the same",
                    [seat.rank],
                )
        self._answer(due, {seat.rank: seat.brought[1] for seat in due if seat.brought is not None})

    def _answer(self, seats: list[Seat], brought: dict[int, bytes]) -> None:
        text = msgspec.msgpack.encode(brought)
        for seat in seats:
            seat.brought = None
            self._seats.answer(seat, Met())
            try:
                send_parts(seat.wire, text)
            except Closed:
                continue  # its end will be heard
