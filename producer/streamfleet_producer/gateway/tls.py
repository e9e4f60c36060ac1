"""The gateway's certificate: TLS 1.2 or newer, and renewed without losing a stream."""

from __future__ import annotations

import ssl
from pathlib import Path

import structlog

from streamfleet_common.errors import InvalidRequest
from streamfleet_producer.gateway.settings import GatewaySettings

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2: with forward secrecy alone. Those of 1.3 all are."""

log = structlog.get_logger()


class Certificate:
    """A certificate and its key, read from their files now and whenever `renew` is called.

    `context` is one for the whole life of the server: connections made after a renewal show the new
    certificate, and those there are go on.

    Raises:
        InvalidRequest: the files cannot be read, do not fit, or the key is encrypted.
    """

    def __init__(self, certificate: Path, key: Path | None = None) -> None:
        self._files = (certificate, key)
        self.context = self._read()

    @classmethod
    def of(cls, settings: GatewaySettings) -> Certificate | None:
        """That of the settings; None where HTTP goes in clear. Raises InvalidRequest, as above."""
        if settings.tls_certificate is None:
            if settings.tls_key is not None:
                raise InvalidRequest(
                    "STREAMFLEET_TLS_KEY needs STREAMFLEET_TLS_CERTIFICATE, the chain it is of"
                )
            return None
        return cls(settings.tls_certificate, settings.tls_key)

    def renew(self) -> None:
        """Take what the files hold now; if that is of no use, say so and keep what there is."""
        try:
            self._read()  # a context that has taken half of it would be of no use
            self.context.load_cert_chain(*self._files, _no_password)
        except (InvalidRequest, OSError) as error:
            log.error("new certificate not taken; the one of before goes on", reason=str(error))
        else:
            log.info("new certificate taken", file=str(self._files[0]))

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(CIPHERS)
        certificate, key = self._files
        try:
            context.load_cert_chain(certificate, key, _no_password)
        except (OSError, ValueError) as error:
            named = f"STREAMFLEET_TLS_CERTIFICATE {certificate}" + (
                f", STREAMFLEET_TLS_KEY {key}" if key else ""
            )
            raise InvalidRequest(
                f"{named}: of no use ({_why(error)}): PEM files are wanted, the chain and a key "
                "without a password"
            ) from None
        return context


def _no_password() -> str:
    # Without it, OpenSSL would ask at the terminal, and wait.
    return "-"


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "no PEM"
    return getattr(error, "strerror", None) or type(error).__name__
