# SPDX-License-Identifier: Apache-2.0
"""What people and workers write is in memory only: no word of it is in a file, a log line or a process's public face.

Every body has a word of its own. A whole run is looked through as it goes, after it, and after kills, the one in the
middle of a commit among them.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.orchpeer import body, plan
from tests.contract.orchruns import Run
from tests.contract.orchteam import Command, World
from tests.contract.peer import Frame
from tests.contract.servicemanager import Nursery

SPECIALISTS = ("probe", "playwright", "django")
LISTS = ("relevant_paths", "relevant_symbols", "intended_changes", "required_checks", "risks", "open_questions")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    place = Nursery()
    yield place
    place.close()


def content(path: Path) -> bytes:
    """What is in a file; nothing, if it is gone by now: a process's, or a commit's journal."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


class Words:
    """The words that must be nowhere."""

    def __init__(self) -> None:
        self.all: set[str] = set()

    def new(self, what: str) -> str:
        """A word that nothing else has in it."""
        word = f"canary-{what}-{uuid.uuid4().hex}"
        self.all.add(word)
        return word

    def within(self, content: bytes) -> list[str]:
        """Those that are in `content`, in any of the forms in which text may be kept."""
        forms = ("utf-8", "utf-16-le", "utf-16-be")
        return sorted(word for word in self.all if any(word.encode(form) in content for form in forms))

    def report(self, role: str, kind: str, round_: int) -> Frame:
        """A report with a word in every field that takes one."""
        if kind == "plan":
            return plan(summary=self.new("summary"), **{name: [self.new(name)] for name in LISTS})
        checks = [{"name": self.new("check"), "status": "passed"}]
        finding = {"severity": "high", "path": self.new("path"), "line": 3, "summary": self.new("finding")}
        found: Frame = {
            "summary": self.new("summary"),
            "checks": checks,
            "findings": [{**finding, "acceptance": self.new("acceptance")}],
            "risks": [self.new("risk")],
            "limitations": [self.new("limitation")],
        }
        if kind == "implementation":
            found["changed_paths"] = [f"{self.new('changed')}.py" if round_ == 1 else f"{self.new('changed')}.md"]
        if kind == "review":
            found["verdict"] = "changes_requested" if round_ == 1 else "approved"
        return body(role, **found)


class Watched:
    """A run of whose every body there is a word, and a journal that is read."""

    def __init__(self, nursery: Nursery | None) -> None:
        self.words = words = Words()
        roles = ("implementer", "reviewer", *SPECIALISTS)
        self.run = Run(
            *SPECIALISTS,
            flow="phased",
            task=words.new("task"),
            role_tasks={role: words.new("roletask") for role in roles},
            capsule=words.new("capsule"),
        )
        self.world = World(self.run, nursery, words.report)
        self.journal = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.journal.bind(str(self.run.root / "journal"))
        self.lines: list[bytes] = []
        self.world.loop.watch(self.journal.fileno(), self._read)
        self.faces = b""
        self.statuses: set[str] = set()

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *rest: object) -> None:
        self.world.loop.unwatch(self.journal.fileno())
        self.journal.close()
        self.world.close()

    def _read(self) -> None:
        self.lines.append(self.journal.recv(65536))
        self.look()

    def look(self) -> None:
        """Remember what can be seen of the broker from outside, now."""
        process = Path("/proc") / str(self.world.manager.pid)
        for name in ("cmdline", "environ", "comm"):
            self.faces += content(process / name) if self.world.manager.pid else b""
        self.statuses.add(self.world.manager.status)

    def files(self) -> dict[str, list[str]]:
        """The words in each file of the run, its runtime directory and its broker's output; none is left out."""
        paths = [path for path in self.run.root.rglob("*") if path.is_file()]
        assert {"broker.sqlite3", "manifest.json", "control.token", "run.json", "stderr"} <= {
            path.name for path in paths
        }
        found = {path.name: self.words.within(content(path)) for path in paths}
        return {name: words for name, words in found.items() if words}

    def clean(self) -> None:
        """No word is anywhere."""
        self.look()
        assert self.files() == {}
        assert self.words.within(b"\n".join(self.lines)) == []
        assert self.words.within("\n".join(self.statuses).encode()) == []
        assert self.words.within(self.faces) == []

    def begin(self) -> None:
        """Until the work has begun, the startup file alone has the bodies that it is there for."""
        given = sorted(self.words.all)
        assert self.files() == {"startup.json": given}
        self.world.manager.start()
        *first, last = self.world.lines
        for line in first:
            line.connect()
            while not line.admitted:
                self.world.loop.step("was a peer admitted")
        assert self.files() == {"startup.json": given}
        last.connect()

    def message(self, role: str) -> None:
        """Send the role a message with a word in it."""
        text = self.words.new("message")
        run = self.run
        command = Command(self.world.loop, run.socket, run.control_token, "send", role, text)
        command.connect()
        while not command.status or command.socket:
            self.world.loop.step("was a command answered")
        assert command.status == "accepted"
        member = self.world.members[role]
        self.world.loop.until(lambda: text in member.messages, "did the message arrive")

    def whole(self) -> None:
        """Two rounds to the end, a message, and the round that follows from it."""
        self.begin()
        self.world.settle()
        if self.world.watcher.state == "uncertain":
            self.world.redeliver()
        self.message("reviewer")
        round_ = self.world.watcher.round
        self.message("implementer")
        self.world.loop.until(lambda: self.world.watcher.round > round_, "did another round begin")
        assert self.world.settle() == "ready"
        self.world.told()
        taken = {text for member in self.world.members.values() for text in member.messages}
        assert any(word in text for word in self.words.all for text in taken)


