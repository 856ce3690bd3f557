"""The fault file: a forked child lets go of what it inherits and deletes nothing; the program's own
handler stays."""

from __future__ import annotations

import faulthandler
from pathlib import Path

import pytest

from torchwhere.hooks.stack_files import Faults


def test_a_child_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`abandon` deletes no file, the parent's or any other: as root, a device that has no size
    would be gone for everybody."""
    deleted: list[Path] = []
    monkeypatch.setattr(Path, "unlink", lambda path, **_: deleted.append(path))
    faults = Faults(tmp_path / "rank0.fault")
    faults.install()
    assert faults.signal is not None
    faults.abandon()
    assert deleted == []
    assert faults.signal is None


def test_an_empty_file_goes(tmp_path: Path) -> None:
    """`remove` deletes the file if nobody had to write into it, and keeps it otherwise."""
    for text in ("", "Fatal Python error"):
        path = tmp_path / "rank0.fault"
        faults = Faults(path)
        faults.install()
        path.write_text(text)
        faults.remove()
        assert path.exists() == bool(text)


@pytest.mark.parametrize("file_of_its_own", [True, False])
def test_the_programs_own_fault_handler_stays(tmp_path: Path, file_of_its_own: bool) -> None:
    """One that the program enables while we watch is still on when the watch is over; ours alone is
    not."""
    faulthandler.disable()
    try:
        faults = Faults(tmp_path / "rank0.fault")
        faults.install()
        assert faulthandler.is_enabled()
        with (tmp_path / "mine").open("w") as mine:
            if file_of_its_own:
                faulthandler.enable(mine)
            faults.remove()
            assert faulthandler.is_enabled() == file_of_its_own
    finally:
        faulthandler.enable()
