"""Which chunks of a gradient go where, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from paceline.relay.chunks import ChunkMap, GradientUpload, cut
from paceline.transport.links import CHUNK


@given(some.lists(some.integers(0, 5 * CHUNK), min_size=2, max_size=12, unique=True))
def test_chunks_cover_what_they_are_cut_from_and_nothing_else(edges: list[int]) -> None:
    edges = sorted(edges)
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    chunks = cut(spans)
    assert all(0 < stop - start <= CHUNK for start, stop in chunks)
    assert chunks == sorted(chunks)
    assert sum(stop - start for start, stop in chunks) == sum(stop - start for start, stop in spans)
    assert all(any(a <= start and stop <= b for a, b in spans) for start, stop in chunks)


def _all(shipment: GradientUpload) -> list[int]:
    places = []
    while (chunk := shipment.next()) is not None:
        places.append(chunk[0])
    return places


def test_a_chunk_goes_once_all_parameters_in_it_are_made() -> None:
    memory = memoryview(bytearray(3 * CHUNK))
    parameters = [(0, CHUNK // 2), (CHUNK // 2, CHUNK + 64), (CHUNK + 64, 3 * CHUNK)]
    shipment = GradientUpload(ChunkMap([(0, 3 * CHUNK)], parameters), memory)
    shipment.made(0)
    assert _all(shipment) == []
    shipment.made(1)
    assert _all(shipment) == [0]
    shipment.made(2)
    assert _all(shipment) == [CHUNK, 2 * CHUNK]
    assert not shipment.complete
    shipment.close()
    assert _all(shipment) == []
    assert shipment.complete


def test_what_was_changed_after_it_went_goes_again() -> None:
    memory = bytearray(2 * CHUNK)
    shipment = GradientUpload(ChunkMap([(0, 2 * CHUNK)], [(0, 2 * CHUNK)]), memoryview(memory))
    shipment.made(0)
    assert _all(shipment) == [0, CHUNK]
    memory[CHUNK + 5] = 1
    shipment.close()
    assert _all(shipment) == [CHUNK]
    shipment.restart()
    shipment.close()
    assert _all(shipment) == [0, CHUNK]
