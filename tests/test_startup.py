"""`TORCHWHERE_OUT` and `torchwhere run` watch every process that becomes a rank: real launchers, real
groups."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

import torchwhere_startup
from job_scripts import LIGHTNING
from test_own_processes import ENVIRONMENT as OWN_ENVIRONMENT
from test_own_processes import free_port, names
from torchwhere.blackbox.run import read_run
from torchwhere.commands.launch import launcher_command, without_python
from torchwhere.commands.watch_options import options_of_environment
from torchwhere.pipeline.verdict import diagnose_folder
from torchwhere.processes import launcher
from warm_python import WarmPython

BIN = Path(sys.executable).parent
SOURCE = Path(torchwhere_startup.__file__).parent
HOOK = SOURCE / "torchwhere" / "startup" / "python_path"
TORCHRUN = (BIN / "torchrun", "--standalone", "--nproc-per-node", 2)
# a source tree, where no .pth file is installed
ENVIRONMENT = OWN_ENVIRONMENT | {
    "PYTHONPATH": f"{HOOK}{os.pathsep}{SOURCE}",
    "TORCHWHERE_OUT": "run",
    "TORCHWHERE_NATIVE": "0",
}

# Two ranks train. After that, rank 0 prints how many monitors watch the folder.
TRAIN = """
import os, pathlib, sys
import torch, torch.distributed as dist

def monitors():
    count = 0
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().decode().split("\\0")
            folders = [os.path.join(os.readlink(path / "cwd"), text) for text in command]
            count += "monitor" in command and os.environ["TORCHWHERE_OUT"] in folders
        except OSError:
            pass
    return count

