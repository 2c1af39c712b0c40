"""The manifest inside an exported file, and the seal that tells a whole file from a damaged one.

A file is an ONNX model whose ``metadata_props`` hold two entries: ``nerd.manifest``, canonical
JSON, and, as the very last bytes, ``nerd.sha256``, the SHA-256 of all bytes before that entry. The
seal finds damage and edits by accident; it is no signature.

Keys of the manifest, format version 1: ``format``, ``format_version``, ``name``, ``robot``,
``robot_digest``, ``dt`` [s], ``model`` (``digest`` of its manifest, ``weights_sha256``,
``datasets``, ``parameters``), ``config`` (the network), ``context`` (``kind`` and ``config`` of the
context encoder and the ``rows`` that one world holds, or null), ``spans``, ``receptive_field``,
``cache``, ``normaliser``, ``integration``, ``limits`` (``batch``, the largest number of worlds whose
tensors 32-bit indices reach; ``control``, ``joint`` and ``effort`` ranges of the robot), ``precision``,
``inputs`` and ``outputs`` (name, dtype, shape, and names, units and frames of the entries),
``versions``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "canonical_json",
    "check_seal",
    "metadata_entries",
    "read_manifest",
    "seal",
]

FORMAT = "nerd-onnx"
FORMAT_VERSION = 1
MANIFEST_KEY = "nerd.manifest"
SEAL_KEY = "nerd.sha256"

_REQUIRED = {
    "name": str,
    "robot": dict,
    "robot_digest": str,
    "dt": float,
    "model": dict,
    "spans": list,
    "precision": str,
    "inputs": list,
    "outputs": list,
}


def canonical_json(document: Mapping[str, Any]) -> str:
    """One text per document: sorted keys, no spaces, numbers in full precision."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def metadata_entry(key: str, value: str) -> bytes:
    """A ``metadata_props`` entry of an ONNX model, to be appended to the bytes of one.

    In the protobuf encoding, appending a field to a message adds to its repeated fields, so no ONNX
    library is needed.
    """
    pair = b"\x0a" + _sized(key.encode()) + b"\x12" + _sized(value.encode())
    return b"\x72" + _sized(pair)  # field 14 of ModelProto


def seal(body: bytes) -> bytes:
    """The bytes of a file, from those of an ONNX model."""
    return body + metadata_entry(SEAL_KEY, hashlib.sha256(body).hexdigest())


def check_seal(data: bytes, where: str) -> None:
    """Refuse bytes that :func:`seal` did not write.

    Args:
        data: Content of the file.
        where: Words that name the file to the user.

    Raises:
        ValueError: The seal is missing or belongs to other bytes.
    """
    length = len(metadata_entry(SEAL_KEY, "0" * 64))
    if seal(data[:-length]) != data:
        raise ValueError(
            f"{where}: truncated, edited or not made by nerd-deploy: the SHA-256 at its end is not "
            "that of its content; export the model again"
        )


def metadata_entries(data: bytes, where: str) -> dict[str, str]:
    """The ``metadata_props`` of an ONNX model, read without an ONNX library.

    Raises:
        ValueError: The bytes are not a protobuf message.
    """
    try:
        pairs = [dict(_fields(content)) for field, content in _fields(data) if field == 14]
        return {pair[1].decode(): pair.get(2, b"").decode() for pair in pairs}
    except (IndexError, KeyError, ValueError) as error:
        raise ValueError(f"{where}: not an ONNX file ({error})") from None


def read_manifest(metadata: Mapping[str, str], where: str) -> dict[str, Any]:
    """The manifest among the metadata of an ONNX model.

    Raises:
        ValueError: It is missing, not readable, or of another format version.
    """
    try:
        document = json.loads(metadata[MANIFEST_KEY])
    except KeyError:
        raise ValueError(f"{where}: holds no {MANIFEST_KEY}; not made by nerd-deploy") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: its {MANIFEST_KEY} is not valid JSON ({error})") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{where}: its {MANIFEST_KEY} is not of the format {FORMAT!r}")
    if document.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{where}: format_version {document.get('format_version')!r}, this nerd-deploy reads {FORMAT_VERSION}"
        )
    wrong = [k for k, kind in _REQUIRED.items() if not isinstance(document.get(k), kind)]
    if wrong:
        raise ValueError(f"{where}: its {MANIFEST_KEY} lacks a usable {', '.join(wrong)}")
    return document


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of each field of a protobuf message; numbers are passed over."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            _, at = _varint(message, at)
            continue
        size, at = _varint(message, at) if kind == 2 else ({1: 8, 5: 4}.get(kind, -1), at)
        if size < 0 or at + size > len(message):
            raise ValueError(f"broken at byte {at}")
        if kind == 2:
            yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at


def _sized(content: bytes) -> bytes:
    """Content after its length as a protobuf varint."""
    size, digits = len(content), bytearray()
    while size > 0x7F:
        digits.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*digits, size]) + content
