"""Save and load: arrays and settings in one safetensors file, written atomically and checked on reading.

A file holds the arrays plus one JSON text in its header: format version, kind, library version, settings and a SHA-256
over all of it. Nothing in a file is ever executed, and an existing file is replaced only by a whole new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from terrafirma._version import __version__
from terrafirma.errors import BadFile, InvalidInput

__all__ = ["FORMAT", "read_arrays", "read_json", "replacing", "write_arrays", "write_bytes", "write_json"]

FORMAT = 1
KEY = "terrafirma"
DTYPES = {"bool": "BOOL"} | {
    f"{kind}{bits}": f"{letter}{bits}"
    for kind, letter in (("float", "F"), ("int", "I"), ("uint", "U"))
    for bits in (64, 32, 16, 8)
    if (kind, bits) != ("float", 8)
}
Arrays = Mapping[str, npt.NDArray[Any]]


def write_arrays(path: str | os.PathLike[str], kind: str, arrays: Arrays, settings: Mapping[str, Any]) -> None:
    """Write arrays and settings (anything JSON holds) to one file, whole or not at all, and array by array."""
    plain = {name: _plain(name, array) for name, array in arrays.items()}
    header = {"format": FORMAT, "kind": kind, "version": __version__, "settings": dict(settings)}
    header["sha256"] = _digest(header, plain)
    about: dict[str, Any] = {"__metadata__": {KEY: json.dumps(header)}}
    start = 0
    for name, array in plain.items():
        about[name] = {
            "dtype": DTYPES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [start, start + array.nbytes],
        }
        start += array.nbytes
    text = json.dumps(about).encode()
    text += b" " * (-len(text) % 8)  # so that the arrays are aligned
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in plain.values():
            file.write(array.reshape(-1).view(np.uint8).data)


def _plain(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array as a file holds it: contiguous, little-endian, of a type that safetensors knows."""
    if array.dtype.name not in DTYPES:
        raise InvalidInput(f"{name} must be numbers or bool to be saved. Got {array.dtype}; number the classes, say.")
    return np.asarray(array, array.dtype.newbyteorder("<"), order="C")  # ascontiguousarray would give a number an axis


def read_arrays(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Read what ``write_arrays`` wrote as this kind: arrays and settings."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if path.is_dir():
        raise BadFile(f"{path} is a folder. Load the file that save wrote.")
    try:
        with path.open("rb"):  # the usual errors, where it is missing or must not be read
            pass
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get(KEY, "null"))
            _check_header(path, header, kind)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (
        SafetensorError,
        UnicodeDecodeError,
        json.JSONDecodeError,
        RecursionError,
        TypeError,
        AttributeError,
    ) as error:
        raise BadFile(
            f"{path} is not a whole safetensors file ({error}). It is truncated or of another kind; save it again."
        ) from error
    checksum = header.pop("sha256", None)
    if checksum != _digest(header, arrays):
        raise BadFile(f"{path} has been altered: its content does not match its checksum. Save it again.")
    return arrays, header.get("settings", {})


def write_json(path: str | os.PathLike[str], kind: str, settings: Mapping[str, Any]) -> None:
    """Write settings to a JSON file that a person can read, with a checksum."""
    header = {"format": FORMAT, "kind": kind, "version": __version__, "settings": dict(settings)}
    header["sha256"] = _digest(header, {})
    write_bytes(path, (json.dumps(header, indent=2) + "\n").encode())


def read_json(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """Read what ``write_json`` wrote as this kind."""
    path = Path(path)
    try:
        header = json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise BadFile(
            f"{path} is not a whole JSON file ({error}). It is truncated or of another kind; save it again."
        ) from error
    _check_header(path, header, kind)
    checksum = header.pop("sha256", None)
    if checksum != _digest(header, {}):
        raise BadFile(f"{path} has been altered: its content does not match its checksum. Save it again.")
    settings: dict[str, Any] = header.get("settings", {})
    return settings


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace a file by ``data`` at once."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Replace a file at once by what is written to another: a crash half-way leaves the old one whole, no litter that counts.

    The context gives the path to write to; what raises within it leaves everything as it was.
    """
    try:
        path = Path(path).resolve()  # through a link, to the file itself
    except RuntimeError as error:
        raise BadFile(f"{path} cannot be written: its links lead in a circle.") from error
    reason = _why_not_writable(path)
    if reason:
        raise BadFile(f"{path} cannot be written: {reason}.")
    temporary = path.with_name(f".terrafirma-{secrets.token_hex(8)}.tmp")
    try:
        temporary.touch(exist_ok=False)
        if path.exists():
            temporary.chmod(path.stat().st_mode & 0o777)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # what the user asked for
        raise


def _why_not_writable(path: Path) -> str | None:
    if not path.parent.is_dir():
        return "its folder does not exist"
    if path.is_dir():
        return "it is a folder"
    if path.exists() and not path.is_file():
        return "it is not a regular file"
    if path.exists() and not path.stat().st_mode & 0o222:
        return "it is read-only"
    return None


def _check_header(path: Path, header: Any, kind: str) -> None:
    whole = isinstance(header, dict) and isinstance(header.get("settings", {}), dict)
    if not whole or type(header.get("format")) is not int or header["format"] < 1:
        raise BadFile(f"{path} was not written by terrafirma. Load files that its save wrote.")
    if header["format"] > FORMAT:
        raise BadFile(
            f"{path} has format {header['format']}, written by terrafirma {header.get('version')}; this is version "
            f"{__version__}, which reads formats up to {FORMAT}. Install the newer version."
        )
    if header.get("kind") != kind:
        raise BadFile(f"{path} holds a {header.get('kind')}, not a {kind}. Load it with the class that saved it.")


def _digest(header: Mapping[str, Any], arrays: Arrays) -> str:
    """SHA-256 over the header and all arrays, in order of their names."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
