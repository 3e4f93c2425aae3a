"""The algorithms as published, simulated over several workers in one process: plain loops over lists of tensors.

Each takes `Workers` and returns what every worker held after every step, and at the end after `finish()`: one list of
flat tensors (one a worker) for each of them. Nothing here is fast, clever or shared with Cadenza, except that codecs
write and read their own bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import nn

from cadenza.codecs import Codec
from cadenza.testing.encoded_mean import EncodedMean, round_trip

__all__ = [
    "Case",
    "History",
    "Nesterov",
    "Workers",
    "average",
    "compressed_diloco",
    "diloco",
    "flat",
    "flat_in_blocks",
    "hierarchical",
    "late_local_sgd",
    "local_sgd",
    "mean",
    "out_of_blocks",
    "post_local_sgd",
    "slowmo",
    "sparse_loco",
    "streaming_diloco",
    "unflatten",
]

History: TypeAlias = list[list[torch.Tensor]]


class Case(Protocol):
    """A model and the data to train it, the same on every call except for what `rank` changes."""

    def model(self, rank: int) -> nn.Module: ...

    def backward(self, model: nn.Module, rank: int, step: int) -> None: ...


class Workers:
    """Copies of a model in one process, each with its own optimizer and data; all start from the first one's values."""

    def __init__(self, case: Case, count: int, optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        self.case = case
        self.models = [case.model(rank) for rank in range(count)]
        for model in self.models[1:]:
            model.load_state_dict(self.models[0].state_dict())
        self.optimizers = [optimizer(model) for model in self.models]

    def __len__(self) -> int:
        return len(self.models)

    @property
    def parameters(self) -> list[list[torch.Tensor]]:
        """The tensors of each worker, which algorithms change in place."""
        return [[p.data for p in model.parameters() if p.requires_grad] for model in self.models]

    def local_step(self, n: int) -> None:
        """Every worker takes step `n` on its own data."""
        for rank in range(len(self)):
            self.backward(rank, n)
            self.optimizers[rank].step()

    def backward(self, rank: int, n: int) -> None:
        self.optimizers[rank].zero_grad()
        self.case.backward(self.models[rank], rank, n)

    def step_on_mean_gradient(self, n: int) -> None:
        """All workers take step `n` together."""
        for rank in range(len(self)):
            self.backward(rank, n)
        for copies in zip(*(model.parameters() for model in self.models), strict=True):
            gradient = mean([copy.grad for copy in copies if copy.grad is not None])
            for copy in copies:
                copy.grad = gradient.clone()
        for optimizer in self.optimizers:
            optimizer.step()

    def snapshot(self) -> list[torch.Tensor]:
        return [flat(tensors) for tensors in self.parameters]


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One copy of all values, side by side."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten(values: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write flat values back into the tensors."""
    for part, tensor in zip(values.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
        tensor.copy_(part.view(tensor.shape))


def flat_in_blocks(tensors: Sequence[torch.Tensor], block: int) -> torch.Tensor:
    """One copy of all values; every tensor starts at a multiple of a block, and zeros lie between them."""
    padded = [torch.nn.functional.pad(t.detach().reshape(-1), (0, -t.numel() % block)) for t in tensors[:-1]]
    return torch.cat([*padded, tensors[-1].detach().reshape(-1)])


def out_of_blocks(values: torch.Tensor, tensors: Sequence[torch.Tensor], block: int) -> None:
    """Write such a copy back into the tensors."""
    start = 0
    for tensor in tensors:
        tensor.copy_(values[start : start + tensor.numel()].view(tensor.shape))
        start += math.ceil(tensor.numel() / block) * block


def mean(rows: Sequence[torch.Tensor], weights: Sequence[float] | None = None) -> torch.Tensor:
    """Sum up in the order of the workers, then divide; or the weighted sum."""
    total = torch.zeros_like(rows[0])
    for i, row in enumerate(rows):
        total = total + (row * weights[i] if weights else row)
    return total if weights else total / len(rows)


def average(workers: Workers, members: Sequence[int] | None = None) -> None:
    """Give the members (everyone, if None) the mean of their parameters."""
    chosen = [workers.parameters[rank] for rank in members or range(len(workers))]
    for copies in zip(*chosen, strict=True):
        value = mean(copies)
        for copy in copies:
            copy.copy_(value)


def _in_periods(workers: Workers, steps: int, period: int, come_together: Callable[[], None]) -> History:
    """Train, and come together after every `period` steps and at the end."""
    history = []
    for n in range(1, steps + 1):
        workers.local_step(n)
        if n % period == 0:
            come_together()
        history.append(workers.snapshot())
    if steps % period:
        come_together()
    return [*history, workers.snapshot()]


def local_sgd(workers: Workers, steps: int, *, period: int) -> History:
    """Average the parameters every `period` steps."""
    return post_local_sgd(workers, steps, period=period, warmup_steps=0)


def post_local_sgd(workers: Workers, steps: int, *, period: int, warmup_steps: int) -> History:
    """Average gradients during the warm-up, then parameters every `period` steps after it."""
    history = []
    for n in range(1, steps + 1):
        if n <= warmup_steps:
            workers.step_on_mean_gradient(n)
        else:
            workers.local_step(n)
            if (n - warmup_steps) % period == 0:
                average(workers)
        history.append(workers.snapshot())
    if (steps - warmup_steps) % period:
        average(workers)
    return [*history, workers.snapshot()]


def hierarchical(workers: Workers, steps: int, *, levels: dict[int, Sequence[Sequence[int]]]) -> History:
    """Average the groups of the largest level that is due: {period: groups}, from the innermost."""
    history = []
    for n in range(1, steps + 1):
        workers.local_step(n)
        due = [groups for period, groups in levels.items() if n % period == 0]
        for group in due[-1] if due else ():
            average(workers, group)
        history.append(workers.snapshot())
    if steps % max(levels):
        average(workers)
    return [*history, workers.snapshot()]


def late_local_sgd(workers: Workers, steps: int, *, period: int, delay: int) -> History:
    """The mean of what was launched lands `delay` steps later, and what a worker learned meanwhile stays its own."""
    history = []
    launched: list[torch.Tensor] = []

    def land() -> None:
        for tensors, origin in zip(workers.parameters, launched, strict=True):
            unflatten(mean(launched) + (flat(tensors) - origin), tensors)
        launched.clear()

    for n in range(1, steps + 1):
        workers.local_step(n)
        if launched and n % period == delay:
            land()
        if n % period == 0:
            launched += workers.snapshot()
        history.append(workers.snapshot())
    if launched:
        land()
    average(workers)
    return [*history, workers.snapshot()]


def slowmo(workers: Workers, steps: int, *, period: int, alpha: float, beta: float, lr: float) -> History:
    """M ← β·m + (anchor − mean)/lr; anchor ← anchor − α·lr·m. The inner momentum starts anew."""
    anchor = workers.snapshot()[0]
    momentum = torch.zeros_like(anchor)

    def come_together() -> None:
        nonlocal anchor, momentum
        momentum = beta * momentum + (anchor - mean(workers.snapshot())) / lr
        anchor = anchor - alpha * lr * momentum
        for tensors, optimizer in zip(workers.parameters, workers.optimizers, strict=True):
            unflatten(anchor, tensors)
            for state in optimizer.state.values():
                if "momentum_buffer" in state:
                    state["momentum_buffer"].zero_()

    return _in_periods(workers, steps, period, come_together)


class Nesterov:
    """Torch's SGD with Nesterov momentum, each product rounded before it is added, as without fused ones."""

    def __init__(self, parameters: Sequence[torch.Tensor], lr: float, momentum: float) -> None:
        self._parameters, self._lr, self._momentum = parameters, lr, momentum
        self._momenta = [torch.zeros_like(parameter) for parameter in parameters]

    def step(self) -> None:
        for parameter, m in zip(self._parameters, self._momenta, strict=True):
            assert parameter.grad is not None
            m.copy_(m * self._momentum + parameter.grad)
            parameter -= (parameter.grad + m * self._momentum) * self._lr


def diloco(workers: Workers, steps: int, *, period: int, lr: float = 0.7, momentum: float = 0.9) -> History:
    """An outer step of Nesterov SGD on the mean difference from the anchor."""
    whole = [list(range(len(workers.parameters[0])))]
    return streaming_diloco(workers, steps, period=period, lr=lr, momentum=momentum, fragments=whole)


def streaming_diloco(
    workers: Workers,
    steps: int,
    *,
    period: int,
    lr: float,
    fragments: Sequence[Sequence[int]],
    momentum: float = 0.9,
    delay: int = 0,
    alpha: float = 0.0,
    keep_progress: bool = False,
) -> History:
    """DiLoCo in fragments (lists of parameters' positions) that take turns, land late, and mix with local values.

    Or, instead of mixing, they keep what each worker has learned since the launch.
    """
    history = []
    count = len(fragments)
    turns = [(p + 1) * period // count % period for p in range(count)]
    anchors = [[workers.parameters[0][k].clone() for k in fragment] for fragment in fragments]
    outers = [Nesterov(anchor, lr, momentum) for anchor in anchors]
    flying: dict[int, tuple[int, list[torch.Tensor]]] = {}
    origins: dict[int, list[list[torch.Tensor]]] = {}
    met_at = dict.fromkeys(range(count), 0)

    def launch(p: int, n: int) -> None:
        """Take the mean difference, now; it lands at step n + delay."""
        deltas = []
        for place, k in enumerate(fragments[p]):
            deltas.append(mean([anchors[p][place] - tensors[k] for tensors in workers.parameters]))
        flying[p] = (n, deltas)
        origins[p] = [[tensors[k].clone() for k in fragments[p]] for tensors in workers.parameters]

    def land(p: int, kept: float) -> None:
        _, deltas = flying.pop(p)
        for anchor, delta in zip(anchors[p], deltas, strict=True):
            anchor.grad = delta
        outers[p].step()
        for tensors, starts in zip(workers.parameters, origins[p], strict=True):
            for place, k in enumerate(fragments[p]):
                progress = tensors[k] - starts[place] if keep_progress else torch.zeros_like(tensors[k])
                tensors[k].copy_(kept * tensors[k] + (1 - kept) * anchors[p][place] + progress)

    for n in range(1, steps + 1):
        workers.local_step(n)
        for p in list(flying):
            if n == flying[p][0] + delay:
                land(p, alpha)
        for p in range(count):
            if n % period == turns[p]:
                launch(p, n)
                if not delay:
                    land(p, alpha)
                    met_at[p] = n
        history.append(workers.snapshot())
    for p in sorted(flying):
        land(p, alpha)
    for p in range(count):
        if alpha or met_at[p] != steps:  # otherwise all hold the same already
            launch(p, steps)
            land(p, 0.0)
    return [*history, workers.snapshot()]


def sparse_loco(
    workers: Workers,
    steps: int,
    *,
    period: int,
    codec: Codec,
    decay: float = 0.95,
    lr: float = 1.0,
    of_senders: bool = True,
) -> History:
    """Top-k of (difference + what was not sent before); the union is averaged; an outer step of plain SGD."""
    anchor = workers.snapshot()[0]
    left = [torch.zeros_like(anchor) for _ in range(len(workers))]

    def come_together() -> None:
        wanted = [anchor - x + rest for x, rest in zip(workers.snapshot(), left, strict=True)]
        sent = [round_trip(codec, values) for values in wanted]
        for rest, values, got in zip(left, wanted, sent, strict=True):
            rest.copy_(decay * (values - got))
        total, senders = torch.stack(sent).sum(0), (torch.stack(sent) != 0).sum(0)
        anchor.sub_(lr * total / (senders.clamp(min=1) if of_senders else len(workers)))
        for tensors in workers.parameters:
            unflatten(anchor, tensors)

    return _in_periods(workers, steps, period, come_together)


def compressed_diloco(
    workers: Workers, steps: int, *, period: int, codec: Codec, lr: float = 0.7, momentum: float = 0.9
) -> History:
    """DiLoCo whose differences are encoded, reduced by their owners and encoded once more, with error feedback."""
    anchor = flat_in_blocks(workers.parameters[0], codec.block)
    outer = Nesterov([anchor], lr, momentum)
    reduction = EncodedMean(codec, len(workers), anchor.numel(), anchor.device)

    def come_together() -> None:
        anchor.grad = reduction([anchor - flat_in_blocks(tensors, codec.block) for tensors in workers.parameters])
        outer.step()
        for tensors in workers.parameters:
            out_of_blocks(anchor, tensors, codec.block)

    return _in_periods(workers, steps, period, come_together)
