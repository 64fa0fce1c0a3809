"""Certificates of the tests, which sign themselves, for localhost and 127.0.0.1, from 2000 to 2099; their keys protect
nothing.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

PEMS = {
    "server.key": b"""-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg5eu5tGNXrGisjRDH
bP/IR4T/l8BFpA0HIA5tkJAMXnahRANCAASkiwYaA1s7WQfrU4IbRNtLQy1mlddN
zjKLUQcntx5+7hgpU3gRgN5b+JgZv0qSPhOaajpX5M3zGDE5rpQbQzx3
-----END PRIVATE KEY-----
""",
    "server.crt": b"""-----BEGIN CERTIFICATE-----
MIIBezCCASGgAwIBAgIBATAKBggqhkjOPQQDAjAeMRwwGgYDVQQDDBNzZXJ2ZXIg
b2YgdGhlIHRlc3RzMCAXDTAwMDEwMTAwMDAwMFoYDzIxMDAwMTAxMDAwMDAwWjAe
MRwwGgYDVQQDDBNzZXJ2ZXIgb2YgdGhlIHRlc3RzMFkwEwYHKoZIzj0CAQYIKoZI
zj0DAQcDQgAEpIsGGgNbO1kH61OCG0TbS0MtZpXXTc4yi1EHJ7cefu4YKVN4EYDe
W/iYGb9Kkj4Tmmo6V+TN8xgxOa6UG0M8d6NOMEwwGgYDVR0RBBMwEYIJbG9jYWxo
b3N0hwR/AAABMA8GA1UdEwEB/wQFMAMBAf8wHQYDVR0OBBYEFJO3grNA2BaCBSy9
Z0LRaVQpDNbxMAoGCCqGSM49BAMCA0gAMEUCIGqUgz5Mp6c6kpeh0xIIO9d1/w+x
HvtqS0OdbG9XHAOTAiEAnqfpXbO0bYAKEhvOheqLrtD2qOYlcSDMHJoaWCcRRTU=
-----END CERTIFICATE-----
""",
    "client.key": b"""-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgX4BGsJ6bgRZWevC0
RnyJgpMJggCOecfDDxKhZ9NAK26hRANCAAQua6OKu6NG/yjvRN39MxMT59uUSLd0
mD1ng0wfGzTU5p5HHFWYukW7zZAMmLkWSy+7pwL2xfOcWiNwjP4hYPKu
-----END PRIVATE KEY-----
""",
    "client.crt": b"""-----BEGIN CERTIFICATE-----
MIIBejCCASGgAwIBAgIBATAKBggqhkjOPQQDAjAeMRwwGgYDVQQDDBNjbGllbnQg
b2YgdGhlIHRlc3RzMCAXDTAwMDEwMTAwMDAwMFoYDzIxMDAwMTAxMDAwMDAwWjAe
MRwwGgYDVQQDDBNjbGllbnQgb2YgdGhlIHRlc3RzMFkwEwYHKoZIzj0CAQYIKoZI
zj0DAQcDQgAELmujirujRv8o70Td/TMTE+fblEi3dJg9Z4NMHxs01OaeRxxVmLpF
u82QDJi5Fksvu6cC9sXznFojcIz+IWDyrqNOMEwwGgYDVR0RBBMwEYIJbG9jYWxo
b3N0hwR/AAABMA8GA1UdEwEB/wQFMAMBAf8wHQYDVR0OBBYEFDT0XVDaaR0SEJ4Y
1gLZakYBM5ktMAoGCCqGSM49BAMCA0cAMEQCIG52Qp35Mgh06AFC372QzThfad2b
eG9JwJ4ri8LoYk7rAiBo0lorBmHA8eKJWQQei/z+6JTpunh86G/Ye7opytUxHQ==
-----END CERTIFICATE-----
""",
    "locked.key": b"""-----BEGIN EC PRIVATE KEY-----
Proc-Type: 4,ENCRYPTED
DEK-Info: AES-128-CBC,DE1EEF39559E0B4E51E93DF0F18733FF

yKfasqzpDp9qwEl4+pUjeuZuRXU990Y5FuP88kt7e6sfyq15nYOKHRbWefnv98HG
meEvX9HjGETZvCOKQd3ZmYnvwQtZLhI5G4O1bdMJlsLQ+vjkuiGh5gOV1kSWv9FH
+TRm6oT1kWvDQNf8zpfV46NHGt5QgVK1vh+FBiVQqto=
-----END EC PRIVATE KEY-----
""",
}


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The two PEM texts, and the files that hold them."""

    key: bytes
    certificates: bytes
    key_file: str
    certificate_file: str


def certificate(folder: Path, name: str) -> Certificate:
    """Writes "server" or "client" into a folder."""
    files = [folder / f"{name}.{ending}" for ending in ("key", "crt")]
    for file in files:
        file.write_bytes(PEMS[file.name])
    return Certificate(*(PEMS[file.name] for file in files), *map(str, files))
