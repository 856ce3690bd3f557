"""Writes the events of a run as Parquet: a folder with `rank=0/part-0.parquet` and so on, the
layout that Hive, Spark and most other tools read.

Takes boxes one by one and writes each in batches; needs pyarrow. Columns and their types are those
of `blackbox/columns.py`, the same in every file. Texts are dictionary-encoded, pages compressed
with zstd. The metadata of a file describes its rank and box. Each file gets its name only when it
is complete, so an export that resumes does not write it again if the box is the same.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.columns import COLUMNS, FLAG, NUMBER, Column, Texts, columns
from torchwhere.blackbox.summary import BoxSummary
from torchwhere.core.atomic_file import check_folder, partial_path, replacing
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.rank_text import ranks_to_text
from torchwhere.core.version import __version__

BATCH = 1 << 16  # events of a batch, which becomes a row group
_SOURCE = b"torchwhere.source"
_NAME = "part-0.parquet"
_NEEDS = (
    "export to Parquet needs pyarrow, which is not installed here: pip install"
    " 'torchwhere[parquet]'"
)


class ParquetFolder:
    """Writes a file for each rank into a folder, which has another name until it is complete."""

    def __init__(self, target: Path, *, kinds: set[str] | None) -> None:
        try:
            self._pa: Any = importlib.import_module("pyarrow")
            self._pq: Any = importlib.import_module("pyarrow.parquet")
        except ModuleNotFoundError:
            raise TorchwhereError(_NEEDS) from None
        self._target, self._part, self._kinds = target, partial_path(target), kinds
        self._members: dict[tuple[int, ...], str] = {}
        types = {NUMBER: self._pa.int64(), FLAG: self._pa.bool_()}
        text = self._pa.dictionary(self._pa.int32(), self._pa.string())
        self._schema: Any = self._pa.schema(
            [(name, types.get(type_, text)) for name, type_ in COLUMNS.items()]
        )

    def __enter__(self) -> ParquetFolder:
        self._part.mkdir(exist_ok=True)
        try:
            check_folder(self._part)
        except OSError as error:
            self.__exit__(error)
            raise
        return self

    def expect(self, ranks: Collection[int]) -> None:
        """Delete the files of an interrupted export that this export cannot use."""
        wanted = {path for rank in ranks for path in (self._path(rank), self._path(rank).parent)}
        # in reverse order: the content of a folder comes before the folder
        for path in sorted(self._part.rglob("*"), reverse=True):
            if path not in wanted:
                path.rmdir() if path.is_dir() else path.unlink()

    def __exit__(self, *error: object) -> None:
        """Give the folder its name. After an error, keep the complete files for the next export."""
        if not any(error):
            self._replace_target()
        else:
            with contextlib.suppress(OSError):
                self._part.rmdir()  # fails if the folder has files, which stay

    def _replace_target(self) -> None:
        """Give the folder its name. Delete an earlier export only after that."""
        if not self._target.is_dir():
            os.replace(self._part, self._target)
            return
        old = self._target.with_name(f"{self._target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(self._target, old)
        try:
            os.replace(self._part, self._target)
        except BaseException:
            os.rename(old, self._target)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def _path(self, rank: int) -> Path:
        return self._part / f"rank={rank}" / _NAME

    def _source(self, box: Box | BoxSummary) -> bytes:
        """The box, its state and the chosen kinds of events. A file with the same source need not
        be written again."""
        kinds = sorted(self._kinds) if self._kinds is not None else None
        source = [*box.run, box.rank, box.checksum, box.counts.good, kinds, __version__]
        return json.dumps(source).encode()

    def has(self, summary: BoxSummary) -> int | None:
        """The number of events, if the output already has this box in its current state."""
        try:
            file = self._pq.read_metadata(self._path(summary.rank))
        except (OSError, self._pa.ArrowException):
            return None
        is_same = (file.metadata or {}).get(_SOURCE) == self._source(summary)
        return int(file.num_rows) if is_same else None

    def write(self, box: Box) -> int:
        """Write the events of a box. Returns their number."""
        path = self._path(box.rank)
        path.parent.mkdir(exist_ok=True)
        rows = box.rows(self._kinds)
        schema = self._schema
        # Without Arrow's schema in the file, every reader gets plain texts instead of Arrow's
        # dictionary type.
        with (
            replacing(path) as part,
            self._pq.ParquetWriter(part, schema, compression="zstd", store_schema=False) as file,
        ):
            for start in range(0, len(rows), BATCH):
                batch = columns(box, rows[start : start + BATCH])
                arrays = [self._array(column) for column in batch.values()]
                file.write_table(self._pa.table(arrays, schema=schema))
            file.add_key_value_metadata(self._metadata(box))
        return len(rows)

    def _array(self, column: Column) -> Any:
        if isinstance(column, Texts):
            codes = self._pa.array(column.codes, mask=column.codes < 0)
            return self._pa.DictionaryArray.from_arrays(
                codes, self._pa.array(column.values, self._pa.string())
            )
        return self._pa.array(column.values, mask=column.missing)

    def _metadata(self, box: Box) -> dict[bytes, bytes]:
        counts = {
            name: getattr(box.counts, name)
            for name in ("good", "torn", "unknown", "overwritten", "torn_entries")
        }
        groups = [self._group(group) for group in box.groups().values()]
        values = {"version": __version__, "rank": box.meta, "counts": counts, "groups": groups}
        metadata = {
            f"torchwhere.{key}".encode(): json.dumps(value).encode()
            for key, value in values.items()
        }
        return metadata | {_SOURCE: self._source(box)}

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        """A process group with its members as a short text. All files share the texts: that of the
        world is made only once."""
        ranks = group.get("ranks")
        members = tuple(ranks) if isinstance(ranks, list) and set(map(type, ranks)) <= {int} else ()
        if members not in self._members:
            self._members[members] = ranks_to_text(members)
        return group | {"ranks": self._members[members]}
