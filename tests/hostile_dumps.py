"""Files that somebody may plant among dumps, and what must be said when they are refused."""

from __future__ import annotations

import bz2
import gzip
import lzma
import pickle
import struct

P = b"\x80\x02"
RUNS_A_COMMAND = b"cos\nsystem\n(X\x04\x00\x00\x00truetR."


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


# Ten of the one before, thirty times over: 10**29 items in 1 KB.
_LAUGHING_LISTS = (
    P
    + b"]("
    + b"".join(
        b"](" + (b"h" + bytes([level])) * 10 + b"eq" + bytes([level + 1]) if level else b"]q\x01"
        for level in range(30)
    )
    + b"e."
)
_LAUGHING_DICTS = (
    P
    + b"]("
    + b"".join(
        b"}("
        + b"".join(text(str(key)) + b"h" + bytes([level]) for key in range(10))
        + b"uq"
        + bytes([level + 1])
        if level
        else b"}q\x01"
        for level in range(30)
    )
    + b"e."
)

EXECUTES = {
    "global": (P + RUNS_A_COMMAND, "imports something"),
    "stack_global": (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "imports something"),
    "reduce": (P + b"NNR.", "calls something"),
    "build": (P + b"}}b.", "changes an object's state"),
    "inst": (P + b"(ios\nsystem\n.", "imports and calls something"),
    "obj": (P + b"(No.", "calls something"),
    "newobj": (P + b"N)\x81.", "makes an object"),
    "newobj_ex": (b"\x80\x04N)}\x92.", "makes an object"),
    "ext1": (P + b"\x82\x01.", "uses a registered extension"),
    "ext2": (P + b"\x83\x01\x00.", "uses a registered extension"),
    "ext4": (P + b"\x84\x01\x00\x00\x00.", "uses a registered extension"),
    "persid": (P + b"P1\n.", "asks for an object from outside"),
    "binpersid": (P + b"NQ.", "asks for an object from outside"),
}
GREEDY = {
    "text of 4 GB in 9 bytes": (P + b"X\xff\xff\xff\xff.", "cut short: it ends at byte 8"),
    "text of 2**62": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62), "cut short"),
    "memo of 4 billion": (P + b"Nr\xff\xff\xff\xff.", "it holds a NoneType instead of a dict"),
    "bytes of 2**62": (
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62),
        "instruction 0x8e, which no dump has",
    ),
    "bytearray of 2**62": (
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 62),
        "instruction 0x96, which no dump has",
    ),
    "integer of 2 GB": (P + b"\x8b\xff\xff\xff\x7f.", "instruction 0x8b, which no dump has"),
    "integer of 255 bytes": (P + b"\x8a\xff" + b"\x01" * 255 + b".", "an integer of 255 bytes"),
    "frame of 2**62": (b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.", "it holds a NoneType"),
    "a billion laughs, lists": (
        _LAUGHING_LISTS,
        "more than 8000000 items, with shared values written out",
    ),
    "a billion laughs, dicts": (
        _LAUGHING_DICTS,
        "more than 8000000 items, with shared values written out",
    ),
    "marks": (P + b"(" * 100_000, "nested deeper than 32"),
    "lists in lists": (P + b"]" * 1000 + b"a" * 999 + b".", "nested deeper than 32"),
    "dicts in dicts": (
        P + b"}" + (text("") + b"}") * 1000 + b"s" * 1000 + b".",
        "nested deeper than 32",
    ),
    "tuples in tuples": (P + b")" + b"\x85" * 100_000 + b".", "a tuple that holds a container"),
    "lists by memory": (P + b"](]q\x00" + b"]h\x00aq\x00" * 100 + b"e.", "nested deeper than 32"),
    "memories": (b"\x80\x04N" + b"\x94" * 1_100_000 + b".", "more than 1000000 values in its memo"),
    "dicts": (P + b"](" + b"}" * 1_100_000 + b"e.", "more than 1000000 lists, dicts and tuples"),
    "nothings": (P + b"](" + b"N" * 8_100_000 + b"e.", "more than 8000000 instructions"),
    "too large": (P + bytes(64 << 20), "larger than 64 MiB"),
    "JSON lists": (
        b'{"version": [' + b"[]," * 1_100_000 + b"0]}",
        "more than 1000000 lists and dicts",
    ),
    "JSON numbers": (b'{"version": [' + b"0," * 8_100_000 + b"0]}", "or 8000000 items"),
    "JSON nested": (b'{"a":' * 100_000, "JSON that is nested too deep"),
    "JSON integer": (b'{"version": ' + b"9" * 5000 + b"}", "JSON that is cut short or damaged"),
    "gzip": (gzip.compress(bytes(10 << 20)), "compressed with gzip: decompress it first"),
    "bzip2": (bz2.compress(bytes(1 << 20)), "compressed with bzip2: decompress it first"),
    "xz": (lzma.compress(bytes(1 << 20)), "compressed with xz: decompress it first"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(20), "compressed with zstd: decompress it first"),
    "zip": (b"PK\x03\x04" + bytes(20), "compressed with zip: decompress it first"),
}
CROOKED = {
    "list in itself": (P + b"]q\x00h\x00a.", "contains itself"),
    "dict in itself": (P + b"}q\x00" + text("a") + b"h\x00s.", "contains itself"),
    "lists in each other": (P + b"]q\x00]q\x01h\x00aa.", "contains itself"),
    "list changed later": (P + b"](]q\x00h\x00Nae.", "changes a list that it has used already"),
    "list filled that is none": (P + b"N(Ne.", "it fills a list that is not there"),
    "dict filled that is none": (P + b"](NNu.", "it fills a dict that is not there"),
    "end without beginning": (P + b"]e.", "it closes a mark that it has not opened"),
    "nothing to append": (P + b"a.", "it takes a value that is not there"),
    "nothing to remember": (P + b"q\x00.", "it stores a value that is not there"),
    "nothing remembered": (P + b"h\x07.", "it reads memo 7, which it has not written"),
    "nothing at all": (P + b".", "it ends with its data incomplete"),
    "two values": (P + b"NN.", "it ends with its data incomplete"),
    "an open mark": (P + b"(N.", "it ends with its data incomplete"),
    "bytes after the end": (P + b"N.N", "1 bytes after its end"),
    "key without value": (P + b"}(Nu.", "a key without a value"),
    "number as key": (P + b"}K\x01Ns.", "a key that is not a text but int"),
    "list as key": (P + b"}]Ns.", "a key that is not a text but list"),
    "tuple of lists": (P + b"]]\x86.", "a tuple that holds a container"),
    "second protocol": (P + P + b"N.", "a second protocol"),
    "protocol 0": (b"\x80\x00N.", "pickle protocol 0"),
    "protocol 6": (b"\x80\x06N.", "pickle protocol 6"),
    "no such instruction": (P + b"\xff", "instruction 0xff, which no dump has"),
    "integer as text": (P + b"I42\n.", "instruction 0x49, which no dump has"),
    "no UTF-8": (P + b"X\x02\x00\x00\x00\xff\xfe.", "a text that is not UTF-8"),
    "half a surrogate": (P + b"X\x03\x00\x00\x00\xed\xa0\x80.", "a text that is not UTF-8"),
    "JSON without UTF-8": (b'{"version": "\xff"}', "a text that is not UTF-8, at byte 13"),
    "JSON with NaN": (b'{"version": NaN}', "NaN is not a number"),
    "JSON cut": (b'{"version": "2.10", "entries": [', "cut short or damaged"),
    "a list": (pickle.dumps([1], protocol=2), "it holds a list instead of a dict"),
    "a JSON list": (b"[1]", "neither a pickle nor JSON"),
    "a program": (b"\x7fELF" + bytes(60), "neither a pickle nor JSON"),
    "a pickle of old": (pickle.dumps({"a": 1}, protocol=0), "neither a pickle nor JSON"),
    "nothing": (b"", "empty: its rank has not written it yet"),
    "no version": (pickle.dumps({"entries": []}, protocol=2), "it has no version"),
    "no entries": (pickle.dumps({"version": "2.10"}, protocol=2), "neither entries nor groups"),
    "a number for a version": (
        pickle.dumps({"version": 2.1, "entries": []}, protocol=2),
        "its version is not a number",
    ),
    "old": (
        pickle.dumps({"version": "2.3", "entries": []}, protocol=2),
        "a dump of version 2.3; torchwhere reads versions 2.4",
    ),
    "new": (
        pickle.dumps({"version": "3.0", "entries": []}, protocol=2),
        "a dump of version 3.0; torchwhere reads versions 2.4",
    ),
    "entries by name": (
        pickle.dumps({"version": "2.10", "entries": {}}, protocol=2),
        "its entries are a dict, not a list",
    ),
}
HOSTILE = {**EXECUTES, **GREEDY, **CROOKED}
