"""Several hosts: two torchrun agents and one verdict; with separate folders, with a shared folder,
and in separate networks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from synthetic_boxes import make
from synthetic_job import Job
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.run import read_run
from torchwhere.cli import main
from torchwhere.core.atomic_file import replace_file
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.monitor.broadcast import LeadState, run_key
from torchwhere.monitor.discovery import Rendezvous
from torchwhere.monitor.follower import Follower
from torchwhere.monitor.lead import Lead
from torchwhere.monitor.roles import role_from_launcher
from torchwhere.monitor.single import STATE_FILE, SingleHost
from torchwhere.monitor.transport import FollowerClient, LeadServer
from torchwhere.pipeline.verdict import diagnose_folder, diagnose_run
from torchwhere.processes.status import ProcessStatus

SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist

victim, is_killed = int(sys.argv[1]), sys.argv[2] == "killed"
dist.init_process_group("gloo")
for step in range(6):
    if dist.get_rank() == victim and step == 3:
        while not (is_killed and os.path.exists("go")):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))
"""

# In the first attempt rank 1 fails at once, and rank 0 does not notice; in the second, rank 1
# blocks until a file appears.
LIVES = """
import os, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
is_again = os.path.exists("again")
dist.barrier()
for step in range(6):
    if dist.get_rank() == 1 and step == 3:
        open("again", "w").close()
        if not is_again:
            raise ValueError("so early")
        while not os.path.exists("over"):
            time.sleep(0.1)
    try:
        dist.all_reduce(torch.ones(4))
    except RuntimeError:
        time.sleep(600)
"""

# As srun starts it: the variables give the ranks, the script gives the address.
TASKS = """
import os, sys, time
import torch, torch.distributed as dist

rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=sys.argv[1])
dist.init_process_group("gloo", rank=rank, world_size=world)
for step in range(6):
    if rank == 3 and step == 3:
        time.sleep(600)
    dist.all_reduce(torch.ones(4))
"""


@dataclass
class Scene:
    """The result of a job with two agents."""

    folder: Path
    stderrs: list[str]

    @property
    def reporting_agents(self) -> list[int]:
        """The agents whose stderr contains a verdict."""
        return [agent for agent, text in enumerate(self.stderrs) if "--- torchwhere ---" in text]

    @property
    def lead(self) -> Path:
        """The folder of the agent that got rank 0."""
        (box,) = self.folder.rglob("rank0.box")
        return box.parent

    def verdict(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.lead / "verdict.json").read_text())
        return found


@dataclass
class Setup:
    """How two agents run: the prefix of their commands, how they find each other, and where they
    record."""

    name: str
    ranks: int  # of each agent
    arguments: tuple[str, ...]
    options: tuple[str, ...]
    outs: tuple[str, str] = ("a", "b")
    script: str = SCRIPT
    restarts: int = 0
    before: tuple[tuple[str, ...], ...] = ((), ())
    addresses: tuple[str, str] = ("localhost", "localhost")

    def start(self, folder: Path) -> list[subprocess.Popen[str]]:
        folder.mkdir()
        (folder / "train.py").write_text(self.script)
        endpoint = f"{self.addresses[0]}:{free_port()}"
        return [self._agent(folder, number, endpoint) for number in (0, 1)]

    def _agent(self, folder: Path, number: int, endpoint: str) -> subprocess.Popen[str]:
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--nproc-per-node",
            str(self.ranks),
        ]
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", self.name]
        where = (
            ["--local-addr", self.addresses[number]]
            if self.addresses[number] != "localhost"
            else []
        )
        watched = [
            "-m",
            "torchwhere",
            "run",
            "--out",
            self.outs[number],
            *self.options,
            "train.py",
            *self.arguments,
        ]
        restarts = ["--max-restarts", str(self.restarts)]
        # With one store for all attempts, torchrun cannot restart a job over gloo: ranks find the
        # addresses of the attempt before.
        stores = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.restarts else {}
        interface = {"GLOO_SOCKET_IFNAME": f"twv{number}"} if self.before[number] else {}
        return started(
            [*self.before[number], *torchrun, *rendezvous, *restarts, *where, *watched],
            folder,
            stores | interface,
        )


