"""Runs Python programs in forks of a process that has imported torch.

A program runs as with `python -c`, `python -m` or `python file`: with its own arguments, folder,
environment and output, as `__main__`, until the interpreter shuts down. The import of torch, 2 s
of CPU time, is done once for all programs. Tracebacks have two more frames at the top.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_PIPE_BYTES = 1 << 20  # a program may print this much before the test waits for its end


class Ended(NamedTuple):
    """How a program ended. A negative code is the number of a signal, as in `subprocess`."""

    returncode: int
    stdout: str
    stderr: str


class Program:
    """A program that runs, or has ended."""

    def __init__(self, pid: int, status: int, outputs: list[int]) -> None:
        self.pid = pid
        self._status = status  # a pipe: empty until the program has ended
        self._outputs = outputs

    def runs(self) -> bool:
        return not select.select([self._status], [], [], 0)[0]

    def end(self, timeout: float = 400) -> Ended:
        """Wait until the program and all processes that print to its output have ended. Returns its
        code and the whole output."""
        deadline = time.monotonic() + timeout
        texts = dict.fromkeys(self._outputs, b"")
        unread = set(self._outputs)
        while unread or self.runs():
            ready = select.select([*unread], [], [], 0.1)[0] if unread else []
            for output in ready:
                block = os.read(output, 1 << 16)
                texts[output] += block
                if not block:
                    unread.remove(output)
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"the program runs for more than {timeout} s")
            if not unread:
                time.sleep(0.01)
        code = os.waitstatus_to_exitcode(int(os.read(self._status, 32)))
        for descriptor in (self._status, *self._outputs):
            os.close(descriptor)
        return Ended(code, *(text.decode() for text in texts.values()))

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class WarmPython:
    """Starts programs; the first one starts the process that all are forked from."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(
        self,
        *arguments: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
    ) -> Program:
        """Start `python *arguments`; the arguments begin with `-c`, `-m` or a file. `stdin` and
        `stdout` may be other files than an empty one and the one that `Program.end` reads."""
        if self._socket is None:
            self._serve()
        assert self._socket is not None
        request = {
            "arguments": [*map(str, arguments)],
            "cwd": str(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
        }
        outputs, theirs = zip(*(os.pipe() for _ in range(2)), strict=True)
        status, writing = os.pipe()
        for output in outputs:
            fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        with open(os.devnull) as nothing:
            descriptors = [nothing.fileno() if stdin is None else stdin, *theirs]
            if stdout is not None:
                descriptors[1] = stdout
            message = json.dumps(request).encode()
            header = b"%12d" % len(message)
            socket.send_fds(self._socket, [header], [*descriptors, writing])
            self._socket.sendall(message)
        for descriptor in (*theirs, writing):
            os.close(descriptor)
        return Program(int(self._socket.recv(32)), status, [*outputs])

    def run(self, *arguments: object, timeout: float = 400, **options: Any) -> Ended:
        """Run `python *arguments` until it ends."""
        return self.start(*arguments, **options).end(timeout)

    def _serve(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )

    def close(self) -> None:
        if self._server is not None and self._socket is not None:
            self._socket.close()  # the server ends
            self._server.wait(10)


# -- the process that programs are forked from -----------------------------------------------------


def requests(connection: socket.socket) -> Iterator[tuple[dict[str, Any], list[int]]]:
    while True:
        header, descriptors, _, _ = socket.recv_fds(connection, 12, 4)
        if not header:
            return
        message = connection.recv(int(header), socket.MSG_WAITALL)
        yield json.loads(message), list(descriptors)


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork a child for each request. Returns the request in a child, None in the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the parents of programs
    for request, descriptors in requests(connection):
        reading, writing = os.pipe()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            pid = os.fork()
            if pid == 0:
                _enter(request, descriptors, [connection.detach(), reading, writing])
                return request
            os.write(writing, str(pid).encode())
            os.write(descriptors[-1], str(os.waitpid(pid, 0)[1]).encode())
            os._exit(0)
        os.close(writing)
        connection.sendall(os.read(reading, 32))
        for descriptor in (reading, *descriptors):
            os.close(descriptor)
    return None


def _enter(request: dict[str, Any], descriptors: list[int], others: list[int]) -> None:
    """Take the standard files, the folder and the environment of a program."""
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    for descriptor in (*descriptors, *others):
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])


def execute(arguments: list[str]) -> None:
    """Run a program as `__main__`, in place of this module."""
    import runpy
    from types import ModuleType

    path = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = [folder for folder in sys.path[1:] if folder not in path]
    if arguments[0] == "-m":
        sys.path[:0] = [os.getcwd(), *path]
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    is_text = arguments[0] == "-c"
    sys.argv = ["-c", *arguments[2:]] if is_text else arguments
    sys.path[:0] = ["" if is_text else str(Path(arguments[0]).resolve().parent), *path]
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    if not is_text:
        main.__file__ = arguments[0]
    text = arguments[1] if is_text else Path(arguments[0]).read_text()
    exec(compile(text, "<string>" if is_text else arguments[0], "exec"), main.__dict__)


if __name__ == "__main__":
    import torch
    import torch.distributed
    import torch.nn.parallel

    import torchwhere.recorder.session  # noqa: F401 - what every watched program imports

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # at its end a program looks only at its own objects: 0.5 s less of CPU time
    program = serve(socket.socket(fileno=int(sys.argv[1])))
    if program is not None:
        execute(program["arguments"])
