"""Encryption of what nodes send to each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from anabranch.errors import PlanError


@dataclass(frozen=True)
class Tls:
    """Encrypt what nodes and driver send to each other.

    Three files in PEM form: the certificate of a node and its private key, at the same paths on
    every node, and the certificate to trust, on the nodes and where the driver runs. A node's
    certificate must name the host, or the address, under which Spark knows its executor.
    """

    certificate: str
    key: str
    root: str

    def trusted(self) -> bytes:
        """The certificate to trust, as bytes."""
        try:
            return Path(self.root).read_bytes()
        except OSError as error:
            raise PlanError(f"tls: cannot read the certificate to trust: {error}") from error
