"""How monitors of several hosts write to each other where they share no folder: through a c10d
TCPStore of their own.

The monitor of host 0 has an `LeadServer`: it serves the store, says a `LeadState` every second, and
takes snapshots. The others have a `FollowerClient`. They find the office in the job's own store, at
MASTER_ADDR and MASTER_PORT, under one key; nothing else there is touched. A job that dies in its
first seconds takes that store with it: then they look where the office is likely to be. All of it
happens in threads: a network that fails or hangs holds up nobody, and what was received last is
there to be looked at. This is the one part of a monitor that imports torch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from torchwhere.monitor.broadcast import LeadState, run_key
from torchwhere.monitor.discovery import Rendezvous, ServerAddress

TICK_S = 1.0
_POLL_S = 0.1
_CONNECT_S = 5.0
_RETRY_S = 0.5
_PROBE_S = 2.0  # to reach a port at all
_WAIT_S = 0.5  # for something to come, before looking whether one is to stop
_CLOSE_S = 2.0
_WORDS_KEPT = 8
_MOST_HOSTS = 1 << 14
# c10d's errors are RuntimeErrors
_FAILURES = (RuntimeError, OSError, ValueError, TypeError, LookupError, ImportError)


@dataclass(slots=True)
class Received:
    """The last snapshot of a host, as it came."""

    data: bytes
    at: float  # monotonic


def ready_for(correspondent: LeadServer | FollowerClient | None) -> float:
    """For how many seconds it could have been heard; without end if there is none. To import torch
    takes a second, or ten where many do so at once."""
    if correspondent is None:
        return math.inf
    return time.monotonic() - correspondent.ready_at if correspondent.ready_at is not None else 0.0


def _store(address: str, port: int, *, serves: bool = False) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        address, port, None, serves, timeout=timedelta(seconds=_CONNECT_S), wait_for_workers=False
    )


class _StoreThread:
    """A thread that does one thing for as long as it says that there is more to do; what fails is
    tried again."""

    def __init__(self, name: str, do: Callable[[], bool]) -> None:
        self._do, self._over = do, threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"torchwhere-{name}", daemon=True)
        self.problem: str | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()

    @property
    def is_stopping(self) -> bool:
        return self._over.is_set()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                is_done = not self._do()
                self.problem = None
                if is_done:
                    return
            except _FAILURES as error:
                self.problem = (str(error).splitlines() or [type(error).__name__])[0]
                self._over.wait(_RETRY_S)


def _stop(workers: list[_StoreThread]) -> bool:
    for worker in workers:
        worker.stop()
    deadline = time.monotonic() + _CLOSE_S
    while any(worker.is_running for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(worker.is_running for worker in workers)


# -- host 0 ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class LeadServer:
    """Where snapshots arrive, and words go out."""

    token: str
    rendezvous: Rendezvous | None = None
    port: int = 0  # 0: a free one
    snapshots: dict[int, Received] = field(default_factory=dict)  # the newest of each host
    ready_at: float | None = None  # monotonic
    _store: Any = None
    _state: LeadState | None = None
    _is_new: threading.Event = field(default_factory=threading.Event)
    _said: int = 0
    _spoke_at: float = 0.0
    _arrivals: int = 0
    _taken: dict[int, int] = field(default_factory=dict)
    _workers: list[_StoreThread] = field(default_factory=list)

    def open(self) -> None:
        self._workers = [_StoreThread("office", self._work)]
        if self.rendezvous is not None:
            self._workers.append(_StoreThread("announcer", self._announce))
        for worker in self._workers:
            worker.start()

    def say(self, state: LeadState) -> None:
        self._state = state
        self._is_new.set()

    def close(self) -> bool:
        """Whether nothing of it runs any more."""
        return _stop(self._workers)

    @property
    def problem(self) -> str | None:
        return next((worker.problem for worker in self._workers if worker.problem), None)

    def _work(self) -> bool:
        if self._store is None:
            self._store = self._serve()
            self.port, self.ready_at = self._store.port, time.monotonic()
        is_new = self._is_new.wait(_POLL_S)
        if self._state is not None and (is_new or time.monotonic() - self._spoke_at > TICK_S):
            self._is_new.clear()
            self._speak(self._state)
        arrivals = self._store.add("arrivals", 0)
        if arrivals != self._arrivals:
            self._arrivals = arrivals
            self._take()
        return True

    def _serve(self) -> Any:
        likely = (
            self.rendezvous.likely_ports if self.rendezvous is not None and not self.port else []
        )
        for port in likely:
            with contextlib.suppress(RuntimeError):  # somebody else's
                return _store("127.0.0.1", port, serves=True)
        return _store("127.0.0.1", self.port, serves=True)

    def _speak(self, state: LeadState) -> None:
        self._said += 1
        self._spoke_at = time.monotonic()
        told = asdict(state) | {"number": self._said, "t_ns": time.time_ns()}
        self._store.set(f"word/{self._said}", json.dumps(told))
        self._store.set("newest", str(self._said))
        if self._said > _WORDS_KEPT:
            self._store.delete_key(f"word/{self._said - _WORDS_KEPT}")

    def _take(self) -> None:
        for host in range(1, min(int(self._store.add("hosts", 0)), _MOST_HOSTS) + 1):
            while self._store.check([key := f"snapshot/{host}/{self._taken.get(host, 0)}"]):
                self.snapshots[host] = Received(bytes(self._store.get(key)), time.monotonic())
                self._store.delete_key(key)
                self._taken[host] = self._taken.get(host, 0) + 1

    def _announce(self) -> bool:
        """Say in the job's own store where this one is, once, and leave."""
        assert self.rendezvous is not None
        if not self.port:
            raise ValueError("its own store is not open yet")
        _reach(self.rendezvous.address, self.rendezvous.port)
        job = _store(self.rendezvous.address, self.rendezvous.port)
        found = {"addresses": self._addresses(), "port": self.port, "token": self.token}
        job.set(self.rendezvous.key, json.dumps(found))
        return False

    def _addresses(self) -> list[str]:
        """Where others may reach this host: by the job's own address, as rank 0 is here, or by that
        of this end of it."""
        assert self.rendezvous is not None
        found = [self.rendezvous.address]
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((self.rendezvous.address, self.rendezvous.port))
            found.append(way.getsockname()[0])
        return list(dict.fromkeys([*found, socket.gethostname()]))


