"""Connects monitors of several hosts without a shared folder, through their own c10d TCPStore.

The lead has a `LeadServer`: it serves the store, publishes a `LeadState` every second and receives
snapshots. The other monitors have a `FollowerClient`. They find the server by one key in the job's
own store, at MASTER_ADDR and MASTER_PORT; nothing else there is touched. A job that fails in its
first seconds takes that store with it: then they try the ports that the server prefers.

All of it runs in threads, so that a failing or hanging network blocks nothing; the last data that
arrived can always be read. This is the only part of a monitor that imports torch.
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
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from torchwhere.monitor.broadcast import LeadState, run_key
from torchwhere.monitor.discovery import Rendezvous, ServerAddress

TICK_S = 1.0
_POLL_S = 0.1
_CONNECT_S = 5.0
_RETRY_S = 0.5
_PROBE_S = 2.0  # to reach a port at all
_WAIT_S = 0.5  # for a key, before the thread checks whether it shall stop
_CLOSE_S = 2.0
_STATES_KEPT = 8
_MOST_HOSTS = 1 << 14
# c10d raises RuntimeError
_FAILURES = (RuntimeError, OSError, ValueError, TypeError, LookupError, ImportError)


@dataclass(slots=True)
class Received:
    """The last snapshot of a host, as it arrived."""

    data: bytes
    at: float  # monotonic


def ready_s(connection: LeadServer | FollowerClient | None) -> float:
    """Seconds since the connection became ready; infinity without one.

    Importing torch takes a second, or ten if many processes do it at once.
    """
    if connection is None:
        return math.inf
    return time.monotonic() - connection.ready_at if connection.ready_at is not None else 0.0


def _store(address: str, port: int, *, is_server: bool = False) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        address,
        port,
        None,
        is_server,
        timeout=timedelta(seconds=_CONNECT_S),
        wait_for_workers=False,
    )


class _StoreThread(threading.Thread):
    """A thread that calls `work` until it returns False. After a failure it tries again."""

    def __init__(self, name: str, work: Callable[[], bool]) -> None:
        super().__init__(name=f"torchwhere-{name}", daemon=True)
        self._work = work
        self._over = threading.Event()
        self.problem: str | None = None

    def stop(self) -> None:
        self._over.set()

    @property
    def is_stopping(self) -> bool:
        return self._over.is_set()

    def run(self) -> None:
        while not self._over.is_set():
            try:
                has_more = self._work()
                self.problem = None
                if not has_more:
                    return
            except _FAILURES as error:
                self.problem = (str(error).splitlines() or [type(error).__name__])[0]
                self._over.wait(_RETRY_S)


def _stop(threads: list[_StoreThread]) -> bool:
    """Stop the threads and wait a moment. Returns True if all have ended."""
    for thread in threads:
        thread.stop()
    deadline = time.monotonic() + _CLOSE_S
    for thread in threads:
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


# -- the lead --------------------------------------------------------------------------------------


@dataclass(slots=True)
class LeadServer:
    """Receives snapshots and publishes the lead's state."""

    token: str
    rendezvous: Rendezvous | None = None
    port: int = 0  # 0: any free port
    snapshots: dict[int, Received] = field(default_factory=dict)  # the newest of each host
    ready_at: float | None = None  # monotonic
    _store: Any = None
    _state: LeadState | None = None
    _is_new: threading.Event = field(default_factory=threading.Event)
    _published: int = 0
    _published_at: float = 0.0
    _arrivals: int = 0
    _received: dict[int, int] = field(default_factory=dict)
    _threads: list[_StoreThread] = field(default_factory=list)

    def open(self) -> None:
        self._threads = [_StoreThread("server", self._serve)]
        if self.rendezvous is not None:
            self._threads.append(_StoreThread("announcer", self._announce))
        for thread in self._threads:
            thread.start()

    def publish(self, state: LeadState) -> None:
        self._state = state
        self._is_new.set()

    def close(self) -> bool:
        """Stop the threads. Returns True if all have ended."""
        return _stop(self._threads)

    @property
    def problem(self) -> str | None:
        return next((thread.problem for thread in self._threads if thread.problem), None)

    def _serve(self) -> bool:
        if self._store is None:
            self._store = self._open_store()
            self.port, self.ready_at = self._store.port, time.monotonic()
        is_new = self._is_new.wait(_POLL_S)
        is_due = time.monotonic() - self._published_at > TICK_S
        if self._state is not None and (is_new or is_due):
            self._is_new.clear()
            self._write_state(self._state)
        arrivals = self._store.add("arrivals", 0)
        if arrivals != self._arrivals:
            self._arrivals = arrivals
            self._receive()
        return True

    def _open_store(self) -> Any:
        if self.rendezvous is not None and not self.port:
            for port in self.rendezvous.likely_ports:
                with contextlib.suppress(RuntimeError):  # another process uses the port
                    return _store("127.0.0.1", port, is_server=True)
        return _store("127.0.0.1", self.port, is_server=True)

    def _write_state(self, state: LeadState) -> None:
        self._published += 1
        self._published_at = time.monotonic()
        current = replace(state, number=self._published, t_ns=time.time_ns())
        self._store.set(f"state/{self._published}", current.to_json())
        self._store.set("newest", str(self._published))
        if self._published > _STATES_KEPT:
            self._store.delete_key(f"state/{self._published - _STATES_KEPT}")

    def _receive(self) -> None:
        hosts = min(int(self._store.add("hosts", 0)), _MOST_HOSTS)
        for host in range(1, hosts + 1):
            key = f"snapshot/{host}/{self._received.get(host, 0)}"
            while self._store.check([key]):
                self.snapshots[host] = Received(bytes(self._store.get(key)), time.monotonic())
                self._store.delete_key(key)
                self._received[host] = self._received.get(host, 0) + 1
                key = f"snapshot/{host}/{self._received[host]}"

    def _announce(self) -> bool:
        """Put the address of this server into the job's own store, once."""
        assert self.rendezvous is not None
        if not self.port:
            raise ValueError("the server of this monitor is not open yet")
        _reach(self.rendezvous.address, self.rendezvous.port)
        job_store = _store(self.rendezvous.address, self.rendezvous.port)
        server = {"addresses": self._addresses(), "port": self.port, "token": self.token}
        job_store.set(self.rendezvous.key, json.dumps(server))
        return False

    def _addresses(self) -> list[str]:
        """Addresses of this host: the job's own (rank 0 is here), and this end of a connection."""
        assert self.rendezvous is not None
        addresses = [self.rendezvous.address]
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            probe.connect((self.rendezvous.address, self.rendezvous.port))
            addresses.append(probe.getsockname()[0])
        return list(dict.fromkeys([*addresses, socket.gethostname()]))


