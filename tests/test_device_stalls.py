"""Devices that do not progress: which of them hang, and which only wait."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from device_boxes import DeviceBox, S
from diagnosing import diagnose
from torchwhere.blackbox import file_format
from torchwhere.blackbox.file_format import FLAG_ASYNC, FLAG_ON_DEVICE, EntryType
from torchwhere.blackbox.run import read_run
from torchwhere.core.events import Kind
from torchwhere.core.place import Pass
from torchwhere.diagnose.calls.job_calls import calls_of_run
from torchwhere.diagnose.doctor.stragglers import straggler
from torchwhere.pipeline.verdict import diagnose_folder
from torchwhere.processes.status import ProcessStatus


def write_rank(folder: Path, *, rank: int, world_size: int, reached_s: float) -> None:
    """A rank whose CPU issued its last collective at 100 s, which the device has done, and whose
    device was last looked at after 130 s."""
    device = DeviceBox(folder / f"rank{rank}.box", rank=rank, world_size=world_size)
    device.box.record(Kind.START, 99 * S)
    record = device.issue(step=4, at_s=100)
    device.reach(record, at_s=100.1, done_s=100.2)
    is_stalled = reached_s < 130
    device.lane(
        place=device.place(),
        time=int(reached_s * S),
        step=4,
        record=record + 1,
        pending=3 if is_stalled else 0,
        next_place=device.place() if is_stalled else 0,
    )
    device.look(130)
    device.cpu(step=4, at_s=100.5)
    device.box.beat(130 * S)
    device.box.close()


def test_one_process(tmp_path: Path) -> None:
    """A job of one process whose device hangs is not healthy: the verdict says where the device
    is."""
    write_rank(tmp_path, rank=0, world_size=1, reached_s=101)
    verdict = diagnose_folder(tmp_path, stall_s=5)
    assert (verdict.kind, verdict.culprits) == ("missing", (0,))
    assert verdict.explanation[0] == "The device of rank 0 has not progressed for 29 s."
    assert "issued after forward of layers.1.mlp, step 4." in verdict.explanation[-1]


def test_two_ranks(tmp_path: Path) -> None:
    """Only the rank whose device hangs is named, not the rank whose device is idle."""
    write_rank(tmp_path, rank=0, world_size=2, reached_s=130)
    write_rank(tmp_path, rank=1, world_size=2, reached_s=101)
    verdict = diagnose_folder(tmp_path, stall_s=5)
    assert (verdict.kind, verdict.culprits) == ("missing", (1,))


def test_an_idle_device(tmp_path: Path) -> None:
    """A device that has reached all its marks is not stalled, however long the CPU does nothing."""
    write_rank(tmp_path, rank=0, world_size=1, reached_s=130)
    verdict = diagnose_folder(tmp_path, stall_s=5)
    assert verdict.culprits == ()
    assert not verdict.facts.get("on_device")


# -- asynchronous collectives of several groups, and ranks without data ----------------------------


class JobBox(DeviceBox):
    """The box of a rank in several groups, whose device was last looked at after 130 s."""

    def __init__(self, folder: Path, rank: int, groups: dict[str, list[int]]) -> None:
        super().__init__(folder / f"rank{rank}.box", rank=rank, world_size=len(groups["world"]))
        self.box.record(Kind.START, 99 * S)
        self.streams: dict[str, list[int]] = {}  # counter, count
        for name, ranks in groups.items():
            if rank in ranks:
                entry = self._json(EntryType.GROUP, name=name, ranks=ranks, backend="nccl")
                self.streams[name] = [self.box.counter_at((entry, -1, -1)) or 0, 0]

    def call(
        self,
        group: str,
        at_s: float,
        *,
        reached: bool = True,
        reached_s: float | None = None,
        is_done: bool = False,
        is_async: bool = False,
        op: str = "all_reduce",
    ) -> int:
        """Issue a collective, which the device reaches 10 ms later, or at `reached_s`. Returns its
        record. The group `cpu` does not use the device."""
        counter, count = self.streams[group]
        signature = self._json(EntryType.COLLECTIVE, op=op, group=group)
        flags = (0 if group == "cpu" else FLAG_ON_DEVICE) | (FLAG_ASYNC if is_async else 0)
        ids = (self.module, 0, self.line, 0, signature, 0, 0, count)
        t_ns = int(at_s * S)
        record = self.box.record(Kind.COLLECTIVE, t_ns, Pass.BACKWARD, flags, 0, 4, *ids)
        self.streams[group][1] += 1
        self.box.words[counter + file_format.COUNTER_COUNT] = count + 1
        self.box.words[counter + file_format.COUNTER_TIME] = t_ns
        self.box.words[counter + file_format.COUNTER_RECORD] = record
        if reached:
            self.counter = counter
            device_s = at_s + 0.01 if reached_s is None else reached_s
            self.reach(record, at_s=device_s, done_s=device_s + 0.001 if is_done else 0)
        return record

    def stall(
        self,
        record: int,
        at_s: float,
        *,
        first_unreached: int | None = None,
        looked_s: float = 130,
        cpu_s: float = 102,
        is_idle: bool = False,
    ) -> None:
        """Let the device hang after the mark of a record, until it was last looked at; an idle one
        has reached all marks. The CPU has moved last at `cpu_s`."""
        next_record = 0 if first_unreached is None else first_unreached + 1
        self.lane(
            place=self.place(),
            time=int((at_s + 0.01) * S),
            step=4,
            record=record + 1,
            pending=0 if is_idle else 1,
            next_place=self.place(),
            next_record=next_record,
        )
        self.look(looked_s)
        self.cpu(step=4, at_s=cpu_s)
        self.box.beat(int(looked_s * S))
        self.box.close()


GROUPS = {"world": [0, 1, 2, 3], "tp0": [0, 1], "tp1": [2, 3]}


def test_an_open_collective_of_another_group(tmp_path: Path) -> None:
    """The device of rank 3 hangs before an asynchronous collective of all ranks. The others have
    reached it and a later one of their own group, and wait: only rank 3 is named."""
    for rank in range(4):
        box, own = JobBox(tmp_path, rank, GROUPS), "tp0" if rank < 2 else "tp1"
        box.call("world", 100)
        before = box.call(own, 100.1)
        if rank == 3:
            first = box.call("world", 101, reached=False, is_async=True)
            box.call(own, 101.1, reached=False)
            box.stall(before, 100.1, first_unreached=first)
        else:
            box.call("world", 101, is_async=True)
            box.stall(box.call(own, 101.1), 101.1)
    verdict = diagnose_folder(tmp_path, stall_s=5)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == ("missing", (3,), "exact")
    assert sorted(verdict.facts["waiting_devices"]) == [0, 1, 2]


def test_devices_that_wait_in_different_collectives(tmp_path: Path) -> None:
    """The text has a line for each collective in which devices wait."""
    for rank in range(4):
        box, pair = JobBox(tmp_path, rank, GROUPS), "tp0" if rank < 2 else "tp1"
        before = box.call(pair, 100)
        if rank < 2:
            box.stall(box.call("world", 101), 101)
        elif rank == 2:
            box.stall(box.call("tp1", 101), 101)
        else:
            box.stall(before, 100, first_unreached=box.call("tp1", 101, reached=False))
    verdict = diagnose_folder(tmp_path, stall_s=5)
    assert (verdict.kind, verdict.culprits) == ("missing", (3,))
    assert verdict.explanation[1:3] == (
        '  waiting on the device: ranks 0-1, in all_reduce, #0 of group "world"',
        '  waiting on the device: rank 2, in all_reduce, #1 of group "tp1"',
    )


def test_two_devices_that_hang(tmp_path: Path) -> None:
    """If two devices hang, the text names both, and the rank to which the two points belong."""
    for rank in range(4):
        box = JobBox(tmp_path, rank, GROUPS)
        before = box.call("world", 100)
        last = box.call("world", 101, reached=rank < 2)
        box.stall(*(last, 101) if rank < 2 else (before, 100), first_unreached=last)
    verdict = diagnose_folder(tmp_path, stall_s=5)
    assert (verdict.kind, verdict.culprits) == ("missing", (2, 3))
    assert verdict.explanation[0].endswith("which their CPUs issued 29 s ago.")
    assert verdict.explanation[2] == (
        "Likely cause: a kernel or a copy on each of these devices does not end. Look at: nvidia-smi"
        " and the kernel log (Xid) on the hosts of ranks 2-3, and the kernels that the CPU of rank 2"
        " issued between these two points:"
    )


def item_stack(folder: Path) -> tuple[str, ...]:
    """The stack of a rank that is in `.item()`. Its source is older than any process."""
    source = folder / "train.py"
    source.write_text("value = loss.item()\n")
    os.utime(source, (0, 0))
    return (f"{source}:1 in <module>",)


def test_a_cpu_that_waits_for_a_kernel_after_the_last_mark(tmp_path: Path) -> None:
    """The device of rank 1 has reached all marks, and its CPU waits in `.item()` for a kernel that
    was issued after them: the verdict says so, and suspects no other code path."""
    stack = item_stack(tmp_path)
    for rank in range(2):
        box = JobBox(tmp_path, rank, {"world": [0, 1]})
        last = box.call("world", 100)
        if rank == 0:
            last = box.call("world", 101)
        box.stall(last, 101, is_idle=rank == 1)
    statuses = {rank: ProcessStatus(True, "R", stack=stack * rank) for rank in range(2)}
    run = read_run(tmp_path)
    run.boxes[1].meta["started_ns"] = 1
    verdict = diagnose(run, statuses=statuses, now_ns=1130 * S, stall_s=5)
    assert (verdict.kind, verdict.culprits) == ("missing", (1,)), verdict
    assert verdict.explanation[2].endswith("waiting in .item() for its device")
    assert verdict.explanation[3].startswith(
        "Likely cause: a kernel or a copy on the device of rank 1 does not end."
    )


def test_ranks_that_have_finished(tmp_path: Path) -> None:
    """If no rank waits for another, the text does not say of finished ranks where they are, and says
    of the others whether they wait for their devices."""
    stack = item_stack(tmp_path)
    for rank in range(2):
        box = JobBox(tmp_path, rank, {"world": [0, 1]})
        last = box.call("world", 100)
        if rank == 0:
            reason = box.box.text(json.dumps({"reason": "exit"}))
            box.box.record(Kind.END, 102 * S, extra=reason)
        box.stall(last, 100, is_idle=True)
    statuses = {0: ProcessStatus(alive=False), 1: ProcessStatus(alive=True, stack=stack)}
    run = read_run(tmp_path)
    run.boxes[1].meta["started_ns"] = 1
    verdict = diagnose(run, statuses=statuses, now_ns=1130 * S, stall_s=5)
    assert (verdict.kind, verdict.culprits) == ("healthy", ()), verdict
    assert verdict.explanation[1] == "  rank 0: finished"
    assert verdict.explanation[2].startswith("  rank 1: outside any module")
    assert verdict.explanation[2].endswith(": waiting in .item() for its device")


def test_a_process_that_could_not_run(tmp_path: Path) -> None:
    """The heartbeat of rank 1 stopped before its device reached a call that its CPU had issued: it
    took no other code path. Rank 0 waits where it issued that call, not where its CPU is."""
    for rank in range(2):
        box = JobBox(tmp_path, rank, {"world": [0, 1]})
        before = box.call("world", 100)
        last = box.call("world", 101, reached=rank == 0)
        if rank == 0:
            box.stall(last, 101)
        else:
            box.stall(before, 100, first_unreached=last, looked_s=101.5)
    gone = dict.fromkeys(range(2), ProcessStatus(alive=False))
    verdict = diagnose(read_run(tmp_path), statuses=gone, now_ns=1130 * S, stall_s=5)
    assert (verdict.kind, verdict.culprits) == ("missing", (1,)), verdict
    assert verdict.explanation[0].endswith("but cannot complete it.")
    assert verdict.explanation[1].startswith("  waiting: rank 0, in backward of layers.1.mlp")
    assert verdict.explanation[-1] == (
        "Look at: the log of rank 1, and the kernel log of its host: what kept its process from"
        " running, or ended it."
    )


@pytest.mark.parametrize(
    ("reached", "is_async", "number"), [(1, False, 2), (3, False, 3), (3, True, 2)]
)
def test_a_rank_that_exited_while_its_device_was_behind(
    tmp_path: Path, reached: int, number: int, *, is_async: bool
) -> None:
    """The others wait for it in the first call that its device has not reached, not in the first
    that its CPU has not issued; calls that the device of another rank has completed show that it
    had come further, asynchronous ones that are only reached do not."""
    for rank in range(2):
        box = JobBox(tmp_path, rank, {"world": [0, 1]})
        count = 1 + (reached if rank == 0 else 1)
        records = [
            box.call(
                "world",
                100,
                reached=number < count,
                is_done=number < count - 1 and not is_async,
                is_async=is_async,
            )
            for number in range(6)
        ]
        if rank == 1:
            reason = box.box.text(json.dumps({"reason": "failed: ValueError: bad batch"}))
            box.box.record(Kind.END, 102 * S, extra=reason)
        unreached = records[count] if count < len(records) else None
        box.stall(records[count - 1], 100, first_unreached=unreached, looked_s=102.5)
    statuses = {rank: ProcessStatus(alive=rank == 0) for rank in range(2)}
    verdict = diagnose(read_run(tmp_path), statuses=statuses, now_ns=1103 * S, stall_s=5)
    assert (verdict.kind, verdict.culprits) == ("dead", (1,)), verdict
    assert verdict.collective is not None
    assert verdict.collective["number"] == number


def test_the_first_of_several_open_collectives(tmp_path: Path) -> None:
    """Of several asynchronous collectives that the device has reached, the verdict names the first
    that the other rank has not reached."""
    for rank in range(2):
        box = JobBox(tmp_path, rank, {"world": [0, 1]})
        before = box.call("world", 100)
        records = [
            box.call("world", 101 + part / 100, reached=rank == 0, is_async=True)
            for part in range(3)
        ]
        if rank == 0:
            box.stall(records[-1], 101.02)
        else:
            box.stall(before, 100, first_unreached=records[0])
    verdict = diagnose_folder(tmp_path, stall_s=5)
    assert (verdict.kind, verdict.culprits) == ("missing", (1,))
    waiting = next(line for line in verdict.explanation if "waiting on the device" in line)
    assert waiting == '  waiting on the device: rank 0, in all_reduce, #1 of group "world"'


def test_a_rank_without_data(tmp_path: Path) -> None:
    """Devices that may wait for a rank without a box are not blamed: the verdict names that rank,
    and is not certain."""
    for rank in range(3):
        box = JobBox(tmp_path, rank, GROUPS)
        box.call("tp0" if rank < 2 else "tp1", 100)
        record = box.call("world", 101)
        box.stall(record, 101)
    verdict = diagnose_folder(tmp_path, stall_s=5)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == ("missing", (3,), "inferred")
    assert "There is no data for rank 3." in "\n".join(verdict.explanation)


@pytest.mark.parametrize(("group", "state"), [("world", "running"), ("cpu", "waiting")])
def test_a_wait_that_has_not_begun(tmp_path: Path, group: str, state: str) -> None:
    """The CPU of rank 0 has issued a collective that rank 1 has not. If the device of rank 0 still
    has earlier work, rank 0 does not wait yet; in a collective of the CPUs it waits."""
    for rank in range(2):
        box = JobBox(tmp_path, rank, {"world": [0, 1], "cpu": [0, 1]})
        before = box.call("world", 102)
        first = box.call("world", 102.1, reached=False)
        if rank == 0:
            box.call(group, 102.2, reached=False)
        box.stall(before, 102, first_unreached=first, looked_s=102.3)
    verdict = diagnose_folder(tmp_path, stall_s=5)
    assert verdict.culprits == ()
    assert [str(verdict.ranks[rank].state) for rank in range(2)] == [state, "running"]


@pytest.mark.parametrize(("looked_s", "culprits"), [(110, ()), (120, (1,))])
def test_a_cpu_that_is_far_ahead(
    tmp_path: Path, looked_s: float, culprits: tuple[int, ...]
) -> None:
    """The CPU of rank 0 issues all calls at once, that of rank 1 one every 4 s. Rank 0 waits since
    its device has reached the call that rank 1 has not issued, not since its CPU has issued it."""
    slow, fast = (JobBox(tmp_path, rank, {"world": [0, 1]}) for rank in (1, 0))
    for number in range(3):
        fast.call("world", 100, reached_s=100.01 + 4 * number)
    last = fast.call("world", 100, reached_s=108.02)
    fast.stall(
        last, 108.01, first_unreached=fast.call("world", 100, reached=False), looked_s=looked_s
    )
    for number in range(3):
        last = slow.call("world", 100 + 4 * number)
    slow.stall(last, 108, looked_s=looked_s)
    verdict = diagnose_folder(tmp_path, stall_s=5)
    assert (verdict.culprits, verdict.kind == "missing") == (culprits, bool(culprits)), verdict


@pytest.mark.parametrize(("state", "stall_s"), [("R", 5), ("S", 1.5), (None, 1.5)])
def test_devices_that_progress(tmp_path: Path, state: str | None, stall_s: float) -> None:
    """While devices reach one collective after another, CPUs that wait for them are not blocked,
    although they have issued the same last collective long ago."""
    for rank in range(2):
        box = JobBox(tmp_path, rank, {"world": [0, 1]})
        records = [box.call("world", 100, reached_s=100 + 1.2 * number) for number in range(25)]
        unreached = [box.call("world", 100, reached=False) for _ in range(5)]
        box.stall(records[-1], 128.8, first_unreached=unreached[0], cpu_s=100)
    is_alive = state is not None
    stack = ("train.py:40 in main",) if is_alive else ()
    statuses = dict.fromkeys(range(2), ProcessStatus(alive=is_alive, state=state, stack=stack))
    verdict = diagnose(read_run(tmp_path), statuses=statuses, now_ns=1130 * S, stall_s=stall_s)
    assert verdict.kind == ("healthy" if is_alive else "dead"), verdict


@pytest.mark.parametrize(
    ("reached_s", "waits_since_s"), [([101, 101.4, 101.4, 101.4], None), ([101] * 4, 105)]
)
@pytest.mark.parametrize("is_over", [False, True])
def test_a_long_kernel(
    tmp_path: Path, reached_s: list[float], waits_since_s: float | None, *, is_over: bool
) -> None:
    """No rank is named while all devices are in a kernel for nearly as long, or while the others
    have hardly begun to wait for the one that is still in it."""
    for rank in range(4):
        box = JobBox(tmp_path, rank, GROUPS)
        before = box.call("world", 100, reached_s=reached_s[rank])
        if waits_since_s is None or rank == 0:
            first = box.call("world", 100.1, reached=False)
            box.stall(before, reached_s[rank], first_unreached=first, looked_s=106.2)
        else:
            box.stall(box.call("world", 100.1, reached_s=waits_since_s), 105, looked_s=106.2)
    statuses = dict.fromkeys(range(4), ProcessStatus(alive=not is_over))
    verdict = diagnose(read_run(tmp_path), statuses=statuses, now_ns=int(1106.2 * S), stall_s=5)
    assert (verdict.kind, verdict.culprits) == ("dead" if is_over else "healthy", ()), verdict


@pytest.mark.parametrize(("lasted_s", "kind"), [(9, "healthy"), (25, "together")])
def test_a_kernel_that_was_as_long_before(tmp_path: Path, lasted_s: float, kind: str) -> None:
    """A device may take twice as long as it took before to reach the calls of a call site."""
    looked_s = 140 + lasted_s
    for rank in range(2):
        box = JobBox(tmp_path, rank, {"world": [0, 1]})
        records = [box.call("world", 100 + number) for number in range(3)]
        records.append(box.call("world", 103, reached_s=115))  # a kernel of 12 s before it
        records += [box.call("world", 103, reached_s=115 + number) for number in range(26)]
        first = box.call("world", 104, reached=False)
        box.stall(records[-1], 140, first_unreached=first, looked_s=looked_s)
    alive = dict.fromkeys(range(2), ProcessStatus(alive=True))
    now_ns = int((1000 + looked_s) * S)
    verdict = diagnose(read_run(tmp_path), statuses=alive, now_ns=now_ns, stall_s=5)
    assert (verdict.kind, verdict.culprits) == (kind, ()), verdict
    assert verdict.certainty == "inferred"


def test_devices_that_are_blocked_by_a_mismatch(tmp_path: Path) -> None:
    """If devices do not progress after a mismatch, the verdict says so, although the CPUs go on."""
    for rank in range(4):
        box = JobBox(tmp_path, rank, GROUPS)
        box.call("world", 100)
        last = box.call("world", 101, op="broadcast" if rank == 2 else "all_reduce")
        first = box.call("world", 101.1, reached=False)
        box.stall(last, 101, first_unreached=first, cpu_s=129)
    verdict = diagnose_folder(tmp_path, stall_s=5)
    assert (verdict.kind, verdict.culprits) == ("mismatch", (2,)), verdict
    assert any(line.startswith("Now all 4 ranks are blocked") for line in verdict.explanation)
    assert verdict.stalled_s is not None
    assert verdict.stalled_s > 25


def test_a_long_wait_before(tmp_path: Path) -> None:
    """A device that once waited for long in a call before did not need as long to reach the next
    one: it gets no more time for it."""
    for rank in range(2):
        box = JobBox(tmp_path, rank, {"world": [0, 1]})
        last = box.call("world", 100, reached_s=100.1 if rank else 112)
        for number in range(3):
            last = box.call("world", 100, reached_s=112.1 + number)
        first = box.call("world", 116, reached=rank == 0)
        box.stall(*(last, 114.1) if rank else (first, 116), first_unreached=first, looked_s=123)
    alive = dict.fromkeys(range(2), ProcessStatus(alive=True))
    verdict = diagnose(read_run(tmp_path), statuses=alive, now_ns=1123 * S, stall_s=5)
    assert (verdict.kind, verdict.culprits) == ("missing", (1,)), verdict


def test_a_rank_beside_a_slow_device(tmp_path: Path) -> None:
    """The device of rank 2 is late for its pair in each round. So that of rank 3 is late for another
    group, and is not named."""
    groups = {"pair0": [0, 1], "pair1": [2, 3], "across0": [0, 2], "across1": [1, 3]}
    for rank in range(4):
        box = JobBox(tmp_path, rank, {"world": [0, 1, 2, 3]} | groups)
        for turn in range(30):
            issued_s = 100 + 0.3 * turn
            late, met = (0.2 if rank == 2 else 0), (0.201 if rank > 1 else 0.001)
            box.call(f"pair{rank // 2}", issued_s, reached_s=issued_s + late)
            last = box.call(f"across{rank % 2}", issued_s, reached_s=issued_s + met)
        box.stall(last, 109, looked_s=109.1)
    late_ranks = straggler(calls_of_run(read_run(tmp_path)))
    assert late_ranks is not None
    assert (late_ranks.ranks, late_ranks.on_device) == ((2,), True)


@pytest.mark.parametrize(
    ("pauses_at", "pause_s", "ranks"), [([5], 3.0, None), ([5, 15, 25, 35, 45], 0.5, (2,))]
)
def test_a_cpu_that_pauses(
    tmp_path: Path, pauses_at: list[int], pause_s: float, ranks: tuple[int, ...] | None
) -> None:
    """After a pause, all devices wait for this CPU at each collective, because the other CPUs are
    ahead. Only a CPU that pauses again and again is a straggler."""
    issued_s = 100.0
    slow = []  # when the CPU of rank 2 issues each call
    for number in range(56):
        issued_s += 0.1 + (pause_s if number in pauses_at else 0)
        slow.append(issued_s)
    for rank in range(4):
        box, done_s = JobBox(tmp_path, rank, {"world": [0, 1, 2, 3]}), 0.0
        for number, slow_s in enumerate(slow):
            issued_s = slow_s if rank == 2 else 100.1 + 0.1 * number
            last = box.call("world", issued_s, reached_s=max(issued_s, done_s) + 0.001)
            done_s = slow_s + 0.002
        box.stall(last, done_s, looked_s=done_s)
    late = straggler(calls_of_run(read_run(tmp_path)))
    assert (None if late is None else (late.ranks, late.on_device)) == (
        None if ranks is None else (ranks, False)
    )