# -- the others ------------------------------------------------------------------------------------


@dataclass(slots=True)
class FollowerClient:
    """Sends snapshots to the office, and hears its words."""

    rendezvous: Rendezvous | None = None
    address: tuple[str, int] | None = None  # of the office itself, where it is known
    state: LeadState | None = None  # the last one
    heard_at: float | None = None  # monotonic
    ahead_ns: int | None = None  # of the office's clock; None: not known yet
    # whether this is a monitor of the same life of the job
    accepts: Callable[[LeadState], bool] = lambda state: True
    host: int = 0  # the number it was given
    ready_at: float | None = None  # monotonic
    _delays: deque[int] = field(default_factory=lambda: deque(maxlen=64))
    _snapshot: bytes = b""
    _written: int = 0
    _delivered: int = 0
    _line: Any = None  # a second connection: the first one waits for words
    _sent: int = 0
    _workers: list[_StoreThread] = field(default_factory=list)

    def open(self) -> None:
        self._workers = [_StoreThread("listener", self._listen), _StoreThread("sender", self._send)]
        for worker in self._workers:
            worker.start()

    def send(self, snapshot: bytes) -> None:
        """Soon, if there is a way; of two that wait the newer one."""
        self._snapshot = snapshot
        self._written += 1

    def flush(self, *, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while (
            self._delivered < self._written
            and self._line is not None
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)

    def stop(self) -> None:
        """It is not needed any more. Nobody waits until it has ended."""
        for worker in self._workers:
            worker.stop()

    def close(self) -> bool:
        """Whether nothing of it runs any more."""
        return _stop(self._workers)

    def _listen(self) -> bool:
        address, port = self._server_at()
        store = _store(address, port)
        self.host, self._sent, self._delays = int(store.add("hosts", 1)), 0, deque(maxlen=64)
        self._line = _store(address, port)
        try:
            number = int(store.get("newest"))
            self._hear(store.get(f"word/{number}"))
            while not self._workers[0].is_stopping:
                if _comes(store, f"word/{number + 1}", within_s=1.5 * TICK_S):
                    now_ns, number = time.time_ns(), number + 1
                    self._hear(store.get(f"word/{number}"), came_ns=now_ns)
                elif (newest := int(store.get("newest"))) > number + 1:  # some were missed
                    number = newest
                    self._hear(store.get(f"word/{number}"))
                if self.state is not None and self.state.is_over:
                    raise ValueError("the monitor of host 0 has left")
        finally:
            self._line = None
        return False

    def _server_at(self) -> tuple[str, int]:
        import torch.distributed  # noqa: F401 - before anything is looked for: meanwhile it may be gone

        self.ready_at = self.ready_at or time.monotonic()
        if self.address is not None:
            _reach(*self.address)
            return self.address
        found = self._look_up()
        for address, port in itertools.product(found.addresses, found.ports):
            with contextlib.suppress(OSError, RuntimeError):
                _reach(address, port)
                state = _first_word(_store(address, port))
                if state is not None and self._is_meant(found, state):
                    return address, port
        addresses, ports = ", ".join(found.addresses), ", ".join(map(str, found.ports))
        raise ValueError(f"the monitor of host 0 is not to be reached at {addresses}, port {ports}")

    def _is_meant(self, found: ServerAddress, state: LeadState) -> bool:
        """Whether the one that was reached is the one that was looked for, in this life of the
        job."""
        is_it = state.token == found.token if found.token is not None else state.run == run_key()
        return is_it and not state.is_over and self.accepts(state)

    def _hear(self, data: bytes, *, came_ns: int | None = None) -> None:
        state = LeadState.from_json(data)
        if state is None:
            return
        # it was waited for: the least delay is the difference of the clocks, and the way
        if came_ns is not None:
            self._delays.append(came_ns - state.t_ns)
            self.ahead_ns = min(self._delays)
        self.state, self.heard_at = state, time.monotonic()

    def _look_up(self) -> ServerAddress:
        """As the job's own store says; if there is none any more, or not yet, where it is likely to
        be."""
        if self.rendezvous is None:
            raise ValueError("no launcher says where the job's store is")
        address, port, key = self.rendezvous
        try:
            _reach(address, port)
            job = _store(address, port)
            while not self._workers[0].is_stopping:
                if _comes(job, key, within_s=_WAIT_S):
                    return ServerAddress.from_json(bytes(job.get(key)))
        except (OSError, RuntimeError):
            return ServerAddress((address,), tuple(self.rendezvous.likely_ports))
        raise ValueError("the monitor of host 0 is not to be found in the job's store")

    def _send(self) -> bool:
        written = self._written
        if self._delivered == written:
            time.sleep(_POLL_S / 2)
            return True
        line = self._line
        if line is None:
            raise ValueError("no way to the monitor of host 0")
        line.set(f"snapshot/{self.host}/{self._sent}", self._snapshot)
        self._sent += 1
        line.add("arrivals", 1)
        self._delivered = written
        return True


def _reach(address: str, port: int) -> None:
    """Raises at once where c10d would try again for seconds."""
    socket.create_connection((address, port), timeout=_PROBE_S).close()


def _first_word(store: Any) -> LeadState | None:
    return LeadState.from_json(store.get(f"word/{int(store.get('newest'))}"))


def _comes(store: Any, key: str, *, within_s: float) -> bool:
    """Whether something comes soon. A connection that is lost is another matter, and raises."""
    from torch.distributed import DistStoreError

    try:
        store.wait([key], timedelta(seconds=within_s))
    except DistStoreError:
        return False
    return True