def started(command: list[str], folder: Path, variables: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def start_tasks(folder: Path) -> list[subprocess.Popen[str]]:
    """Four processes, two for each of two hosts, as srun would start them."""
    folder.mkdir()
    (folder / "train.py").write_text(TASKS)
    port, found = str(free_port()), []
    for rank in range(4):
        node, local = divmod(rank, 2)
        slurm = {
            "SLURM_JOB_ID": "77",
            "SLURM_STEP_ID": "0",
            "SLURM_NTASKS": "4",
            "SLURM_NNODES": "2",
        }
        slurm |= {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
        command = [
            sys.executable,
            "-m",
            "torchwhere",
            "run",
            "--out",
            "ab"[node],
            *ENDED,
            "train.py",
            port,
        ]
        found.append(started(command, folder, slurm))
    return found


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


# -- networks of their own -------------------------------------------------------------------------

SPACES = ("twhost0", "twhost1")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@contextlib.contextmanager
def two_networks() -> Iterator[str | None]:
    """Two network namespaces joined by a virtual cable, with their own names; or the reason why
    they cannot be created."""
    if os.geteuid() != 0:
        yield "not root"
        return
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        yield "no ip or no unshare command"
        return
    try:
        for space in SPACES:
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip(
            "link",
            "add",
            "twv0",
            "netns",
            SPACES[0],
            "type",
            "veth",
            "peer",
            "name",
            "twv1",
            "netns",
            SPACES[1],
        )
        for number, space in enumerate(SPACES):
            ip("-n", space, "address", "add", f"10.213.7.{number + 1}/24", "dev", f"twv{number}")
            ip("-n", space, "link", "set", f"twv{number}", "up")
        yield None
    except subprocess.CalledProcessError as error:
        yield f"no network namespaces: {error.stderr.decode().strip()}"
    finally:
        for space in SPACES:
            subprocess.run(
                ["ip", "netns", "delete", space], capture_output=True, timeout=20, check=False
            )


def inside(number: int) -> tuple[str, ...]:
    """The prefix of a command that runs it in one of these networks, on a host name that both
    know."""
    names = (
        r'printf "127.0.0.1 localhost\n10.213.7.1 node0\n10.213.7.2 node1\n" > hosts && mount'
        r" --bind hosts /etc/hosts"
    )
    script = f'{names} && hostname node{number} && exec "$@"'
    return (
        "ip",
        "netns",
        "exec",
        SPACES[number],
        "unshare",
        "--uts",
        "--mount",
        "sh",
        "-c",
        script,
        "sh",
    )


# -- real jobs -------------------------------------------------------------------------------------

ENDED = ("--stall", "3", "--end-with", "SIGKILL")
JOBS = [
    Setup("apart", 2, ("3", "stuck"), ENDED),
    Setup("killed", 1, ("1", "killed"), ("--stall", "60")),
    Setup("lives", 1, (), ("--stall", "3"), script=LIVES, restarts=2),
]
SHARED = Setup("shared", 1, ("1", "stuck"), ENDED, outs=("run", "run"))
NETWORKS = Setup(
    "networks",
    1,
    ("1", "stuck"),
    ENDED,
    before=(inside(0), inside(1)),
    addresses=("10.213.7.1", "10.213.7.2"),
)


@pytest.fixture(scope="module")
def scenes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Scene | str]]:
    """The jobs of all selected tests, at once: they mostly import torch and wait."""
    root = tmp_path_factory.mktemp("hosts")
    wanted = {scene_name(item) for item in request.session.items}
    with two_networks() if wanted & {"shared", "networks"} else contextlib.nullcontext() as problem:
        shared = replace(NETWORKS, name="shared", outs=SHARED.outs) if problem is None else SHARED
        setups = [*JOBS, shared, *([NETWORKS] if problem is None else [])]
        agents = {
            setup.name: setup.start(root / setup.name) for setup in setups if setup.name in wanted
        }
        if "tasks" in wanted:
            agents["tasks"] = start_tasks(root / "tasks")
        try:
            if "killed" in wanted:
                wait_until_connected(root / "killed")
                (root / "killed" / "go").touch()
            if "lives" in wanted:
                wait_for_verdict(root / "lives", "missing")
                (root / "lives" / "over").touch()
            results: dict[str, Scene | str] = {"networks": problem or ""}
            for name, started in agents.items():
                results[name] = Scene(
                    root / name, [agent.communicate(timeout=400)[1] for agent in started]
                )
            yield results
        finally:
            for agent in (agent for started in agents.values() for agent in started):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(agent.pid, 9)