def train(rank=-1, world=-1, address=None):
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print("monitors:", monitors(), flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""
MAIN = f"{TRAIN}\nif __name__ == '__main__':\n    train()\n"
ENV_RANKS = f"""{TRAIN}
rank, world = (int(os.environ[name]) for name in sys.argv[2:4])
train(rank, world, "tcp://localhost:" + sys.argv[1])
"""
SPAWN = f"""{TRAIN}
import torch.multiprocessing as mp

def work(rank, port):
    train(rank, 2, f"tcp://localhost:{{port}}")

if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), nprocs=2)
"""
PROCESSES = f"""{TRAIN}
import multiprocessing

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[2])
    workers = [
        context.Process(target=train, args=(rank, 2, "tcp://localhost:" + sys.argv[1]))
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print("codes:", *(worker.exitcode for worker in workers))
"""
FITTED = f"""{TRAIN}{LIGHTNING}
class Counting(Lit):
    def on_train_end(self):
        if dist.get_rank() == 0:
            print("monitors:", monitors(), flush=True)

if __name__ == "__main__":
    trainer(sys.argv[1]).fit(Counting(), loader(rows=12))
"""


def run(*command: object, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=ENVIRONMENT | variables,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def check_two_ranks(folder: Path, out: str) -> None:
    """Both ranks have a box, no other process has one, one monitor ran, and nothing is wrong."""
    assert names(folder) == ["rank0.box", "rank1.box"]
    assert "monitors: 1\n" in out
    verdict = diagnose_folder(folder)
    assert (verdict.kind, sorted(verdict.ranks), verdict.missing_data) == ("healthy", [0, 1], ())
    steps = [rank.place.step for rank in verdict.ranks.values()]
    assert min(step for step in steps if step is not None) >= 3


# -- launchers -------------------------------------------------------------------------------------


def test_torchrun(tmp_path: Path) -> None:
    """Under torchrun both ranks are watched, and the agent is not, although Slurm has given it a
    rank."""
    (tmp_path / "train.py").write_text(MAIN)
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    done = run(*TORCHRUN, "train.py", folder=tmp_path, **slurm)
    assert done.returncode == 0, done.stderr
    check_two_ranks(tmp_path / "run", done.stdout)


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("accelerate") is None, reason="Accelerate is not installed")
def test_accelerate(tmp_path: Path) -> None:
    """Under `accelerate launch` both ranks are watched, and the launcher is not."""
    (tmp_path / "train.py").write_text(MAIN)
    # it starts two processes, also without GPUs
    options = ("--multi_gpu", "--num_processes", 2, "--main_process_port", free_port())
    done = run(BIN / "accelerate", "launch", *options, "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    check_two_ranks(tmp_path / "run", done.stdout)


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed(tmp_path: Path) -> None:
    """Under the launcher of DeepSpeed both ranks are watched, and its two launchers are not."""
    (tmp_path / "train.py").write_text(MAIN)
    options = ("--num_accelerators", 2, "--master_port", free_port())
    done = run(BIN / "deepspeed", *options, "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    check_two_ranks(tmp_path / "run", done.stdout)


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_lightning(tmp_path: Path, strategy: str) -> None:
    """Both launchers of Lightning, which start processes themselves, give two watched ranks."""
    (tmp_path / "train.py").write_text(FITTED)
    done = run(sys.executable, "train.py", strategy, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    check_two_ranks(tmp_path / "run", done.stdout)


def test_mp_spawn(tmp_path: Path) -> None:
    """The workers of `mp.spawn` are watched, and their parent, which is not a rank, is not."""
    (tmp_path / "train.py").write_text(SPAWN)
    done = run(sys.executable, "train.py", free_port(), folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    check_two_ranks(tmp_path / "run", done.stdout)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.exhaustive)])
def test_multiprocessing(tmp_path: Path, method: str) -> None:
    """Processes of `multiprocessing` that make a process group are watched until they end."""
    (tmp_path / "train.py").write_text(PROCESSES)
    done = run(sys.executable, "train.py", free_port(), method, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "codes: 0 0\n" in done.stdout
    check_two_ranks(tmp_path / "run", done.stdout)


FAULTS = f"""{TRAIN}
import multiprocessing, time

def work(rank, port):
    dist.init_process_group(
        "gloo", init_method=f"tcp://localhost:{{port}}", rank=rank, world_size=2
    )
    dist.all_reduce(torch.ones(1))
    if rank == 1 and sys.argv[2] == "raise":
        raise ValueError("boom")
    if rank == 1:
        time.sleep(1000)
    dist.all_reduce(torch.ones(1))

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=work, args=(rank, sys.argv[1])) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print("codes:", *(worker.exitcode for worker in workers))
"""


def test_hang_of_forked_ranks(tmp_path: Path) -> None:
    """The monitor that a forked rank starts reports a hang, and ends both ranks as the options in
    the environment say."""
    (tmp_path / "train.py").write_text(FAULTS)
    options = {"TORCHWHERE_OPTIONS": "--stall 3 --end-with SIGKILL"}
    done = run(sys.executable, "train.py", free_port(), "hang", folder=tmp_path, **options)
    assert (done.returncode, done.stdout) == (0, "codes: -9 -9\n")
    saved = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert (saved["kind"], saved["culprits"], saved["certainty"]) == ("missing", [1], "exact")


def test_exception_in_a_forked_rank(tmp_path: Path) -> None:
    """The exception that ends a forked rank, which runs no exit handlers, is in the verdict."""
    (tmp_path / "train.py").write_text(FAULTS)
    done = run(sys.executable, "train.py", free_port(), "raise", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "codes: 1 1\n")
    verdict = diagnose_folder(tmp_path / "run")
    assert (verdict.kind, verdict.culprits) == ("dead", (1,))
    assert "exception: ValueError: boom" in str(verdict.ranks[1].detail)


VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpich": ("PMI_RANK", "PMI_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS"),
}


@pytest.mark.parametrize(
    "kind",
    [
        "torchrun",
        *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in list(VARIABLES)[1:]),
    ],
)
def test_rank_variables(tmp_path: Path, kind: str) -> None:
    """Plain processes with the rank variables of a launcher are watched, with one monitor."""
    (tmp_path / "train.py").write_text(ENV_RANKS)
    command = [sys.executable, "train.py", str(free_port()), *VARIABLES[kind]]
    rank, world = VARIABLES[kind]
    ranks = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=ENVIRONMENT | {rank: str(number), world: "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    outputs = [process.communicate(timeout=400) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    check_two_ranks(tmp_path / "run", "".join(out for out, _ in outputs))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("command", "variables"),
    [
        pytest.param(
            (
                "mpirun.openmpi",
                "--oversubscribe",
                "--allow-run-as-root",
                "-x",
                "TORCHWHERE_OUT=run",
            ),
            VARIABLES["openmpi"],
            id="openmpi",
        ),
        pytest.param(
            ("mpiexec.hydra", "-genv", "TORCHWHERE_OUT", "run"), VARIABLES["mpich"], id="mpich"
        ),
    ],
)
def test_mpirun(tmp_path: Path, command: tuple[str, ...], variables: tuple[str, ...]) -> None:
    """The real launchers of Open MPI and MPICH give two watched ranks, with one monitor."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    (tmp_path / "train.py").write_text(ENV_RANKS)
    arguments = ("-n", 2, sys.executable, "train.py", free_port())
    done = run(*command, *arguments, *variables, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    check_two_ranks(tmp_path / "run", done.stdout)


def test_names_of_rank_variables() -> None:
    """The start-up hook knows the rank variables of the same launchers as the watch."""
    known = [name for variables in launcher._LAUNCHERS for name in variables["rank"]]
    assert sorted(torchwhere_startup.RANK_VARIABLES) == sorted(known)


# -- torchwhere run --------------------------------------------------------------------------------


def test_run_starts_a_launcher(tmp_path: Path) -> None:
    """`torchwhere run torchrun ...` watches both ranks, with the options of `run`, and ends as
    torchrun does."""
    (tmp_path / "train.py").write_text(f"{MAIN}    sys.exit(3 * (os.environ['RANK'] == '1'))\n")
    command = (sys.executable, "-m", "torchwhere", "run", "--out", "boxes", "--records", 4096, "--")
    done = run(
        *command,
        *TORCHRUN,
        "train.py",
        folder=tmp_path,
        TORCHWHERE_OUT="",
        PYTHONPATH=str(SOURCE),
    )
    assert done.returncode == 1  # torchrun's own code after a failed rank
    assert names(tmp_path / "boxes") == ["rank0.box", "rank1.box"]
    assert "monitors: 1\n" in done.stdout
    assert {box.geometry.capacity for box in read_run(tmp_path / "boxes").boxes.values()} == {4096}


def test_run_watches_forked_ranks(warm: WarmPython, tmp_path: Path) -> None:
    """`torchwhere run` also watches the ranks that its script forks. The script itself, which is
    not a rank, causes no remark."""
    (tmp_path / "train.py").write_text(PROCESSES)
    command = ("-m", "torchwhere", "run", "--out", "run", "train.py", free_port(), "fork")
    done = warm.run(
        *command,
        cwd=tmp_path,
        env={name: value for name, value in ENVIRONMENT.items() if name != "TORCHWHERE_OUT"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "codes: 0 0\n" in done.stdout
    verdict = diagnose_folder(tmp_path / "run")
    assert (verdict.kind, sorted(verdict.ranks), verdict.missing_data) == ("healthy", [0, 1], ())
    assert "monitors: 1\n" in done.stdout


def test_which_scripts_are_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher or a program on the PATH replaces `torchwhere run`; a script is watched itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{BIN}:/bin")
    Path("train.py").touch()
    python = sys.executable

    def command(script: str, *, is_module: bool = False) -> list[str] | None:
        return launcher_command(script, ["-x"], is_module=is_module)

    assert command("torchrun") == [str(BIN / "torchrun"), "-x"]
    assert command(str(BIN / "torchrun")) == [python, str(BIN / "torchrun"), "-x"]
    assert command("torch.distributed.run", is_module=True) == [
        python,
        "-m",
        "torch.distributed.run",
        "-x",
    ]
    assert command(python) == [python, "-x"]
    Path("launch.sh").write_text("#!/bin/bash\ntorchrun train.py\n")
    assert command("launch.sh") == [str(tmp_path / "launch.sh"), "-x"]
    Path("own.py").write_text("#!/usr/bin/env python3\n")
    assert command("own.py") is None
    assert command("train.py") is None
    assert command("./no/program") is None
    assert command("train", is_module=True) is None


def test_python_before_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchwhere run python train.py` watches the script, if it is this Python without options."""
    other = tmp_path / "python"
    other.symlink_to(os.path.realpath(sys.executable))
    name = Path(sys.executable).name
    monkeypatch.setenv("PATH", str(BIN))

    def target(*words: str) -> tuple[str, list[str], bool]:
        script, arguments, is_module = without_python(words[0], words[1:], is_module=False)
        return script, [*arguments], is_module

    assert target(name, "train.py", "-x") == ("train.py", ["-x"], False)
    assert target(sys.executable, "-m", "train", "-x") == ("train", ["-x"], True)
    assert target(name, "-u", "train.py") == (name, ["-u", "train.py"], False)
    assert target(str(other), "train.py") == (str(other), ["train.py"], False)
    assert target("train.py", "python") == ("train.py", ["python"], False)


def test_options_travel_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of `torchwhere run` come back from the text of TORCHWHERE_OPTIONS."""
    text = "--records 64 --module-events --no-env --stall 5.0 --json --end-with SIGTERM"
    monkeypatch.setenv("TORCHWHERE_OPTIONS", text)
    options = options_of_environment()
    assert (options.to_text(), options.records, options.sets_variables) == (text, 64, False)
    monkeypatch.setenv("TORCHWHERE_OPTIONS", "--no-monitor")
    assert options_of_environment().monitor is None
    for wrong in ("--sstall 5", "--records few", "train.py", "'"):
        monkeypatch.setenv("TORCHWHERE_OPTIONS", wrong)
        with pytest.raises(ValueError, match=r"."):
            options_of_environment()


# -- other processes -------------------------------------------------------------------------------

LOADED = "import sys; print(*sorted(sys.modules))"


def loaded(python: Path | str, **variables: str) -> set[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", LOADED],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stderr == ""
    return set(done.stdout.split())


def test_cost_without_torch(tmp_path: Path) -> None:
    """In a process that never imports torch, the hook imports one file, and none if
    TORCHWHERE_OUT is empty; installed as a .pth file as well as on the PYTHONPATH."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    plain = loaded(python)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    for name in ("torchwhere_startup.py", "torchwhere_startup.pth"):  # as a wheel has them
        (packages / name).symlink_to(SOURCE / name)
    assert loaded(python) - plain == set()
    assert loaded(python, TORCHWHERE_OUT="") - plain == set()
    assert loaded(python, TORCHWHERE_OUT="run") - plain == {"torchwhere_startup"}
    on_path = loaded(sys.executable, PYTHONPATH=ENVIRONMENT["PYTHONPATH"], TORCHWHERE_OUT="run")
    others = loaded(sys.executable, PYTHONPATH=str(SOURCE))
    assert on_path - others == {"sitecustomize", "torchwhere_startup"}


def test_other_sitecustomize(tmp_path: Path) -> None:
    """A `sitecustomize` of the user runs once and stays the imported one. If it fails, Python says
    so as always."""
    users = tmp_path / "users"
    users.mkdir()
    (users / "sitecustomize.py").write_text("print('mine')\n")
    program = (
        "import sys, sitecustomize; print(sitecustomize.__file__, sys.path.count(sys.argv[1]))"
    )
    path = f"{ENVIRONMENT['PYTHONPATH']}{os.pathsep}{users}"
    done = run(sys.executable, "-c", program, HOOK, folder=tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"mine\n{users / 'sitecustomize.py'} 0\n"
    (users / "sitecustomize.py").write_text("raise RuntimeError('broken')\n")
    own = run(sys.executable, "-c", "print(1)", folder=tmp_path, PYTHONPATH=path)
    plain = run(sys.executable, "-c", "print(1)", folder=tmp_path, PYTHONPATH=str(users))
    assert (own.returncode, own.stdout, own.stderr) == (0, "1\n", plain.stderr)
    assert "RuntimeError: broken" in own.stderr


WORKERS = """
import importlib.util, os, sys
importlib.util.find_spec("torch")  # a search alone loads nothing
import torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.ones(1) * len(os.environ["TORCHWHERE_OUT"])

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="spawn")
    print(len(list(loader)))
"""


def test_workers_are_not_ranks(tmp_path: Path) -> None:
    """A spawned worker inherits the rank variables of its rank, imports torch, and is not watched.
    A wrong option is one line, and the rank is watched without it."""
    (tmp_path / "train.py").write_text(WORKERS)
    rank = {"RANK": "3", "WORLD_SIZE": "4", "TORCHWHERE_OPTIONS": "--no-monitr"}
    done = run(sys.executable, "train.py", folder=tmp_path, **rank)
    assert (done.returncode, done.stdout) == (0, "4\n")
    assert done.stderr == (
        "torchwhere: TORCHWHERE_OPTIONS is ignored: unrecognized arguments: --no-monitr\n"
    )
    assert names(tmp_path / "run") == ["rank3.box"]


@pytest.mark.parametrize(
    ("variables", "is_rank"),
    [
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "ENVIRONMENT": "BATCH"}, False),
        ({}, False),
    ],
)
def test_batch_script_is_not_a_rank(
    warm: WarmPython, tmp_path: Path, variables: dict[str, str], is_rank: bool
) -> None:
    """The batch script of Slurm has the variables of a task and is not a rank; a task is one."""
    program = """
from torchwhere.startup.ranks import torch_is_loaded
import torch.distributed as dist
original = dist.init_process_group
torch_is_loaded(has_own_rank=True)
print(dist.init_process_group is not original)
"""
    done = warm.run("-c", program, cwd=tmp_path, env=ENVIRONMENT | variables)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
    assert (tmp_path / "run").exists() == is_rank


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """If the folder cannot be written, the job prints one line and runs as without a watch."""
    (tmp_path / "train.py").write_text("import torch\nprint(torch.ones(1))\n")
    (tmp_path / "file").touch()
    rank = {"RANK": "0", "WORLD_SIZE": "1", "TORCHWHERE_OUT": "file/run"}
    done = run(sys.executable, "train.py", folder=tmp_path, **rank)
    assert (done.returncode, done.stdout) == (0, "tensor([1.])\n")
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(
        r"torchwhere: nothing is recorded, .*file/run.* cannot be written: .+", line
    )
