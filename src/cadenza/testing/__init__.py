"""For tests and notebooks: workers that are threads of this process."""

from cadenza.testing.workers import Worker, WorkerPool, workers

__all__ = ["Worker", "WorkerPool", "workers"]
