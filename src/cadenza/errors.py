"""Everything that Cadenza raises, in one tree.

::

    CadenzaError
    ├── NotInitializedError     there is no process group to work on         (also a RuntimeError)
    ├── UnsupportedTensorError  a tensor that cannot be averaged             (also a TypeError)
    ├── UnsupportedModelError   a model set up in a way that cannot work     (also a RuntimeError)
    ├── NothingToAverageError   no parameter takes part                      (also a ValueError)
    ├── TopologyError           levels that do not nest or do not fit        (also a ValueError)
    ├── NotFiniteError          a value is NaN or infinite                   (also a ValueError)
    ├── DisagreementError       ranks were about to send different things    (also a RuntimeError)
    ├── CheckpointError         a saved state that is damaged or does not fit (also a ValueError)
    ├── TransportError          a peer or the network failed                 (also a RuntimeError)
    │   ├── StoreLostError      the store in which workers meet cannot be reached
    │   └── NobodyLeftError     of those who have trained nobody is there any more
    ├── TurnedAwayError         this worker may not take part                (also a RuntimeError)
    ├── ReplicaBrokenError      a rank of this worker's replica has ended    (also a RuntimeError)
    ├── UsageError              bad input by the person at the command line  (also a ValueError)
    └── RoundError              a round failed; says what became of the parameters (a RuntimeError)
        ├── RoundAbortedError   they are as they were, on every rank
        │   └── ContributionRefusedError  because a worker's contribution would have done harm
        └── MixedParametersError  some hold the mean and some their local values

Every class also derives from the built-in exception that fits it, so code that catches ``ValueError``,
``TypeError`` or ``RuntimeError`` keeps working.

>>> issubclass(RoundAbortedError, RoundError) and issubclass(RoundError, RuntimeError)
True
"""

from collections.abc import Collection

from cadenza.common.wording import name_workers

__all__ = [
    "CadenzaError",
    "CheckpointError",
    "ContributionRefusedError",
    "DisagreementError",
    "MixedParametersError",
    "NobodyLeftError",
    "NotFiniteError",
    "NotInitializedError",
    "NothingToAverageError",
    "ReplicaBrokenError",
    "RoundAbortedError",
    "RoundError",
    "StoreLostError",
    "TopologyError",
    "TransportError",
    "TurnedAwayError",
    "UnsupportedModelError",
    "UnsupportedTensorError",
    "UsageError",
]


class CadenzaError(Exception):
    """The root: ``except CadenzaError`` catches whatever this library raises on purpose.

    Its text is for programs too, so where the documentation explains it is a note, which tracebacks show below it.

    >>> CheckpointError("shared.json is missing").address
    'docs/errors.md#checkpointerror'
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(f"See {self.address}")

    @property
    def address(self) -> str:
        """Where the documentation says what to do about it."""
        known = next(kind for kind in type(self).__mro__ if kind.__module__ == __name__)
        return f"docs/errors.md#{known.__name__.lower()}"


class NotInitializedError(CadenzaError, RuntimeError):
    """There is no process group: ``init_process_group`` was not called, or the group was destroyed."""


class UnsupportedTensorError(CadenzaError, TypeError):
    """A tensor that has no mean (integers), no memory (meta) or no single place for each element."""


class UnsupportedModelError(CadenzaError, RuntimeError):
    """A model, or a wrapper around it, that is set up in a way that cannot work; says what to change."""


class NothingToAverageError(CadenzaError, ValueError):
    """No parameter takes part, most often because gradients were cleared before the averaging."""


class TopologyError(CadenzaError, ValueError):
    """Levels that do not nest, sizes that do not divide, ranks that do not fit the group."""


class NotFiniteError(CadenzaError, ValueError):
    """A rank was about to send NaN or infinity, which would have reached everyone; nothing was sent."""


class DisagreementError(CadenzaError, RuntimeError):
    """The members of a round were about to send different things; nothing was sent."""


class CheckpointError(CadenzaError, ValueError):
    """A saved state that is damaged, incomplete, or of another strategy or model; nothing was changed."""


class TransportError(CadenzaError, RuntimeError):
    """A peer ended, did not answer in time, or the network failed."""


class StoreLostError(TransportError):
    """The store in which workers meet cannot be reached; it may come back."""


class NobodyLeftError(TransportError):
    """All workers that are there are new: nobody has the state to go on from, unless a checkpoint has."""


class TurnedAwayError(CadenzaError, RuntimeError):
    """The others will not train with this worker: another model, another job, a wrong secret, or its place is taken."""


class ReplicaBrokenError(CadenzaError, RuntimeError):
    """Another rank of this replica has ended, so this one cannot go on: all of them are started again, together."""


class UsageError(CadenzaError, ValueError):
    """What a person gave the command line cannot be used: a key, a file, a folder, a task; says what is allowed."""


class RoundError(CadenzaError, RuntimeError):
    """A round failed; the message says in which state the parameters are."""


class RoundAbortedError(RoundError):
    """The round failed and changed nothing: the parameters are as they were."""


class ContributionRefusedError(RoundAbortedError):
    """A round was given up because contributions were not finite, or far larger than the others'; names the workers."""

    def __init__(self, workers: Collection[int]) -> None:
        super().__init__(f"the contribution of {name_workers(workers)} is not finite, or far larger than the others'")
        self.workers = tuple(workers)


class MixedParametersError(RoundError):
    """The round failed on its way: some parameters hold the mean, the others their local values."""
