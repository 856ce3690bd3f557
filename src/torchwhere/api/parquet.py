"""The events of a run as Parquet: a folder, `rank=0/part-0.parquet` and so on, as Hive, Spark and
everybody else reads it.

Takes boxes one by one, writes each in batches; needs pyarrow. Columns and their types are those of
`blackbox/columns.py`, the same in every file; texts are dictionary-encoded, pages compressed with
zstd. Who wrote a file is in its metadata. A file that has its name is whole: it is written beside
it and renamed. So one that is there already, of the same box, is not written again.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.columns import COLUMNS, FLAG, NUMBER, Column, Texts, columns, rows_of
from torchwhere.blackbox.summary import BoxSummary
from torchwhere.core.atomic_file import check_space, partial_path
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.rank_text import ranks_to_text
from torchwhere.core.version import __version__

BATCH = 1 << 16  # events that are turned into columns together, and a row group
_SOURCE = b"torchwhere.source"
_NAME = "part-0.parquet"
_NEEDS = (
    "export to Parquet needs pyarrow, which is not installed here: pip install"
    " 'torchwhere[parquet]'"
)


class ParquetFolder:
    """Writes a file for each rank into a folder, which has another name until all are there."""

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
            [(name, types.get(sort, text)) for name, sort in COLUMNS.items()]
        )

    def __enter__(self) -> ParquetFolder:
        self._part.mkdir(exist_ok=True)
        try:
            with tempfile.TemporaryFile(dir=self._part) as file:
                check_space(file)
        except OSError as error:
            self.__exit__(error)
            raise
        return self

    def expect(self, ranks: Collection[int]) -> None:
        """Of an export that was interrupted, what can be used stays; what cannot goes."""
        wanted = {path for rank in ranks for path in (self._path(rank), self._path(rank).parent)}
        # what is in a folder before the folder
        for path in sorted(self._part.rglob("*"), reverse=True):
            if path not in wanted:
                path.rmdir() if path.is_dir() else path.unlink()

    def __exit__(self, *error: object) -> None:
        """What is whole stays for the next time."""
        if not any(error):
            self._put()
        else:
            with contextlib.suppress(OSError):
                self._part.rmdir()  # which does nothing if there is anything in it

    def _put(self) -> None:
        """Give what is whole its name. What had it before goes only when the new one is there."""
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
        """Which box, how much of it and which of its events: a file with the same source need not
        be written again."""
        said = [
            *box.run,
            box.rank,
            box.checksum,
            box.counts.good,
            sorted(self._kinds) if self._kinds is not None else None,
        ]
        return json.dumps([*said, __version__]).encode()

    def has(self, label: BoxSummary) -> int | None:
        try:
            found = self._pq.read_metadata(self._path(label.rank))
        except (OSError, self._pa.ArrowException):
            return None
        return (
            int(found.num_rows)
            if (found.metadata or {}).get(_SOURCE) == self._source(label)
            else None
        )

    def write(self, box: Box) -> int:
        path = self._path(box.rank)
        path.parent.mkdir(exist_ok=True)
        beside = path.with_name(f".{_NAME}.{os.getpid()}")
        rows = rows_of(box, kinds=self._kinds)
        schema = self._schema
        # Without the schema of Arrow in it, every reader finds plain texts, and not what Arrow
        # calls a dictionary.
        with self._pq.ParquetWriter(beside, schema, compression="zstd", store_schema=False) as file:
            for start in range(0, len(rows), BATCH):
                found = columns(box, rows[start : start + BATCH])
                file.write_table(
                    self._pa.table(
                        [self._array(column) for column in found.values()], schema=schema
                    )
                )
            file.add_key_value_metadata(self._metadata(box))
        os.replace(beside, path)
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
        said = {"version": __version__, "rank": box.meta, "counts": counts, "groups": groups}
        return {
            f"torchwhere.{key}".encode(): json.dumps(value).encode() for key, value in said.items()
        } | {_SOURCE: self._source(box)}

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        """A process group; of its members a short text, as every file has it. The text of the world
        is made once for all."""
        ranks = group.get("ranks")
        members = tuple(ranks) if isinstance(ranks, list) and set(map(type, ranks)) <= {int} else ()
        if members not in self._members:
            self._members[members] = ranks_to_text(members)
        return group | {"ranks": self._members[members]}
