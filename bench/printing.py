"""Measures printing from many processes into one pipe: how long it takes, and how many lines are
mixed up.

8 processes together print 100,000 numbered lines: with `torchwhere.print_rank`, with DeepSpeed's
`printflock`, and with plain `print`, which alternate. The reader checks that each printed line
arrives complete and exactly once.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass

PROCESSES = 8
LINES = 100_000
ROUNDS = 3
_EVERY_LONG = 1_000  # one of so many lines is longer than what a pipe takes at once
_LONG = 20_000

# The program of each process. It waits for a line on stdin, so that imports are not measured.
_PROGRAM = """
import sys
{setup}
rank, lines = int(sys.argv[1]), int(sys.argv[2])
sys.stderr.write("ready\\n"); sys.stderr.flush(); sys.stdin.readline()
for line in range(lines):
    say(f"<{{rank}} {{line}} " + "x" * ({long} if line % {every} == 0 else 60) + ">")
"""
_SETUPS = {
    "torchwhere.print_rank": "import os; os.environ['RANK'] = sys.argv[1]\n"
    "from torchwhere import print_rank\n"
    "def say(text): print_rank(text, ranks='all')",
    "deepspeed printflock": "from deepspeed.utils.debug import printflock as say",
    "print": "say = print",
}


@dataclass(frozen=True, slots=True)
class Printed:
    """One way to print: microseconds per line, all processes together, in each round; and the
    number of lines that did not arrive complete."""

    contender: str
    us_per_line: tuple[float, ...]
    torn: int
    lines: int

    @property
    def median(self) -> float:
        return statistics.median(self.us_per_line)


def measure(
    *, processes: int = PROCESSES, lines: int = LINES, rounds: int = ROUNDS
) -> list[Printed]:
    """Run every contender once in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in _SETUPS}
    torn: Counter[str] = Counter()
    for _ in range(rounds):
        for name in _SETUPS:
            took, whole = _round(name, processes, lines // processes)
            seconds[name].append(took)
            torn[name] += lines // processes * processes - whole
    return [
        Printed(name, tuple(value / lines * 1e6 for value in values), torn[name], rounds * lines)
        for name, values in seconds.items()
    ]


def rows() -> list[tuple[str, float, str]]:
    """Return rows for the table of the bench: name, figure, unit."""
    return [
        row
        for printed in measure()
        for row in (
            (f"{printed.contender}, {PROCESSES} processes", printed.median, "us a line"),
            (f"{printed.contender}, torn of {printed.lines:,} lines", float(printed.torn), "lines"),
        )
    ]


def _round(name: str, processes: int, lines: int) -> tuple[float, int]:
    """Return the seconds until the last line was read, and the number of complete lines."""
    program = _PROGRAM.format(setup=_SETUPS[name], long=_LONG, every=_EVERY_LONG)
    # buffered, which is the default of Python
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader = subprocess.Popen(
        [sys.executable, "-c", _READER, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(lines)],
            stdin=subprocess.PIPE,
            stdout=reader.stdin,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank in range(processes)
    ]
    reader.stdin.close()
    for writer in writers:
        assert writer.stderr is not None
        while writer.stderr.readline() not in ("ready\n", ""):
            pass
    start = time.perf_counter()
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate()
    whole = int(reader.stdout.read())
    took = time.perf_counter() - start
    reader.wait()
    return took, whole


# Counts the lines that are exactly what a process printed, each once. A line may begin with its
# rank.
_READER = f"""
import re, sys
pattern = re.compile(rb"(?:\\[(\\d+)\\] )?<(\\d+) (\\d+) (x+)>\\n")
complete = set()
for text in sys.stdin.buffer:
    match = pattern.fullmatch(text)
    if match and match[1] in (None, match[2]):
        if len(match[4]) == ({_LONG} if int(match[3]) % {_EVERY_LONG} == 0 else 60):
            complete.add((match[2], match[3]))
print(len(complete))
"""


if __name__ == "__main__":
    for name, figure, unit in rows():
        print(f"{name:<55} {figure:>10.1f} {unit}")
