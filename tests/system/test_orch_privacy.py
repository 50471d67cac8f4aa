# SPDX-License-Identifier: Apache-2.0
"""What a run is about stays in the memory of those who work on it, and other users stay out."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.orchpeer import fresh_id, plan
from tests.contract.peer import Frame
from tests.system.runs import KILL, Run, Team
from tests.system.test_broker_privacy import Canaries
from tests.system.wire import UID, Door, until

STARTUP = {"task", "role-task", "capsule", "workspace"}
"""What a run begins with: on the disk until the work has begun."""

PLACE = {"session", "scope", "environment"}
"""What the broker has to know and the manager must not: in the runtime directory, which is memory."""

MANIFEST = {"session", "project", "provider", "model"}
"""What a person chose for the run, and looks up there."""

LOGGED = {"BROKER_STARTED", "BROKER_RESTORED", "RUN_EVENT", "WORKER_REFUSED"}
"""What must have been told, or its silence shows nothing."""

EVERYWHERE = ["/home/alice", f"/run/user/{UID}", "/tmp", "/var/tmp", "/var/log", "/var/lib/systemd", "/dev/shm"]


@pytest.fixture
def door(bed: Any) -> Iterator[Door]:
    with Door(bed) as opened:
        yield opened
        bed.as_user("alice", "systemctl --user stop orchestrate.slice; systemctl --user reset-failed")


def telling_run(bed: Any, door: Door, canary: Canaries) -> Run:
    """A run that was made with a canary in everything that a person can say."""
    return Run(
        bed,
        door,
        "probe",
        flow="phased",
        task=f"Secure the {canary('task')}.",
        role_tasks={"probe": canary("role-task")},
        context_capsule=canary("capsule"),
        relevant_path=canary("workspace"),
        session=canary("session"),
        scope=canary("scope"),
        environment={"SOMETHING": canary("environment")},
        project=f"/home/alice/.local/{canary('project')}",
        provider=canary("provider"),
        model=canary("model"),
    )


def reports(canary: Canaries) -> Any:
    """Reports with a canary in every text, of two rounds."""

    def think(role: str, kind: str, round_: int) -> Frame:
        one = [canary("item")]
        if kind == "plan":
            lists = ("relevant_symbols", "intended_changes", "required_checks", "risks", "open_questions")
            return plan(summary=canary("plan"), relevant_paths=[canary("path")], **{name: one for name in lists})
        finding = {"severity": "high", "path": canary("place"), "line": 1, "summary": canary("finding")}
        told: Frame = {
            "kind": kind,
            "summary": canary("summary"),
            "checks": [{"name": canary("check"), "status": "failed"}],
            "findings": [finding | {"acceptance": canary("acceptance")}],
            "risks": one,
            "limitations": one,
        }
        if kind == "review":
            told["verdict"] = "approved" if round_ > 1 else "changes_requested"
        return told | ({"changed_paths": [f"{canary('path')}.py"]} if kind == "implementation" else {})

    return think


def break_rules(run: Run, canary: Canaries) -> None:
    """The ways to be refused or cut off, each with a word of the peer's in it."""
    hello = {"version": 1, "type": "hello", "role": "reviewer", "token": run.tokens["reviewer"], "id": fresh_id()}
    for frame in (
        hello | {"generation": 1, "token": canary("guess")},
        hello | {"generation": 1, "role": canary("role")},
        hello | {"generation": 1, canary("key"): 1},
        hello | {"generation": canary("generation")},
        {"version": 1, "type": canary("type"), "id": canary("request")},
        {"version": 1, "type": "observe", "token": canary("guess"), "id": fresh_id()},
        {"version": 1, "type": "control", "token": run.control, "id": fresh_id(), "action": canary("action")},
    ):
        peer = run.connect()
        peer.send(frame)
        while peer.recv() is not None:
            pass
    text = canary("garbage").encode()
    for length in (len(text), 1 << 21):
        peer = run.connect()
        peer.send_bytes(struct.pack(">I", length) + text)
        while peer.recv() is not None:
            pass


