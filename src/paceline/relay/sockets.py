"""The sockets of a machine's relay, which outlive a relay that is killed."""

from __future__ import annotations

import socket

from paceline.relay.messages import RelayBind, RelayBound
from paceline.transport.handshake import listen
from paceline.transport.keys import Secret
from paceline.transport.links import LINKS
from paceline.transport.unix_connection import Listener


class RelaySockets:
    """The sockets at which a machine's relay is called."""

    def __init__(self, bind: RelayBind, local: Listener) -> None:
        """local: for the workers and servers of this machine."""
        self.local = local
        # Without a key only loopback is bound, whatever the address is.
        address = bind.address if Secret.of(bind.key, bind.run).encrypted else "127.0.0.1"
        self.links = {link: listen(address) for link in LINKS}
        self.door: socket.socket | None = None
        ports = (self.links[link].getsockname()[1] for link in LINKS)
        self.bound = RelayBound(*ports)
        if bind.door is not None:
            try:
                self.door = listen(address, bind.door)
            except OSError as error:
                trouble = f"--open cannot listen at port {bind.door} of {address}: {error.strerror}"
                self.bound = RelayBound(0, 0, trouble)
