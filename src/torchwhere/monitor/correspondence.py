"""How monitors of several hosts write to each other where they share no folder: through a c10d TCPStore of their own.

The monitor of host 0 has an `Office`: it serves the store, says a `Word` every second, and takes letters. The others have a
`Post`. They find the office in the job's own store, at MASTER_ADDR and MASTER_PORT, under one key; nothing else there is
touched. All of it happens in threads: a network that fails or hangs holds up nobody, and what was received last is there to be
looked at. This is the one part of a monitor that imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from typing import Any, NamedTuple

TICK_S = 1.0
_POLL_S = 0.1
_CONNECT_S = 5.0
_RETRY_S = 1.0
_CLOSE_S = 2.0
_WORDS_KEPT = 8
_MOST_HOSTS = 1 << 14
_MOST_WORD = 1 << 20
_FAILURES = (RuntimeError, OSError, ValueError, TypeError, LookupError, ImportError)  # c10d's errors are RuntimeErrors


@dataclass(frozen=True, slots=True)
class Word:
    """What the monitor of host 0 says to all others, again every second."""

    token: str = ""  # of this monitor
    run: str = ""  # of which run and restart
    number: int = 0
    t_ns: int = 0  # its wall clock
    asked: int = 0  # how often letters were asked for
    spared: tuple[int, ...] = ()  # who need not answer, having written just now
    stacks: tuple[int, ...] = ()  # ranks whose Python stack is wanted
    said: tuple[str, ...] = ()  # verdicts it has told
    ends: bool = False  # the ranks are to be ended
    is_over: bool = False  # it says no more

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Word | None:
        """Of whatever came; None if it is no word."""
        try:
            value = json.loads(text) if len(text) <= _MOST_WORD else None
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict):
            return None
        known = {each.name: value.get(each.name, each.default) for each in fields(cls)}
        known = {name: tuple(each) if isinstance(each, list) else each for name, each in known.items()}
        word = cls(**known)
        return word if word._is_sound() else None

    def _is_sound(self) -> bool:
        numbers, lists = (self.number, self.t_ns, self.asked), (self.spared, self.stacks, self.said)
        if not (type(self.token) is type(self.run) is str and all(type(number) is int for number in numbers)):
            return False
        if not (all(isinstance(each, tuple) for each in lists) and type(self.ends) is type(self.is_over) is bool):
            return False
        return all(type(rank) is int for rank in (*self.spared, *self.stacks)) and all(type(each) is str for each in self.said)


def run_key() -> str:
    """The run and restart that a launcher's environment speaks of, the same on all hosts."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


class Rendezvous(NamedTuple):
    """The job's own store, and the key under which the office is found there."""

    address: str
    port: int
    key: str

    @classmethod
    def from_environment(cls) -> Rendezvous | None:
        """None where no launcher has said where the store is."""
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
        if not address or not port.isdecimal():
            return None
        return cls(address, int(port), f"torchwhere/monitor/{run_key()}")


class Found(NamedTuple):
    """Where an office is."""

    addresses: tuple[str, ...]
    port: int
    token: str


@dataclass(slots=True)
class Received:
    """The last letter of a host, as it came."""

    data: bytes
    at: float  # monotonic


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
            self._store = _store("127.0.0.1", self.port, serves=True)
            self.port = self._store.port
        is_new = self._is_new.wait(_POLL_S)
        if self._word is not None and (is_new or time.monotonic() - self._spoke_at > TICK_S):
            self._is_new.clear()
            self._speak(self._word)
        arrivals = self._store.add("arrivals", 0)
        if arrivals != self._arrivals:
            self._arrivals = arrivals
            self._take()
        return True

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
    host: int = 0  # the number it was given
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

    def close(self) -> bool:
        """Whether nothing of it runs any more."""
        return _stop(self._workers)

    def _listen(self) -> bool:
        address, port = self.address or self._look_up()
        store = _store(address, port)
        self.host, self._sent, self._delays = int(store.add("hosts", 1)), 0, deque(maxlen=64)
        self._line = _store(address, port)
        try:
            number = int(store.get("newest"))
            self._hear(store.get(f"word/{number}"))
            while not self._workers[0].is_stopping:
                if _comes(store, f"word/{number + 1}"):
                    now_ns, number = time.time_ns(), number + 1
                    self._hear(store.get(f"word/{number}"), came_ns=now_ns)
                elif (newest := int(store.get("newest"))) > number + 1:  # some were missed
                    number = newest
                    self._hear(store.get(f"word/{number}"))
        finally:
            self._line = None
        return False

    def _hear(self, data: bytes, *, came_ns: int | None = None) -> None:
        word = Word.from_json(data)
        if word is None:
            return
        if came_ns is not None:  # it was waited for: the least delay is the difference of the clocks, and the way
            self._delays.append(came_ns - word.t_ns)
            self.ahead_ns = min(self._delays)
        self.word, self.heard_at = word, time.monotonic()

    def _look_up(self) -> tuple[str, int]:
        if self.rendezvous is None:
            raise ValueError("no launcher says where the job's store is")
        job = _store(self.rendezvous.address, self.rendezvous.port)
        if not job.check([self.rendezvous.key]):
            raise ValueError("the monitor of host 0 is not to be found in the job's store")
        found = json.loads(bytes(job.get(self.rendezvous.key))[:_MOST_WORD])
        addresses, port = [str(address) for address in found["addresses"]][:8], int(found["port"])
        for address in addresses:
            with contextlib.suppress(OSError):
                socket.create_connection((address, port), timeout=_CONNECT_S).close()
                return address, port
        raise ValueError(f"the monitor of host 0 is not to be reached at {', '.join(addresses)}, port {port}")

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


def _comes(store: Any, key: str) -> bool:
    """Whether something comes, within a second or so. A connection that is lost is another matter, and raises."""
    from torch.distributed import DistStoreError

    try:
        store.wait([key], timedelta(seconds=1.5 * TICK_S))
    except DistStoreError:
        return False
    return True
