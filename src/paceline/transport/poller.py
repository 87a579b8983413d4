"""Calls an action for every descriptor that is ready: the loop under all connections between machines."""

from __future__ import annotations

import select
from collections.abc import Callable

READ, WRITE = select.EPOLLIN, select.EPOLLOUT


class Poller:
    """Descriptors and their actions; an action is called with the events that are ready."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._actions: dict[int, Callable[[int], None]] = {}
        self._added: set[int] = set()
        """Descriptors since the last wait began: one may have the number of another that was closed meanwhile."""

    def __len__(self) -> int:
        return len(self._actions)

    def watch(self, descriptor: int, action: Callable[[int], None], events: int = READ) -> None:
        """Adds a descriptor, or replaces its action and events."""
        if descriptor in self._actions:
            self._epoll.modify(descriptor, events)
        else:
            self._epoll.register(descriptor, events)
            self._added.add(descriptor)
        self._actions[descriptor] = action

    def change(self, descriptor: int, events: int) -> None:
        self._epoll.modify(descriptor, events)

    def unwatch(self, descriptor: int) -> None:
        """Removes a descriptor, which must still be open."""
        if self._actions.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def wait(self, seconds: float = 0.0) -> None:
        """Waits at most so long until something is ready, and calls its actions."""
        self._added.clear()
        for descriptor, events in self._epoll.poll(max(0.0, seconds)):
            action = self._actions.get(descriptor)
            if action is not None and descriptor not in self._added:  # an earlier action may have removed it
                action(events)

    def close(self) -> None:
        self._actions.clear()
        self._epoll.close()
