"""Keeps a job alive when somebody truncates its box.

A store into a mapped page whose file has shrunk is SIGBUS: a dead job. No check before the store
can help, the file may shrink between the two. So while a box is open, a signal handler stands by: a
fault inside the box's own map puts anonymous memory there, the store is repeated by the processor
and succeeds, and the box is marked lost. Any other fault goes to whoever handled SIGBUS before
(faulthandler, the default action), by putting that handler back and letting the fault repeat.

A signal that was sent rather than caused (`kill -BUS`, or faulthandler passing on the fault it was
told of first) carries no address: it is ours if the file has really shrunk.

The handler is a ctypes callback. That is sound here and only here: the faulting store is our own,
made by a thread that holds the GIL, inside a C function that may call back into Python anyway. The
native part stores without the GIL: there the callback waits for it, and nobody who holds it waits
for that thread, which holds no lock while it stores (`native/reductions.h`). Linux with a 64-bit
glibc or musl; elsewhere a box is simply not guarded.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import sys
import threading
from collections.abc import Callable

_SA_SIGINFO = 4
_CODE_AT, _ADDRESS_AT = 8, 16  # si_code and si_addr within siginfo_t, 64-bit Linux
_MAP_FIXED, _MAP_ANONYMOUS = 0x10, 0x20


class _Action(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint8 * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def guard_region(
    region: mmap.mmap, *, is_short: Callable[[], bool], on_lost: Callable[[], None]
) -> SigbusGuard | None:
    """Guard a mapped region; None where that is not possible (another system, or one that forbids
    callbacks from C)."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    try:
        return SigbusGuard(region, is_short=is_short, on_lost=on_lost)
    except (AttributeError, MemoryError, OSError):
        return None


class SigbusGuard:
    """Guards one mapped region until `close`. `lost` says whether the file behind it was taken
    away."""

    def __init__(
        self, region: mmap.mmap, *, is_short: Callable[[], bool], on_lost: Callable[[], None]
    ) -> None:
        self.lost = False
        self._is_short = is_short
        self._on_lost = on_lost
        self._length = len(region)
        view = ctypes.c_char.from_buffer(region)
        self._start = ctypes.addressof(view)
        del view  # an exported buffer would keep the map from being closed
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            *(ctypes.c_int,) * 3,
            ctypes.c_long,
        )
        self._callback = _Handler(self._on_signal)
        self._address = ctypes.cast(self._callback, ctypes.c_void_p).value
        self._before = _Action()
        self._sigaction(_Action(handler=self._address, flags=_SA_SIGINFO), self._before)

    def _sigaction(self, new: _Action | None, old: _Action | None) -> None:
        self._libc.sigaction(
            int(signal.SIGBUS),
            ctypes.byref(new) if new is not None else None,
            ctypes.byref(old) if old is not None else None,
        )

    def _on_signal(self, signum: int, info: int, _context: int) -> None:
        was_sent = ctypes.c_int.from_address(info + _CODE_AT).value <= 0
        if (self._is_short() if was_sent else self._holds(info)) and self.detach():
            if not self.lost:
                self.lost = True
                # Not from in here: logging takes locks that the interrupted thread may hold.
                threading.Timer(0, self._on_lost).start()
            return
        # the fault repeats and meets the handler that was there before us
        self._sigaction(self._before, None)
        if was_sent:  # nothing repeats: send it again; it waits until this handler has returned
            getattr(self._libc, "raise")(signum)

    def _holds(self, info: int) -> bool:
        address = ctypes.c_void_p.from_address(info + _ADDRESS_AT).value or 0
        return self._start <= address < self._start + self._length

    def detach(self) -> bool:
        """Put memory of our own in the place of the file's. The kernel does it in one go, whoever
        is storing there now."""
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_ANONYMOUS
        found = self._libc.mmap(
            self._start, self._length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0
        )
        return bool(found == self._start)

    def close(self) -> None:
        """Put back the handler found at the start, unless somebody has installed another one
        since."""
        now = _Action()
        self._sigaction(None, now)
        if now.handler == self._address:
            self._sigaction(self._before, None)
            self._take_away_closed_ones()
        else:
            _outlived.append(self)  # somebody may have kept our address to chain to
        self._length = 0  # from here on no fault is ours, whatever gets mapped there next
        self._is_short = lambda: False

    def _take_away_closed_ones(self) -> None:
        """What was put back may be the handler of a guard that was closed while a later one stood
        before it."""
        now = _Action()
        self._sigaction(None, now)
        below = next((guard for guard in _outlived if guard._address == now.handler), None)
        if below is not None:
            _outlived.remove(below)
            self._sigaction(below._before, None)
            self._take_away_closed_ones()


_outlived: list[SigbusGuard] = []
