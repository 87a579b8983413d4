"""The keys of a run: one secret, from which every machine derives the same CURVE keys.

Whoever has the secret is a member; nobody else can read, write, or even knock. Both ends prove that they know it: the
one that listens has the keys of the server, the one that connects those of the client, and accepts no others.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
from typing import NamedTuple

from paceline.errors import UsageError

VARIABLE = "PACELINE_KEY"
_LENGTH = 64


class Pair(NamedTuple):
    """As ZeroMQ writes them."""

    public: bytes
    secret: bytes


class Keys(NamedTuple):
    server: Pair
    client: Pair

    @classmethod
    def of(cls, key: str, run: str) -> Keys:
        """Those of one run, so that what was said in another run is worth nothing in this one."""
        seed = bytes.fromhex(check_key(key))
        return cls(_derive(seed, run, b"server"), _derive(seed, run, b"client"))


def _derive(seed: bytes, run: str, role: bytes) -> Pair:
    from zmq import curve_public
    from zmq.utils.z85 import encode

    secret = encode(hashlib.blake2b(run.encode(), digest_size=32, key=seed, person=role).digest())
    return Pair(curve_public(secret), secret)


def new_key() -> str:
    return secrets.token_hex(_LENGTH // 2)


def check_key(key: str) -> str:
    """The key itself; refuses what is none, without repeating it."""
    if len(key) != _LENGTH or any(message not in "0123456789abcdef" for message in key):
        raise UsageError(
            f"the key of this run is not one: it must be {_LENGTH} hexadecimal digits, as `paceline key` prints them"
        )
    return key


def key_of_run(launched: str | None) -> str | None:
    """The one that the launcher made, or the environment has; None if there is none."""
    key = launched or os.environ.get(VARIABLE)
    return None if not key else check_key(key)


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def demand_key(key: str | None, addresses: list[str]) -> None:
    """Refuse a team over machines that anybody could talk to."""
    if key is None and not all(map(is_loopback, addresses)):
        raise UsageError(
            f"this team spans {len(addresses)} machines and has no key, without which nothing but loopback is used; "
            f"print one with `paceline key`, and set it as {VARIABLE} on every machine"
        )
