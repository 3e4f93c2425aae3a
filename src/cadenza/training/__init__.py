"""A training job: the task, its configuration, the loop of one worker, and the folder that a run is.

It needs `pip install 'cadenza[cli]'`; `import cadenza` does not load it.
"""

from cadenza.training.config import Config, Settings, read_config
from cadenza.training.task import Moment, Task

__all__ = ["Config", "Moment", "Settings", "Task", "read_config"]
