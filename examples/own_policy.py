"""A policy of your own, beside the training script.

paceline run examples/train_paceline.py --workers 4 --strategy own_policy:Quorum:share=0.75
cd examples && paceline simulate --workers 4 --strategy own_policy:Quorum --strategy sync
cd examples && paceline plan train_paceline.py --workers 4 --strategy own_policy:Quorum
"""

import math

from paceline.policies import Arrival, Decision, Order, Policy


class Quorum(Policy):
    """Updates once a share of the workers has pushed; gradients that are more than `late` updates old are dropped."""

    share: float = 0.5
    late: int = 2

    def begin(self) -> None:
        self.k = max(1, math.ceil(self.share * len(self.workers)))

    def arrive(self, push: Arrival) -> Decision:
        if self.version - push.version > self.late:
            return self.drop(push, f"more than {self.late} updates old")
        waits = self.hold(push, Order.WAIT, f"{len(self.held) + 1} of {self.k} have pushed")
        updates = self.reconsider(waits.reason)
        return updates if updates.use else waits

    def reconsider(self, why: str) -> Decision:  # also asked when a worker has left or has no samples
        enough = min(self.k, len(self.held) + self.computing)
        return self.update(why, {}) if self.held and len(self.held) >= enough else Decision(why)
