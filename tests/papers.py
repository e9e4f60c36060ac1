"""Certificates that are thrown away after a test."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

HOST = "127.0.0.1"


class Papers:
    """Certificates that are thrown away: of a server, of a client, and of those who are not trusted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca, self.stranger = trustme.CA(), trustme.CA()
        self.ca_file = folder / "ca.pem"
        self.stranger_file = folder / "stranger.pem"
        self.ca.cert_pem.write_to_path(str(self.ca_file))
        self.stranger.cert_pem.write_to_path(str(self.stranger_file))
        self.server = self.issue("server", HOST)
        self.client = self.issue("client", "client.example")
        self.elsewhere = self.issue("elsewhere", "other.example")
        self.expired = self.issue("expired", HOST, not_after=dt.datetime(2020, 1, 2, tzinfo=dt.UTC))

    def issue(self, name: str, host: str, not_after: dt.datetime | None = None) -> tuple[Path, Path]:
        """Certificate and key, as files; one that ends at a date begins in 2020."""
        not_before = None if not_after is None else dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
        issued = self.ca.issue_cert(host, not_before=not_before, not_after=not_after)
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(key))
        return certificate, key

    def locked(self, key: Path) -> bytes:
        """A private key under a password."""
        loaded = load_pem_private_key(key.read_bytes(), None)
        lock = BestAvailableEncryption(b"a password")
        return loaded.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock)