def wait_until_connected(folder: Path) -> None:
    """Wait until a monitor records that it receives data from another host's monitor."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        kept = [json.loads(path.read_text()) for path in folder.glob("*/monitor-*.json")]
        if any(each["role"] == "lead" and each["connected_to"] for each in kept):
            return
        time.sleep(0.1)


def wait_for_verdict(folder: Path, kind: str) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if any(
            json.loads(path.read_text())["kind"] == kind for path in folder.glob("*/verdict.json")
        ):
            return
        time.sleep(0.1)


def scene_name(item: pytest.Item) -> str | None:
    """The job that a test is about."""
    marker = item.get_closest_marker("scene")
    return None if marker is None else str(marker.args[0])


@pytest.fixture
def scene(request: pytest.FixtureRequest, scenes: dict[str, Scene | str]) -> Scene:
    name = scene_name(request.node)
    assert name is not None
    result = scenes[name]
    if isinstance(result, str):
        pytest.skip(result)
    return result


def index_of_lead(scene: Scene, outs: tuple[str, str]) -> int:
    return outs.index(scene.lead.name)


@pytest.mark.scene("apart")
def test_separate_folders(scene: Scene) -> None:
    """If a rank of the other host hangs, only the monitor of host 0 reports it, for all four ranks,
    with line and stack."""
    verdict = scene.verdict()
    culprit = verdict["culprits"][0]
    assert (
        verdict["kind"],
        verdict["culprits"],
        verdict["certainty"],
        verdict["missing_data"],
    ) == (
        "missing",
        [3],
        "exact",
        [],
    )
    assert {rank: report["state"] for rank, report in verdict["ranks"].items()} == {
        "0": "waiting",
        "1": "waiting",
        "2": "waiting",
        "3": "running",
    }
    assert verdict["ranks"][str(culprit)]["line"] == "train.py:10"
    assert any(line.endswith("train.py:10 in <module>") for line in verdict["ranks"]["3"]["stack"])
    assert scene.reporting_agents == [index_of_lead(scene, ("a", "b"))]
    other = scene.folder / ({"a", "b"} - {scene.lead.name}).pop()
    assert not (other / "verdict.json").exists()
    assert sorted(path.name for path in other.glob("*.box")) == ["rank2.box", "rank3.box"]


@pytest.mark.scene("apart")
def test_all_hosts_are_ended(scene: Scene) -> None:
    """When the monitors are asked to end the job, each ends the ranks of its own host."""
    lead = index_of_lead(scene, ("a", "b"))
    for rank in range(4):
        host = lead if rank < 2 else 1 - lead
        assert f"torchwhere: ending rank {rank} " not in scene.stderrs[1 - host]
        assert was_ended(rank, scene.stderrs[host], is_lead=host == lead)


def was_ended(rank: int, stderr: str, *, is_lead: bool) -> bool:
    """Whether its monitor ended a rank; or the agent of its host did, if host 0 was faster and its
    agent exited."""
    return stderr.count(f"torchwhere: ending rank {rank} ") == 1 or (
        not is_lead and "RendezvousConnectionError" in stderr
    )


@pytest.mark.exhaustive
@pytest.mark.scene("killed")
def test_killed_elsewhere(scene: Scene) -> None:
    """If a rank of the other host is killed, host 0 reports it at once, although it never saw that
    process."""
    verdict = scene.verdict()
    assert (verdict["kind"], verdict["culprits"], sorted(verdict["ranks"])) == (
        "dead",
        [1],
        ["0", "1"],
    )
    assert verdict["ranks"]["1"]["state"] == "dead"
    # from its exit code, if the kernel shows it
    known = ("killed by SIGKILL", "left no exit record")
    assert verdict["ranks"]["1"]["detail"].startswith(known)
    assert scene.reporting_agents == [index_of_lead(scene, ("a", "b"))]


@pytest.mark.exhaustive
@pytest.mark.scene("shared")
def test_shared_folder(scene: Scene) -> None:
    """With one folder for all, one monitor reports; if hosts have different names, with the stack
    from the other host."""
    verdict = scene.verdict()
    assert (verdict["kind"], verdict["culprits"], sorted(verdict["ranks"])) == (
        "missing",
        [1],
        ["0", "1"],
    )
    assert verdict["ranks"]["1"]["line"] == "train.py:10"
    assert any(line.endswith("train.py:10 in <module>") for line in verdict["ranks"]["1"]["stack"])
    assert "".join(scene.stderrs).count("--- torchwhere ---") == 1
    assert all(was_ended(rank, "".join(scene.stderrs), is_lead=rank == 0) for rank in (0, 1))


@pytest.mark.exhaustive
@pytest.mark.scene("networks")
def test_separate_networks(scene: Scene) -> None:
    """Two hosts with different names that share only a cable give the same verdict, with the stack
    from the other host."""
    verdict = scene.verdict()
    assert (verdict["kind"], verdict["culprits"], verdict["missing_data"]) == ("missing", [1], [])
    assert verdict["ranks"]["1"]["line"] == "train.py:10"
    assert any(line.endswith("train.py:10 in <module>") for line in verdict["ranks"]["1"]["stack"])
    assert len(scene.reporting_agents) == 1
    assert {path.name for path in scene.folder.rglob("monitor-*.json")} == {
        "monitor-node0.json",
        "monitor-node1.json",
    }
    elsewhere = {"a": "node1", "b": "node0"}[scene.lead.name]
    assert verdict["facts"]["hosts"] == {"1": elsewhere}
    assert f"  rank 1 is on host {elsewhere}" in verdict["text"].splitlines()


@pytest.mark.exhaustive
@pytest.mark.scene("lives")
def test_restarted_job(scene: Scene) -> None:
    """When a job fails in its first second and restarts, host 0 names the failed rank of host 1,
    and in the next attempt the rank that hangs. Monitors find each other again, although the hosts
    count attempts differently; boxes of both attempts are kept."""
    lead = index_of_lead(scene, ("a", "b"))
    assert scene.reporting_agents == [lead]
    first, second = scene.stderrs[lead].split("--- torchwhere ---")[1:]
    assert "Rank 1 exited: exception: ValueError: so early." in first
    assert "Rank 1 never issued all_reduce of float32 [4]" in second
    verdict = scene.verdict()
    assert (verdict["kind"], verdict["culprits"], verdict["missing_data"]) == ("missing", [1], [])
    assert sorted(verdict["ranks"]) == ["0", "1"]
    for folder, rank in ((scene.lead, 0), (scene.folder / "ab"[1 - lead], 1)):
        run = read_run(folder)
        assert (list(run.boxes), len(run.earlier)) == ([rank], 1)
        before, after = read_box(run.earlier[0]), run.boxes[rank]
        assert before.meta["store"] != after.meta["store"]
        assert after.run[1] - before.run[1] in (0, 1)


@pytest.mark.exhaustive
@pytest.mark.scene("tasks")
def test_tasks_of_slurm(scene: Scene) -> None:
    """Four processes with srun's variables and without torchrun have the right ranks and world
    size, each host has one monitor, and one monitor reports."""
    verdict = scene.verdict()
    assert (verdict["kind"], verdict["culprits"], verdict["missing_data"]) == ("missing", [3], [])
    assert sorted(verdict["ranks"]) == ["0", "1", "2", "3"]
    assert scene.reporting_agents == [0]
    boxes = {name: read_run(scene.folder / name).boxes for name in "ab"}
    assert {name: sorted(ranks) for name, ranks in boxes.items()} == {"a": [0, 1], "b": [2, 3]}
    assert {
        (box.run, box.meta["world_size"]) for ranks in boxes.values() for box in ranks.values()
    } == {(("77", 0), 4)}
    kept = {
        name: json.loads(next((scene.folder / name).glob("monitor-*.json")).read_text())
        for name in "ab"
    }
    assert {name: (each["role"], sorted(each["ranks"])) for name, each in kept.items()} == {
        "a": ("lead", ["0", "1"]),
        "b": ("follower", ["2", "3"]),
    }


@pytest.mark.scene("apart")
def test_copied_together(scene: Scene, tmp_path: Path) -> None:
    """The folders of all hosts, copied into one, are one run: the doctor gives the same verdict."""
    for path in scene.folder.glob("[ab]/*"):
        shutil.copy(
            path,
            (
                tmp_path / path.name
                if path.suffix == ".box"
                else tmp_path / f"{path.stem}-{path.parent.name}.json"
            ),
        )
    verdict = diagnose_folder(tmp_path, stall_s=3.0)
    assert (verdict.kind, verdict.culprits, sorted(verdict.ranks)) == (
        "missing",
        (3,),
        [0, 1, 2, 3],
    )


# -- lead and follower, in this process ------------------------------------------------------------


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen ranks in a deadlock, in three folders: `whole`, and `a` and `b` with half of the
    ranks each."""
    root = tmp_path_factory.mktemp("job")
    (root / "whole").mkdir()
    make(Job(16, steps=4, records=180, fault="deadlock", victim=12), root / "whole")
    for name, ranks in (("a", range(8)), ("b", range(8, 16))):
        (root / name).mkdir()
        for rank in ranks:
            shutil.copy(root / "whole" / f"rank{rank}.box", root / name)
    return root


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Pair:
    """A lead and a follower of one job, with a real store between them."""

    def __init__(self, job: Path, *, stall_s: float = 30.0) -> None:
        port = free_port()
        self.one, self.other = read_run(job / "a"), read_run(job / "b")
        now_ns = max(box.last_ns for box in self.other.boxes.values()) + 60_000_000_000
        self.seen = {
            rank: ProcessStatus(
                alive=True, state="S", stack=(f"train.py:{rank} in main",), alive_ns=now_ns
            )
            for rank in range(8, 16)
        }
        self.lead = Lead(job / "a", stall_s=stall_s, rendezvous=None, port=port)
        self.follower = Follower(job / "b", rendezvous=None, address=("127.0.0.1", port))

    def go_on(self) -> None:
        if self.follower.update(self.other):
            self.follower.send_report(self.other.boxes, self.seen)
        self.lead.update(self.one)

    def judged(self) -> Verdict:
        inputs = self.lead.inputs(self.one)
        return diagnose_run(inputs.run, inputs.saved, stall_s=30.0, job_calls=inputs.job_calls)

    def close(self) -> None:
        assert self.follower.close()
        assert self.lead.close()


