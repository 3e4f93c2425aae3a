"""One file of a checkpoint: safetensors, written so that a crash cannot spoil it, with a manifest that says what it is.

The manifest is JSON beside the file (`worker-00003.json`) and holds the file's size and hash, whose it is, and what it
belongs to. It is written last, so a file without one was not finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cadenza.engine.saving import State
from cadenza.errors import CheckpointError

__all__ = ["Manifest", "as_os_error", "read_manifest", "read_state", "verify", "write_state"]

_TEXTS = "cadenza"  # the one entry of a safetensors file's metadata: with several, their order would be left to chance


@dataclass(frozen=True)
class Manifest:
    """What a file is: the hash and size of its bytes, and to which checkpoint it belongs.

    Attributes:
        step: The clock of the worker that wrote it.
        fingerprint: The same in all files that were saved together.
        workers: Which workers belong to the checkpoint; only in the manifest of what they share.
        held: How many rounds that state has seen, where workers come and go.
    """

    format: int
    bytes: int
    blake2b: str
    step: int
    fingerprint: str
    workers: list[int] | None = None
    held: int = 0

    def to_json(self) -> str:
        fields = asdict(self)
        return json.dumps({**fields, "check": _check(fields)}, indent=1)


def write_state(path: Path, state: Mapping[str, torch.Tensor | str], describe: Callable[[int, str], Manifest]) -> None:
    """Write tensors and texts to a file and its manifest, which `describe` makes of the file's size and hash."""
    save_file, _ = _safetensors()
    from safetensors import SafetensorError

    tensors = {key: value.contiguous() for key, value in state.items() if isinstance(value, torch.Tensor)}
    texts = {key: value for key, value in state.items() if isinstance(value, str)}
    partial = _partial(path)
    try:
        save_file(tensors, partial, metadata={_TEXTS: json.dumps(texts)})
        _settle(partial, path)
        manifest = describe(path.stat().st_size, _hash(path))
        partial = _partial(_beside(path))
        partial.write_text(manifest.to_json())
        _settle(partial, _beside(path))
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be written: safetensors does not hold {error}.") from error
    except (OSError, SafetensorError) as error:  # a full disk, most likely: leave it what room there is
        for unfinished in (_partial(path), _partial(_beside(path))):
            unfinished.unlink(missing_ok=True)
        raise as_os_error(error, path) from error


def as_os_error(error: Exception, path: Path) -> OSError:
    """Return what the system had to say of a file, also where safetensors has put its number into words.

    >>> as_os_error(ValueError("Error while serializing: I/O error: (os error 28)"), Path("model"))
    OSError(28, 'No space left on device')
    """
    found = re.search(r"os error (\d+)", str(error))
    number = error.errno if isinstance(error, OSError) else found and int(found[1])
    return OSError(number, str(error) if number is None else os.strerror(number), str(path))


def read_manifest(path: Path) -> Manifest:
    """Return a file's manifest; raise if there is none, or if it was changed."""
    beside = _beside(path)
    try:
        fields: dict[str, Any] = json.loads(beside.read_text())
        check = fields.pop("check")
        manifest = Manifest(**fields)
        _check_types(fields)
    except FileNotFoundError:
        missing = beside if path.exists() else path
        raise CheckpointError(f"{missing} is missing: it was lost, or never written to the end.") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{beside} is damaged: it is not the manifest that was written ({error}).") from error
    if check != _check(fields):
        raise CheckpointError(f"{beside} is damaged: it is not the manifest that was written.")
    return manifest


def _check_types(fields: Mapping[str, Any]) -> None:
    """Raise if a field is of a wrong type, as in a file that another program wrote."""
    workers = fields.get("workers")
    told = [fields.get("held", 0), *(fields[name] for name in ("format", "bytes", "step"))]
    numbers = [*told, *([] if workers is None else workers)]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise TypeError("what is a number in it must be one, and not below 0")
    if not isinstance(workers, list | None) or any(
        type(fields[name]) is not str for name in ("blake2b", "fingerprint")
    ):
        raise TypeError("workers are a list, and hashes are texts")


def verify(path: Path, manifest: Manifest) -> None:
    """Raise if a file is not what was written."""
    try:
        size = path.stat().st_size
        if size != manifest.bytes:
            raise CheckpointError(f"{path} is damaged: it has {size} bytes, and {manifest.bytes} were written.")
        if _hash(path) != manifest.blake2b:
            raise CheckpointError(f"{path} is damaged: its bytes are not those that were written.")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing, though its manifest is there.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def read_state(path: Path, *, leave: Callable[[str], bool] | None = None) -> State:
    """Return the texts of a file, and the tensors but those to leave; raise if it is anything else than safetensors."""
    _, safe_open = _safetensors()
    from safetensors import SafetensorError

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            state: State = dict(json.loads((file.metadata() or {})[_TEXTS]))
            keys = [key for key in file.keys() if leave is None or not leave(key)]  # noqa: SIM118
            state |= {key: file.get_tensor(key) for key in keys}
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path} is no safetensors file that Cadenza wrote: {error}") from error
    return state


def _safetensors() -> tuple[Callable[..., None], Callable[..., Any]]:
    try:
        from safetensors import safe_open
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(
            "Checkpoints are safetensors files, and safetensors is not installed: pip install 'cadenza[checkpoint]'. "
            "sync.state_dict() and torch.distributed.checkpoint work without it."
        ) from error
    return save_file, safe_open


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _beside(path: Path) -> Path:
    return path.with_suffix(".json")


def _settle(partial: Path, path: Path) -> None:
    """Give a finished file its name, once its bytes are on the disk."""
    _flush(partial)
    os.replace(partial, path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.blake2b).hexdigest()


def _check(fields: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()
