"""Writes output files atomically: a reader finds the whole new file, or the one before it.

`destination` checks that a path is writable before a command spends minutes on the output, and
gives an open temporary file in the same folder. The temporary file replaces the path when the block
ends. If the block fails or is interrupted, the path keeps its old content. `destination` reserves a
little disk space at the start: it notices a full disk at once, but not a disk that fills up later.
Pipes and devices are written directly. `replace_file` is the short form for small files, which
torchwhere writes again and again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from torchwhere.core.errors import TorchwhereError

_SPACE_BYTES = 1 << 16  # must be free


def replace_file(path: Path, content: str | bytes) -> bool:
    """Write a file atomically. Returns False, and raises nothing, if the system refuses."""
    data = content.encode() if isinstance(content, str) else content
    try:
        with replacing(path) as part:
            part.write_bytes(data)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def destination(out: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file that takes the name `out` when the block ends, and not before.

    Raises `TorchwhereError` at the start if `out` is not writable, and at the end if the write
    failed.
    """
    path = Path(out)
    with write_errors(path):
        if path.exists() and not path.is_file() and not path.is_dir():
            with path.open("wb") as device:
                os.write(device.fileno(), b"")  # /dev/full fails here
                yield device
            return
        _check_file(path)
        path = path.resolve()  # replace the target of a symbolic link, not the link
        with replacing(path) as part:
            with part.open("xb") as file:
                check_space(file)
                yield file
            with contextlib.suppress(FileNotFoundError):
                part.chmod(path.stat().st_mode & 0o7777)


@contextlib.contextmanager
def destination_folder(out: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary folder. Its files move into `out` when the block ends, beside the files that
    `out` already holds."""
    folder = Path(out)
    with write_errors(folder):
        _check_parent(folder)
        is_new = not folder.exists()
        folder.mkdir(exist_ok=True)
        part = _temporary_path(folder / "files")
        try:
            part.mkdir()
            check_folder(part)
            yield part
            for path in list(part.iterdir()):
                path.replace(folder / path.name)
            part.rmdir()
        except BaseException:
            import shutil

            shutil.rmtree(part, ignore_errors=True)
            if is_new:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into a `TorchwhereError` that names `path`."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of the pipe has closed it
    except FileExistsError as error:
        raise TorchwhereError(f"cannot write {path}: {error.filename} is not a folder") from None
    except OSError as error:
        raise TorchwhereError(f"cannot write {path}: {error.strerror or error}") from None


def partial_path(path: Path) -> Path:
    """Stable name of a partial output, so that an interrupted export can resume."""
    return path.with_name(f"{path.name}.part")


def check_space(file: IO[bytes]) -> None:
    """Reserve a little disk space and release it. Raises `OSError` on a full disk."""
    os.posix_fallocate(file.fileno(), 0, _SPACE_BYTES)
    os.ftruncate(file.fileno(), 0)


def check_folder(folder: Path) -> None:
    """Raise `OSError` if a folder is not writable, or on a full disk."""
    import tempfile

    with tempfile.TemporaryFile(dir=folder) as file:
        check_space(file)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path that replaces `path` when the block ends; delete it on failure."""
    part = _temporary_path(path)
    try:
        yield part
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _temporary_path(path: Path) -> Path:
    """A unique name in the same folder. It stays short enough where `path` has a long name."""
    return path.with_name(f".{path.name[:32]}.{os.urandom(4).hex()}.part")


def _check_file(path: Path) -> None:
    """Raise errors that say what to do, where those of the system do not."""
    if path.is_dir():
        raise TorchwhereError(f"cannot write {path}: it is a folder; give the name of a file")
    _check_parent(path)
    if path.exists() and not os.access(path, os.W_OK):
        raise TorchwhereError(f"cannot write {path}: it is read-only")


def _check_parent(path: Path) -> None:
    if not path.parent.exists():
        raise TorchwhereError(
            f"cannot write {path}: there is no folder {path.parent}; create it, or give another"
            " name"
        )