@pytest.fixture
def pair(job: Path) -> Iterator[Pair]:
    found = Pair(job)
    yield found
    found.close()


def met(pair: Pair) -> bool:
    pair.go_on()
    return pair.lead.gives_verdicts


def test_snapshot_of_processes_without_ranks(pair: Pair) -> None:
    """Processes of another host that do not know their ranks yet do not count as the ranks that
    they assume, and the lead says why their ranks have no data."""
    for box in pair.other.boxes.values():
        box.meta["rank_is_assumed"] = True
    until(lambda: pair.go_on() is None and bool(pair.lead._snapshots()))
    inputs = pair.lead.inputs(pair.one)
    assert list(inputs.run.boxes) == list(range(8))
    (note,) = inputs.run.notes
    assert note == (
        f"the processes of host {socket.gethostname()} have not called init_process_group, so their"
        " ranks are unknown"
    )


def test_snapshots_give_the_same_verdict(pair: Pair, job: Path) -> None:
    """Half of the boxes and a snapshot give the verdict of all boxes; statuses and stacks are in
    the snapshot."""
    assert not pair.lead.gives_verdicts
    until(lambda: met(pair))
    inputs = pair.lead.inputs(pair.one)
    assert inputs.saved[9]["stack"] == ("train.py:9 in main",)
    assert inputs.run.caveats() == []
    told, whole = pair.judged(), diagnose_folder(job / "whole")
    assert (told.kind, told.culprits, told.collective) == (
        whole.kind,
        whole.culprits,
        whole.collective,
    )
    assert list(told.ranks) == list(whole.ranks) == list(range(16))
    assert [report.last for report in told.ranks.values()] == [
        report.last for report in whole.ranks.values()
    ]
    assert told.ranks[9].stack == ("train.py:9 in main",)
    assert pair.lead.describe() == {"role": "lead", "connected_to": [socket.gethostname()]}
    assert pair.follower.describe() == {"role": "follower", "connected_to": ["host 0"]}


