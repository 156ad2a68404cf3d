"""Files that Triptych reads and appends to: regular ones, so that nothing waits for a pipe or fills a device."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "Is a directory",
    stat.S_IFIFO: "Is a pipe, not a regular file",
    stat.S_IFSOCK: "Is a socket, not a regular file",
    stat.S_IFCHR: "Is a device, not a regular file",
    stat.S_IFBLK: "Is a device, not a regular file",
}


def read_regular(path: Path, start: int = 0) -> bytes:
    """The content of a regular file, or of the one that a link leads to, from byte `start` on.

    Raises:
        OSError: it cannot be read, or is something else than a regular file; `strerror` says what.
    """
    # Non-blocking: a pipe that nobody writes to would have us wait for ever before we could see that it is one.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(os.fstat(descriptor).st_mode, path)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            file.seek(start)
            return file.read()
    finally:
        os.close(descriptor)


def open_to_append(path: Path) -> int:
    """A descriptor that appends to a regular file, which is created if need be.

    Raises:
        OSError: it cannot be written, or is something else than a regular file; `strerror` says what.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    with contextlib.suppress(FileNotFoundError):
        check_regular(path)  # opening a pipe that has no reader fails, with less to say
    file = os.open(path, flags, 0o666)
    try:
        _check_regular(os.fstat(file).st_mode, path)
    except OSError:
        os.close(file)
        raise
    return file


def check_regular(path: Path) -> None:
    """Raise OSError unless `path` is a regular file, or a link to one; `strerror` says what was found."""
    _check_regular(os.stat(path).st_mode, path)


def _check_regular(mode: int, path: Path) -> None:
    kind = stat.S_IFMT(mode)
    if kind != stat.S_IFREG:
        number = errno.EISDIR if kind == stat.S_IFDIR else errno.EINVAL
        raise OSError(number, _KINDS.get(kind, "Is not a regular file"), str(path))
