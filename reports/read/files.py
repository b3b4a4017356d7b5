"""Files as this program reads and writes them; the same rules as ref/files/input.h and
ref/files/output.h.

    read(path) -> bytes        a regular file of at most MOST bytes; nothing that could be waited
                               on; NAME.gz is unpacked
    write(path, bytes)         whole or not at all: under a new name in the same folder, synced,
    renamed; a link is replaced, never written through, and one that
    leads back to itself refused
Both raise OSError with errno, strerror and filename.
"""

import errno
import fcntl
import gzip
import io
import os
import stat
import tempfile
import zlib
from typing import NoReturn

MOST = 4 << 30  # bytes of one record; its Python objects take several times as much


def fail(number: int, path: str, text: str | None = None) -> NoReturn:
    raise OSError(number, text or os.strerror(number), path)


def read(path: str, most: int = MOST) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as f:
        s = os.fstat(fd)
        if not stat.S_ISREG(s.st_mode):
            fail(errno.EINVAL, path, "not a regular file")
        if s.st_size > most:
            fail(errno.EFBIG, path, f"{s.st_size} bytes: at most {most} are read")
        if not s.st_size and has_more(fd):
            fail(errno.EINVAL, path, "its size is 0, and it is not empty: a file of the system")
        data = f.read(s.st_size)
    return _unpacked(path, data, most) if path.endswith(".gz") else data


def has_more(fd: int) -> bool:
    """A file of /proc and /sys: its size says nothing of its content, which may be endless."""
    try:
        return os.pread(fd, 1, 0) != b""
    except OSError:
        return True


def _unpacked(path: str, data: bytes, most: int) -> bytes:
    """A compressed record: no more than `most` bytes of it."""
    try:
        with gzip.open(io.BytesIO(data)) as f:
            out = f.read(most + 1)
    except (OSError, EOFError, zlib.error) as e:
        fail(errno.EINVAL, path, f"not a whole gzip file: {e}")
    if len(out) > most:
        fail(errno.EFBIG, path, f"unpacked more than {most} bytes")
    return out


def write(path: str, data: bytes) -> None:
    if loops(path):
        fail(errno.ELOOP, path)
    try:
        _write(path, data)
    except OSError as e:  # it names the new file, which nobody gave
        fail(e.errno or errno.EIO, path)


def _write(path: str, data: bytes) -> None:
    fd, temp = tempfile.mkstemp(
        prefix=".deltaproof-", suffix=".tmp", dir=os.path.dirname(path) or "."
    )  # O_EXCL | O_NOFOLLOW
    try:
        with os.fdopen(fd, "wb") as f:
            fcntl.flock(
                fd, fcntl.LOCK_EX | fcntl.LOCK_NB
            )  # nobody takes it for one that was left (ref/files/output.c)
            os.fchmod(fd, 0o666 & ~umask())
            f.write(data)
            f.flush()
            os.fsync(fd)
            os.replace(temp, path)
    except BaseException:
        if os.path.lexists(temp):
            os.unlink(temp)
        raise


def remove_page(path: str) -> str:
    """A page of this program that lies there is removed, and returned; another file stays: ""."""
    try:
        text = read(path).decode("utf-8", "replace")
    except OSError:
        return ""
    if "<title>deltaproof" not in text:
        return ""
    os.unlink(path)
    return text


def loops(path: str) -> bool:
    """Is path a symbolic reference that leads back to itself? It names no place."""
    try:
        os.stat(path)
    except OSError as e:
        return e.errno == errno.ELOOP
    return False


def umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now