def test_the_state_reaches_the_follower(pair: Pair) -> None:
    """The follower receives printed verdicts and the wish to end ranks. It gives no verdicts until
    the lead exits."""
    until(lambda: met(pair))
    assert not pair.follower.gives_verdicts
    assert (pair.follower.ends_ranks, pair.follower.has_printed("missing (3,) 7")) == (False, False)
    pair.lead.on_verdict("missing (3,) 7", ends_ranks=True)
    until(lambda: (pair.go_on(), pair.follower.has_printed("missing (3,) 7"))[1])
    assert pair.follower.ends_ranks
    assert not pair.lead.may_exit(has_succeeded=True)  # ranks of the other host are alive
    pair.follower.send_report(pair.other.boxes, pair.seen, is_last=True)
    until(lambda: pair.lead.may_exit(has_succeeded=True))
    pair.lead.close()
    until(lambda: (pair.follower.update(pair.other), pair.follower.gives_verdicts)[1])


def test_no_answer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lead waits only once for a host that does not answer; its last snapshot no longer
    counts, and the verdict says so."""
    monkeypatch.setattr("torchwhere.monitor.lead.ANSWER_S", 0.3)
    monkeypatch.setattr("torchwhere.monitor.lead.FRESH_S", 0.0)
    until(lambda: met(pair))
    pair.lead._stall_s = 0.4
    start = time.monotonic()
    pair.lead.request_snapshots()
    assert time.monotonic() - start >= 0.3
    time.sleep(0.3)
    first, second = pair.lead.inputs(pair.one).run.caveats()
    assert first == "8 of 16 ranks are watched: no box or snapshot of ranks 8-15"
    host = socket.gethostname()
    assert second.startswith(f"no data from host {host} (ranks 8-15) for ")
    assert second.endswith(" s: the host, its monitor or the network is down")


def test_another_run(pair: Pair) -> None:
    """A snapshot of another run or restart is not used."""
    until(lambda: met(pair))
    for box in pair.one.boxes.values():
        box.meta["store"] = "node0:4002"
    caveats = pair.lead.inputs(pair.one).run.caveats()
    host = socket.gethostname()
    assert (
        caveats[-1] == f"the snapshot of host {host} (ranks 8-15) belongs to another run or restart"
    )


def test_an_invalid_snapshot(pair: Pair) -> None:
    """Invalid data is refused, and the verdict says so."""
    until(lambda: met(pair))
    assert pair.follower._client is not None
    pair.follower._client.send(b"not a snapshot at all")
    until(lambda: (pair.lead.update(pair.one), len(pair.lead.inputs(pair.one).run.boxes) == 8)[1])
    said = pair.lead.inputs(pair.one).run.caveats()
    assert said[-1] == "a snapshot of another host was refused: not a snapshot"


def test_the_server_is_found_in_the_job_s_store(job: Path) -> None:
    """The server puts its address into the job's own store, under one key, and touches nothing else
    there."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    before = store.num_keys()
    rendezvous = Rendezvous("127.0.0.1", store.port, "torchwhere/monitor/job/0")
    server, client = LeadServer("token", rendezvous), FollowerClient(rendezvous)
    server.publish(LeadState(token="token"))
    server.open()
    client.open()
    until(lambda: client.ahead_ns is not None)
    assert client.state is not None
    assert client.state.token == "token"
    assert client.ahead_ns is not None
    assert 0 < client.ahead_ns < 1e9  # one clock: only the delay of the network is left
    assert store.num_keys() == before + 1
    assert json.loads(store.get("torchwhere/monitor/job/0"))["port"] == server.port
    client.send(b"snapshot")
    until(lambda: bool(server.snapshots))
    assert server.snapshots[1].data == b"snapshot"
    assert client.close()
    assert server.close()


