"""What can go wrong, as one tree: catch `SamestepError` for all of it, or the builtin that fits.

    SamestepError
    ├── WorldError            ValueError           the environment contradicts itself or is half set
    ├── BackendError          RuntimeError         torch was built without the transport that is needed
    ├── MismatchError         ValueError           ranks disagree; the message lists every rank
    ├── CommunicatorError     RuntimeError         an exchange failed, or an earlier one did
    │   ├── PeerLostError     ConnectionError      a peer died or closed its connection
    │   └── DeadlineError     TimeoutError         peers did not arrive in time
    ├── ReplicaError          RuntimeError         a wrapped module was used in a way that breaks equal steps
    ├── DataError             ValueError           a data file is not what it should be
    │   └── MissingDataError  FileNotFoundError    a data file is not there
    ├── CheckpointError       RuntimeError         a file of weights is not what it should be, or does not fit
    │   ├── MissingCheckpointError  FileNotFoundError    a file of weights is not there
    │   └── SaveError         OSError              weights could not be written
    ├── LaunchError           RuntimeError         workers could not be started
    └── WorkerError           RuntimeError         a rank of `spawn` failed; the message has its own traceback

Every message says what was got, what was expected, on which rank, and what to do.
"""

__all__ = [
    "BackendError",
    "CheckpointError",
    "CommunicatorError",
    "DataError",
    "DeadlineError",
    "LaunchError",
    "MismatchError",
    "MissingCheckpointError",
    "MissingDataError",
    "PeerLostError",
    "ReplicaError",
    "SamestepError",
    "SaveError",
    "WorkerError",
    "WorldError",
]


class SamestepError(Exception):
    """The root of every error that samestep raises on its own account."""


class WorldError(SamestepError, ValueError):
    """The environment contradicts itself or is half set."""


class BackendError(SamestepError, RuntimeError):
    """torch was built without the transport that is needed."""


class MismatchError(SamestepError, ValueError):
    """Ranks disagree about something that must be equal; the message lists every rank."""


class CommunicatorError(SamestepError, RuntimeError):
    """An exchange failed; the communicator is broken from then on and says so at once."""


class PeerLostError(CommunicatorError, ConnectionError):
    """A peer died or closed its connection."""


class DeadlineError(CommunicatorError, TimeoutError):
    """Peers did not arrive in time."""


class ReplicaError(SamestepError, RuntimeError):
    """A wrapped module was used in a way that would make replicas differ."""


class DataError(SamestepError, ValueError):
    """A data file is not what it should be; the message names it."""


class MissingDataError(DataError, FileNotFoundError):
    """A data file is not there; the message names it."""


class CheckpointError(SamestepError, RuntimeError):
    """A file of weights is not what it should be, or does not fit the model; the message names it."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """A file of weights is not there; the message names it."""


class SaveError(CheckpointError, OSError):
    """Weights could not be written; the message has the rank and what the system said."""


class LaunchError(SamestepError, RuntimeError):
    """Workers could not be started."""


class WorkerError(SamestepError, RuntimeError):
    """A rank of `spawn` failed first; the message has its own traceback, and `rank` its number."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