def offend(run: Run, canary: Canaries) -> None:
    """A worker that was admitted is refused, each time with a word of its own in the request."""
    whose = {"version": 1, "role": "reviewer", "token": run.tokens["reviewer"]}
    body: Frame = {"kind": "review", "summary": canary("summary"), "verdict": "approved"}
    for keys in (
        {"type": "report", "assignment_id": fresh_id(), "report": body},
        {"type": "report", "assignment_id": fresh_id(), "report": body | {canary("key"): canary("item")}},
        {"type": "report", "assignment_id": fresh_id(), "report": body | {"verdict": canary("verdict")}},
        {"type": "progress", "assignment_id": fresh_id(), "phase": canary("phase"), "usage": None},
        {"type": "lifecycle", "state": canary("state"), "usage": None},
        {"type": "ack", "delivery_id": canary("delivery"), "status": canary("status")},
    ):
        peer = run.connect()
        peer.send({**whose, "type": "hello", "id": fresh_id(), "generation": 1}, {**whose, "id": fresh_id(), **keys})
        welcome, refusal = peer.recv(), peer.recv()
        assert welcome is not None and welcome["status"] == "connected"
        assert refusal is not None and refusal["success"] is False
        peer.close()
        until(lambda: not run.rows("SELECT 1 FROM roles WHERE connected"), "the end of it")


def test_no_word_leaves_the_memory(bed: Any, door: Door) -> None:
    canary = Canaries()
    run = telling_run(bed, door, canary)
    # The search finds what there is: nothing has begun yet.
    assert kept(bed, run, canary) == {
        **{"manifest.json": MANIFEST, "startup.json": STARTUP},
        run.place_name: PLACE,
    }
    run.start()
    with Team(run, reports(canary), pauses=[("probe", "probe", 1)]) as team:
        break_rules(run, canary)
        offend(run, canary)
        team.come()
        team.until(lambda: team.workers["probe"].thinks, "did it think")
        assert set(kept(bed, run, canary)) == {"manifest.json", run.place_name}
        for role in ("probe", canary("role")):
            run.send(role, canary("message"))
        for way in (KILL, ("restart",)):
            before = run.pid
            run.systemctl(*way, run.service)
            run.next_pid(before)
            team.answered()
        everywhere(bed, run, canary)
        team.workers["probe"].go_on()
        team.until(team.settled, "did the run end")
        assert team.watcher.state == "ready"
        assert run.send("implementer", canary("message"))["status"] == "accepted"
        team.until(lambda: team.watcher.round == 3 and team.settled(), "did it end again")
        assert any(canary("message") in text for text in team.workers["implementer"].messages)
        assert any(canary("finding") in text for text in team.workers["implementer"].messages)
        run.told("ready, round 3")
        everywhere(bed, run, canary)
    run.stop()
    assert kept(bed, run, canary) == {"manifest.json": MANIFEST}
    # The reading works, and there was something to read.
    assert {entry["INTERCOM_EVENT"] for entry in run.journal() if "INTERCOM_EVENT" in entry} >= LOGGED


