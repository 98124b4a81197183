"""Files that are replaced as a whole or not at all, whatever becomes of the process that writes them."""

import errno
import fcntl
import glob
import os
import secrets
import stat
from collections.abc import Callable
from typing import IO

__all__ = ["replace_file"]

_ENDING = ".part"


def replace_file(path: str, write: Callable[[IO[bytes]], None]) -> None:
    """Make `path` what `write` puts into the file that it is given, open for writing and reading.

    Until all of that is on the disk, `path` is what it was before, also when this process is killed: the new file is
    written beside it under a hidden name and then takes its place. A killed writer leaves its hidden file behind, and
    the next call for the same path removes it. Folders that lack are made; a link is followed; the permissions of an
    old file are kept.

    Raises OSError where the system refuses, and whatever `write` raises; `path` is as before then, and nothing else is
    left.
    """
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    os.makedirs(folder, exist_ok=True)
    if os.path.lexists(target) and not os.path.isfile(target):
        raise OSError(errno.EINVAL, "is there and is no file", target)
    _remove_left_behind(folder, name)
    with _new_file(folder, name) as file:
        try:
            if os.path.isfile(target):
                os.fchmod(file.fileno(), stat.S_IMODE(os.stat(target).st_mode))
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, target)  # still locked, so that nobody takes it for left behind
        except BaseException:
            os.unlink(file.name)
            raise
    _sync_folder(folder)


def _new_file(folder: str, name: str) -> IO[bytes]:
    """Make a file for nobody but this writer, locked for as long as it is open."""
    while True:
        file = open(_hidden(folder, name, secrets.token_hex(4)), "x+b")  # noqa: SIM115 - the caller closes it
        if not _lock(file.fileno(), wait=True) or _is_at(file.name, file.fileno()):
            return file
        file.close()  # somebody else's call came between the two and took it for left behind


def _remove_left_behind(folder: str, name: str) -> None:
    """Remove the hidden files whose writers are dead: those that nobody holds a lock on."""
    for path in glob.glob(_hidden(glob.escape(folder), glob.escape(name), "[0-9a-f]" * 8)):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # gone meanwhile, or not ours
            continue
        try:
            if _lock(fd, wait=False) and _is_at(path, fd):
                os.unlink(path)
        finally:
            os.close(fd)


def _hidden(folder: str, name: str, mark: str) -> str:
    return os.path.join(folder, f".{name}.{mark}{_ENDING}")


def _lock(fd: int, *, wait: bool) -> bool:
    """Lock a file against those who clear away; whether that was possible, which some file systems don't know."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _is_at(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _sync_folder(folder: str) -> None:
    """Have the new name on the disk too; a folder that can't be opened or synchronised stays the system's affair."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        return
    finally:
        os.close(fd)