def test_late_hosts_are_not_blamed(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lead gives no verdict before it has data of all ranks; after a while it does without them,
    and lists the missing ranks."""
    run = read_run(job / "a")
    lead = Lead(job / "a", stall_s=30.0, rendezvous=None)
    assert (lead.update(run), lead.gives_verdicts) == (False, False)
    monkeypatch.setattr("torchwhere.monitor.lead.SETTLE_S", 0.0)
    assert (lead.update(run), lead.gives_verdicts) == (True, True)
    assert lead.inputs(run).run.caveats() == ["8 of 16 ranks are watched: no box of ranks 8-15"]


def test_a_lead_that_is_gone(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower without a lead gives verdicts after a while, and says that it is alone."""
    run = read_run(job / "b")
    follower = Follower(job / "b", rendezvous=None)
    assert (follower.update(run), follower.gives_verdicts) == (False, False)
    monkeypatch.setattr("torchwhere.monitor.follower.SILENCE_S", 0.0)
    assert follower.gives_verdicts
    assert (
        follower.inputs(run).run.caveats()[-1]
        == "no data from the lead monitor; this verdict uses only the ranks of this host"
    )


SERVER = """
import sys, time
from torchwhere.monitor.broadcast import LeadState, run_key
from torchwhere.monitor.transport import LeadServer

server = LeadServer(sys.argv[1], port=int(sys.argv[2]))
server.publish(LeadState(token=sys.argv[1], run=run_key(), requests=1))
server.open()
time.sleep(600)
"""


def test_a_lead_that_is_killed(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the lead was killed, the follower gives verdicts; when another lead starts, it joins
    that one and reports everything."""
    monkeypatch.setattr("torchwhere.monitor.follower.SILENCE_S", 2.0)
    port, run = free_port(), read_run(job / "b")
    first = subprocess.Popen([sys.executable, "-c", SERVER, "first", str(port)])
    follower = Follower(job / "b", rendezvous=None, address=("127.0.0.1", port))
    try:
        until(lambda: follower.update(run))
        assert not follower.gives_verdicts
    finally:
        first.kill()
        first.wait()
    until(lambda: follower.gives_verdicts)
    assert follower.inputs(run).run.caveats()[-1].startswith("no data from the lead monitor")
    lead, here = Lead(job / "a", stall_s=30.0, rendezvous=None, port=port), read_run(job / "a")

    def is_joined() -> bool:
        if follower.update(run):
            follower.send_report(run.boxes, {})
        lead.update(here)
        return lead.gives_verdicts

    until(is_joined)
    assert not follower.gives_verdicts
    assert lead.inputs(here).run.caveats() == []
    assert follower.close()
    assert lead.close()


def test_a_port_that_refuses(job: Path) -> None:
    """The follower goes on without a lead; it exits at once after a success, soon after a
    failure."""
    run = read_run(job / "b")
    follower = Follower(job / "b", rendezvous=None, address=("127.0.0.1", free_port()))
    until(lambda: follower._client is not None and follower._client._threads[0].problem is not None)
    assert not follower.update(run)
    follower.send_report(run.boxes, {})
    assert follower.may_blame([3])
    assert follower.may_exit(has_succeeded=True)
    assert not follower.may_exit(has_succeeded=False)
    # it is over, and rank 3 is elsewhere
    assert (follower.may_blame([9]), follower.may_blame([3, 9])) == (True, False)
    assert follower.close()


def test_the_server_is_found_by_its_likely_ports() -> None:
    """When the job's own store is gone with the job, both sides compute the same port; the server
    of another job is skipped."""
    gone = free_port()
    rendezvous = Rendezvous("127.0.0.1", gone, "torchwhere/monitor/none")
    other, server, client = (
        LeadServer("other", rendezvous),
        LeadServer("token", rendezvous),
        FollowerClient(rendezvous),
    )
    other.publish(LeadState(token="other", run="another"))
    other.open()
    until(lambda: other.ready_at is not None)
    server.publish(LeadState(token="token", run=run_key()))
    server.open()
    client.open()
    until(lambda: client.ahead_ns is not None)
    assert [other.port, server.port] == rendezvous.likely_ports[:2]
    assert client.state is not None
    assert client.state.token == "token"
    for connection in (client, server, other):
        assert connection.close()


@pytest.mark.parametrize(
    ("age_s", "gone_s", "is_accepted"),
    [(100, 0, True), (100, 3, True), (100, 60, False), (2, 0, True)],
    ids=["there", "just gone", "gone before", "new"],
)
def test_a_lead_of_another_attempt(job: Path, age_s: int, gone_s: int, is_accepted: bool) -> None:
    """A lead whose ranks ended before ours started is of an earlier attempt; one that started after
    ours ended is of a later one."""
    follower = Follower(job / "b", rendezvous=None)
    follower._lifetime._started_at -= 30
    state = LeadState(token="x", age_ns=age_s * 10**9, ended_ns=gone_s * 10**9)
    assert follower._is_same_attempt(state) == is_accepted
    follower._lifetime._ended_at = time.monotonic() - 10
    assert follower._is_same_attempt(state) == (is_accepted and age_s > 10)


# -- one folder ------------------------------------------------------------------------------------


def test_the_state_in_a_shared_folder(tmp_path: Path, job: Path) -> None:
    """In a shared folder the state is a file: that of an earlier run is ignored, one that changes
    is used."""
    folder, run = tmp_path, read_run(job / "whole")
    replace_file(
        folder / STATE_FILE,
        LeadState(
            token="old", run=run_key(), number=9, t_ns=time.time_ns(), ends_ranks=True
        ).to_json(),
    )
    follower = Follower(folder, rendezvous=None)
    assert not follower.update(run)
    assert not follower.ends_ranks
    lead = Lead(folder, stall_s=30.0, rendezvous=None)
    assert lead.update(run)  # all ranks are in the folder: it may speak at once
    assert follower.update(run)
    follower.send_report(run.boxes, {})
    assert not follower.update(run)
    assert follower.describe() == {"role": "follower", "connected_to": ["host 0"]}
    lead.on_verdict("dead (3,) None", ends_ranks=True)
    follower.update(run)
    assert (
        follower.ends_ranks,
        follower.has_printed("dead (3,) None"),
        follower.gives_verdicts,
    ) == (
        True,
        True,
        False,
    )
    lead.close()
    follower.update(run)
    assert follower.gives_verdicts


def test_a_folder_that_is_found_to_be_shared_late(tmp_path: Path, job: Path) -> None:
    """A follower that already looks for the lead elsewhere uses the state that appears in the
    folder."""
    run = read_run(job / "whole")
    follower = Follower(tmp_path, rendezvous=None, address=("127.0.0.1", free_port()))
    assert not follower.update(run)
    lead = Lead(tmp_path, stall_s=30.0, rendezvous=None)
    lead.update(run)
    follower.update(run)
    lead.on_verdict("dead (3,) None", ends_ranks=False)
    assert follower.update(run)
    follower.send_report(run.boxes, {})
    assert not follower.update(run)
    assert follower.describe() == {"role": "follower", "connected_to": ["host 0"]}
    assert follower.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"token": 5}',
        '{"wanted_stacks": ["x"]}',
        '{"wanted_stacks": 7}',
        '{"verdicts": [1]}',
        '{"ends_ranks": 1}',
        '{"number": true}',
    ],
)
def test_invalid_states(text: str) -> None:
    """Data of another form is not a state; a state of a newer version, with more fields, is."""
    assert LeadState.from_json(text) is None
    assert LeadState.from_json('{"token": "x", "wanted_stacks": [3], "new": {}}') == LeadState(
        token="x", wanted_stacks=(3,)
    )


# -- who is who ------------------------------------------------------------------------------------

TWO = {"GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "SLURM_NNODES",
    "SLURM_NODEID",
)


@pytest.mark.parametrize(
    ("environment", "kind"),
    [
        ({}, SingleHost),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, SingleHost),
        (
            {
                "RANK": "0",
                "WORLD_SIZE": "4",
                "LOCAL_WORLD_SIZE": "4",
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
            },
            SingleHost,
        ),
        ({**TWO, "RANK": "0", "GROUP_RANK": "0"}, Lead),
        ({**TWO, "RANK": "2", "GROUP_RANK": "1"}, Follower),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, Lead),
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, Follower),
        ({"RANK": "8", "WORLD_SIZE": "16", "SLURM_NNODES": "2", "SLURM_NODEID": "1"}, Follower),
        ({"RANK": "0", "WORLD_SIZE": "4"}, SingleHost),
        ({"RANK": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, SingleHost),
    ],
)
def test_roles(
    environment: dict[str, str], kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher's environment makes a monitor the lead, a follower, or the only one."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert type(role_from_launcher(tmp_path, stall_s=30.0)) is kind


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--serve", "many"], "'many' is not a port (example: 29600)"),
        (["--serve", "70000"], "'70000' is not a port (example: 29600)"),
        (["--join", "29600"], "'29600' is not an address (example: node0:29600)"),
        (["--join", "node0:x"], "'x' is not a port (example: 29600)"),
        (["--join", "node0:29600", "--serve", "29600"], "not allowed with argument"),
    ],
)
def test_bad_options(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An invalid port or address is refused, with an example of a valid one."""
    with pytest.raises(SystemExit):
        main(["monitor", ".", *arguments])
    assert said in capsys.readouterr().err