# -- the followers ---------------------------------------------------------------------------------


@dataclass(slots=True)
class FollowerClient:
    """Sends snapshots to the lead and receives its state."""

    rendezvous: Rendezvous | None = None
    address: tuple[str, int] | None = None  # of the server, if it is known
    state: LeadState | None = None  # the last one
    received_at: float | None = None  # monotonic
    ahead_ns: int | None = None  # this host's clock minus the lead's; None: not known yet
    # whether a lead belongs to the same attempt of the job
    accepts: Callable[[LeadState], bool] = lambda state: True
    host: int = 0  # the number that the server gave this host
    ready_at: float | None = None  # monotonic
    _delays: deque[int] = field(default_factory=lambda: deque(maxlen=64))
    _snapshot: bytes = b""
    _written: int = 0
    _delivered: int = 0
    _sending_store: Any = (
        None  # a second connection: the first one blocks while it waits for states
    )
    _sent: int = 0
    _threads: list[_StoreThread] = field(default_factory=list)

    def open(self) -> None:
        self._threads = [
            _StoreThread("receiver", self._receive),
            _StoreThread("sender", self._send),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, snapshot: bytes) -> None:
        """Send a snapshot as soon as there is a connection. A newer one replaces one that waits."""
        self._snapshot = snapshot
        self._written += 1

    def flush(self, *, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while (
            self._delivered < self._written
            and self._sending_store is not None
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop the threads without waiting for them."""
        for thread in self._threads:
            thread.stop()

    def close(self) -> bool:
        """Stop the threads. Returns True if all have ended."""
        return _stop(self._threads)

    def _receive(self) -> bool:
        address, port = self._find_server()
        store = _store(address, port)
        self.host, self._sent, self._delays = int(store.add("hosts", 1)), 0, deque(maxlen=64)
        self._sending_store = _store(address, port)
        try:
            number = int(store.get("newest"))
            self._on_state(store.get(f"state/{number}"))
            while not self._threads[0].is_stopping:
                number = self._receive_next(store, number)
                if self.state is not None and self.state.has_left:
                    raise ValueError("the lead monitor has exited")
        finally:
            self._sending_store = None
        return False

    def _receive_next(self, store: Any, number: int) -> int:
        """Wait for the next state. Returns the number of the last one received."""
        if _wait_for_key(store, f"state/{number + 1}", within_s=1.5 * TICK_S):
            arrived_ns = time.time_ns()
            self._on_state(store.get(f"state/{number + 1}"), arrived_ns=arrived_ns)
            return number + 1
        newest = int(store.get("newest"))
        if newest <= number + 1:
            return number
        self._on_state(store.get(f"state/{newest}"))  # it has missed some
        return newest

    def _find_server(self) -> tuple[str, int]:
        import torch.distributed  # noqa: F401 - slow, and the job's store may end meanwhile

        self.ready_at = self.ready_at or time.monotonic()
        if self.address is not None:
            _reach(*self.address)
            return self.address
        server = self._look_up()
        for address, port in itertools.product(server.addresses, server.ports):
            with contextlib.suppress(OSError, RuntimeError):
                _reach(address, port)
                state = _newest_state(_store(address, port))
                if state is not None and self._is_wanted(server, state):
                    return address, port
        addresses, ports = ", ".join(server.addresses), ", ".join(map(str, server.ports))
        raise ValueError(f"cannot reach the lead monitor at {addresses}, port {ports}")

    def _is_wanted(self, server: ServerAddress, state: LeadState) -> bool:
        """Whether a server is the one looked for, in the same attempt of the job."""
        if server.token is not None:
            is_same = state.token == server.token
        else:
            is_same = state.run == run_key()
        return is_same and not state.has_left and self.accepts(state)

    def _on_state(self, data: bytes, *, arrived_ns: int | None = None) -> None:
        state = LeadState.from_json(data)
        if state is None:
            return
        # This thread was waiting: the smallest delay is the clock difference plus the network's.
        if arrived_ns is not None:
            self._delays.append(arrived_ns - state.t_ns)
            self.ahead_ns = min(self._delays)
        self.state, self.received_at = state, time.monotonic()

    def _look_up(self) -> ServerAddress:
        """Find the server by the job's own store, or without that store by its likely ports."""
        if self.rendezvous is None:
            raise ValueError("the address of the job's store is not known")
        address, port, key = self.rendezvous
        try:
            _reach(address, port)
            job_store = _store(address, port)
            while not self._threads[0].is_stopping:
                if _wait_for_key(job_store, key, within_s=_WAIT_S):
                    return ServerAddress.from_json(bytes(job_store.get(key)))
        except (OSError, RuntimeError):
            return ServerAddress((address,), tuple(self.rendezvous.likely_ports))
        raise ValueError("the job's store does not hold the address of the lead monitor")

    def _send(self) -> bool:
        written = self._written
        if self._delivered == written:
            time.sleep(_POLL_S / 2)
            return True
        store = self._sending_store
        if store is None:
            raise ValueError("not connected to the lead monitor")
        store.set(f"snapshot/{self.host}/{self._sent}", self._snapshot)
        self._sent += 1
        store.add("arrivals", 1)
        self._delivered = written
        return True


def _reach(address: str, port: int) -> None:
    """Raise at once if the port refuses; c10d would retry for seconds."""
    socket.create_connection((address, port), timeout=_PROBE_S).close()


def _newest_state(store: Any) -> LeadState | None:
    return LeadState.from_json(store.get(f"state/{int(store.get('newest'))}"))


def _wait_for_key(store: Any, key: str, *, within_s: float) -> bool:
    """Whether the key appears in time. A lost connection raises."""
    from torch.distributed import DistStoreError

    try:
        store.wait([key], timedelta(seconds=within_s))
    except DistStoreError:
        return False
    return True
