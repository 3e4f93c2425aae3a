"""The command `cadenza plan`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from cadenza.cli.plan import options
from cadenza.errors import UsageError

if TYPE_CHECKING:
    from cadenza.cli.plan.wishes import Wishes

__all__ = ["plan"]


def plan(
    task: options.Task = None,
    parameters: options.Parameters = None,
    step_s: options.StepS = None,
    workers: options.Workers = None,
    bandwidth: options.Bandwidth = None,
    latency: options.Latency = None,
    target_utilisation: options.Target = 0.95,
    layers: options.Layers = 0,
    tokens: options.Tokens = None,
    tokens_per_step: options.TokensPerStep = None,
    memory: options.Memory = None,
    source: options.From = None,
    down: options.Down = None,
    sites: options.Sites = 1,
    between: options.Between = None,
    between_latency: options.BetweenLatency = "0",
    slowest: options.Slowest = 1.0,
    jitter: options.Jitter = 0.0,
    straggle: options.Straggle = None,
    fails_every: options.FailsEvery = None,
    faults: options.Policy = "raise_error",
    restart: options.Restart = "2min",
    checkpoint_every: options.CheckpointEvery = "15min",
    strategy: options.Strategies = None,
    codec: options.Codecs = None,
    delay: options.Delays = None,
    period: options.Periods = None,
    measured: options.Measured = None,
    model: options.ModelName = "ours",
    as_json: options.AsJson = False,
    html: options.Html = None,
    simulate: options.Simulate = None,
    rounds: options.Rounds = 200,
    seed: options.Seed = 1,
) -> None:
    """Say before training what period, codec and link will cost, and which strategy to begin with.

    cadenza plan --parameters 1.3B --step-s 0.8 --workers 8 --bandwidth 200mbit --latency 40ms; or cadenza plan
    mypkg.task:build --workers 8 --bandwidth 200mbit, which measures the step here; or cadenza plan --from RUN.
    """
    from cadenza.cli.plan.wishes import gather

    wishes = gather(locals())
    told = _idealised(wishes) if wishes.idealised else _plan(wishes)
    if html is not None:
        from cadenza.cli.plan.page import write_page

        write_page(html, wishes)
        told["html"] = str(html)
    if simulate is not None:
        from cadenza.cli.plan.simulating import simulate_into

        told["simulation"] = simulate_into(simulate, wishes, told, rounds=rounds, seed=seed)
    if as_json:
        print(json.dumps(told, indent=1), flush=True)
    else:
        from cadenza.cli.plan.showing import show

        show(told)


def _plan(wishes: Wishes) -> dict[str, Any]:
    """Return everything that is known of the plan, as JSON can hold it."""
    from cadenza.cli.plan.candidates import as_python, as_toml, candidates
    from cadenza.planning.choices import plan_row, recommend, shortest_row
    from cadenza.planning.laws import outer_settings

    place, cluster = wishes.place, wishes.place.cluster
    found = candidates(wishes.strategies, wishes.codecs, wishes.delays, cluster, place.model, wishes.policy)
    if wishes.periods:
        rows = [
            plan_row(one, 1 if one.name == "ddp" else period, place)
            for one in found
            for period in (wishes.periods if one.name != "ddp" else [1])
            if one.name == "ddp" or one.least <= period <= one.most
        ]
        if not rows:
            least = min(one.least for one in found)
            raise UsageError(
                f"--period {', '.join(map(str, wishes.periods))}: no strategy asked for has such a short period; the "
                f"shortest is {least}."
            )
    else:
        rows = [shortest_row(one, place) for one in found]
    chosen = recommend(rows, place)
    row = chosen.row
    words = (row.name, row.codec, row.delay, row.period, cluster.site_workers)
    outer_lr, outer_momentum = outer_settings(place.model.parameters, cluster.workers)
    return {
        "model": "ours",
        "inputs": wishes.plain(),
        "calibration": wishes.calibration_plain(),
        "rows": [{**one.plain(), **wishes.duration_of(one.outcome.step_s, one.outcome.sent)} for one in rows],
        "recommendation": {
            "possible": chosen.possible,
            "why": chosen.why,
            **row.plain(),
            "python": as_python(*words),
            "toml": as_toml(*words),
            "published_outer": {"outer_lr": outer_lr, "outer_momentum": outer_momentum},
        },
    }


def _idealised(wishes: Wishes) -> dict[str, Any]:
    """Return what the papers' model says at this bandwidth, and which it needs for some utilisations."""
    from cadenza.planning.idealised import KINDS, bandwidth_needed, utilisation

    model, cluster = wishes.place.model, wishes.place.cluster
    shape: dict[str, Any] = {
        "parameters": model.parameters,
        "layers": model.layer_count,
        "step_s": cluster.step_s,
    }
    rows = []
    for kind in KINDS:
        for period in [1] if kind == "data parallel" else wishes.periods or [10, 30, 100, 300, 500]:
            needed = {
                f"{target:g}": bandwidth_needed(kind, target, period=period, **shape)
                for target in (0.5, 0.8, 0.9, 0.95, 0.99)
            }
            rows.append(
                {
                    "strategy": kind,
                    "period": period,
                    "utilisation": utilisation(kind, cluster.link.up, period=period, **shape),
                    "bandwidth_for": {k: v if v < float("inf") else None for k, v in needed.items()},
                }
            )
    return {"model": "idealised", "inputs": wishes.plain(), "rows": rows}
