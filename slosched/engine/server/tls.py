"""TLS: the certificate by which clients know a server."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from slosched.core import SloschedError


class CertificateError(SloschedError):
    """The certificate or its private key cannot be used."""


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """The PEM files of a certificate, with those that vouch for it, and of its private key."""

    certfile: Path
    keyfile: Path

    def check(self) -> None:
        """Raise CertificateError if a server could not start with these files."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certfile, self.keyfile)
        except (OSError, ValueError) as error:
            raise CertificateError(
                f"cannot use the certificate {self.certfile} with the key {self.keyfile}: {error}"
            ) from error
