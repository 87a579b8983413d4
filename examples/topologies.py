"""Draws the messages of an all-reduce in every topology, from the recorded events of a real run.

    paceline run --workers 4 examples/topologies.py docs/figures

Each worker does the same all-reduce in each topology and records its messages; the lead writes one SVG per topology,
and all events to `topologies.jsonl`.
"""

import sys
from pathlib import Path

import msgspec
import torch

import paceline
from paceline import collectives
from paceline.collectives.algorithms import ALGORITHMS
from paceline.events import Message
from paceline.report import draw_messages
from paceline.report.messages import arrows

REPEATS = 15


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    team = paceline.join()
    tensor = torch.zeros(4 << 20)  # 16 MB
    every: list[Message] = []
    for topology in (*ALGORITHMS, "shared"):
        runs = []
        for _ in range(REPEATS):
            collectives.barrier()
            with collectives.observe() as seen:
                collectives.all_reduce(tensor, topology=topology)
            runs.append(gather(seen.messages))
        if team.is_lead:
            # The quickest shows the algorithm, the others what else the machine did.
            best = min(runs, key=lambda messages: max(m.start + m.seconds for m in messages) - messages[0].start)
            every += best
            title = f"all_reduce of 16 MB over {team.world_size} workers: {topology}"
            (folder / f"topology-{topology}.svg").write_text(draw_messages(best, title), encoding="utf-8")
            print(f"{topology}: {len(arrows(best))} messages, or reads and writes")
    if team.is_lead:
        lines = [msgspec.json.encode(message) for message in every]
        (folder / "topologies.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def gather(messages: list[Message]) -> list[Message]:
    """Everybody's events, in the order of time."""
    own = torch.frombuffer(bytearray(msgspec.json.encode(messages)), dtype=torch.uint8)
    texts = [bytes(part.numpy()) for part in collectives.all_gather(own)]
    decoded = [message for text in texts for message in msgspec.json.decode(text, type=list[Message])]
    return sorted(decoded, key=lambda message: message.start)


if __name__ == "__main__":
    main()
