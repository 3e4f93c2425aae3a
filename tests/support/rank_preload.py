"""Imported once by the fork server, so that every rank process starts with torch and Cadenza already in memory."""

import contextlib
import gc

import torch
import torch._dynamo  # the first optimizer step would import it otherwise, in every rank
import torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook
import torch.distributed.algorithms.model_averaging.hierarchical_model_averager
import torch.distributed.optim
import torch.nn.parallel  # noqa: F401

# A Cadenza that cannot be imported must fail the test that needs it, with its own traceback, not the fork server.
with contextlib.suppress(Exception):
    import cadenza.ddp_comm_hooks.post_localSGD_hook
    import cadenza.model_averaging.hierarchical_model_averager
    import cadenza.optim  # noqa: F401

# The collector has nothing to find among imported modules; leaving them out makes it quick in the ranks.
gc.collect()
gc.freeze()
