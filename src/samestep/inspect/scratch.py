"""Files that a checked program writes go to a scratch folder, so that a check of three steps spoils no results.

What Python opens for writing, and torch.save, lands there, and is found there again by its name (not by listing its
folder). Programs that the script starts, and libraries that write by other means, are not reached.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["Scratch"]

_NOT_FILES = ("/dev/", "/proc/", "/sys/")
_CACHES = frozenset({".cache", ".triton", ".config", "__pycache__", "site-packages", "dist-packages"})
_TEMPORARY = ("tmp", "torch", "pymp-", "samestep-", "triton")
_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Scratch:
    """A folder in which files lie under the paths that the program gave them; `note` is told of each made anew."""

    def __init__(self, folder: Path, name: str, note: Callable[[str], None]) -> None:
        """`folder` is ours, with the scratch folder `name` in it."""
        self._ours, self._folder, self._note = f"{folder}{os.sep}", str(folder / name), note
        self._temporary = os.path.realpath(tempfile.gettempdir()) + os.sep
        self._gone: set[str] = set()  # what the program has removed, and is there all the same
        self._real_stat, self._real_unlink, self._real_replace = os.stat, os.unlink, os.replace

    def install(self) -> None:
        """Change what opens, renames and removes files, for the rest of this process."""
        builtins.open = io.open = self._opening(io.open)
        os.open = self._os_opening(os.open)
        os.mkdir = self._making(os.mkdir)
        os.replace = os.rename = self._rename  # type: ignore[assignment]
        os.remove = os.unlink = self._removing(os.unlink)
        os.rmdir, shutil.rmtree = self._removing(os.rmdir), self._removing(shutil.rmtree)  # type: ignore[assignment]
        os.stat = self._stat
        torch.save, torch.load = self._saving(torch.save), self._loading(torch.load)

    def _place(self, path: Any) -> str | None:
        """Where a path lies in the scratch folder; None for what is no file of the program's own."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        full = _full(path)
        if full.startswith((*_NOT_FILES, self._ours)) or not _CACHES.isdisjoint(full.split(os.sep)):
            return None
        is_temporary = full.startswith(self._temporary)
        if is_temporary and full.removeprefix(self._temporary).startswith(_TEMPORARY):
            return None
        return (
            None if self._is(full, lambda mode: not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)) else self._at(full)
        )

    def _at(self, full: str) -> str:
        return self._folder + full

    def _is(self, path: str, what: Callable[[int], bool]) -> bool:
        try:
            return what(self._real_stat(path).st_mode)
        except (OSError, ValueError):
            return False

    def _for_writing(self, path: Any, place: str, *, anew: bool) -> str:
        """Make ready the place of a file to be written; what is not written anew begins as the real file is."""
        full = _full(path)
        folder = os.path.dirname(full)
        if self._is(folder, stat.S_ISDIR) or self._is(self._at(folder), stat.S_ISDIR):
            os.makedirs(os.path.dirname(place), exist_ok=True)
            if anew:
                self._note(full)
        if not (anew or self._is(place, stat.S_ISREG) or full in self._gone) and self._is(full, stat.S_ISREG):
            shutil.copyfile(full, place)
        self._gone.discard(full)
        return place

    def _for_reading(self, path: Any, place: str) -> Any:
        if self._is(place, stat.S_ISREG):
            return place
        self._require(path)
        return path

    def _require(self, path: Any) -> None:
        if _full(path) in self._gone:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _refuse_if_there(self, path: Any, place: str) -> None:
        full = _full(path)
        if self._is(place, stat.S_ISREG) or (self._is(full, stat.S_ISREG) and full not in self._gone):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def _opening(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def open(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            place = self._place(file)
            if place is not None and set(mode) & set("wax+"):
                if "x" in mode:
                    self._refuse_if_there(file, place)
                file = self._for_writing(file, place, anew="w" in mode or "x" in mode)
            elif place is not None:
                file = self._for_reading(file, place)
            return real(file, mode, *args, **options)

        return open

    def _os_opening(self, real: Callable[..., int]) -> Callable[..., int]:
        def open(path: Any, flags: int, *args: Any, **options: Any) -> int:
            place = None if options.get("dir_fd") is not None or flags & os.O_DIRECTORY else self._place(path)
            if place is not None and flags & _FOR_WRITING:
                if flags & os.O_EXCL:
                    self._refuse_if_there(path, place)
                path = self._for_writing(path, place, anew=bool(flags & (os.O_TRUNC | os.O_EXCL)))
            elif place is not None:
                path = self._for_reading(path, place)
            return real(path, flags, *args, **options)

        return open

    def _making(self, real: Callable[..., None]) -> Callable[..., None]:
        def mkdir(path: Any, *args: Any, **options: Any) -> None:
            try:
                real(path, *args, **options)
            except FileExistsError:
                if _full(path) not in self._gone:
                    raise
                self._gone.discard(_full(path))

        return mkdir

    def _rename(self, source: Any, target: Any, **options: Any) -> None:
        """Move within the scratch folder; what is a real file stays, and its copy moves."""
        origin, place = self._place(source), self._place(target)
        if options or place is None or not isinstance(source, str | bytes | os.PathLike):
            self._real_replace(source, target, **options)
            return
        if origin is None or self._is(origin, stat.S_ISREG):
            self._real_replace(origin or source, self._for_writing(target, place, anew=True))
            return
        self._require(source)
        if self._is(_full(source), stat.S_ISDIR):
            os.makedirs(_full(target), exist_ok=True)
            if self._is(origin, stat.S_ISDIR):
                shutil.copytree(origin, place, dirs_exist_ok=True)
        else:
            shutil.copyfile(_full(source), self._for_writing(target, place, anew=True))
        self._gone.add(_full(source))

    def _removing(self, real: Callable[..., None]) -> Callable[..., None]:
        def remove(path: Any, *args: Any, **options: Any) -> None:
            place = None if options.get("dir_fd") is not None else self._place(path)
            if place is None:
                real(path, *args, **options)
                return
            self._stat(path)  # what is not there can't be removed
            if self._is(place, stat.S_ISREG):
                self._real_unlink(place)
            self._gone.add(_full(path))

        return remove

    def _stat(self, path: Any, *args: Any, **options: Any) -> os.stat_result:
        place = None if options.get("dir_fd") is not None else self._place(path)
        if place is not None:
            path = self._for_reading(path, place)
        return self._real_stat(path, *args, **options)

    def _saving(self, real: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(real)
        def save(obj: object, f: Any, *args: Any, **options: Any) -> None:
            place = self._place(f)
            real(obj, f if place is None else self._for_writing(f, place, anew=True), *args, **options)

        return save

    def _loading(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def load(f: Any, *args: Any, **options: Any) -> Any:
            place = self._place(f)
            return real(f if place is None else self._for_reading(f, place), *args, **options)

        return load


def _full(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))
