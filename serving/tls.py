"""The server's TLS files: read and checked, before a client could trip over them."""

from __future__ import annotations

import dataclasses
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_jax.errors import one_line

if TYPE_CHECKING:
    import grpc


@dataclasses.dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files: the server's certificate chain and its key, and the authorities that vouch for clients.

    Raises ValueError for a key or authorities without a certificate, or a certificate without its key.
    """

    certfile: str | None = None
    keyfile: str | None = None
    ca_certs: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("ssl-keyfile", self.keyfile), ("ssl-ca-certs", self.ca_certs)):
            if value is not None and self.certfile is None:
                raise ValueError(f"{name}: got {value!r}, but there is no ssl-certfile; allowed is one with it")
        if self.certfile is not None and self.keyfile is None:
            raise ValueError(
                f"ssl-certfile: got {self.certfile!r}, a certificate without its key; allowed is ssl-keyfile with it"
            )

    def credentials(self) -> grpc.ServerCredentials | None:
        """What the server listens with; None: plaintext. Raises ValueError for files that do not do."""
        import grpc  # the flags are read without the extra that brings it

        if self.certfile is None or self.keyfile is None:
            return None
        chain, key = _read("ssl-certfile", self.certfile), _read("ssl-keyfile", self.keyfile)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certfile, self.keyfile, password=_no_password)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise ValueError(
                f"ssl-certfile, ssl-keyfile: got {self.certfile!r} and {self.keyfile!r}, which do not work together "
                f"({_reason(error)}); allowed are a PEM certificate chain and its key without a password"
            ) from None
        authorities = None
        if self.ca_certs is not None:
            authorities = _read("ssl-ca-certs", self.ca_certs)
            try:
                context.load_verify_locations(cadata=authorities.decode("ascii"))
            except (ssl.SSLError, ValueError) as error:
                raise ValueError(
                    f"ssl-ca-certs: got {self.ca_certs!r}, which holds no certificates ({_reason(error)}); allowed are "
                    "PEM certificates"
                ) from None
        return grpc.ssl_server_credentials(
            [(key, chain)], root_certificates=authorities, require_client_auth=authorities is not None
        )


def _no_password() -> str:
    # Without this OpenSSL would ask for one on the terminal.
    raise ValueError("the key has a password")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or one_line(error)


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{name}: got {path!r}, which cannot be read ({reason}); allowed is a file") from None
