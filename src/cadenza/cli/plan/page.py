"""The page of a plan: curves and sliders in one file, without any network."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from cadenza.cli.plan.candidates import POLICIES, build
from cadenza.cli.plan.wishes import Wishes
from cadenza.common.messages import HEADER_BYTES
from cadenza.errors import UsageError
from cadenza.planning.inputs import estimated_layers
from cadenza.planning.waiting import expected_maximum, pause_s

__all__ = ["KINDS", "page_data", "write_page"]

# Name, codec, delay; each has a colour of the page.
KINDS = (
    ("ddp", "fp32", 0),
    ("local_sgd", "fp32", 0),
    ("diloco", "fp32", 0),
    ("diloco", "int8", 0),
    ("diloco", "e3m0", 0),
    ("diloco", "int8", 2),
    ("streaming_diloco", "e3m0", 5),
    ("sparse_loco", "topk+feedback", 0),
)
_TITLES = {
    "parameters": "Parameters",
    "step": "A step",
    "bandwidth": "Bandwidth of a link",
    "workers": "Workers",
    "period": "Period",
}


def page_data(wishes: Wishes) -> dict[str, Any]:
    """Return what the page's script needs: inputs, what is compared, and where sliders stop."""
    place, cluster = wishes.place, wishes.place.cluster
    work = place.work
    parameters = _stops([10.0 ** (power / 4) for power in range(24, 46)], place.model.parameters)
    workers = _stops([2**power for power in range(1, 11)], cluster.workers)
    sliders = {
        "parameters": [round(n) for n in parameters],
        "step": _stops([10.0 ** (power / 8) for power in range(-16, 9)], cluster.step_s),
        "bandwidth": _stops([10.0 ** (7 + power / 8) for power in range(33)], cluster.link.up),
        "workers": workers,
        "period": _stops([1, 2, 4, 8, 16, 32, 64, 100, 200, 500, 1000, 2000, 5000, 10000], _period(wishes)),
    }
    return {
        "place": {
            **asdict(cluster),
            "parameters": place.model.parameters,
            "layers": place.model.layer_count,
            "work": {
                **work.plain(),
                "codec_s": {name: work.of(name) for name in ("fp32", "bf16", "int8", "e3m0", "topk")},
            },
            "header_bytes": HEADER_BYTES,
            "policy": wishes.policy,
            "grace_s": pause_s(POLICIES[wishes.policy]()),
            "maximum": expected_maximum(cluster.workers),
        },
        "kinds": [_kind(*one, wishes.policy) for one in KINDS],
        "sliders": sliders,
        "start": {
            "parameters": sliders["parameters"].index(place.model.parameters),
            "step": sliders["step"].index(cluster.step_s),
            "bandwidth": sliders["bandwidth"].index(cluster.link.up),
            "workers": workers.index(cluster.workers),
            "period": sliders["period"].index(_period(wishes)),
        },
        "maxima": {str(count): expected_maximum(int(count)) for count in workers},
        "layers": {str(size): estimated_layers(size) for size in sliders["parameters"]},
        "grid": [10.0 ** (7 + power / 12) for power in range(49)],
        "target": place.target,
    }


def write_page(path: Path, wishes: Wishes) -> None:
    """Write the page."""
    data = page_data(wishes)
    model, page = _resource("model.js"), _resource("page.js")
    sliders = "".join(
        f'<label for="{name}">{title}: <output id="{name}-value" for="{name}"></output>'
        f'<input type="range" id="{name}" min="0" max="{len(data["sliders"][name]) - 1}" value="{data["start"][name]}">'
        "</label>\n"
        for name, title in _TITLES.items()
    )
    text = Template(_resource("page.html")).substitute(
        policy=_policy(model, page),
        sliders=sliders,
        target=escape(f"{wishes.place.target:.1%}"),
        data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        model=model,
        page=page,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html {path}: it cannot be written: {error.strerror}.") from None


def _period(wishes: Wishes) -> int:
    return wishes.periods[0] if wishes.periods else 100


def _kind(name: str, codec: str, delay: int, policy: str) -> dict[str, Any]:
    strategy = build(name, codec, delay, 2**16, policy=policy)
    plain = codec.partition("+")[0]
    late = f", {delay} steps late" if delay else ""
    return {
        "name": name,
        "label": name if name == "ddp" else f"{name} {plain}{late}",
        "codec": plain,
        "delay": delay,
        "anchored": strategy.levels[0].anchored,
        "layers": getattr(strategy.fragments, "layers", 0),
    }


def _stops(usual: list[Any], given: Any) -> list[Any]:
    """Return where a slider stops: at usual values, and at the one that was given."""
    return sorted({*usual, given})


def _policy(*scripts: str) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; base-uri 'none'"


def _resource(name: str) -> str:
    return files("cadenza.cli.plan").joinpath(name).read_text(encoding="utf-8")
