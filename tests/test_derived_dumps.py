"""What the doctor says about flight recorder dumps that are derived from those of NCCL jobs: with
entries removed, with timing, large numbers, many groups, expert groups, pipelines, empty lists."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from test_nccl_dumps import (
    HEALTHY,
    KINDS,
    MISSING,
    NOT_KNOWN,
    PARTIAL,
    TABLE,
    TOGETHER,
    VICTIM,
    Dump,
    conclusion,
    diagnosed,
    read,
)
from test_nccl_runs import unpacked
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.flight_recorder.verdict import consult_dumps

HANGS = ["endless_ddp", "endless_fsdp2", "endless_pipeline", "opposite_groups", "stuck_cpu"]


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
@pytest.mark.parametrize(
    ("job", "absent"), [("stopped", VICTIM), *(("endless_ddp", rank) for rank in range(4))]
)
def test_timing_and_a_rank_without_a_dump(
    dumps: Path, tmp_path: Path, job: str, absent: int, kind: str
) -> None:
    """If all ranks with a dump have reached the call, the network may be the cause, and the rank
    without a dump be healthy: it is not named, and the text says to look at it first."""
    ranks = read(dumps / job / kind)
    ranks.pop(absent, None)
    started = {rank: with_timing(dump, has_reached=True) for rank, dump in ranks.items()}
    verdict = diagnosed(tmp_path, started)
    assert (conclusion(verdict), verdict.certainty) == (NOT_KNOWN, "unknown")
    assert any(f"Look at rank {absent} first" in line for line in verdict.explanation)


def test_timing_on_all_ranks(dumps: Path, tmp_path: Path) -> None:
    """If all devices have started a call, no rank is named: the network is the likely cause."""
    ranks = read(dumps / "endless_ddp" / "active")
    started = {rank: with_timing(dump, has_reached=True) for rank, dump in ranks.items()}
    verdict = diagnosed(tmp_path, started)
    assert (conclusion(verdict), verdict.certainty) == (TOGETHER, "exact")
    assert "All devices have started it: look at the network between them." in verdict.explanation


def test_default_group(dumps: Path, tmp_path: Path) -> None:
    """A rank without entries is found in the default group, which is always its first one, also if
    the names of the other groups have no order."""
    ranks = read(dumps / "stuck_cpu" / "active")
    for dump in ranks.values():
        dump["pg_config"]["a7f"] = dump["pg_config"]["0"] | {"name": "a7f", "desc": "dp"}
    assert conclusion(diagnosed(tmp_path, ranks)) == MISSING


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


def test_a_call_of_one_rank(dumps: Path, tmp_path: Path) -> None:
    """If most ranks are in no call, and one waits for them, it may have issued a call that the
    others leave out, such as a barrier of rank 0: no rank is named."""
    ranks = read(dumps / "stuck_cpu" / "active")
    for rank in (1, 3):
        ranks[rank] |= {name: ranks[VICTIM][name] for name in ("entries", "pg_status")}
    verdict = diagnosed(tmp_path, ranks)
    assert (conclusion(verdict), verdict.certainty) == (NOT_KNOWN, "unknown")
    assert verdict.explanation[0].endswith(" The other ranks are in no call: ranks 1-3.")
    assert verdict.explanation[2] == (
        "Look at: the code path of rank 0, and the stacks of ranks 1-3."
    )


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


@pytest.mark.parametrize("wrong", [2, 3])
def test_experts_in_another_order(dumps: Path, tmp_path: Path, wrong: int) -> None:
    """Ranks that are in one of two groups cannot use them in a wrong order, so their number decides
    nothing. Of two ranks that are in both, the one is named that differs from the other groups."""
    usual: list[Call] = [("0", 41), ("2", 81)] if wrong == 3 else [("2", 81), ("0", 41)]
    pending: dict[int, list[Call]] = {
        2: usual if wrong == 3 else usual[::-1],
        3: usual if wrong == 2 else usual[::-1],
    }
    of_others: list[Call] = [("0", 41), ("1", 81)] if wrong == 3 else [("0", 41)]
    pending |= {0: of_others, 1: of_others}
    counts = {"0": 41, "1": 81, "2": 81}
    verdict = diagnosed(tmp_path, expert_ranks(dumps, pending, lambda rank, name: counts[name]))
    assert conclusion(verdict) == ("deadlock", (wrong,))


def test_experts_and_a_call_that_one_rank_completed(dumps: Path, tmp_path: Path) -> None:
    """A rank that has not completed what another rank has may wait in that call. So it is not
    blamed for what it has not issued in another group."""
    pending: dict[int, list[Call]] = {
        0: [("0", 41)],
        1: [("0", 41)],
        2: [("2", 81)],
        3: [("0", 41)],
    }
    counts = {(2, "0"): 41, (2, "2"): 81, (3, "2"): 80}
    ranks = expert_ranks(
        dumps, pending, lambda rank, name: counts.get((rank, name), 41 if name == "0" else 80)
    )
    assert conclusion(diagnosed(tmp_path, ranks)) == NOT_KNOWN


def test_experts_that_wait_for_each_other(dumps: Path, tmp_path: Path) -> None:
    """If two ranks wait for each other, and nothing shows which one is wrong, none is named."""
    pending: dict[int, list[Call]] = {
        rank: [("2", 81) if rank == 2 else ("0", 41)] for rank in range(4)
    }
    counts = {(2, "0"): 40, (3, "2"): 80}
    ranks = expert_ranks(
        dumps, pending, lambda rank, name: counts.get((rank, name), 41 if name == "0" else 81)
    )
    assert conclusion(diagnosed(tmp_path, ranks)) == ("deadlock", ())


def test_two_ranks_that_have_lost_their_first_calls(dumps: Path, tmp_path: Path) -> None:
    """A rank that issues one call too many stays at a line that the other one has left. If both
    rings have lost the calls before, that line is not new, and the other rank is not blamed."""
    ranks = {rank: dump for rank, dump in read(dumps / "extra" / "all").items() if rank < 2}
    for rank, dump in ranks.items():
        template = dump["entries"][-1]
        dump["pg_config"]["0"]["ranks"] = "[0, 1]"
        dump["pg_status"]["0"] |= {
            "last_enqueued_collective": 520,
            "last_completed_collective": 499,
        }
        dump["entries"] = [
            template
            | {
                "record_id": number + 40,
                "collective_seq_id": number,
                "frames": [
                    {
                        "name": "f",
                        "filename": "/job/train.py",
                        "line": 7 if (number - rank) % 60 < 30 else 9,
                    }
                ],
            }
            for number in range(500, 521)
        ]
    assert diagnosed(tmp_path, ranks).culprits == ()


def replicas(dumps: Path, number: int, wrong: int) -> dict[int, Dump]:
    """Dumps of two groups of two ranks with equal calls; one rank differs from a number on."""
    ranks = read(dumps / "skipped" / "all")
    for rank, dump in ranks.items():
        name = str(1 + rank // 2)
        template = dump["entries"][0] | {"pg_id": 1, "process_group": (name, "replicate")}
        members = str([rank // 2 * 2, rank // 2 * 2 + 1])
        dump["pg_config"][name] = {"name": name, "desc": "replicate", "ranks": members}
        dump["pg_status"]["1"] |= {"last_enqueued_collective": 20, "last_completed_collective": 9}
        dump["pg_status"].pop("0")
        sizes = [[100 + 7 * (n % 3)] for n in range(21 + (rank == wrong))]
        if rank == wrong:
            del sizes[number]
        dump["entries"] = [
            template
            | {
                "record_id": n,
                "collective_seq_id": n,
                "input_sizes": [size],
                "output_sizes": [size],
                "state": "completed" if n < 10 else "scheduled",
                "retired": n < 10,
            }
            for n, size in enumerate(sizes)
            if n
        ]
    return ranks


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_a_tie_in_one_of_several_groups(dumps: Path, tmp_path: Path, wrong: int) -> None:
    """If the two ranks of a group differ, the one is named that differs from the other groups."""
    verdict = diagnosed(tmp_path, replicas(dumps, 10, wrong))
    assert (conclusion(verdict), verdict.certainty) == (("mismatch", (wrong,)), "inferred")
    assert (
        f"The cohorts have the same size, but only rank {wrong} differs from the other groups of"
        " this kind."
    ) in verdict.explanation


def test_a_tie_in_groups_that_differ(dumps: Path, tmp_path: Path) -> None:
    """Another group counts only if it issued the same calls before."""
    ranks = replicas(dumps, 10, 1)
    for rank in (2, 3):
        ranks[rank]["entries"][4]["input_sizes"] = [[5]]
    assert conclusion(diagnosed(tmp_path, ranks)) == ("mismatch", ())


# -- pipelines -------------------------------------------------------------------------------------


def test_pipeline_and_a_stuck_cpu(dumps: Path, tmp_path: Path) -> None:
    """A rank that has not issued the send that its neighbour waits for is named."""
    ranks = read(dumps / "endless_pipeline" / "all")
    ranks[VICTIM]["entries"] = ranks[VICTIM]["entries"][:61]
    ranks[VICTIM]["pg_status"]["0"]["last_enqueued_collective"] = 61
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
        entry |= {"state": "completed", "retired": True}
    ranks.pop(removed, None)
    verdict = diagnosed(tmp_path, ranks)
    assert conclusion(verdict) == ("missing", (3,))
    assert verdict.facts["on_device"] is True


@pytest.mark.parametrize("kind", ["all", "watchdog"])
def test_pipeline_and_an_aborted_sender(dumps: Path, tmp_path: Path, kind: str) -> None:
    """If the communicator of a sender was aborted, its sends seem complete, and are not retired:
    the receiver is not blamed."""
    ranks = read(dumps / "endless_pipeline" / kind)
    for entry in ranks[VICTIM]["entries"]:
        entry["state"] = "completed"
    verdict = diagnosed(tmp_path, ranks)
    assert (conclusion(verdict), verdict.certainty) == (NOT_KNOWN, "unknown")


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("entries", [0, 3])
def test_pipeline_and_a_dump_that_lost_its_messages(
    dumps: Path, tmp_path: Path, rank: int, entries: int
) -> None:
    """A dump without the last messages that its status counts, or without any data, does not show
    that its rank has not issued them."""
    ranks = read(dumps / "endless_pipeline" / "all")
    ranks[rank]["entries"] = ranks[rank]["entries"][:entries]
    if not entries:
        ranks[rank]["pg_status"] = {}
    verdict = diagnosed(tmp_path, ranks)
    assert set(verdict.culprits) <= {VICTIM}
    assert verdict.kind != "healthy"


@pytest.mark.parametrize("completed", [252, 251], ids=["confirmed", "perhaps aborted"])
def test_pipeline_and_an_idle_receiver(dumps: Path, tmp_path: Path, completed: int) -> None:
    """A rank whose calls are all complete has not issued the receive that a pending send waits for.
    If its last call may have been aborted, it is not named."""
    ranks = read(dumps / "endless_pipeline" / "active")
    status = {"last_enqueued_collective": 252, "last_completed_collective": completed}
    ranks[3]["entries"] = []
    ranks[3]["pg_status"]["0"] |= status
    verdict = diagnosed(tmp_path, ranks)
    is_clear = completed == 252
    assert conclusion(verdict) == (("missing", (3,)) if is_clear else NOT_KNOWN)
    assert verdict.certainty == ("inferred" if is_clear else "unknown")


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


def add_collective(dump: Dump, *, pending: bool) -> None:
    """Add a collective of the same group after all messages."""
    last = dump["entries"][-1]
    collective = last | {
        "record_id": last["record_id"] + 1,
        "collective_seq_id": 1,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4]],
        "output_sizes": [[4]],
        "is_p2p": False,
        "state": "scheduled" if pending else "completed",
        "retired": not pending,
    }
    dump["entries"].append(collective)
    status = dump["pg_status"]["0"]
    status["last_enqueued_collective"] = 1
    status["last_completed_collective"] = last["p2p_seq_id"] if pending else 1


@pytest.mark.parametrize("pending", [False, True])
def test_active_dumps_that_begin_with_batches(dumps: Path, tmp_path: Path, pending: bool) -> None:
    """The recorder never completes the entries inside a batch, also the first ones of a job: in
    active dumps, those whose end is not listed are complete."""
    ranks = read(dumps / "endless_pipeline" / "all")
    for rank, dump in ranks.items():
        dump = in_batches(dump)
        for record_id, entry in enumerate(dump["entries"]):
            entry["record_id"] = record_id
            if record_id % 2:
                entry |= {"state": "completed", "retired": True}
        add_collective(dump, pending=pending)
        ranks[rank] = only_active(dump)
        assert ranks[rank]["entries"][0]["record_id"] == 0
    assert conclusion(diagnosed(tmp_path, ranks)) == (TOGETHER if pending else HEALTHY)


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


# -- devices that failed, and dumps of different moments -------------------------------------------


def with_completed(dump: Dump, number: int) -> Dump:
    """The dump as it is if the watchdog saw all calls up to a sequence number complete."""
    dump = copy.deepcopy(dump)
    for entry in dump["entries"]:
        if entry["collective_seq_id"] <= number:
            entry |= {"state": "completed", "retired": True}
    dump["pg_status"]["0"]["last_completed_collective"] = number
    return dump


def failed_device(
    folder: Path, rank: int, *, completed: int, issued: int | None = None
) -> dict[int, Dump]:
    """Dumps in which all ranks but one have completed more; `issued`: the last call of that one."""
    ranks = {other: with_completed(dump, completed) for other, dump in read(folder).items()}
    ranks[rank] = read(folder)[rank]
    if issued is not None:
        dump = ranks[rank]
        dump["pg_status"]["0"]["last_enqueued_collective"] = issued
        dump["entries"] = [
            entry for entry in dump["entries"] if entry["collective_seq_id"] <= issued
        ]
    if folder.name == "active":
        ranks = {other: only_active(dump) for other, dump in ranks.items()}
    return ranks


@pytest.mark.parametrize("kind", ["all", "active"])
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(
    ("job", "completed", "issued"),
    [
        ("endless_ddp", 23, None),  # rank 2 has completed 22; all have issued 25
        ("endless_ddp", 23, 23),
        ("endless_ddp", 25, None),  # the others have nothing pending
        ("endless_fsdp2", 80, None),  # it has completed 77
    ],
)
def test_failed_device(
    dumps: Path, tmp_path: Path, kind: str, rank: int, job: str, completed: int, issued: int | None
) -> None:
    """The rank is named that has issued what all others have completed, and has not completed
    it."""
    ranks = failed_device(dumps / job / kind, rank, completed=completed, issued=issued)
    verdict = diagnosed(tmp_path, ranks)
    assert (conclusion(verdict), verdict.certainty) == (("missing", (rank,)), "inferred")
    assert verdict.facts["on_device"] is True
    assert verdict.explanation[0].startswith(f"The device of rank {rank} has not completed ")


@pytest.mark.parametrize("kind", ["all", "active"])
def test_failed_device_and_a_rank_without_a_dump(dumps: Path, tmp_path: Path, kind: str) -> None:
    """In the last call that the others have completed, a rank may wait for one without a dump.
    It does not wait in an earlier one."""
    folder = dumps / "endless_ddp" / kind
    for completed, culprits in ((23, ()), (24, (VICTIM,))):
        ranks = failed_device(folder, VICTIM, completed=completed)
        del ranks[0]
        verdict = diagnosed(tmp_path / str(completed), ranks)
        assert conclusion(verdict) == ("missing", culprits)
        assert any("ook at rank 2 first" in line for line in verdict.explanation) != bool(culprits)


@pytest.mark.parametrize("kind", ["all", "active"])
def test_ranks_behind_each_other(dumps: Path, tmp_path: Path, kind: str) -> None:
    """One rank against one proves nothing, and of two ranks that are behind one may wait for the
    other. Nothing shows that the job progressed."""
    folder = dumps / "endless_ddp" / kind
    ranks = failed_device(folder, VICTIM, completed=23)
    for name, some in {
        "pair": {rank: ranks[rank] for rank in (0, VICTIM)},
        "two": ranks | {3: failed_device(folder, 3, completed=23)[3]},
    }.items():
        verdict = diagnosed(tmp_path / name, some)
        assert (conclusion(verdict), verdict.certainty) == (NOT_KNOWN, "unknown")
        suspects = "rank 2" if name == "pair" else "ranks 2-3"
        assert any(f"Look at {suspects} first" in line for line in verdict.explanation)


@pytest.mark.parametrize("kind", ["all", "active"])
def test_an_old_dump(dumps: Path, tmp_path: Path, kind: str) -> None:
    """If a rank has not issued what the others have completed, its dump is older. That the others
    wait now may be because of it, and is not progress."""
    folder = dumps / "endless_ddp" / kind
    ranks = failed_device(folder, VICTIM, completed=24, issued=23)
    verdict = diagnosed(tmp_path, ranks)
    assert (conclusion(verdict), verdict.certainty) == (NOT_KNOWN, "unknown")
    assert any("the dump of rank 2 is older" in line for line in verdict.explanation)
    assert any("Look at rank 2 first" in line for line in verdict.explanation)


@pytest.mark.parametrize("kind", ["all", "active"])
def test_an_old_dump_of_a_job_that_waits_for_nothing(
    dumps: Path, tmp_path: Path, kind: str
) -> None:
    """If the others have completed everything, an older dump with a pending call is no hang."""
    ranks = failed_device(dumps / "endless_ddp" / kind, VICTIM, completed=25, issued=24)
    verdict = diagnosed(tmp_path, ranks)
    assert conclusion(verdict) == HEALTHY
    assert verdict.explanation[0].startswith("The job progressed while the dumps were written")


def test_progress_of_a_status_lags(dumps: Path, tmp_path: Path) -> None:
    """The status of a rank is behind its device: without a pending call, it has not failed."""
    ranks = read(dumps / "slow_ddp" / "active")
    assert all(dump["entries"] == [] for dump in ranks.values())
    for rank, dump in ranks.items():
        if rank != VICTIM:
            dump["pg_status"]["0"]["last_completed_collective"] = 58
    assert conclusion(diagnosed(tmp_path, ranks)) == HEALTHY


@pytest.mark.parametrize("aborted", [(0,), (1, 3), (0, 1, 2)])
@pytest.mark.parametrize("kind", ["all", "active"])
@pytest.mark.parametrize("job", ["endless_ddp", "endless_fsdp2", "stuck_cpu"])
def test_aborted_communicators(
    dumps: Path, tmp_path: Path, job: str, kind: str, aborted: tuple[int, ...]
) -> None:
    """If a communicator is aborted before the dump is written, its calls seem complete: they are
    not, as long as another rank has one of them pending."""
    ranks = read(dumps / job / kind)
    for rank in aborted:
        for entry in ranks[rank]["entries"]:
            entry["state"] = "completed"  # and not retired, if it was pending
        if kind == "active":
            ranks[rank]["entries"] = []
    verdict = diagnosed(tmp_path, ranks)
    assert verdict.kind in ("missing", "together")
    assert verdict.culprits == (() if job != "stuck_cpu" else (VICTIM,))


@pytest.mark.parametrize("kind", ["all", "active"])
@pytest.mark.parametrize("job", HANGS)
def test_communicators_aborted_on_all_ranks(
    dumps: Path, tmp_path: Path, job: str, kind: str
) -> None:
    """If all ranks abort their communicators before they write their dumps, nothing is pending. No
    watchdog confirms the last calls, so the job is not called healthy."""
    ranks = read(dumps / job / kind)
    for dump in ranks.values():
        for entry in dump["entries"]:
            entry["state"] = "completed"  # and not retired, if it was pending
        if kind == "active":
            dump["entries"] = []
    verdict = diagnosed(tmp_path, ranks)
    assert (conclusion(verdict), verdict.certainty) == (PARTIAL, "unknown")
    assert verdict.explanation[0].startswith("No call is pending in the dumps. But the watchdog of")
    assert "A hang is not excluded, and the culprit is unknown." in verdict.explanation


@pytest.mark.parametrize(("took_s", "expected"), [(3, HEALTHY), (8, PARTIAL)])
def test_retired_calls_that_timed_out(
    dumps: Path, tmp_path: Path, took_s: int, expected: tuple[str, tuple[int, ...]]
) -> None:
    """The watchdog also retires calls that it aborted after their timeout (8 s): if the last calls
    took so long, the job is not called healthy."""
    ranks = read(dumps / "endless_ddp" / "all")
    for dump in ranks.values():
        dump["pg_status"]["0"]["last_completed_collective"] = 25
        for entry in dump["entries"]:
            if entry["state"] != "completed":
                completed_ns = entry["time_created_ns"] + took_s * 1_000_000_000
                entry |= {"state": "completed", "retired": True}
                entry["time_discovered_completed_ns"] = completed_ns
    assert conclusion(diagnosed(tmp_path, ranks)) == expected


def test_a_device_that_no_rank_waits_for(dumps: Path, tmp_path: Path) -> None:
    """With timing, a call that no device has reached is pending, although no rank is in a call."""
    ranks = {
        rank: with_timing(dump, has_reached=False)
        for rank, dump in read(dumps / "endless_ddp" / "active").items()
    }
    verdict = diagnosed(tmp_path, ranks)
    assert (conclusion(verdict), verdict.certainty) == (NOT_KNOWN, "unknown")
    assert "no device has reached it" in verdict.explanation[0]


def test_failed_device_in_one_of_two_groups(dumps: Path, tmp_path: Path) -> None:
    """A device that failed in one group is named, although all ranks wait in another one."""
    folder = dumps / "endless_ddp" / "active"
    ranks = failed_device(folder, VICTIM, completed=25)
    for rank, dump in ranks.items():
        status, template = dump["pg_status"]["0"], read(folder)[rank]["entries"][0]
        dump["pg_config"]["1"] = dump["pg_config"]["0"] | {"name": "1", "desc": "dp"}
        dump["pg_status"]["1"] = dict.fromkeys(status, -1) | {
            "last_enqueued_collective": 7,
            "last_completed_collective": 6,
        }
        dump["entries"].append(
            template
            | {"record_id": 90, "pg_id": 1, "process_group": ("1", "dp"), "collective_seq_id": 7}
        )
    verdict = diagnosed(tmp_path, ranks)
    assert (conclusion(verdict), verdict.certainty) == (MISSING, "inferred")
    assert verdict.collective is not None
    assert verdict.collective["group"] == "default"


@pytest.mark.parametrize("kind", ["all", "active"])
@pytest.mark.parametrize("job", TABLE)
def test_entries_without_times(dumps: Path, tmp_path: Path, job: str, kind: str) -> None:
    """Without the times of calls, the verdict names the same ranks. But nothing shows then that the
    last sends of a pipeline completed a moment before the dump, and were not aborted."""
    ranks = read(dumps / job / kind)
    for rank in (0, 1):  # on some ranks, and then on all
        for other in ranks if rank else [rank]:
            for entry in ranks[other]["entries"]:
                for name in [name for name in entry if name.startswith("time_")]:
                    del entry[name]
        verdict = diagnosed(tmp_path / str(rank), ranks)
        expected = dict(zip(KINDS, TABLE[job], strict=True))[kind]
        is_pipeline = rank == 1 and job == "endless_pipeline"
        assert expected is not None
        assert verdict.culprits == (expected[1] if not is_pipeline else ())


# -- mismatches that are over ----------------------------------------------------------------------


@pytest.mark.parametrize("other", [0, VICTIM], ids=["another rank", "the same rank"])
@pytest.mark.parametrize(
    ("job", "has_timing"), [("stuck_cpu", False), ("endless_ddp", False), ("endless_ddp", True)]
)
def test_a_hang_after_a_mismatch(
    dumps: Path, tmp_path: Path, job: str, has_timing: bool, other: int
) -> None:
    """A mismatch in a call that completed long ago does not hide a later hang; it is mentioned."""
    ranks = read(dumps / job / "all")
    if has_timing:
        ranks = {rank: with_timing(ranks[rank], has_reached=rank != VICTIM) for rank in ranks}
    expected = conclusion(diagnosed(tmp_path / "before", ranks))
    entry = next(e for e in ranks[other]["entries"] if e["collective_seq_id"] == 8)
    entry |= {"input_sizes": [[7]], "output_sizes": [[7]]}
    verdict = diagnosed(tmp_path / "after", ranks)
    assert conclusion(verdict) == expected
    assert expected == (MISSING if job == "stuck_cpu" or has_timing else TOGETHER)
    assert (
        f'Earlier, rank {other} differed in #7 of group "default" (shape). All ranks have completed'
        " that call and agree since then, so it does not explain the hang."
    ) in verdict.explanation


@pytest.mark.parametrize("number", [22, 23])
def test_a_hang_because_of_a_mismatch(dumps: Path, tmp_path: Path, number: int) -> None:
    """A mismatch in the call that hangs, or in the last call before it, may be the cause: it is the
    verdict."""
    ranks = read(dumps / "endless_ddp" / "all")
    entries = ranks[1]["entries"]
    next(e for e in entries if e["collective_seq_id"] == number)["input_sizes"] = [[7]]
    assert conclusion(diagnosed(tmp_path, ranks)) == ("mismatch", (1,))


@pytest.mark.parametrize("has_frames", [True, False])
def test_a_call_too_many_between_equal_calls(dumps: Path, tmp_path: Path, has_frames: bool) -> None:
    """A rank that issued one call too many long ago waits in the end for all others. If all calls
    look alike, nothing shows that they agree again, and the others are not blamed."""
    ranks = read(dumps / "stuck_cpu" / "all")
    template = ranks[0]["entries"][-1] | {"state": "completed", "retired": True}
    for rank, dump in ranks.items():
        dump["entries"] = [
            template | {"record_id": number - 1, "collective_seq_id": number}
            for number in range(1, 31 + (rank == VICTIM))
        ]
        status = dump["pg_status"]["0"]
        status["last_enqueued_collective"] = status["last_completed_collective"] = 30
        if not has_frames:
            dump["entries"] = [entry | {"frames": []} for entry in dump["entries"]]
    last = ranks[VICTIM]["entries"][-1]
    last |= {"state": "scheduled", "retired": False}
    ranks[VICTIM]["pg_status"]["0"]["last_enqueued_collective"] = 31
    ranks[VICTIM]["entries"][9]["input_sizes"] = [[7]]
    verdict = diagnosed(tmp_path, ranks)
    assert conclusion(verdict) == ("mismatch", (VICTIM,)), verdict.explanation


# -- two promises ----------------------------------------------------------------------------------


def aborted(dump: Dump) -> Dump:
    return dump | {"entries": [entry | {"state": "completed"} for entry in dump["entries"]]}


def cut_to(count: int) -> Callable[[Dump], Dump]:
    return lambda dump: dump | {"entries": dump["entries"][:count]}


LOSSES: dict[str, Callable[[Dump], Dump]] = {
    "only active": only_active,
    "no status": lambda dump: dump | {"pg_status": {}},
    "no entries": lambda dump: dump | {"entries": []},
    "no data": lambda dump: dump | {"entries": [], "pg_status": {}},
    "aborted": aborted,
    "last entry lost": cut_to(-1),
    "last four entries lost": cut_to(-4),
    "only three entries": cut_to(3),
    "first entry lost": lambda dump: dump | {"entries": dump["entries"][1:]},
}


def check_promises(folder: Path, job: str, ranks: dict[int, Dump]) -> None:
    verdict = diagnosed(folder, ranks)
    assert set(verdict.culprits) <= {VICTIM}, verdict.explanation
    has_hang = job not in ("healthy_ddp", "healthy_fsdp2", "slow_ddp", "replay_skipped")
    assert verdict.kind != "healthy" or not has_hang or job == "wrong_size", verdict.explanation


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("job", ["endless_pipeline", "stuck_cpu"])
def test_losses_on_all_ranks(dumps: Path, tmp_path: Path, job: str, loss: str) -> None:
    """Whatever all dumps of a hang have lost, no healthy rank is named, and it is not called
    healthy."""
    ranks = read(dumps / job / "all")
    check_promises(tmp_path, job, {rank: LOSSES[loss](dump) for rank, dump in ranks.items()})


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        *(("all", loss) for loss in LOSSES),
        # without the first call in flight, nothing shows that the order was another one
        *(("active", loss) for loss in LOSSES if loss != "first entry lost"),
    ],
)
@pytest.mark.parametrize("job", TABLE)
def test_losses(dumps: Path, tmp_path: Path, job: str, loss: str, kind: str) -> None:
    """Whatever the dumps of one rank, or of all, have lost, and with one dump missing too, no
    healthy rank is named, and no hang is called healthy."""
    ranks = read(dumps / job / kind)
    for rank in ranks:
        lossy = ranks | {rank: LOSSES[loss](ranks[rank])}
        check_promises(tmp_path / f"{rank}", job, lossy)
        for absent in ranks.keys() - {rank}:
            some = {other: dump for other, dump in lossy.items() if other != absent}
            check_promises(tmp_path / f"{rank} without {absent}", job, some)
    check_promises(tmp_path / "all", job, {rank: LOSSES[loss](ranks[rank]) for rank in ranks})


# -- the age of dumps ------------------------------------------------------------------------------


def written_after(folder: Path, ranks: dict[int, Dump], age_s: float, **other_s: float) -> Verdict:
    """The verdict on dumps that were written some seconds after the first pending call was issued;
    `rank_2=`: another age of one dump."""
    diagnosed(folder, ranks)
    issued_ns = min(
        entry["time_created_ns"]
        for dump in ranks.values()
        for entry in dump["entries"]
        if entry["state"] != "completed"
    )
    for path in folder.iterdir():
        time_ns = issued_ns + int(other_s.get(path.name, age_s) * 1e9)
        os.utime(path, ns=(time_ns, time_ns))
    return consult_dumps(folder)


@pytest.mark.parametrize("age_s", [-1.0, 0.1, 0.9])
@pytest.mark.parametrize("kind", ["all", "active"])
@pytest.mark.parametrize("job", [*HANGS, "skipped"])
def test_calls_that_were_just_issued(
    dumps: Path, tmp_path: Path, job: str, kind: str, age_s: float
) -> None:
    """If dumps were written a moment after the calls were issued, the job may be progressing: no
    rank is named, and the job is not called healthy. File systems have other clocks."""
    verdict = written_after(tmp_path, read(dumps / job / kind), age_s)
    assert (conclusion(verdict), verdict.certainty) == (NOT_KNOWN, "unknown")
    assert f", at most {max(age_s, 0):.1f} s before " in verdict.explanation[0]
    assert "The dumps do not show a hang: the job may be progressing." in verdict.explanation


@pytest.mark.parametrize("kind", ["all", "active"])
@pytest.mark.parametrize("job", [*HANGS, "skipped"])
def test_calls_that_are_pending_for_seconds(
    dumps: Path, tmp_path: Path, job: str, kind: str
) -> None:
    """Dumps that were written some seconds after the calls were issued show a hang."""
    verdict = written_after(tmp_path, read(dumps / job / kind), 3.0)
    assert conclusion(verdict) == dict(zip(KINDS, TABLE[job], strict=True))[kind]
    assert (verdict.certainty == "exact") == (job == "stuck_cpu")


@pytest.mark.parametrize("age_s", [-1e9, -1.0, 0.5], ids=["unknown", "before", "after"])
def test_a_dump_that_is_older_than_the_call(dumps: Path, tmp_path: Path, age_s: float) -> None:
    """That a rank has not issued a call is only inferred, if its dump is not known to be newer than
    the call: it may have written the dump when it failed."""
    verdict = written_after(tmp_path, read(dumps / "stuck_cpu" / "all"), 10.0, rank_2=age_s)
    assert (conclusion(verdict), verdict.certainty) == (MISSING, "inferred")


def test_dumps_without_a_time(dumps: Path) -> None:
    """Without the times of the files, a short wait looks like a long one: the rank is inferred."""
    verdict = consult_dumps(dumps / "stuck_cpu" / "all")  # the archive has no times
    assert (conclusion(verdict), verdict.certainty) == (MISSING, "inferred")


@pytest.mark.parametrize(("age_s", "culprits"), [(0.5, ()), (10.0, (VICTIM,))])
def test_a_device_that_may_have_failed(
    dumps: Path, tmp_path: Path, age_s: float, culprits: tuple[int, ...]
) -> None:
    """A rank that is behind has an older dump, unless the others have waited for some seconds: a
    process may write a dump at once if its device fails."""
    ranks = failed_device(dumps / "endless_ddp" / "all", VICTIM, completed=23)
    verdict = written_after(tmp_path, ranks, age_s, rank_2=0.5)
    assert conclusion(verdict) == ("missing", culprits)
    assert any("ook at rank 2 first" in line for line in verdict.explanation) != bool(culprits)


# -- what a verdict says ---------------------------------------------------------------------------


@pytest.mark.parametrize("other", [0, 1, 3])
def test_a_tie(dumps: Path, tmp_path: Path, other: int) -> None:
    """If two ranks differ, and nothing shows which one is wrong, no rank is named."""
    ranks = read(dumps / "extra" / "active")
    verdict = diagnosed(tmp_path, {rank: ranks[rank] for rank in (other, VICTIM)})
    assert conclusion(verdict) == ("mismatch", ())
    assert (
        "The cohorts have the same size: the dumps do not show which one is wrong."
        in verdict.explanation
    )
    assert not any(line.startswith("Likely cause") for line in verdict.explanation)


def test_blocked_ranks(dumps: Path) -> None:
    """Only ranks with a pending call are blocked after a mismatch."""
    lines = consult_dumps(dumps / "wrong_size" / "all").explanation
    assert "The job continued after it: nothing in the dumps is pending." in lines
    assert not any("blocked" in line for line in lines)
    lines = consult_dumps(dumps / "extra" / "all").explanation
    assert "Now all 4 ranks are blocked, in calls that do not match each other." in lines


def test_places(dumps: Path) -> None:
    """Where no dump has a line, the verdict says nothing about places."""
    verdict = consult_dumps(dumps / "stuck_cpu" / "active_json")
    assert "unknown place" not in str(verdict)
    assert "  waiting: ranks 0-1, 3" in verdict.explanation
    assert "  the dump of rank 2 does not show where it is" in verdict.explanation


def test_groups_with_one_description(dumps: Path, tmp_path: Path) -> None:
    """If several groups have the same description, the verdict also has the name and the ranks."""
    ranks = read(dumps / "stuck_cpu" / "active")
    for dump in ranks.values():
        config = dump["pg_config"]["0"] | {"desc": "dp"}
        dump["pg_config"] = {"0": config, "1": config | {"name": "1"}}
        dump["pg_status"]["1"] = dump["pg_status"]["0"] | {"last_enqueued_collective": 22}
        for entry in dump["entries"]:
            entry["process_group"] = ("0", "dp")
    verdict = diagnosed(tmp_path, ranks)
    assert conclusion(verdict) == MISSING
    assert verdict.explanation[0].endswith('#22 of group "dp (0: ranks 0-3)".')
