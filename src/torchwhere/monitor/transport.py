"""How monitors of several hosts write to each other where they share no folder: through a c10d TCPStore of their own.

The monitor of host 0 has an `Office`: it serves the store, says a `Word` every second, and takes letters. The others have a
`Post`. They find the office in the job's own store, at MASTER_ADDR and MASTER_PORT, under one key; nothing else there is
touched. A job that dies in its first seconds takes that store with it: then they look where the office is likely to be. All of
it happens in threads: a network that fails or hangs holds up nobody, and what was received last is there to be looked at. This
is the one part of a monitor that imports torch.
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

from torchwhere.monitor.broadcast import Word, run_key
from torchwhere.monitor.discovery import Found, Rendezvous

TICK_S = 1.0
_POLL_S = 0.1
_CONNECT_S = 5.0
_RETRY_S = 0.5
_PROBE_S = 2.0  # to reach a port at all
_WAIT_S = 0.5  # for something to come, before looking whether one is to stop
_CLOSE_S = 2.0
_WORDS_KEPT = 8
_MOST_HOSTS = 1 << 14
_FAILURES = (RuntimeError, OSError, ValueError, TypeError, LookupError, ImportError)  # c10d's errors are RuntimeErrors


@dataclass(slots=True)
class Received:
    """The last letter of a host, as it came."""

    data: bytes
    at: float  # monotonic


def ready_for(correspondent: Office | Post | None) -> float:
    """For how many seconds it could have been heard; without end if there is none. To import torch takes a second, or ten
    where many do so at once."""
    if correspondent is None:
        return math.inf
    return time.monotonic() - correspondent.ready_at if correspondent.ready_at is not None else 0.0


def _store(address: str, port: int, *, serves: bool = False) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(address, port, None, serves, timeout=timedelta(seconds=_CONNECT_S), wait_for_workers=False)


class _Worker:
    """A thread that does one thing for as long as it says that there is more to do; what fails is tried again."""

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


def _stop(workers: list[_Worker]) -> bool:
    for worker in workers:
        worker.stop()
    deadline = time.monotonic() + _CLOSE_S
    while any(worker.is_running for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(worker.is_running for worker in workers)


# -- host 0 ----------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Office:
    """Where letters arrive, and words go out."""

    token: str
    rendezvous: Rendezvous | None = None
    port: int = 0  # 0: a free one
    letters: dict[int, Received] = field(default_factory=dict)  # the newest of each host
    ready_at: float | None = None  # monotonic
    _store: Any = None
    _word: Word | None = None
    _is_new: threading.Event = field(default_factory=threading.Event)
    _said: int = 0
    _spoke_at: float = 0.0
    _arrivals: int = 0
    _taken: dict[int, int] = field(default_factory=dict)
    _workers: list[_Worker] = field(default_factory=list)

    def open(self) -> None:
        self._workers = [_Worker("office", self._work)]
        if self.rendezvous is not None:
            self._workers.append(_Worker("announcer", self._announce))
        for worker in self._workers:
            worker.start()

    def say(self, word: Word) -> None:
        self._word = word
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
        if self._word is not None and (is_new or time.monotonic() - self._spoke_at > TICK_S):
            self._is_new.clear()
            self._speak(self._word)
        arrivals = self._store.add("arrivals", 0)
        if arrivals != self._arrivals:
            self._arrivals = arrivals
            self._take()
        return True

    def _serve(self) -> Any:
        likely = self.rendezvous.likely_ports if self.rendezvous is not None and not self.port else []
        for port in likely:
            with contextlib.suppress(RuntimeError):  # somebody else's
                return _store("127.0.0.1", port, serves=True)
        return _store("127.0.0.1", self.port, serves=True)

    def _speak(self, word: Word) -> None:
        self._said += 1
        self._spoke_at = time.monotonic()
        told = asdict(word) | {"number": self._said, "t_ns": time.time_ns()}
        self._store.set(f"word/{self._said}", json.dumps(told))
        self._store.set("newest", str(self._said))
        if self._said > _WORDS_KEPT:
            self._store.delete_key(f"word/{self._said - _WORDS_KEPT}")

    def _take(self) -> None:
        for host in range(1, min(int(self._store.add("hosts", 0)), _MOST_HOSTS) + 1):
            while self._store.check([key := f"letter/{host}/{self._taken.get(host, 0)}"]):
                self.letters[host] = Received(bytes(self._store.get(key)), time.monotonic())
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
        """Where others may reach this host: by the job's own address, as rank 0 is here, or by that of this end of it."""
        assert self.rendezvous is not None
        found = [self.rendezvous.address]
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((self.rendezvous.address, self.rendezvous.port))
            found.append(way.getsockname()[0])
        return list(dict.fromkeys([*found, socket.gethostname()]))


