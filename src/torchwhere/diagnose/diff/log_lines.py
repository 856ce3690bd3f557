"""Replaces in a line what may differ between ranks that do the same: ids, addresses, devices,
times, processes, ranks, hosts, temporary files.

`stripped(text)` puts a mark in the place of each, so that equal results mean equal lines.
`skeleton` also replaces every other number, so that equal results mean equal lines up to values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_CLOCK = r"\d{1,2}:\d\d:\d\d(?:[.,]\d+)?"
# both signs for micro are in use
_UNITS = "(?:ns|us|µs|μs|ms|s|secs?|seconds?|mins?|minutes?|h|hrs?|hours?)"
_NUMBER = r"\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
_IS = r"(?:\s?[=:]\s?|\s)"
_DURATION = rf"(?:{_CLOCK}|{_NUMBER}(?:\s?{_UNITS})?)"
_UUID = r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"

# The first character decides which patterns are tried at a position: trying all 17 at every
# position takes 50 us a line, this takes 12. The first match wins. For names in _ENDS, only the
# number at the end is replaced.
_AT_DIGIT = {
    "uuid": _UUID,
    "date": (
        r"(?<!\.)\d{4}[-/]\d\d[-/]\d\d(?:[T"
        r" ,_]+\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)?(?!\d)"
    ),
    "host": r"(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?\b",
    "progress": r"\d+:\d\d(?::\d\d)?<(?:\d+:\d\d(?::\d\d)?|\?)",  # tqdm: elapsed<remaining
    "clock": rf"(?<![.:]){_CLOCK}(?![\w:])",
    "address": r"0x[0-9a-fA-F]+\b",
    "epoch": r"(?<!\.)1[5-9]\d{8}(?:\.\d+|\d{3}|\d{6}|\d{9})?(?![\w.])",
    "rate": rf"(?<!\.){_NUMBER}\s?(?:[a-zA-Z]+/s(?:ec(?:ond)?)?|s/[a-zA-Z]+)\b",
    "time": rf"(?<!\.)(?:(?:\d+[dhm]\s?){{1,3}}{_NUMBER}s|{_NUMBER}\s?{_UNITS})(?![\w/])",
}
_AT_LETTER = {
    "rank": r"[Rr](?:ank|ANK)(?:\s?[=:#]?\s?|[_\-\[(]+)\d+(?!\d)",
    "device": (
        r"\b(?:(?:cuda|xpu|npu|hpu|mps|mlu|musa|xla):|(?:[Gg][Pp][Uu]|[Dd]evice(?:_index|_id)?)\s?[:=#]?\s?)\d+\b"
    ),
    "id": (
        rf"\b(?:(?:id|Id|ID|p?pid|p?PID|tid|TID|[Pp]ort){_IS}|(?:[Pp]rocess|[Tt]hread){_IS}(?=\d\d))\d+\b"
    ),
    "took": (
        rf"\b(?:\w+_)?(?:time|elapsed|took|duration|latency|eta|ETA)(?:_\w+)?{_IS}{_DURATION}(?![\w.])"
    ),
    "day": (
        rf"\b(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*,? )?{_MONTH} +\d{{1,2}},? (?:{_CLOCK}(?:"
        r" \d{4})?|\d{4})\b"
    ),
    "log": rf"\b[IWEF]\d{{4}} {_CLOCK} +\d+",  # glog: severity and date, time, thread
    "uuid_too": _UUID,
    "host_too": r"\blocalhost:\d+",
    "tmp_name": r"\btmp[a-z0-9_]{8}\b",
}
_AT_SIGN = {
    "tmp": r"(?:/private)?/(?:tmp|var/tmp|var/folders|dev/shm)/[^\s/'\":,;)\]]+",
    "host_six": r"\[[0-9a-fA-F]*:[0-9a-fA-F:]+\]:\d+",
}
_ENDS = {
    "device": re.compile(r"\d+$"),
    "rank": re.compile(r"\d+$"),
    "id": re.compile(r"\d+$"),
    "took": re.compile(r"(?<=[=:\s])\d.*$"),
}
_MARKS = {
    **dict.fromkeys(("uuid", "uuid_too"), "<id>"),
    **dict.fromkeys(("host", "host_too", "host_six"), "<host>"),
    **dict.fromkeys(("tmp", "tmp_name"), "<tmp>"),
    "address": "<address>",
}


def _alternatives(patterns: dict[str, str]) -> str:
    return "|".join(f"(?P<{name}>{pattern})" for name, pattern in patterns.items())


_ANY = re.compile(
    rf"(?<!\w)(?=\d)(?:{_alternatives(_AT_DIGIT)})|(?<![A-Za-z])(?=[A-Za-z])(?:{_alternatives(_AT_LETTER)})"
    rf"|(?=[/\[])(?:{_alternatives(_AT_SIGN)})"
)
_NCCL = re.compile(r"(?:^|(?<=\s))[^\s:]+:\d+:\d+ \[\d+\](?= NCCL)")
_MAY_MATCH = re.compile(r"\d|tmp")
_OWN = re.compile(
    r"(\s*[\[(<]?)(\d+)(?=[\])>]|:(?!\d)|\s*\|)"
)  # `[3] text`, `3: text`: a launcher put the rank before the line
# A number that is a value, and not part of a name (`layers.0.weight`), of a version, or of a code
# line (`train.py:12`).
_VALUE = re.compile(
    rf"(?<![\w.])(?<!\.py:)(?<!, line )[-+]?(?:{_NUMBER}|nan|inf|NaN|Infinity)(?!\w)(?!\.\w)"
)


@dataclass(frozen=True, slots=True)
class Stripper:
    """Strips the texts of one rank. `user_patterns` are removed too."""

    rank: int | None = None
    host: str | None = None
    user_patterns: tuple[re.Pattern[str], ...] = ()

    def __call__(self, text: str) -> str:
        for pattern in self.user_patterns:
            text = pattern.sub("<->", text)
        if self.host and len(self.host) > 2 and self.host in text:
            text = text.replace(self.host, "<host>")
        if self.rank is not None and (own := _OWN.match(text)) and own[2] == str(self.rank):
            text = f"{own[1]}<n>{text[own.end() :]}"
        return stripped(text)


def stripped(text: str) -> str:
    """The text with marks instead of what may differ."""
    if not _MAY_MATCH.search(text):
        return text
    if " NCCL" in text:
        text = _NCCL.sub("<process>", text)
    return _ANY.sub(_mark, text)


def _mark(match: re.Match[str]) -> str:
    name = match.lastgroup or ""
    return _ENDS[name].sub("<n>", match[0]) if name in _ENDS else _MARKS.get(name, "<time>")


def skeleton(text: str) -> str:
    """A stripped text without its numbers."""
    return _VALUE.sub("#", text)


def patterns(texts: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    """Compile the user's regular expressions; an invalid one is a ValueError that says where."""
    compiled = []
    for text in texts:
        try:
            compiled.append(re.compile(text))
        except re.error as error:
            raise ValueError(f"{text!r} is not a regular expression: {error}") from None
    return tuple(compiled)
