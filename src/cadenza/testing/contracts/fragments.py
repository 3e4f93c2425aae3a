"""The contract of fragmentations."""

from __future__ import annotations

from copy import deepcopy

from cadenza.fragments import Fragmentation
from cadenza.testing.contracts.promises import Contract

__all__ = ["check_fragmentation"]

_Parameters = list[tuple[str, int]]


def check_fragmentation(fragmentation: Fragmentation) -> None:
    """Raise AssertionError if a fragmentation breaks a promise of `cadenza.fragments.Fragmentation`.

    >>> from cadenza.fragments import by_layers
    >>> check_fragmentation(by_layers(3))
    """
    contract = Contract(fragmentation, Fragmentation)
    contract.is_whole()
    for model, parameters in _models().items():
        _check_model(contract, fragmentation, model, parameters)


def _check_model(contract: Contract, fragmentation: Fragmentation, model: str, parameters: _Parameters) -> None:
    given = list(parameters)
    fragments = fragmentation.split(given)
    names = [name for name, _ in parameters]
    told = sorted(name for fragment in fragments for name in fragment)
    contract.holds(given == parameters, "split leaves the list that it is given alone")
    contract.holds(told == sorted(names), f"every parameter is in exactly one fragment; not so of {model}")
    contract.holds(all(fragments), f"no fragment is empty; one of {model} is")
    again = deepcopy(fragmentation).split(list(parameters))
    contract.holds(fragments == again, f"all ranks cut alike; twice {model} gave different fragments")
    for fragment in fragments:
        contract.holds(fragment == sorted(fragment, key=names.index), f"parameters keep their order; not in {model}")
    if fragmentation.single:
        contract.holds(len(fragments) <= 1, f"single means one fragment; {model} was cut into {len(fragments)}")


def _models() -> dict[str, _Parameters]:
    parts = ("attention.weight", "mlp.0.weight", "mlp.0.bias")
    layers = [(f"layers.{i}.{part}", 4 + 40 * (part != "mlp.0.bias")) for i in range(12) for part in parts]
    return {
        "a transformer": [("embed.weight", 400), *layers, ("norm.weight", 4), ("head.weight", 400)],
        "a Sequential": [(f"{i}.{part}", 8) for i in range(5) for part in ("weight", "bias")],
        "names without numbers": [("embed", 4), ("norm1", 4), ("h2o.weight", 0), ("head.weight", 4)],
        "layers out of order": [(f"blocks.{i}.w", i) for i in (10, 2, 1)],
        "one parameter": [("weight", 1)],
        "one large parameter among small ones": [("a", 4), ("b", 1 << 40), ("c", 4)],
        "no parameters": [],
    }
