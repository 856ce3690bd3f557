"""What the doctor says about flight recorder dumps that are derived from those of NCCL jobs: with
entries removed, with timing, large numbers, many groups, expert groups, pipelines, empty lists."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from test_nccl_dumps import (
    HEALTHY,
    KINDS,
    MISSING,
    NOT_KNOWN,
    TABLE,
    TOGETHER,
    VICTIM,
    Dump,
    conclusion,
    diagnosed,
    read,
)
from test_nccl_runs import unpacked
from torchwhere.flight_recorder.verdict import consult_dumps


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("nccl_dumps.txz", tmp_path_factory.mktemp("dumps"))


def only_active(dump: Dump) -> Dump:
    entries = [entry for entry in dump["entries"] if entry["state"] != "completed"]
    return dump | {"entries": entries}


@pytest.mark.parametrize("job", [job for job in TABLE if job != "wrong_size"])
def test_entries_removed(dumps: Path, tmp_path: Path, job: str) -> None:
    """Complete dumps without their completed entries give the verdict of active dumps."""
    ranks = {rank: only_active(dump) for rank, dump in read(dumps / job / "all").items()}
    assert conclusion(diagnosed(tmp_path, ranks)) == TABLE[job][1]


@pytest.mark.parametrize("kind", ["all", "active"])
@pytest.mark.parametrize("job", ["stuck_cpu", "endless_fsdp2", "skipped", "extra"])
def test_large_numbers(dumps: Path, tmp_path: Path, job: str, kind: str) -> None:
    """Numbers in the tens of thousands are read as they are: nothing counts as missing before
    active entries."""
    ranks = read(dumps / job / kind)
    number = consult_dumps(dumps / job / kind).collective
    for dump in ranks.values():
        for entry in dump["entries"]:
            entry["record_id"] += 90_000
            entry["collective_seq_id"] += 40_000
        for status in dump["pg_status"].values():
            status["last_enqueued_collective"] += 40_000
            status["last_completed_collective"] += 40_000
    verdict = diagnosed(tmp_path, ranks)
    assert conclusion(verdict) == dict(zip(KINDS, TABLE[job], strict=True))[kind]
    assert number is not None
    assert verdict.collective is not None
    assert verdict.collective["number"] == number["number"] + 40_000
    has_wrapped = any("have wrapped" in caveat for caveat in verdict.missing_data)
    assert has_wrapped == (kind == "all")


@pytest.mark.parametrize("job", ["endless_fsdp2", "opposite_groups", "skipped"])
@pytest.mark.parametrize("lengths", [(9, 30, 14, 11), (40, 9, 22, 60)])
def test_cpus_that_run_ahead(
    dumps: Path, tmp_path: Path, job: str, lengths: tuple[int, ...]
) -> None:
    """How far each CPU was ahead of its device when its dump was written does not matter."""
    ranks = read(dumps / job / "active")
    for rank, dump in ranks.items():
        dump["entries"] = dump["entries"][: lengths[rank]]
        for entry in dump["entries"]:
            status = dump["pg_status"][str(entry["pg_id"])]
            status["last_enqueued_collective"] = entry["collective_seq_id"]
    assert conclusion(diagnosed(tmp_path, ranks)) == TABLE[job][1]


def with_timing(dump: Dump, *, has_reached: bool) -> Dump:
    """The dump as it is with TORCH_NCCL_ENABLE_TIMING=1."""
    dump = copy.deepcopy(dump)
    for status in dump["pg_status"].values():
        status["last_started_collective"] = status["last_completed_collective"] + has_reached
    pending = [entry for entry in dump["entries"] if entry["state"] == "scheduled"]
    for entry in pending[:1] if has_reached else ():
        entry["state"] = "started"
    return dump


@pytest.mark.parametrize("kind", ["all", "active"])
@pytest.mark.parametrize("job", ["endless_ddp", "endless_fsdp2", "endless_pipeline"])
def test_timing(dumps: Path, tmp_path: Path, job: str, kind: str) -> None:
    """With timing, the rank is named whose device has not reached what the others have started."""
    ranks = read(dumps / job / kind)
    verdict = diagnosed(
        tmp_path,
        {rank: with_timing(dump, has_reached=rank != VICTIM) for rank, dump in ranks.items()},
    )
    assert (conclusion(verdict), verdict.certainty) == (MISSING, "exact")
    assert verdict.facts["on_device"] is True
    assert verdict.explanation[0].startswith("The device of rank 2 has not reached ")


@pytest.mark.parametrize("kind", ["all", "active"])
@pytest.mark.parametrize("job", ["opposite_groups", "skipped"])
def test_timing_and_order(dumps: Path, tmp_path: Path, job: str, kind: str) -> None:
    """With timing, ranks that used groups in different orders get the same verdict as without."""
    ranks = read(dumps / job / kind)
    started = {rank: with_timing(dump, has_reached=True) for rank, dump in ranks.items()}
    assert conclusion(diagnosed(tmp_path, started)) == TABLE[job][0]


@pytest.mark.parametrize("kind", ["all", "active"])
def test_timing_and_a_rank_without_a_dump(dumps: Path, tmp_path: Path, kind: str) -> None:
    """If all ranks with a dump have reached the call, the rank without a dump is named."""
    ranks = read(dumps / "stopped" / kind)
    assert VICTIM not in ranks
    started = {rank: with_timing(dump, has_reached=True) for rank, dump in ranks.items()}
    assert conclusion(diagnosed(tmp_path, started)) == ("missing", (VICTIM,))


def test_timing_on_all_ranks(dumps: Path, tmp_path: Path) -> None:
    """If all devices have started a call, no rank is named: the network is the likely cause."""
    ranks = read(dumps / "endless_ddp" / "active")
    started = {rank: with_timing(dump, has_reached=True) for rank, dump in ranks.items()}
    verdict = diagnosed(tmp_path, started)
    assert (conclusion(verdict), verdict.certainty) == (TOGETHER, "exact")
    assert "All devices have started it: look at the network between them." in verdict.explanation


@pytest.mark.parametrize("names", ["numbers", "hashes"])
def test_many_groups(dumps: Path, tmp_path: Path, names: str) -> None:
    """A rank without entries is found in the right one of 300 groups, by the order in which it
    created them; if their names have no order, it is not blamed."""
    ranks = read(dumps / "stuck_cpu" / "active")
    hung = 250
    for rank, dump in ranks.items():
        members = {number: [number % 4, (number + 1) % 4] for number in range(300)}
        members[hung] = [0, 1, 2, 3]
        own = [number for number in members if rank in members[number]]
        name = {number: str(number) if names == "numbers" else f"{number:x}g" for number in own}
        for entry in dump["entries"]:
            entry |= {"pg_id": own.index(hung), "process_group": (name[hung], "dp")}
        of_hung = dump["pg_status"]["0"]
        filler = dict.fromkeys(of_hung, 50) | {"last_started_collective": -1}
        dump["pg_config"] = {
            name[number]: {"name": name[number], "desc": "dp", "ranks": str(members[number])}
            for number in sorted(own, key=str)
        }
        dump["pg_status"] = {
            str(own.index(number)): of_hung if number == hung else filler for number in own
        }
    verdict = diagnosed(tmp_path, ranks)
    if names == "hashes":
        assert (conclusion(verdict), verdict.certainty) == (NOT_KNOWN, "unknown")
        return
    assert (conclusion(verdict), verdict.certainty) == (MISSING, "exact")
    assert verdict.collective is not None
    assert verdict.collective["number"] == 22


# -- expert groups ---------------------------------------------------------------------------------

GROUPS = {"0": [0, 1, 2, 3], "1": [0, 1], "2": [2, 3]}
Call = tuple[str, int]  # group and sequence number


def expert_ranks(
    dumps: Path, pending: dict[int, list[Call]], issued: Callable[[int, str], int]
) -> dict[int, Dump]:
    """Dumps of a job with one expert group for two ranks, made from entries of a real one."""
    ranks = read(dumps / "skipped" / "active")
    for rank, dump in ranks.items():
        template, own = dump["entries"][0], [name for name in GROUPS if rank in GROUPS[name]]
        dump["entries"] = [
            template
            | {
                "record_id": 500 + position,
                "pg_id": own.index(name),
                "process_group": (name, dump["pg_config"][name]["desc"]),
                "profiling_name": "nccl:all_to_all" if name != "0" else "nccl:all_reduce",
                "collective_seq_id": number,
            }
            for position, (name, number) in enumerate(pending[rank])
        ]
        for name in own:
            numbers = [number for group, number in pending[rank] if group == name]
            dump["pg_status"][str(own.index(name))] |= {
                "last_enqueued_collective": issued(rank, name),
                "last_completed_collective": min(numbers, default=issued(rank, name) + 1) - 1,
            }
    return ranks


def test_experts_and_a_stuck_cpu(dumps: Path, tmp_path: Path) -> None:
    """Ranks of other expert groups wait for a rank that waits for the culprit: only the culprit is
    named."""
    pending = {0: [("0", 41)], 1: [("0", 41)], 2: [], 3: [("2", 81)]}
    counts = {(0, "0"): 41, (1, "0"): 41, (3, "2"): 81}
    ranks = expert_ranks(
        dumps, pending, lambda rank, name: counts.get((rank, name), 40 if name == "0" else 80)
    )
    assert conclusion(diagnosed(tmp_path, ranks)) == MISSING


@pytest.mark.parametrize("has_timing", [False, True], ids=["untimed", "timed"])
def test_experts_and_a_stuck_device(dumps: Path, tmp_path: Path, has_timing: bool) -> None:
    """With CPUs that run ahead, the hang comes from the expert group; timing names the rank."""
    pending: dict[int, list[Call]] = {
        rank: [("0", 41), ("1", 81), ("0", 42)] if rank < 2 else [("2", 81), ("0", 41), ("2", 82)]
        for rank in range(4)
    }
    ranks = expert_ranks(
        dumps, pending, lambda rank, name: max(n for group, n in pending[rank] if group == name)
    )
    if has_timing:
        ranks = {rank: with_timing(dump, has_reached=rank != 2) for rank, dump in ranks.items()}
    verdict = diagnosed(tmp_path, ranks)
    assert conclusion(verdict) == (MISSING if has_timing else TOGETHER)
    assert verdict.collective is not None
    assert (verdict.collective["group"], verdict.collective["number"]) == ("2", 80)
    if not has_timing:
        assert "  ranks 0-1 only wait for ranks in this call" in verdict.explanation


# -- pipelines -------------------------------------------------------------------------------------


def test_pipeline_and_a_stuck_cpu(dumps: Path, tmp_path: Path) -> None:
    """A rank that has not issued the send that its neighbour waits for is named."""
    ranks = read(dumps / "endless_pipeline" / "all")
    ranks[VICTIM]["entries"] = ranks[VICTIM]["entries"][:61]
    verdict = diagnosed(tmp_path, ranks)
    assert (conclusion(verdict), verdict.certainty) == (MISSING, "exact")
    assert verdict.explanation[0] == (
        "Rank 2 never issued the send of the message of float32 [4096] from rank 2 to rank 3 on"
        ' group "default".'
    )


@pytest.mark.parametrize("removed", [None, 0, 1], ids=["all", "no 0", "no 1"])
def test_pipeline_and_a_stuck_receiver(dumps: Path, tmp_path: Path, removed: int | None) -> None:
    """If a send is complete and its receive is not, the device of the receiver is named."""
    ranks = read(dumps / "endless_pipeline" / "all")
    for entry in ranks[VICTIM]["entries"]:
        entry["state"] = "completed"
    ranks.pop(removed, None)
    verdict = diagnosed(tmp_path, ranks)
    assert conclusion(verdict) == ("missing", (3,))
    assert verdict.facts["on_device"] is True


def test_batches_of_messages(dumps: Path, tmp_path: Path) -> None:
    """The recorder never completes the entries inside a batch: in active dumps, the status of the
    group shows that the batch is complete."""
    ranks = read(dumps / "endless_pipeline" / "active")
    for dump in ranks.values():
        status = dump["pg_status"]["0"]
        status["last_completed_collective"] = status["last_enqueued_collective"]
    assert conclusion(diagnosed(tmp_path, ranks)) == HEALTHY


def in_batches(dump: Dump) -> Dump:
    """The dump as it is if each message is a batch: an entry that ends it has the state."""
    entries = []
    for entry in dump["entries"]:
        end = entry | {"profiling_name": "nccl:coalesced", "input_sizes": [], "output_sizes": []}
        entries += [entry | {"state": "scheduled"}, end]
    return dump | {"entries": entries}


def test_batches_and_timing(dumps: Path, tmp_path: Path) -> None:
    """In a pipeline of batches, the device is named that has not reached its send."""
    ranks = read(dumps / "endless_pipeline" / "active")
    for rank, dump in ranks.items():
        ranks[rank] = in_batches(with_timing(dump, has_reached=rank != VICTIM))
    assert conclusion(diagnosed(tmp_path, ranks)) == MISSING


# -- empty lists -----------------------------------------------------------------------------------


def test_empty_lists(dumps: Path, tmp_path: Path) -> None:
    """Ranks without entries are compared by their status: the rank that is behind in what the
    others have completed has an old dump, and is not blamed."""
    ranks = read(dumps / "healthy_ddp" / "active")
    assert all(dump["entries"] == [] for dump in ranks.values())
    ranks[VICTIM]["pg_status"]["0"]["last_enqueued_collective"] = 60
    verdict = diagnosed(tmp_path, ranks)
    assert conclusion(verdict) == HEALTHY
    assert any("list only what is in flight" in caveat for caveat in verdict.missing_data)


def test_a_dump_without_data(dumps: Path, tmp_path: Path) -> None:
    """A dump without entries and status does not show that its rank has issued nothing, in a group
    in which it has been before."""
    ranks = read(dumps / "stuck_cpu" / "active")
    for dump in ranks.values():
        dump["pg_status"] = {}
    verdict = diagnosed(tmp_path, ranks)
    assert (conclusion(verdict), verdict.certainty) == (NOT_KNOWN, "unknown")


def test_gaps(dumps: Path, tmp_path: Path) -> None:
    """Batches of messages use up numbers of collectives: gaps do not prevent the verdict."""
    ranks = read(dumps / "endless_ddp" / "active")
    for dump in ranks.values():
        for entry, number in zip(dump["entries"], (23, 27, 31), strict=True):
            entry["collective_seq_id"] = number
    verdict = diagnosed(tmp_path, ranks)
    assert conclusion(verdict) == TOGETHER
    assert verdict.collective is not None
    assert verdict.collective["number"] == 22


def test_other_members(dumps: Path, tmp_path: Path) -> None:
    """A rank whose dump has other members of a group is not compared in that group."""
    ranks = read(dumps / "endless_ddp" / "active")
    ranks[VICTIM]["pg_config"]["0"]["ranks"] = "[2, 5]"
    verdict = diagnosed(tmp_path, ranks)
    assert (conclusion(verdict), verdict.certainty) == (NOT_KNOWN, "unknown")


@pytest.mark.parametrize("value", [-5, 2**62, 2**80, "x", None, [], {}, 3.5])
def test_malformed_status(dumps: Path, tmp_path: Path, value: object) -> None:
    """A status that is no number is left out, and the rest of the dump is still read."""
    ranks = read(dumps / "endless_ddp" / "active")
    ranks[VICTIM]["pg_status"] = {
        "0": dict.fromkeys(ranks[VICTIM]["pg_status"]["0"], value),
        "999999999999": {},
        "-1": {},
        "x": value,
    }
    ranks[VICTIM]["pg_config"]["x" * 5000] = {"ranks": "[1]"}
    assert conclusion(diagnosed(tmp_path, ranks)) == TOGETHER