# -- the others ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Post:
    """Sends letters to the office, and hears its words."""

    rendezvous: Rendezvous | None = None
    address: tuple[str, int] | None = None  # of the office itself, where it is known
    word: Word | None = None  # the last one
    heard_at: float | None = None  # monotonic
    ahead_ns: int | None = None  # of the office's clock; None: not known yet
    accepts: Callable[[Word], bool] = lambda word: True  # whether this is a monitor of the same life of the job
    host: int = 0  # the number it was given
    ready_at: float | None = None  # monotonic
    _delays: deque[int] = field(default_factory=lambda: deque(maxlen=64))
    _letter: bytes = b""
    _written: int = 0
    _delivered: int = 0
    _line: Any = None  # a second connection: the first one waits for words
    _sent: int = 0
    _workers: list[_Worker] = field(default_factory=list)

    def open(self) -> None:
        self._workers = [_Worker("listener", self._listen), _Worker("sender", self._send)]
        for worker in self._workers:
            worker.start()

    def send(self, letter: bytes) -> None:
        """Soon, if there is a way; of two that wait the newer one."""
        self._letter = letter
        self._written += 1

    def flush(self, *, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while self._delivered < self._written and self._line is not None and time.monotonic() < deadline:
            time.sleep(0.02)

    def stop(self) -> None:
        """It is not needed any more. Nobody waits until it has ended."""
        for worker in self._workers:
            worker.stop()

    def close(self) -> bool:
        """Whether nothing of it runs any more."""
        return _stop(self._workers)

    def _listen(self) -> bool:
        address, port = self._office_at()
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
                if self.word is not None and self.word.is_over:
                    raise ValueError("the monitor of host 0 has left")
        finally:
            self._line = None
        return False

    def _office_at(self) -> tuple[str, int]:
        import torch.distributed  # noqa: F401 - before anything is looked for: meanwhile it may be gone

        self.ready_at = self.ready_at or time.monotonic()
        if self.address is not None:
            _reach(*self.address)
            return self.address
        found = self._look_up()
        for address, port in itertools.product(found.addresses, found.ports):
            with contextlib.suppress(OSError, RuntimeError):
                _reach(address, port)
                word = _first_word(_store(address, port))
                if word is not None and self._is_meant(found, word):
                    return address, port
        addresses, ports = ", ".join(found.addresses), ", ".join(map(str, found.ports))
        raise ValueError(f"the monitor of host 0 is not to be reached at {addresses}, port {ports}")

    def _is_meant(self, found: Found, word: Word) -> bool:
        """Whether the one that was reached is the one that was looked for, in this life of the job."""
        is_it = word.token == found.token if found.token is not None else word.run == run_key()
        return is_it and not word.is_over and self.accepts(word)

    def _hear(self, data: bytes, *, came_ns: int | None = None) -> None:
        word = Word.from_json(data)
        if word is None:
            return
        if came_ns is not None:  # it was waited for: the least delay is the difference of the clocks, and the way
            self._delays.append(came_ns - word.t_ns)
            self.ahead_ns = min(self._delays)
        self.word, self.heard_at = word, time.monotonic()

    def _look_up(self) -> Found:
        """As the job's own store says; if there is none any more, or not yet, where it is likely to be."""
        if self.rendezvous is None:
            raise ValueError("no launcher says where the job's store is")
        address, port, key = self.rendezvous
        try:
            _reach(address, port)
            job = _store(address, port)
            while not self._workers[0].is_stopping:
                if _comes(job, key, within_s=_WAIT_S):
                    return Found.from_json(bytes(job.get(key)))
        except (OSError, RuntimeError):
            return Found((address,), tuple(self.rendezvous.likely_ports))
        raise ValueError("the monitor of host 0 is not to be found in the job's store")

    def _send(self) -> bool:
        written = self._written
        if self._delivered == written:
            time.sleep(_POLL_S / 2)
            return True
        line = self._line
        if line is None:
            raise ValueError("no way to the monitor of host 0")
        line.set(f"letter/{self.host}/{self._sent}", self._letter)
        self._sent += 1
        line.add("arrivals", 1)
        self._delivered = written
        return True


def _reach(address: str, port: int) -> None:
    """Raises at once where c10d would try again for seconds."""
    socket.create_connection((address, port), timeout=_PROBE_S).close()


def _first_word(store: Any) -> Word | None:
    return Word.from_json(store.get(f"word/{int(store.get('newest'))}"))


def _comes(store: Any, key: str, *, within_s: float) -> bool:
    """Whether something comes soon. A connection that is lost is another matter, and raises."""
    from torch.distributed import DistStoreError

    try:
        store.wait([key], timedelta(seconds=within_s))
    except DistStoreError:
        return False
    return True
