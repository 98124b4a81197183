"""Files that take what ranks write: which streams get one, which show on the screen, and the writing itself.

The files lie as torchrun lays them: `LOG_DIR/<run_id>_<random>/attempt_<n>/<local_rank>/stdout.log` and
`stderr.log`. They hold every byte as the rank wrote it, without a prefix, and are never held back in a buffer:
what the agent has read is in the file even if the agent is killed right after.
"""

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from samestep.errors import LaunchError

__all__ = ["LogFiles", "LogSettings", "Route", "Sink", "route"]

_BITS = {"stdout": 1, "stderr": 2}
_ALL = 3

Streams = Mapping[int, int] | int


@dataclass(frozen=True)
class LogSettings:
    """Where output goes besides the screen, as torchrun's flags of these names say it.

    `redirects` are streams that go to their file only, `tee` those that go to file and screen (and wins over
    `redirects`): 0 none, 1 stdout, 2 stderr, 3 both, for all local ranks or by local rank. With a `log_dir` and
    neither of the two, everything goes to both. `local_ranks_filter` are the local ranks that show on the
    screen; empty means all. A `log_dir` of None means a new temporary folder where files are wanted at all;
    /dev/null means no files, as with torchrun. Raises ValueError for a number out of range.
    """

    log_dir: str | None = None
    redirects: Streams = 0
    tee: Streams = 0
    local_ranks_filter: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name, streams in (("redirects", self.redirects), ("tee", self.tee)):
            for local_rank, value in _by_rank(streams).items():
                if value not in range(_ALL + 1):
                    of = "" if local_rank is None else f" for local rank {local_rank}"
                    raise ValueError(f"{name}{of} is {value}; expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both)")
                if local_rank is not None and local_rank < 0:
                    raise ValueError(f"{name} names local rank {local_rank}; expected at least 0")
        if self.local_ranks_filter and min(self.local_ranks_filter) < 0:
            raise ValueError(f"local_ranks_filter has {min(self.local_ranks_filter)}; expected at least 0")
        if self.log_dir == "":
            raise ValueError("log_dir is empty; expected a folder")

    @property
    def wants_files(self) -> bool:
        """Whether any stream of any rank may get a file."""
        return self.log_dir != os.devnull and (self.log_dir is not None or self._asks)

    @property
    def _asks(self) -> bool:
        return any((*_by_rank(self.redirects).values(), *_by_rank(self.tee).values()))


@dataclass(frozen=True)
class Route:
    """Where one stream of one rank goes; neither means that it is dropped.

    `spill` says whether the screen takes over should the file fail.
    """

    file: bool
    screen: bool
    spill: bool


def route(settings: LogSettings, local_rank: int, stream: str) -> Route:
    """Decides where `stream` ("stdout" or "stderr") of a local rank goes. Pure."""
    shown = not settings.local_ranks_filter or local_rank in settings.local_ranks_filter
    if not settings.wants_files:
        return Route(False, shown, shown)
    tee = settings.tee if settings._asks else _ALL
    teed = bool(_of(tee, local_rank) & _BITS[stream])
    redirected = bool(_of(settings.redirects, local_rank) & _BITS[stream])
    return Route(teed or redirected, shown and (teed or not redirected), shown)


class Sink:
    """Where one stream of one rank goes: whether the screen gets it (`screen`), and the file that gets it, if any."""

    def __init__(self, way: Route, path: Path | None, failures: set[int]) -> None:
        self.screen = way.screen
        self._spill = way.spill
        self._path = path
        self._failures = failures
        self._fd: int | None = None if path is None else _create(path)

    def write(self, data: bytes) -> str | None:
        """Puts `data` into the file; where there is none, does nothing.

        To be called before `screen` is looked at: when the file can't be written to any more it is given up, and
        the screen takes over from this very data on (if the rank shows there at all). A failure that no other file
        of the run had before gives the line to be said about it.
        """
        if self._fd is None:
            return None
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as e:
            self.close()
            self.screen = self._spill
            return self._first(e)
        return None

    def close(self) -> None:
        """Closes the file; what comes after that goes to the screen or nowhere."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _first(self, e: OSError) -> str | None:
        number = e.errno or 0
        if number in self._failures:
            return None
        self._failures.add(number)
        then = "the output goes on to the screen" if self._spill else "what the rank writes from here on is dropped"
        return (
            f"log file {self._path} can't be written to ({os.strerror(number)}) and ends there; {then}."
            " This is said for the first such file alone"
        )


class LogFiles:
    """The log files of one run on one machine: those of one attempt at a time are open.

    `folder` is the run's own, made at once so that a place that can't be written to is known before any worker
    starts; it is None where no files are wanted. Raises LaunchError, with the path, where it can't be made.
    """

    def __init__(self, settings: LogSettings, run_id: str) -> None:
        self._settings = settings
        self._sinks: dict[tuple[int, str], Sink] = {}
        self._failures: set[int] = set()
        self.folder: Path | None = _run_folder(settings.log_dir, run_id) if settings.wants_files else None

    def __enter__(self) -> "LogFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_temporary(self) -> bool:
        """Whether the folder is one that the user didn't name, and so has to be told of."""
        return self.folder is not None and self._settings.log_dir is None

    def open_attempt(self, attempt: int, local_ranks: Iterable[int]) -> None:
        """Closes the files of the attempt before and makes those of this one.

        Raises LaunchError, with the path, where one can't be made; none is open then.
        """
        self.close()
        try:
            for local_rank in local_ranks:
                for stream in _BITS:
                    self._sinks[local_rank, stream] = self._open(attempt, local_rank, stream)
        except OSError as e:
            self.close()
            raise LaunchError(
                f"log file {e.filename} of local rank {local_rank} can't be made ({os.strerror(e.errno or 0)});"
                " give --log-dir a folder with room that can be written to"
            ) from e

    def sink(self, local_rank: int, stream: str) -> Sink:
        """Where `stream` ("stdout" or "stderr") of a local rank of this attempt goes."""
        return self._sinks[local_rank, stream]

    def close(self) -> None:
        """Closes all files."""
        while self._sinks:
            self._sinks.popitem()[1].close()

    def _open(self, attempt: int, local_rank: int, stream: str) -> Sink:
        way = route(self._settings, local_rank, stream)
        path = None
        if way.file and self.folder is not None:
            path = self.folder / f"attempt_{attempt}" / str(local_rank) / f"{stream}.log"
        return Sink(way, path, self._failures)


def _by_rank(streams: Streams) -> dict[int | None, int]:
    return {None: streams} if isinstance(streams, int) else dict(streams.items())


def _of(streams: Streams, local_rank: int) -> int:
    return streams if isinstance(streams, int) else streams.get(local_rank, 0)


def _run_folder(log_dir: str | None, run_id: str) -> Path:
    prefix = run_id.replace(os.sep, "_") + "_"
    try:
        if log_dir is None:
            return Path(tempfile.mkdtemp(prefix=f"samestep_{prefix}"))
        # The path stays right in messages, whoever changes the working folder.
        base = os.path.abspath(log_dir)
        os.makedirs(base, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    except OSError as e:
        place = log_dir if log_dir is not None else "in the temporary folder"
        raise LaunchError(
            f"log folder {place} can't be made or written to ({os.strerror(e.errno or 0)});"
            " give --log-dir a folder that can"
        ) from e


def _create(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    # O_APPEND: whoever cuts the file short meanwhile, as log rotation does, gets no hole. O_CLOEXEC is Python's own.
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
