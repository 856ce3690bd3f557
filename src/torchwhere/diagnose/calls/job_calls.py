"""The collectives of all ranks of a job, comparable as arrays.

`JobCalls` takes batches and translates their local ids to ids that all ranks share.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.reader import BoxReader, read_or_empty
from torchwhere.blackbox.run import RunSummary, box_files, choose
from torchwhere.blackbox.string_table import Group
from torchwhere.blackbox.summary import BoxSummary
from torchwhere.core.arrays import Ints
from torchwhere.core.grouping import grouped
from torchwhere.core.worker_pool import Progress, ProgressCounter, default_workers, run_jobs
from torchwhere.diagnose.calls.encode import CallBatch, Encoder, RankSummary
from torchwhere.diagnose.calls.keys import CallSite, Signature, StreamKey
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.calls.stream_calls import (
    CallWindow,
    DecodedBatch,
    IdMap,
    SharedIds,
    StreamCalls,
    call_window,
)

_OWN_ENCODER = -2  # the encoder for boxes that are added one by one


class CallCounts(NamedTuple):
    """How often the ranks of one batch issued each pair of signature and call site.

    The arrays have one item for each rank and pair that occurs.
    """

    ranks: Ints
    pairs: npt.NDArray[np.int32]  # local ids of signature and call site
    counts: Ints
    within: Ints  # how many of them are in the wanted steps
    signatures: list[Signature]  # by local id
    call_sites: list[CallSite]  # by local id
    groups: list[int]  # the shared id of each local group id


class JobCalls:
    """The calls of all ranks of a run, with shared ids."""

    def __init__(self) -> None:
        self.by_rank: dict[int, RankCalls] = {}
        # how many calls a rank issued in each of its groups, if its box says no more
        self.unnamed_counts: dict[int, tuple[int, ...]] = {}
        # ranks whose box is gone or cut, and whose data comes from a snapshot
        self.from_snapshot: frozenset[int] = frozenset()
        self.stale: frozenset[int] = frozenset()  # those that may have done more since
        self.shared_ids = SharedIds()
        self._keys: dict[StreamKey, StreamKey] = {}
        self._id_maps: dict[int, IdMap] = {}  # by encoder
        self._own_encoder = Encoder()
        self._windows: list[CallWindow] | None = None

    # -- adding ranks ------------------------------------------------------------------------------

    def add_box(self, rank: int, box: Box) -> RankCalls:
        """Encodes one box in this process."""
        decoded = self._decoded(self._own_encoder.encode([box]), _OWN_ENCODER)
        rank_calls = self._rank_calls(rank, decoded.batch.rank_summaries[0], decoded)
        rank_calls._box = box
        self.by_rank[rank] = rank_calls
        return rank_calls

    def add_batch(self, batch: CallBatch, *, encoder: int, wanted: Container[Path]) -> None:
        """Adds the wanted boxes of a batch.

        All batches of one encoder must come in the order in which it made them, because each one
        brings only the ids that are new.
        """
        decoded = self._decoded(batch, encoder)
        for summary in batch.rank_summaries:
            if summary.box_summary.path not in wanted:
                continue
            if summary.box_summary.lacks_counts:
                self._add_unnamed(summary)
            else:
                rank = summary.box_summary.rank
                self.by_rank[rank] = self._rank_calls(rank, summary, decoded)

    def add_cut_box(self, box: Box) -> None:
        """Adds a box that was cut before its counts, or before the names of what they count."""
        decoded = self._decoded(self._own_encoder.encode([box]), _OWN_ENCODER)
        self._add_unnamed(decoded.batch.rank_summaries[0])

    def copy(self) -> JobCalls:
        """Returns a copy with the same ranks. Ranks added to it are not added to this one."""
        other = copy.copy(self)
        other.by_rank = dict(self.by_rank)
        other._windows = None
        return other

    def _add_unnamed(self, summary: RankSummary) -> None:
        if summary.unnamed is not None:
            self.unnamed_counts[summary.box_summary.rank] = summary.unnamed

    def _decoded(self, batch: CallBatch, encoder: int) -> DecodedBatch:
        id_map = self._id_maps.setdefault(encoder, IdMap())
        id_map.extend((batch.groups, batch.signatures, batch.call_sites), self.shared_ids)
        return DecodedBatch.decode(batch, id_map)

    def _rank_calls(self, rank: int, summary: RankSummary, decoded: DecodedBatch) -> RankCalls:
        rank_calls = RankCalls(rank, summary, {}, {}, self.shared_ids)
        id_map, keys = decoded.id_map, self._keys
        groups, signature_ids = id_map.groups, id_map.signature_ids
        for part in summary.parts:
            key = StreamKey(groups[part.key.group], part.key.source, part.key.destination)
            key = keys.setdefault(key, key)  # one object for all ranks
            rank_calls.counts[key] = part.issued
            if part.length:
                signature_id = int(signature_ids[part.signature + 1]) if part.signature >= 0 else -1
                rank_calls.calls[key] = StreamCalls(
                    part.first, signature_id, part.length, part.at, summary, decoded
                )
            if summary.last is not None and part.key == summary.last[0]:
                rank_calls.last = key, summary.last[1]
        return rank_calls

    # -- questions ---------------------------------------------------------------------------------

    def group(self, key: StreamKey) -> Group:
        return self.shared_ids.group(key)

    def members(self, key: StreamKey) -> tuple[int, ...]:
        """Returns the ranks of a stream: those of the group, or sender and receiver.

        A recv from any source has no known sender.
        """
        if not key.is_p2p:
            return self.group(key).ranks
        return tuple(rank for rank in (key.source, key.destination) if rank >= 0)

    def has_data(self, rank: int) -> bool:
        """Whether it is known what a rank did last."""
        return rank in self.by_rank and rank not in self.stale

    def has_issued(self, rank: int, key: StreamKey, number: int) -> bool | None:
        """Whether a rank of which only the counts are left has issued a collective of a group.

        None if the counts do not decide that, because they do not say which group each belongs to.
        """
        counts = self.unnamed_counts.get(rank)
        if counts is None or key.is_p2p:
            return None
        answers = {count > number for count in counts}
        return answers.pop() if len(answers) == 1 else None

    def windows(self) -> list[CallWindow]:
        """Returns a window for each stream of which two or more ranks have a part in common.

        Streams in which all calls are alike are left out. The windows are computed once.
        """
        if self._windows is None:
            by_stream = grouped(
                (key, (rank, calls))
                for rank, rank_calls in self.by_rank.items()
                for key, calls in rank_calls.calls.items()
            )
            candidates = [
                call_window(key, by_stream[key], members=self.members(key))
                for key in sorted(by_stream)
            ]
            self._windows = [candidate for candidate in candidates if candidate is not None]
        return self._windows

    def longer_windows(self) -> Iterator[CallWindow]:
        """Yields windows without the ranks whose newest calls are lost.

        Such a rank ends a window for all ranks, perhaps before the difference that the others show.
        """
        cut = {
            rank
            for rank, rank_calls in self.by_rank.items()
            if rank in self.stale or rank_calls.has_lost_its_newest
        }
        keys = {key for rank in cut for key in self.by_rank[rank].calls}
        for key in sorted(keys):
            calls = [
                (rank, rank_calls.calls[key])
                for rank, rank_calls in self.by_rank.items()
                if rank not in cut and key in rank_calls.calls
            ]
            longer = call_window(key, calls, members=self.members(key))
            if longer is not None:
                yield longer

    # -- counting ----------------------------------------------------------------------------------

    def count_calls(self, steps: Mapping[int, tuple[int, int]]) -> Iterator[CallCounts]:
        """Counts all calls that the rings still hold without a gap.

        `steps` are the first and the last wanted step of each rank.
        """
        batches = {}
        for rank_calls in self.by_rank.values():
            for calls in rank_calls.calls.values():
                batches[id(calls._decoded)] = calls._decoded
                break
        for decoded in batches.values():
            yield self._count(decoded, steps)

    def _count(self, decoded: DecodedBatch, steps: Mapping[int, tuple[int, int]]) -> CallCounts:
        batch, summaries = decoded.batch, decoded.batch.rank_summaries
        lengths = [sum(part.length for part in summary.parts) for summary in summaries]
        begins = [summary.pairs_at for summary in summaries]
        pairs_per_rank = np.diff([*begins, len(batch.pairs)])
        ranks = [summary.box_summary.rank for summary in summaries]
        wanted = np.array([steps.get(rank, (1, 0)) for rank in ranks], np.int64)
        wanted -= [[summary.step] for summary in summaries]
        first, last = np.repeat(wanted, lengths, axis=0).T
        pair = batch.codes.astype(np.int64) + np.repeat(begins, lengths)
        counts = np.bincount(pair, minlength=len(batch.pairs))
        is_within = (batch.steps >= first) & (batch.steps <= last)
        within = np.bincount(pair[is_within], minlength=len(batch.pairs))
        is_ours = [self._is_from(summary) for summary in summaries]
        chosen = (counts > 0) & np.repeat(is_ours, pairs_per_rank)
        return CallCounts(
            np.repeat(ranks, pairs_per_rank)[chosen],
            batch.pairs[chosen],
            counts[chosen],
            within[chosen],
            decoded.id_map.signatures,
            decoded.id_map.call_sites,
            decoded.id_map.groups,
        )

    def _is_from(self, summary: RankSummary) -> bool:
        """Whether the data of a rank comes from this summary."""
        rank_calls = self.by_rank.get(summary.box_summary.rank)
        return rank_calls is not None and rank_calls.rank_summary is summary


def calls_of_run(run: RunSummary[Any]) -> JobCalls:
    """Encodes all boxes of a run that are in memory."""
    job_calls = JobCalls()
    for rank, box in run.in_order():
        if box.lacks_counts:
            job_calls.add_cut_box(box)
        else:
            job_calls.add_box(rank, box)
    return job_calls


# -- reading all boxes of a run --------------------------------------------------------------------
# In worker processes if there are many; no box is kept in memory. A small run is read in this
# process, because starting a worker takes as long as reading a few hundred boxes.


_FEW = 256  # this process reads so many boxes before a worker has started
_CHUNK = 64  # boxes that become one batch


class Extractor(Protocol):
    """Extracts extra data from each box while it is read.

    A worker process creates it and pickles it back.
    """

    def take(self, box: Box) -> Box:
        """Extracts what it wants from a box. Returns the box for the encoder."""
        ...


E = TypeVar("E", bound=Extractor)


class _NoExtractor:
    def take(self, box: Box) -> Box:
        return box


def load_calls(
    folder: str | Path, *, on_progress: Progress | None = None, processes: int | None = None
) -> tuple[RunSummary[BoxSummary], JobCalls]:
    """Loads the newest run in a folder.

    Args:
        folder: The folder with the boxes.
        on_progress: Called with the number of boxes read so far and the number of all boxes.
        processes: How many worker processes read; by default this depends on the number of boxes.

    Raises:
        TorchwhereError: The folder holds no run.
    """
    run, job_calls, _ = load_calls_with(
        _NoExtractor, folder, on_progress=on_progress, processes=processes
    )
    return run, job_calls


def load_calls_with(
    make_extractor: Callable[[], E],
    folder: str | Path,
    *,
    on_progress: Progress | None = None,
    processes: int | None = None,
) -> tuple[RunSummary[BoxSummary], JobCalls, list[E]]:
    """Like `load_calls`. Also returns the extractors: each has seen some of the boxes."""
    files = box_files(folder)
    if processes is None:
        processes = default_workers() if len(files) > _FEW else 0
    chunks = [files[start : start + _CHUNK] for start in range(0, len(files), _CHUNK)]
    batches: list[tuple[int, CallBatch]] = []
    extractors: list[E] = []
    progress = ProgressCounter(len(files), on_progress)
    task = partial(_BoxChunkReader, make_extractor)
    for worker, (batch, extractor) in run_jobs(task, chunks, workers=processes):
        batches.append((worker, batch))
        extractors.append(extractor)
        progress.add(len(batch.rank_summaries))
    summaries = [summary.box_summary for _, batch in batches for summary in batch.rank_summaries]
    run = RunSummary(Path(folder), *choose(Path(folder), summaries))
    job_calls = JobCalls()
    wanted = {summary.path for summary in run.boxes.values()}
    for worker, batch in batches:
        job_calls.add_batch(batch, encoder=worker, wanted=wanted)
    job_calls.by_rank = dict(sorted(job_calls.by_rank.items()))
    return run, job_calls, extractors


class _BoxChunkReader(Generic[E]):
    """The task of a worker: reads some boxes and encodes them as one batch."""

    def __init__(self, make_extractor: Callable[[], E]) -> None:
        self._make_extractor = make_extractor
        self._reader = BoxReader()
        self._encoder = Encoder()

    def __call__(self, files: Sequence[Path]) -> tuple[CallBatch, E]:
        extractor = self._make_extractor()
        boxes = map(partial(read_or_empty, self._reader.read), files)
        return self._encoder.encode(map(extractor.take, boxes)), extractor
