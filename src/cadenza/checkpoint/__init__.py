"""Writing and reading a run's state safely: model, inner optimizer, synchronizer, random numbers.

Between rounds every worker has a model of its own, so every worker writes a file of its own, when it likes: nothing
here is a collective. Files are safetensors and JSON, never pickle, so a checkpoint cannot run code; each is written
under another name, flushed and renamed, and has a hash beside it. A checkpoint is *whole* when the files of all its
workers are there and are what was written.

>>> import tempfile, torch, torch.distributed as dist, cadenza
>>> from cadenza import checkpoint
>>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
>>> model = torch.nn.Linear(2, 1)
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> sync = cadenza.attach(model, optimizer, cadenza.local_sgd(period=4))
>>> root = tempfile.mkdtemp()
>>> checkpoint.save(f"{root}/step-{sync.clock}", model=model, optimizer=optimizer, sync=sync, extra={"epoch": 3})
>>> checkpoint.load(checkpoint.latest(root), model=model, optimizer=optimizer, sync=sync)
{'epoch': 3}
>>> dist.destroy_process_group()

torch.distributed.checkpoint (DCP) works as well: see `dcp_state`.
"""

from cadenza.checkpoint.dcp import dcp_state, dcp_template, load_dcp_state
from cadenza.checkpoint.folders import latest, load, save
from cadenza.checkpoint.models import load_model

__all__ = ["dcp_state", "dcp_template", "latest", "load", "load_dcp_state", "load_model", "save"]
