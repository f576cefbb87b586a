"""Encryption of the traffic between nodes."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from anabranch.errors import PlanError


@dataclass(frozen=True)
class Tls:
    """Encrypt the traffic between nodes and driver.

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


def read_root(path: str) -> str:
    """The certificate to trust in a file, as PEM text. PlanError if it is none."""
    found = Tls("", "", path).trusted()
    client_context(found)
    return found.decode("ascii")


def client_context(root: bytes) -> ssl.SSLContext:
    """The TLS context of a client that trusts this certificate, as PEM text."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=root.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise PlanError(f"tls: the certificate to trust is no PEM text: {error}") from error
    return context


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    """The TLS context of a node with this certificate and key, the paths of two files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # connections are kept, and not resumed
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:
        raise PlanError(f"tls: cannot use {certificate} with {key}: {error}") from error
    return context
