# SPDX-License-Identifier: Apache-2.0
"""What a bridge must not forget: the content of its file, which has to be on the disk before anything is acknowledged.

Pure. One file for each generation, because each generation begins without a memory (orchestration spec, section 4.7).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from agent_intercom.orchestration import reports
from agent_intercom.orchestration.contract import Kind
from agent_intercom.workers.bridge import fields, spending
from agent_intercom.workers.bridge.spending import Spending

VERSION: Final = 1
MAX_BYTES: Final = 8 * 1_048_576
"""More than the file can come to have: see the bounds below."""

_MAX_SEEN: Final = 4_096
_MAX_DONE: Final = 256
_MAX_MESSAGES: Final = 100
_MAX_MESSAGE_CHARACTERS: Final = 262_144


class Work(msgspec.Struct):
    """The open assignment. `begun`: a command was run for it, or was about to be."""

    delivery: str
    assignment_id: str
    round: int
    kind: str
    content: str
    begun: bool = False
    crossed: list[tuple[str, str]] = []
    """Level and metric of the thresholds that were told."""


class Message(msgspec.Struct):
    """A person's words. `deliver_as` is `steer` or `followUp`."""

    number: int
    deliver_as: str
    content: str


class Kept(msgspec.Struct):
    """A report that the broker has not answered yet, and the round of its assignment (0: unknown)."""

    assignment_id: str
    report: dict[str, Any]
    usage: dict[str, Any] | None = None
    round: int = 0


class Memory(msgspec.Struct):
    """All of it. `seen` are ids of deliveries, `done` ids of assignments that were reported, both oldest first.

    `plans` are those of `done` whose report is a plan. `dropped` counts messages that are too old to be kept,
    `numbered` all that have come.
    """

    role: str
    generation: int
    version: int = VERSION
    baseline: str = ""
    run_state: str = ""
    messages: list[Message] = []
    numbered: int = 0
    dropped: int = 0
    seen: list[str] = []
    work: Work | None = None
    done: list[str] = []
    plans: list[str] = []
    report: Kept | None = None
    spending: Spending = msgspec.field(default_factory=Spending)

    def __repr__(self) -> str:
        return "Memory()"

    def see(self, delivery: str) -> bool:
        """Note a delivery; whether it was there before."""
        if delivery in self.seen:
            return True
        self.seen = [*self.seen[-_MAX_SEEN + 1 :], delivery]
        return False

    def take_message(self, content: str, deliver_as: str) -> Message:
        """Keep a message, and of those before it as many as there is room for."""
        self.numbered += 1
        message = Message(self.numbered, deliver_as, content)
        self.messages.append(message)
        while len(self.messages) > 1 and (
            len(self.messages) > _MAX_MESSAGES
            or sum(len(each.content) for each in self.messages) > _MAX_MESSAGE_CHARACTERS
        ):
            self.messages.pop(0)
            self.dropped += 1
        return message

    def reported(self, assignment_id: str) -> None:
        """An assignment is over."""
        if assignment_id not in self.done:
            self.done = [*self.done[-_MAX_DONE + 1 :], assignment_id]
            # The next assignment may have come meanwhile.
            kept = self.report
            planned = kept is not None and kept.assignment_id == assignment_id and kept.report.get("kind") == Kind.PLAN
            self.plans = [each for each in self.done if each in self.plans or (planned and each == assignment_id)]
        self.report = None
        if self.work is not None and self.work.assignment_id == assignment_id:
            self.work = None

    def text(self) -> str:
        """What a command reads: baseline, run state, messages, assignment, how to answer, each after an empty line.

        The others were written for agents with a tool that a command does not have.
        """
        assert self.work is not None
        lost = [f"({self.dropped} earlier messages are not kept any more.)"] if self.dropped else []
        messages = [each.content for each in self.messages]
        parts = [
            self.baseline,
            self.run_state,
            *lost,
            *messages,
            self.work.content,
            _answering(self.role, self.work.kind),
        ]
        return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _answering(role: str, kind: str) -> str:
    """How a command answers, whatever the texts before say."""
    choice = reports.verdicts(role) if kind != Kind.PLAN else []
    verdict = f" --verdict {choice[0]}\n\nInstead of {choice[0]}: {', '.join(choice[1:])}." if choice else ""
    return (
        "# How to answer here\n\n"
        "There is no tool `orchestrator_report` here: where it is named, the command `orchestrate report` is meant. It "
        "reads the report, one JSON object, from standard input:\n\n"
        "    orchestrate report <report.json\n\n"
        f"{fields.told(role, kind)}\n\n"
        f"A report in words only:\n\n    orchestrate report --summary 'TEXT'{verdict}\n\n"
        "It prints what became of it, and `accepted` ends the assignment. Call it once; do not, "
        "if whoever started you makes the report out of what you print."
    )


_decoder = msgspec.json.Decoder(Memory)
_encoder = msgspec.json.Encoder()


def encode(memory: Memory) -> bytes:
    """The content of the file."""
    return _encoder.encode(memory)


def decode(content: bytes, role: str, generation: int) -> Memory:
    """What `encode` made. Raises ValueError, without any of it, for anything else."""
    try:
        memory = _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # Not chained: the library's own text quotes what was read.
        raise ValueError("not the memory of a bridge") from None
    if (memory.version, memory.role, memory.generation) != (VERSION, role, generation):
        raise ValueError("the memory of another bridge")
    memory.spending.mend()
    if memory.report is not None and not spending.is_report(memory.report.usage):
        memory.report.usage = None
    return memory