def everywhere(bed: Any, run: Run, canary: Canaries) -> None:
    """Whatever systemd, the kernel, the journal or a file has to say of a run that has begun says none of it."""
    tokens = {f"token of {role}": token for role, token in {**run.tokens, "control": run.control}.items()}
    shown = {
        "journal of the user": bed.as_user("alice", "journalctl --user -o json --all").stdout,
        "journal": bed.run("journalctl --sync; journalctl -o json --all; journalctl -o export --all").stdout,
        "properties": bed.as_user("alice", "systemctl --user show '*'; systemctl --user show").stdout,
        "properties of the machine": bed.run("systemctl show '*'; systemctl show").stdout,
        "status": bed.as_user("alice", "systemctl --user status --full --lines=999 '*'", check=False).stdout,
        "command lines": bed.run("cat /proc/[0-9]*/cmdline /proc/[0-9]*/comm", check=False).stdout,
        "environment": bed.run(["cat", f"/proc/{run.pid}/environ"]).stdout,
    }
    assert all(shown.values())
    assert run.service in shown["properties"] and "orchestrate-broker" in shown["command lines"]
    found = {name: canary.found(text) for name, text in shown.items()}
    for name, text in shown.items():
        found[name] |= {which for which, token in tokens.items() if token in text}
    assert {name: kinds for name, kinds in found.items() if kinds} == {}
    assert kept(bed, run, canary) == {
        "manifest.json": MANIFEST,
        run.place_name: PLACE,
    }
    holding = bed.run(["grep", "-rlaF", "-D", "skip", *words(tokens.values()), *EVERYWHERE], check=False).stdout
    allowed = {"control.token", "broker.sqlite3", *(f"{role}.token" for role in run.roles)}
    assert {Path(file) for file in holding.split()} == {run.directory / name for name in allowed}


def words(texts: Any) -> list[str]:
    return [word for text in texts for word in ("-e", text)]


def kept(bed: Any, run: Run, canary: Canaries) -> dict[str, set[str]]:
    """The files of the machine that have a canary in them, by name, and which; those of the run by their own name."""
    found = bed.run(["grep", "-rlaF", "-D", "skip", canary.tail, *EVERYWHERE], check=False).stdout
    files = [Path(file) for file in found.splitlines()]
    kinds = {file: canary.found((bed.root / file.relative_to("/")).read_bytes()) for file in files}
    return {
        str(file.relative_to(run.directory if run.directory in file.parents else "/")): kind
        for file, kind in kinds.items()
    }


def test_other_users_neither_read_nor_connect(bed: Any, door: Door) -> None:
    run = Run(bed, door)
    run.start()
    with (
        Team(run, pauses=[("implementer", "implementation", 1)]) as team,
        Door(bed, "bob") as bob,
        Door(bed, None) as root,
    ):
        team.come()
        files = [str(file) for file in (run.directory, *sorted(run.directory / f.name for f in run.path.iterdir()))]
        place = f"/run/user/{UID}/agent-intercom/run/{run.unit}"
        for file in (*files, place, f"{place}/run.json", f"/proc/{run.pid}/environ", f"/proc/{run.pid}/fd"):
            done = bed.as_user("bob", f"ls -A {file}/ || cat {file}", check=False)
            assert done.returncode != 0 and done.stdout == "", file
        with pytest.raises(PermissionError):
            bob.connect(run.socket)
        above = [str(parent) for parent in Path(run.socket).parents if str(parent).startswith(f"/run/user/{UID}")]
        bed.run(["chmod", "0777", run.socket, *above])
        try:
            for each in (bob, root):
                peer = each.connect(run.socket)
                peer.try_send({"version": 1, "type": "observe", "token": run.control, "id": fresh_id()})
                peer.expect_end()
        finally:
            bed.run(["chmod", "0700", *above])
        # Modes of files alone, once everything above them is open.
        opened = [parent for parent in run.directory.parents if parent.is_relative_to("/home/alice")]
        bed.run(["chmod", "0755", *map(str, opened), str(run.directory)])
        try:
            for name in ("manifest.json", "broker.sqlite3", "control.token", "reviewer.token"):
                assert bed.as_user("bob", ["cat", str(run.directory / name)], check=False).stdout == "", name
        finally:
            bed.run(["chmod", "0700", *map(str, opened), str(run.directory)])
        team.answered()
        assert team.closes() == 0
    refused = [entry for entry in run.journal() if entry.get("INTERCOM_EVENT") == "PEER_REFUSED"]
    assert [entry["INTERCOM_UID"] for entry in refused] == [str(UID + 1), "0"]
    assert {entry["INTERCOM_CODE"] for entry in refused} == {"FOREIGN"}
