"""The keys of a run: one secret that all its machines know, from which the secret of every connection is derived.

A process that has the key is a member of the run. Both ends of a connection prove that they know it, each in its own
role, before a byte of the protocol is read; see `handshake`.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
from typing import NamedTuple

from paceline.errors import UsageError

VARIABLE = "PACELINE_KEY"
_LENGTH = 64


class Secret(NamedTuple):
    """What both ends of a connection prove to know, for one run."""

    proof: bytes
    encrypted: bool
    """True if the run has a key; without one, connections are authenticated by the run's random name only."""

    @classmethod
    def of(cls, key: str | None, run: str | bytes) -> Secret:
        """That of one run: nothing recorded in another run is of use in this one."""
        name = run.encode() if isinstance(run, str) else run
        seed = b"" if key is None else bytes.fromhex(check_key(key))
        return cls(hashlib.blake2b(name, digest_size=32, key=seed).digest(), key is not None)

    def answer(self, role: bytes, *parts: bytes) -> bytes:
        """The proof of one end, `caller` or `listener`, for one connection's challenge."""
        return hmac.digest(self.proof, b"\0".join([role, *parts]), "sha256")


def new_key() -> str:
    return secrets.token_hex(_LENGTH // 2)


def check_key(key: str) -> str:
    """The key itself; UsageError, which does not repeat it, if it is malformed."""
    if len(key) != _LENGTH or any(digit not in "0123456789abcdef" for digit in key):
        raise UsageError(
            f"the key of this run is not one: it must be {_LENGTH} hexadecimal digits, as `paceline key` prints them"
        )
    return key


def key_of_run(launched: str | None) -> str | None:
    """The launcher's key, or the environment's; None without either."""
    key = launched or os.environ.get(VARIABLE)
    return None if not key else check_key(key)


def fingerprint(key: str | None, occasion: str) -> str:
    """Tells keys apart without telling them: equal for equal keys, and of no use on another occasion.

    Empty without a key.
    """
    if key is None:
        return ""
    return hashlib.blake2b(occasion.encode(), digest_size=16, key=bytes.fromhex(key), person=b"fingerprint").hexdigest()


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def demand_key(key: str | None, addresses: list[str]) -> None:
    """Raises UsageError for a team over machines without a key, to which anybody could connect."""
    if key is None and not all(map(is_loopback, addresses)):
        raise UsageError(
            f"this team spans {len(addresses)} machines and has no key, without which nothing but loopback is used; "
            f"print one with `paceline key`, and set it as {VARIABLE} on every machine"
        )
