"""DDP with fewer bytes: gradients are averaged in every step, as 8-bit integers or 4-bit powers of two.

Every rank sends each other rank its share of a bucket, encoded; the owner of a share sums in fp32, encodes the mean
once and sends it to all. So each sends 2(N−1)/N of the encoded size, and all hold the same bits. What encoding lost of
one gradient is added to the next one (error feedback).

Buckets are taken in DDP's order by one thread, on a process group of their own, while the backward pass goes on.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the classes themselves.
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cadenza.codecs import Codec, error_feedback, int8
from cadenza.common.process_groups import resolve
from cadenza.common.streams import Moment, SideStreams, devices_of, keep_for_stream
from cadenza.ddp_comm_hooks.first_pass import on_first_pass
from cadenza.engine.encoded_gradients import EncodedGradients, GradientBucket
from cadenza.errors import UnsupportedModelError, UnsupportedTensorError
from cadenza.transports import Transport
from cadenza.transports.c10d_group import C10dGroup

__all__ = ["QuantizedState", "quantized_hook"]


class QuantizedState:
    """What the hook remembers: how gradients are written, and what that has lost so far.

    Args:
        process_group: The ranks to average over; None: those of the model's DDP.
        codec: How gradients are written: by default as `int8`, with error feedback. For a seventh of DDP's bytes
            `cadenza.codecs.error_feedback(cadenza.codecs.e3m0())`.

    Attributes:
        iterations: Backward passes in which gradients were averaged.

    `state_dict` has this rank's residuals: save it on every rank, and give each rank its own back. As many ranks go on
    bit for bit; with another number every rank keeps what it has lost of its own gradients, and forgets what it has
    lost of the means that it made for all.

    >>> from cadenza.codecs import e3m0, error_feedback
    >>> from cadenza.ddp_comm_hooks.quantized_hook import QuantizedState
    >>> state = QuantizedState(codec=error_feedback(e3m0()))
    >>> state.codec.name, state.iterations, state.bytes_sent
    ('error_feedback(e3m0)', 0, 0)
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, codec: Codec | None = None) -> None:
        codec = error_feedback(int8()) if codec is None else codec
        _check_codec(codec)
        self.process_group = process_group
        self.iterations = 0
        self._gradients = EncodedGradients(codec)
        self._names: dict[int, str] = {}
        self._transport: Transport | None = None
        self._streams = SideStreams()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cadenza gradients")
        on_first_pass(self, QuantizedState.meet)

    @property
    def codec(self) -> Codec:
        """How gradients are written."""
        return self._gradients.codec

    @property
    def bytes_sent(self) -> int:
        """What this rank has handed to the transport so far."""
        return self._gradients.bytes_sent

    def meet(self, ddp: DistributedDataParallel) -> None:
        """Learn the names of the parameters; called before the first pass."""
        if self.process_group is None:
            self.process_group = ddp.process_group
        self._names = {id(p): name.replace("_orig_mod.", "") for name, p in ddp.module.named_parameters()}

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket in the background, after those that came before it."""
        values, step = bucket.buffer(), self.iterations
        named = GradientBucket(self._sizes(bucket), values)
        if self._transport is None:
            group = C10dGroup(resolve(self.process_group))
            self._transport = group.connect(group.ranks)
        transport = self._transport
        if bucket.is_last():
            self.iterations += 1
        failed: list[BaseException] = []
        devices: list[int | str | torch.device] = [*devices_of([values])]
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)

        def result(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            if failed:
                raise failed[0]  # DDP raises it from backward()
            return done.value()

        averaged = done.then(result)
        ready = Moment([values.device])

        def work() -> None:
            with self._streams.use([values.device]):  # one stream for all buckets, once the gradients are there
                ready.wait()
                keep_for_stream([values])
                try:
                    self._gradients.average(named, transport, step)
                except BaseException as error:
                    failed.append(error)
                done.set_result(values)

        self._thread.submit(work)
        return averaged

    def _sizes(self, bucket: dist.GradBucket) -> dict[str, int]:
        parameters, values = bucket.parameters(), bucket.buffer()
        if values.is_sparse or not values.is_floating_point():
            raise UnsupportedTensorError(
                f"quantized_hook averages dense gradients of real numbers; got a bucket of {values.dtype}, "
                f"{values.layout}. Leave such parameters to a DDP without this hook."
            )
        if any(id(parameter) not in self._names for parameter in parameters):
            raise UnsupportedModelError(
                "quantized_hook does not know the model of this state. Register the state itself, before the first "
                "pass: ddp.register_comm_hook(state, quantized_hook); one state for each DistributedDataParallel."
            )
        return {self._names[id(parameter)]: parameter.numel() for parameter in parameters}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs on this rank; call it between two iterations."""
        return {"iterations": self.iterations, **self._gradients.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the saved run stopped; call it before the first backward pass, or between two."""
        self._gradients.load_state_dict(state_dict)
        self.iterations = int(state_dict["iterations"])

    def __getstate__(self) -> dict[str, Any]:
        return {"codec": self.codec, "saved": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy: of the group it knows nothing, as torch's own states after they were pickled."""
        QuantizedState.__init__(self, codec=state["codec"])
        self.load_state_dict(state["saved"])


def quantized_hook(state: QuantizedState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients in a codec's bytes: `ddp.register_comm_hook(state, quantized_hook)`.

    Gradients of 16 bits are summed in fp32 too. If a gradient is not finite on some rank, its bucket is NaN on every
    rank, so that a GradScaler skips the step everywhere; residuals stay as they were.

    >>> import torch, torch.distributed as dist
    >>> from cadenza.ddp_comm_hooks.quantized_hook import QuantizedState, quantized_hook
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> state = QuantizedState()
    >>> model.register_comm_hook(state, quantized_hook)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> state.iterations
    1
    >>> dist.destroy_process_group()
    """
    return state.average(bucket)


def _check_codec(codec: object) -> None:
    if not isinstance(codec, Codec):
        raise TypeError(f"codec is {codec!r}; give a codec, such as cadenza.codecs.int8().")
    if codec.exact or codec.sparse:
        raise ValueError(
            f"codec is {codec.name}; give one that writes every value in fewer bits, such as int8() or e3m0(), with "
            "error_feedback(…) around it or without."
        )
