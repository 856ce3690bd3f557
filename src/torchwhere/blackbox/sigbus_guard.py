"""Keeps a job alive if another process truncates its box.

A store into a mapped page whose file has shrunk raises SIGBUS and kills the job. A check before the
store does not help: the file may shrink in between. So a signal handler is installed while a box is
open. On a fault inside the box's map, it maps anonymous memory there, the processor repeats the
store, and the box is marked lost. For any other fault, it restores the previous handler
(faulthandler, the default action) and lets the fault repeat.

A signal that was sent, not caused (`kill -BUS`, or faulthandler forwarding a fault that it handled
first), carries no address. It belongs to this handler if the file has really shrunk.

The handler is a ctypes callback. That is sound only here: the store that faults is torchwhere's
own, in a thread that holds the GIL, inside a C function that may call back into Python. The native
extension stores without the GIL: there the callback waits for the GIL. No holder of the GIL waits
for that thread, because it holds no lock while it stores (`native/reductions.h`). Supports Linux
with a 64-bit glibc or musl; elsewhere boxes are not guarded.
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
    """Guard a mapped region. None if the system does not support it or forbids callbacks from
    C."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    try:
        return SigbusGuard(region, is_short=is_short, on_lost=on_lost)
    except (AttributeError, MemoryError, OSError):
        return None


class SigbusGuard:
    """Guards one mapped region until `close`. `lost` is True once its file was truncated."""

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
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
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
                # Not in the handler: logging takes locks that the interrupted thread may hold.
                threading.Timer(0, self._on_lost).start()
            return
        # the fault repeats and goes to the previous handler
        self._sigaction(self._before, None)
        if was_sent:  # no fault repeats: send the signal again, for after this handler
            getattr(self._libc, "raise")(signum)

    def _holds(self, info: int) -> bool:
        address = ctypes.c_void_p.from_address(info + _ADDRESS_AT).value or 0
        return self._start <= address < self._start + self._length

    def detach(self) -> bool:
        """Replace the mapped file by private memory. The kernel does this atomically, also while
        other threads store there."""
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_ANONYMOUS
        address = self._libc.mmap(
            self._start, self._length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0
        )
        return bool(address == self._start)

    def close(self) -> None:
        """Restore the previous handler, unless other code has installed another one since."""
        now = _Action()
        self._sigaction(None, now)
        if now.handler == self._address:
            self._sigaction(self._before, None)
            self._remove_closed_guards()
        else:
            _closed_but_installed.append(self)  # other code may chain to this callback
        self._length = 0  # from now on, no fault belongs to this guard
        self._is_short = lambda: False

    def _remove_closed_guards(self) -> None:
        """The restored handler may be that of a guard that was closed while a later one was
        installed: remove it too."""
        now = _Action()
        self._sigaction(None, now)
        for guard in _closed_but_installed:
            if guard._address == now.handler:
                _closed_but_installed.remove(guard)
                self._sigaction(guard._before, None)
                self._remove_closed_guards()
                return


_closed_but_installed: list[SigbusGuard] = []
