"""The monitor of host 0: it gives the verdict for all hosts, with what the others tell it.

With a shared folder it reads all boxes there, and its `Word` is a file; without one, the word goes out through a store, and
letters come in. What it could not learn it says, and goes on: nobody is waited for longer than a few seconds.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchwhere.blackbox.run import Run, port_of
from torchwhere.blackbox.summary import Labelled
from torchwhere.diagnose.calls.rank_calls import heard
from torchwhere.monitor.broadcast import Word, run_key
from torchwhere.monitor.discovery import Rendezvous
from torchwhere.monitor.roles import GRACE_S, LINGER_S, MOST_LINGER_S, WORD_FILE, Alone, Assembly, Gathering, Kept, Span
from torchwhere.monitor.transport import TICK_S, Office, Received, ready_for
from torchwhere.pipeline.verdict import kept_sightings
from torchwhere.snapshots.decode import Refusal, open_letter
from torchwhere.snapshots.encode import CALLS, Letter
from torchwhere.snapshots.write import write_whole

ANSWER_S = 3.0  # for letters
STACKS_S = 4.0  # for letters with stacks
SETTLE_S = 30.0  # for others to join, before a verdict is given without them
FRESH_S = 1.0  # who has written just now is not asked again


class Lead(Alone):
    """The monitor of host 0."""

    def __init__(self, folder: Path, *, stall_s: float, rendezvous: Rendezvous | None, port: int | None = None) -> None:
        self._folder, self._stall_s, self._rendezvous = folder, stall_s, rendezvous
        self._word = Word(token=secrets.token_hex(8), run=run_key())
        self._began, self._spoke_at, self._span = time.monotonic(), 0.0, Span()
        self._office: Office | None = None
        self._seen: dict[int, float] = {}  # when the last letter came that was made use of, by host
        self._opened: dict[int, tuple[float, Letter | Refusal]] = {}
        self._late: dict[int, float] = {}  # hosts that did not answer, and when they had last written
        self._run: Run | None = None
        self._is_shared = self.speaks = False
        if port is not None:
            self._open(port)

    def tend(self, run: Run | None) -> bool:
        now = time.monotonic()
        if now - self._spoke_at > TICK_S:
            self._say()
        if run is not None and run is not self._run:
            self._run, self._is_shared = run, not run.missing
            self._span.meet(run)
            self._rendezvous = self._rendezvous or Rendezvous.at(next(iter(run.labels.values())).meta.get("store"))
        is_settled = run is not None and now - self._began > GRACE_S
        if self._office is None and is_settled and not self._is_shared and self._rendezvous is not None:
            self._open(0)
        # Who writes unasked, or after nobody waited for it any more, has something to say.
        has_news = any(letter.at > self._seen.get(host, 0.0) for host, letter in self._letters().items())
        was_settled, self.speaks = self.speaks, self.speaks or self._is_settled()
        return self.speaks and (has_news or not was_settled)

    def _is_settled(self) -> bool:
        """Whether all ranks are accounted for, or have had their time: a verdict without them would blame who is only late."""
        if self._run is None:
            return False
        told = {rank for host in self._letters() for rank in self._ranks_of(host)}
        is_whole = self._is_shared or self._run.boxes.keys() | told >= set(range(self._run.world_size))
        return is_whole or time.monotonic() - self._began > SETTLE_S

    def prepare(self) -> None:
        """Ask all others how things are, and wait a little for their answers."""
        letters = self._letters()
        now = time.monotonic()
        spared = tuple(host for host, letter in letters.items() if now - letter.at < FRESH_S)
        asked = [host for host in letters if host not in spared and not self._is_last(host)]
        if asked:
            self._word = replace(self._word, asked=self._word.asked + 1, spared=spared, stacks=())
            self._wait_for([host for host in asked if self._late.get(host) != letters[host].at], ANSWER_S)

    def gather(self, run: Run) -> Gathering:
        if self._office is None:
            return Alone.gather(self, run)
        hearing, boxes, kept, lacks = heard(run), dict[int, Any](run.boxes), Kept(), list[str]()
        for host, received in sorted(self._letters().items()):
            letter, self._seen[host] = self._open_letter(host), received.at
            if isinstance(letter, Refusal):
                lacks.append(f"a letter of another host was refused: {letter.reason}")
            elif problem := self._problem(host, letter, run):
                lacks.append(problem)
            else:
                labels = {said.label.rank: said.label for said in letter.transcript.statements}
                labels = {rank: label for rank, label in labels.items() if rank not in boxes}
                wanted = {label.path for label in labels.values() if not label.lacks_counts}
                hearing.admit(letter.transcript, clerk=host, wanted=wanted)
                boxes |= labels
                kept |= {rank: letter.sightings[rank].to_dict() for rank in labels if rank in letter.sightings}
                lacks += _limits(letter, sorted(labels))
        if len(boxes) < run.world_size and self._office.problem:
            lacks.append(f"letters of other hosts cannot come: {self._office.problem}")
        hearing.testimonies = dict(sorted(hearing.testimonies.items()))
        assembly = Assembly(run.folder, dict(sorted(boxes.items())), run.earlier, list(run.unreadable), tuple(lacks))
        return Gathering(assembly, hearing, kept)

    def ask(self, ranks: Sequence[int]) -> Kept:
        own = self._run.boxes if self._run is not None else {}
        hosts = {rank: host for host in self._letters() for rank in self._alive_at(host) if rank not in own}
        elsewhere = [rank for rank in ranks if rank in hosts]
        known = kept_sightings(self._folder)
        shared = [rank for rank in ranks if _is_elsewhere(known.get(rank))]
        if not elsewhere and not shared:
            return {}
        self._word = replace(self._word, asked=self._word.asked + 1, spared=(), stacks=(*elsewhere, *shared))
        self._wait_for({hosts[rank] for rank in elsewhere}, STACKS_S, shared)
        found = {rank: value for rank, value in kept_sightings(self._folder).items() if rank in shared}
        for rank in elsewhere:
            letter = self._open_letter(hosts[rank])
            if isinstance(letter, Letter) and rank in letter.sightings:
                found[rank] = letter.sightings[rank].to_dict()
        self._seen |= {host: letter.at for host, letter in self._letters().items()}
        return found

    def told(self, verdict: str, *, ends: bool) -> None:
        self._word = replace(self._word, said=(*self._word.said, verdict)[-64:], ends=ends)
        self._say()

    def may_leave(self, *, is_well: bool) -> bool:
        """When the others are done too, or have had some seconds more: what happened here, they may want to know there."""
        gone_s = self._span.end()
        letters = [self._open_letter(host) for host, each in self._letters().items() if self._late.get(host) != each.at]
        alive = any(isinstance(letter, Letter) and not letter.is_last and _any_alive(letter) for letter in letters)
        is_wanted = alive or not (self.speaks or is_well)
        if is_wanted and min(gone_s, ready_for(self._office)) < LINGER_S and gone_s < MOST_LINGER_S:
            return False
        self.speaks = True  # now or never
        return True

    def describe(self) -> dict[str, Any]:
        letters = [self._open_letter(host) for host in sorted(self._letters())]
        return {"role": "lead", "hears": [letter.host for letter in letters if isinstance(letter, Letter)]}

    def close(self) -> bool:
        self._word = replace(self._word, is_over=True)
        self._say()
        if self._office is None:
            return True
        time.sleep(0.3)  # a word takes a moment, and the store goes with this process
        return self._office.close()

    # -- letters -----------------------------------------------------------------------------------------------------

    def _open(self, port: int) -> None:
        self._office = Office(self._word.token, self._rendezvous, port)
        self._office.say(self._word)
        self._office.open()

    def _letters(self) -> dict[int, Received]:
        return dict(self._office.letters) if self._office is not None else {}

    def _open_letter(self, host: int) -> Letter | Refusal:
        received = self._letters()[host]
        known = self._opened.get(host)
        if known is None or known[0] != received.at:
            known = self._opened[host] = received.at, open_letter(received.data)
        return known[1]

    def _is_last(self, host: int) -> bool:
        letter = self._open_letter(host)
        return isinstance(letter, Letter) and letter.is_last

    def _ranks_of(self, host: int) -> list[int]:
        letter = self._open_letter(host)
        return [said.label.rank for said in letter.transcript.statements] if isinstance(letter, Letter) else []

    def _alive_at(self, host: int) -> list[int]:
        letter = self._open_letter(host)
        return [rank for rank, seen in letter.sightings.items() if seen.alive] if isinstance(letter, Letter) else []

    def _wait_for(self, hosts: Sequence[int] | set[int], patience_s: float, shared: Sequence[int] = ()) -> None:
        """Until these have answered the last question, and those who share the folder have kept the stacks of these ranks."""
        self._say()
        deadline = time.monotonic() + patience_s
        waiting = set(hosts)
        while (waiting or shared) and time.monotonic() < deadline:
            time.sleep(0.05)
            waiting = {host for host in waiting if not self._has_answered(host)}
            kept = kept_sightings(self._folder) if shared else {}
            shared = [rank for rank in shared if not kept.get(rank, {}).get("stack")]
        letters = self._letters()
        self._late |= {host: letters[host].at for host in waiting}

    def _has_answered(self, host: int) -> bool:
        letter = self._open_letter(host)
        return isinstance(letter, Letter) and (letter.answers >= self._word.asked or letter.is_last)

    def _problem(self, host: int, letter: Letter, run: Run) -> str | None:
        """Why a letter does not count."""
        ranks = self._ranks_of(host)
        age_s = time.monotonic() - self._letters()[host].at
        if not letter.is_last and age_s > max(ANSWER_S, self._stall_s / 2):
            return (
                f"nothing from host {letter.host} ({_named(ranks)}) for {age_s:.0f} s: it, its monitor or the way to it is gone"
            )
        if self._is_of_another_life(letter, run) or any(rank >= run.world_size for rank in ranks):
            return f"host {letter.host} tells of another run or restart: {_named(ranks)} there"
        return None

    def _is_of_another_life(self, letter: Letter, run: Run) -> bool:
        """Whether a letter is about ranks that never were there together with those of this host. Hosts may count restarts
        differently."""
        own, told = list(run.labels.values()), [said.label for said in letter.transcript.statements]
        job = {_job(label) for label in own}
        if any(_job(label) not in job for label in told):
            return True
        began_ns = min((label.meta["started_ns"] for label in told), default=0)
        own_ns = min((label.meta.get("started_ns", 0) for label in own), default=0)
        seen = {rank: sighting for rank, sighting in letter.sightings.items() if rank not in run.labels}
        last_ns = max((each.alive_ns or 0 for each in seen.values()), default=0)
        are_gone = bool(seen) and not any(each.alive for each in seen.values())
        left_ns = time.time_ns() - int(self._span.gone_s * 1e9)
        return (self._span.has_ended and began_ns > left_ns) or (are_gone and 0 < last_ns < own_ns)

    def _say(self) -> None:
        self._spoke_at = time.monotonic()
        age_ns, gone_ns = int(self._span.age_s * 1e9), int(self._span.gone_s * 1e9)
        number = self._word.number + 1
        self._word = replace(self._word, number=number, t_ns=time.time_ns(), age_ns=age_ns, gone_ns=gone_ns)
        if self._office is not None:
            self._office.say(self._word)
        write_whole(self._folder / WORD_FILE, self._word.to_json())


def _is_elsewhere(kept: dict[str, Any] | None) -> bool:
    """Whether another host that shares the folder has seen a rank alive."""
    return kept is not None and kept.get("alive") is True and kept.get("host") != socket.gethostname()


def _job(label: Labelled) -> tuple[str, Any, str]:
    return label.run[0], label.meta.get("world_size"), port_of(label)


def _any_alive(letter: Letter) -> bool:
    return any(seen.alive for seen in letter.sightings.values())


def _limits(letter: Letter, ranks: list[int]) -> list[str]:
    is_cut = letter.is_cut and ranks
    return [f"of {_named(ranks)}, on host {letter.host}, only the last {CALLS} collectives were compared"] if is_cut else []


def _named(ranks: Sequence[int]) -> str:
    if not ranks:
        return "no rank"
    is_row = len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"ranks {ranks[0]} to {ranks[-1]}" if is_row else f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:16]))}"
