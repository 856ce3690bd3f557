"""Where a command writes to: known to be writable before minutes are spent on what is to be
written, and whole or not there.

Takes the name of a file, gives an open one beside it, which takes the name when all of it is
written. Until then, and when that fails or is interrupted, what had the name before keeps it. Room
is asked for a little in advance: a full disk is noticed at once, one that becomes full is not. A
pipe or a device is written to as it is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from torchwhere.core.errors import TorchwhereError

_ROOM = 1 << 16  # bytes that must be free


@contextlib.contextmanager
def destination(out: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """What is written to the file that this gives stands under the name `out` when the block has
    ended, and not before.

    Raises `TorchwhereError` at the beginning if it cannot be written to, and at the end if it could
    not be.
    """
    path = Path(out)
    with refusing(path):
        if path.exists() and not path.is_file() and not path.is_dir():
            with path.open("wb") as device:
                os.write(device.fileno(), b"")  # asks it: /dev/full says here that it is
                yield device
            return
        _check(path)
        path = path.resolve()  # where a link leads, the link stays
        part = beside(path)
        try:
            with part.open("xb") as file:
                take_room(file)
                yield file
            with contextlib.suppress(FileNotFoundError):
                part.chmod(path.stat().st_mode & 0o7777)
            part.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise


@contextlib.contextmanager
def destination_folder(out: str | os.PathLike[str]) -> Iterator[Path]:
    """What is put into the folder that this gives lies in `out` when the block has ended, beside
    what was there before."""
    folder = Path(out)
    with refusing(folder):
        _check_parent(folder)
        is_new = not folder.exists()
        folder.mkdir(exist_ok=True)
        part = beside(folder / "files")
        try:
            part.mkdir()
            with (part / "room").open("xb") as file:
                take_room(file)
            (part / "room").unlink()
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
def refusing(path: Path) -> Iterator[None]:
    """What the system says when it cannot be written, as a `TorchwhereError`."""
    try:
        yield
    except BrokenPipeError:
        raise  # whoever reads it has seen enough
    except FileExistsError as error:
        raise TorchwhereError(f"cannot write {path}: {error.filename} is no folder") from None
    except OSError as error:
        raise TorchwhereError(f"cannot write {path}: {error.strerror or error}") from None


def part_of(path: Path) -> Path:
    """The name of what is not whole and may be gone on with: always the same."""
    return path.with_name(f"{path.name}.part")


def beside(path: Path) -> Path:
    """A name in the same folder that nobody else has, however long the name is."""
    return path.with_name(f".{path.name[:32]}.{os.urandom(4).hex()}.part")


def take_room(file: IO[bytes]) -> None:
    """See that there is some room, and give it back."""
    os.posix_fallocate(file.fileno(), 0, _ROOM)
    os.ftruncate(file.fileno(), 0)


def _check(path: Path) -> None:
    """What the system would say in words that do not tell what to do."""
    if path.is_dir():
        raise TorchwhereError(f"cannot write {path}: it is a folder; give the name of a file")
    _check_parent(path)
    if path.exists() and not os.access(path, os.W_OK):
        raise TorchwhereError(f"cannot write {path}: it may not be changed")


def _check_parent(path: Path) -> None:
    if not path.parent.exists():
        raise TorchwhereError(
            f"cannot write {path}: there is no folder {path.parent}; make it first, or give another"
            " name"
        )
