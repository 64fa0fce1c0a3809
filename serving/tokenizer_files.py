"""What a gateway needs to turn text into tokens and back, as one archive."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

from serving.errors import NotBuiltError

CHUNK_BYTES = 64 * 1024  # of the archive in one message
_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "config.json",
    "generation_config.json",
)
_SUFFIXES = (".jinja", ".model", ".tiktoken")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same archive, and so the same fingerprint, from every server of a model


def archive(folder: Path | None) -> tuple[bytes, str]:
    """A zip of the tokenizer's files in a model folder, and its SHA-256 in hexadecimal digits.

    Raises NotBuiltError where the folder has no tokenizer.json.
    """
    if folder is None or not (folder / "tokenizer.json").is_file():
        raise NotBuiltError(
            f"tokenizer: {'the model' if folder is None else folder.name} has no tokenizer.json; send token ids"
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as out:
        for file in sorted(folder.iterdir()):
            if file.is_file() and (file.name in _NAMES or file.suffix in _SUFFIXES):
                info = zipfile.ZipInfo(file.name, _EPOCH)
                info.compress_type = zipfile.ZIP_DEFLATED
                out.writestr(info, file.read_bytes())
    content = buffer.getvalue()
    return content, hashlib.sha256(content).hexdigest()
