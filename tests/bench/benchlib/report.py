# SPDX-License-Identifier: Apache-2.0
"""From rounds to figures: medians, ratios within each round, targets, and the table.

A ratio is taken between two runs of one round, which stood next to each other in time, and the median is taken over
the rounds. So a machine that slows down for a minute spoils a round and not the figure.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

Rounds = list[dict[str, dict[str, float]]]
"""One dict per round: figure → server → value."""


class Target(NamedTuple):
    """`figure` of `subject` divided by `base` of `reference`, held against `bound`.

    Without a reference it is the figure itself, and without a bound it is only shown.
    """

    title: str
    figure: str
    reference: str | None
    bound: float | None
    at_least: bool = False
    base: str | None = None
    subject: str = "broker"

    def ratios(self, rounds: Rounds) -> list[float]:
        """The ratio in each round that has both values."""
        found = []
        for values in rounds:
            above = values.get(self.figure, {}).get(self.subject)
            if self.reference is None:
                found += [] if above is None else [above]
                continue
            below = values.get(self.base or self.figure, {}).get(self.reference)
            if above is not None and below:
                found.append(above / below)
        return found

    def holds(self, ratio: float) -> bool:
        """Whether `ratio` is on the right side of the bound."""
        if self.bound is None:
            return True
        return ratio >= self.bound if self.at_least else ratio <= self.bound


TARGETS = (
    Target("send→delivered p50, to the relay's", "latency_2.delivered_p50", "relay", 2.5),
    Target(
        "send→delivered p50, 120 sessions to 2",
        "latency_crowd.delivered_p50",
        "broker",
        1.2,
        base="latency_2.delivered_p50",
    ),
    Target("60 pairs, rate to the relay's", "pairs_1.rate", "relay", 0.2, at_least=True),
    Target("cold start to health_ok, to bare Python's", "start.health_ok", "bare", 1.8),
    Target("idle memory (PSS), to bare Python's", "memory.pss", "bare", 1.5),
)

CALIBRATION = (
    Target("router: send→delivered p50, to the relay's", "latency_2.delivered_p50", "relay", 1.8, subject="router"),
    Target("router: 60 pairs, rate to the relay's", "pairs_1.rate", "relay", 1 / 3, at_least=True, subject="router"),
)
"""What an asyncio router without rules was seen to cost. Far from it, generator or machine are the bottleneck."""

ROOM = (
    Target("send→delivered p50, to the router's", "latency_2.delivered_p50", "router", 2.5 / 1.8),
    Target("60 pairs, rate to the router's", "pairs_1.rate", "router", 0.6, at_least=True),
)
"""The targets for speed as what the rules may cost: the same bounds where the router is as calibrated. A busy machine
slows the router and the broker more than the relay, whose ratios then say little; these still do."""

RUN_TARGETS = (
    *(
        Target(f"{title}, {place}, to the {words}", f"runs.{place}.{figure}", reference, None, subject="run")
        for figure, title in (("hello", "hello→assignment"), ("report", "report→assignment"))
        for place, reference, words in (
            ("disk", "relay", "relay's"),
            ("disk", "commit", "commit alone"),
            ("memory", "relay", "relay's"),
            ("memory", "commit", "commit alone"),
        )
    ),
    Target("cold start to connected, to bare Python's", "runs.start.answer", "bare", None, subject="run"),
    Target("idle memory (PSS) of one, to bare Python's", "runs.memory_1.pss", "bare", None, subject="run"),
    Target("the same of each of all at once", "runs.memory_crowd.pss", "bare", None, subject="run"),
    Target("status of one of 200 runs, to reading it", "runs.look.status", "bare", 3.0, subject="run"),
    Target("wake-ups per waiting run and minute", "runs.wait.wakeups", None, 0.0, subject="run"),
    Target("core's share for all of them, waiting", "runs.wait.share", None, 0.0001, subject="run"),
)
"""A ratio without a bound is shown. Runs that wait for a person are to do nothing at all; the bound on their share of
a core is what the kernel may count for looking at it."""

WORKER_TARGETS = (
    Target("start, to fork, exec and one trip to systemd", "workers.start", "bare", 15.0, subject="worker"),
    Target("start, to an interpreter's", "workers.start", "interpreter", 3.0, subject="worker"),
    Target("each of 40 at once, to one alone", "workers.crowd", "one", 0.8, subject="worker"),
    *(
        Target(f"{title}, to an interpreter's", f"workers.{figure}.pss", "interpreter", bound, subject="worker")
        for figure, title, bound in (
            ("shim_1", "PSS of a shim", 1.3),
            ("shim_crowd", "PSS of each of 40 shims", 1.3),
            ("bridge_1", "PSS of a bridge", 4.0),
            ("bridge_crowd", "PSS of each of 40 bridges", 4.0),
        )
    ),
)
"""What a worker costs besides its command. Bounds have room for a machine that does other things too."""

FIGURES = (
    ("latency_2.message_p50", "send→message p50, 2 sessions", "us"),
    ("latency_2.message_p99", "send→message p99, 2 sessions", "us"),
    ("latency_2.delivered_p50", "send→delivered p50, 2 sessions", "us"),
    ("latency_2.delivered_p99", "send→delivered p99, 2 sessions", "us"),
    ("latency_crowd.message_p50", "send→message p50, 120 sessions", "us"),
    ("latency_crowd.message_p99", "send→message p99, 120 sessions", "us"),
    ("latency_crowd.delivered_p50", "send→delivered p50, 120 sessions", "us"),
    ("latency_crowd.delivered_p99", "send→delivered p99, 120 sessions", "us"),
    ("pairs_1.rate", "60 pairs, 1 outstanding each", "/s"),
    ("pairs_1.server_us", "  processor time per message, server", "us"),
    ("pairs_1.generator_cpu", "  share of a core for the generator", ""),
    ("pairs_16.rate", "60 pairs, 16 outstanding each", "/s"),
    ("pairs_16.server_us", "  processor time per message, server", "us"),
    ("pairs_16.generator_cpu", "  share of a core for the generator", ""),
    ("list.p50", "list of 120 p50", "us"),
    ("list.p99", "list of 120 p99", "us"),
    ("start.interpreter", "start: interpreter alone", "ms"),
    ("start.imports", "start: interpreter and imports", "ms"),
    ("start.listening", "start: until listening, binding for itself", "ms"),
    ("start.ready", "start: connection to READY=1, activated", "ms"),
    ("start.health_ok", "start: connection to health_ok, activated", "ms"),
    ("start.warm", "connection to health_ok, running", "ms"),
    ("memory.pss", "idle memory, proportional (PSS)", "KiB"),
    ("memory.private", "idle memory, private", "KiB"),
    ("memory.rss", "idle memory, resident", "KiB"),
)

SERVERS = ("relay", "router", "bare", "broker")

RUN_FIGURES = (
    *(
        (f"runs.{place}.{figure}", f"{title}, {place}", "us")
        for figure, title in (
            ("hello", "hello→assignment of the implementer"),
            ("report", "report→assignment of the reviewer"),
            ("review", "review→assignment of the implementer"),
        )
        for place in ("disk", "memory")
    ),
    ("runs.memory.server_us", "processor time of a round of two reports", "us"),
    ("runs.disk.fsync", "fsync of 4 KiB, disk", "us"),
    ("runs.memory.fsync", "fsync of 4 KiB, memory", "us"),
    ("runs.bytes.hello", "moved from hello to assignment", "B"),
    ("runs.bytes.report", "moved from report to assignment", "B"),
    ("runs.bytes.review", "moved from review to assignment", "B"),
    ("runs.start.imports", "start: interpreter and imports", "ms"),
    ("runs.start.ready", "start: connection to READY=1, activated", "ms"),
    ("runs.start.answer", "start: connection to first answer, activated", "ms"),
    ("runs.look.bare", "python3 -c pass", "ms"),
    ("runs.look.read", "a manifest and a database read, process and all", "ms"),
    ("runs.look.status", "both, and `orchestrate status` of 200 runs", "ms"),
    ("runs.memory_1.pss", "idle memory of one, PSS", "KiB"),
    ("runs.memory_1.private", "idle memory of one, private", "KiB"),
    ("runs.memory_crowd.pss", "the same of each of all at once, PSS", "KiB"),
    ("runs.memory_crowd.private", "the same, private", "KiB"),
    ("runs.wait.cpu_us", "waiting: processor time per run and minute", "us"),
    ("runs.wait.wakeups", "waiting: wake-ups per run and minute", ""),
    ("runs.wait.share", "waiting: share of a core for all", ""),
)
"""Figures of `runs`. The relay's are its send→message p50 with as many bytes, the commit's those of `commit.py`."""

RUN_SERVERS = ("relay", "bare", "commit", "run")

WORKER_FIGURES = (
    ("workers.start", "start, until the command runs", "ms"),
    ("workers.crowd", "start of each of 40 at once", "ms"),
    *(
        (f"workers.{what}_{crowd}.{kind}", f"{title}, {kind if kind == 'private' else kind.upper()}", "KiB")
        for what, crowd, title in (
            ("shim", "1", "shim"),
            ("shim", "crowd", "shim, each of 40"),
            ("bridge", "1", "bridge"),
            ("bridge", "crowd", "bridge, each of 40"),
        )
        for kind in ("pss", "private", "rss")
    ),
)
"""Figures of `workers`. `bare` is a fork and exec with one round trip to the service manager."""

WORKER_SERVERS = ("bare", "interpreter", "one", "worker")


def figures(rounds: Rounds) -> dict[str, dict[str, float]]:
    """The median over the rounds of every value."""
    collected: dict[str, dict[str, list[float]]] = {}
    for values in rounds:
        for figure, by_server in values.items():
            for server, value in by_server.items():
                collected.setdefault(figure, {}).setdefault(server, []).append(value)
    return {
        figure: {server: median(values) for server, values in by_server.items()}
        for figure, by_server in collected.items()
    }


class Verdict(NamedTuple):
    """A target, the median ratio, its extremes over the rounds, and whether it holds."""

    title: str
    ratio: float
    low: float
    high: float
    bound: float | None
    at_least: bool
    holds: bool


def judge(targets: Iterable[Target], rounds: Rounds) -> list[Verdict]:
    """One verdict for each target that was measured."""
    verdicts = []
    for target in targets:
        ratios = target.ratios(rounds)
        if ratios:
            ratio = median(ratios)
            verdicts.append(
                Verdict(
                    target.title, ratio, min(ratios), max(ratios), target.bound, target.at_least, target.holds(ratio)
                )
            )
    return verdicts


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


INTERCOM = (
    ("target (median of the ratios of each round)", TARGETS, ("pass", "miss")),
    ("what the rules cost", ROOM, ("within", "above")),
    ("calibration", CALIBRATION, ("as known", "differs")),
)
RUNS = (("runs (median of the ratios of each round)", RUN_TARGETS, ("pass", "miss")),)
WORKERS = (("workers (median of the ratios of each round)", WORKER_TARGETS, ("pass", "miss")),)
SECTIONS = (
    (FIGURES, SERVERS, INTERCOM),
    (RUN_FIGURES, RUN_SERVERS, RUNS),
    (WORKER_FIGURES, WORKER_SERVERS, WORKERS),
)


def table(rounds: Rounds) -> str:
    """Figures, targets and calibration of each section that was measured, as text for a terminal of 100 columns."""
    medians = figures(rounds)
    lines: list[str] = []
    for rows, servers, verdicts in SECTIONS:
        measured = [row for row in rows if row[0] in medians]
        if not measured:
            continue
        lines += [""] if lines else []
        lines.append(f"{'figure (median of the rounds)':<46}{'':>4}" + "".join(f"{name:>12}" for name in servers))
        for figure, title, unit in measured:
            cells = "".join(f"{_cell(medians[figure].get(name)):>12}" for name in servers)
            lines.append(f"{title:<46}{unit:>4}{cells}")
        for heading, targets, words in verdicts:
            lines += ["", f"{heading:<46}{'ratio':>8}{'lowest':>9}{'highest':>9}{'bound':>12}  verdict"]
            lines += [_line(verdict, words) for verdict in judge(targets, rounds)]
    return "\n".join(lines)


def _line(v: Verdict, words: tuple[str, str]) -> str:
    bound, word = "-", ""
    if v.bound is not None:
        bound = f"{'>=' if v.at_least else '<='} {v.bound:.3g}"
        word = words[0] if v.holds else words[1]
    return f"{v.title:<46}{_ratio(v.ratio):>8}{_ratio(v.low):>9}{_ratio(v.high):>9}{bound:>12}  {word}".rstrip()


def _ratio(value: float) -> str:
    return f"{value:.1e}" if 0 < value < 0.01 else f"{value:.3f}"
