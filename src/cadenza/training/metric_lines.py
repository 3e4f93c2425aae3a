"""What a line of metrics must hold so that it can be shown: others are left out, as one that a crash tore is.

>>> line = {"kind": "step", "step": 3, "elapsed": 1.5, "loss": "nan", "samples": 16}
>>> is_readable(line), is_readable({**line, "step": [3]})
(True, False)
"""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["is_readable", "read_line"]

_WHOLE = {"step", "workers", "samples", "bytes_sent", "encoded_bytes", "raw_bytes", "fragment", "delay", "bytes"}
_WHOLE_IN = {"round": {"level"}, "start": {"gradient_bytes", "steps", "parameters"}}  # and elsewhere perhaps not
_NUMBERS = {"loss", "stall_s", "wire_s", "lr", "drift", "codec_error", "launched", "landed"}
_TIMES = {"time", "elapsed"}
_LARGEST = 1 << 63


def read_line(raw: bytes) -> dict[str, Any] | None:
    """Return a line of a file, or None if it cannot be shown.

    >>> read_line(b'{"kind": "step", "step": 3}'), read_line(b'{"kind": "st')
    ({'kind': 'step', 'step': 3}, None)
    """
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):  # torn by a crash: of JSON or of UTF-8
        return None
    return line if is_readable(line) else None


def is_readable(line: Any) -> bool:
    """Tell whether a line is one that `MetricsWriter` may have written."""
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str) or "step" not in line:
        return False
    kind = line["kind"]
    whole = _WHOLE | _WHOLE_IN.get(kind, set())
    return (
        (kind != "end" or "status" in line)
        and all(_is_whole(line[name]) for name in whole & line.keys())
        and all(line[name] is None or _is_number(line[name]) for name in _NUMBERS & line.keys())
        and all(_is_number(line[name]) and math.isfinite(float(line[name])) for name in _TIMES & line.keys())
    )


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < _LARGEST


def _is_number(value: Any) -> bool:
    """Tell whether it is a number; JSON has no infinity and no NaN, so they are texts."""
    return type(value) is float or _is_whole(value) or value in ("inf", "-inf", "nan")