def test_no_body_is_seen_of_a_broker_that_runs() -> None:
    with Watched(None) as watched:
        watched.whole()
        watched.clean()
        assert b"agent_intercom.orchestration" in watched.faces
        assert b"XDG_RUNTIME_DIR" in watched.faces
        watched.world.manager.kill(15)
        watched.world.loop.until(lambda: not watched.world.manager.pid, "did it end")
        watched.clean()


def test_no_body_is_in_a_file_or_log_line_of_a_whole_run(nursery: Nursery) -> None:
    with Watched(nursery) as watched:
        watched.world.manager.orders = [{"journal": str(watched.run.root / "journal")}]
        watched.whole()
        watched.clean()
        # What is looked through is really what the broker writes.
        assert sum(b"INTERCOM_EVENT=RUN_EVENT" in line for line in watched.lines) > 50
        assert any(status.startswith("ready, round 3") for status in watched.statuses)


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "lost"])
@pytest.mark.parametrize("point", [115, 180, 250, 310, 390])
def test_no_body_is_in_a_file_or_log_line_after_kills(nursery: Nursery, point: int, keeps: bool) -> None:
    with Watched(nursery) as watched:
        root = watched.run.root
        order = {"journal": str(root / "journal"), "trace": str(root / "trace")}
        manager = watched.world.manager
        manager.orders = [{**order, "fault": fault} for fault in (point, 5, None)]
        manager.keeps = keeps
        begun = watched.words.within((watched.run.directory / "startup.json").read_bytes())
        after: list[dict[str, list[str]]] = []
        manager.on_end = lambda: after.append(watched.files())
        watched.whole()
        # Bodies that the work has not begun with yet may be needed by the next broker.
        assert all(found in ({}, {"startup.json": sorted(begun)}) for found in after)
        assert len(after) == 2
        watched.clean()


def test_no_body_is_in_what_a_commit_leaves_half_done(nursery: Nursery) -> None:
    with Watched(nursery) as watched:
        root = watched.run.root
        order = {"journal": str(root / "journal"), "trace": str(root / "trace"), "torn": True}
        manager = watched.world.manager
        manager.orders = [{**order, "fault": f"applied#{at}"} for at in (14, 6, 9, 8)]
        manager.orders.append(order)
        after: list[tuple[dict[str, list[str]], bool]] = []
        database = watched.run.directory / "broker.sqlite3-journal"
        manager.on_end = lambda: after.append((watched.files(), database.exists()))
        watched.whole()
        assert len(after) == 4
        # Each left a journal behind, and it was looked through.
        assert all(found == ({}, True) for found in after)
        watched.clean()
