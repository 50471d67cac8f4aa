# SPDX-License-Identifier: Apache-2.0
"""What a person tells a run from the command line, against a real broker (orchestration spec, 3.2 and 11.3)."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.cli.orchestrate.main import main
from tests.contract.orchpeer import Worker, body
from tests.contract.orchruns import SESSION, Run

Call = Callable[..., dict[str, Any]]
COMMON = {
    "session",
    "run_id",
    "role",
    "transport",
    "acknowledged",
    "command_id",
    "command_status",
    "duplicate",
    "event_sequence",
}
ID = "0123456789abcdef" * 2


class Caller:
    """The command line of the person who started a run."""

    def __init__(self, run: Run, capfd: pytest.CaptureFixture[str]) -> None:
        self.run = run
        self._capfd = capfd

    def call(self, *words: str) -> tuple[int, str, str]:
        self._capfd.readouterr()
        code = main(words)
        said = self._capfd.readouterr()
        return code, said.out, said.err

    def data(self, *words: str) -> dict[str, Any]:
        code, out, err = self.call("--json", *words)
        envelope = json.loads(out)
        assert code == 0 and err == "" and envelope["success"] and envelope["command"] == words[0], envelope
        found: dict[str, Any] = envelope["data"]
        return found

    def error(self, *words: str) -> tuple[str, str]:
        """Code and text of a refusal, which a person gets in one line."""
        code, out, err = self.call("--json", *words)
        envelope = json.loads(out)
        assert code == 2 and err == "" and not envelope["success"], envelope
        code, out, err = self.call(*words)
        assert code == 2 and out == "" and err.count("\n") == 1 and err.startswith("orchestrate: ")
        return envelope["error"]["code"], envelope["error"]["message"]


def environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(run.root))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run.runtime))
    monkeypatch.setenv("AGENT_INTERCOM_RUNS_DIR", str(run.root / "state"))
    for name in ("PI_CODING_AGENT_DIR", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "DBUS_SESSION_BUS_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(run.project)


@pytest.fixture
def caller(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Caller]:
    with Run("probe", harness="external", repairs=0) as run:
        environment(run, monkeypatch)
        yield Caller(run, capfd)


def test_a_message_reaches_the_worker_under_the_id_that_is_told(caller: Caller) -> None:
    team = caller.run.team()
    data = caller.data("send", SESSION, "--role", "implementer", "--message", "Keep the old format.")
    assert data.keys() == COMMON | {"sent", "delivery"}
    assert data["sent"] is True and data["delivery"] == "steer" and data["acknowledged"] is True
    assert data["command_status"] == "accepted" and data["duplicate"] is False and data["event_sequence"] is None
    assert (data["session"], data["role"], data["transport"]) == (SESSION, "implementer", "rpc")
    frames = [team["implementer"].incoming() for _ in range(2)]
    assert "Keep the old format." in [frame.get("content", "").strip() for frame in frames]
    rows = caller.run.rows("SELECT id, action, delivery FROM control_commands")
    assert rows == [{"id": data["command_id"], "action": "send", "delivery": "steer"}]


def test_the_session_is_that_of_the_directory(caller: Caller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _team = caller.run.team()
    monkeypatch.chdir(tmp_path)
    code, text = caller.error("send", "--role", "implementer", "--message", "x")
    assert code == "invalid_arguments" and f"`orchestrate send {SESSION} …`" in text
    monkeypatch.chdir(caller.run.project)
    assert caller.data("send", "--role", "implementer", "--message", "x")["session"] == SESSION


def test_the_same_id_again_is_the_same_command(caller: Caller) -> None:
    caller.run.team()
    words = ("send", SESSION, "--role", "probe", "--message", "Look.", "--command-id", ID, "--delivery", "follow-up")
    assert caller.data(*words)["duplicate"] is False
    assert caller.data(*words)["duplicate"] is True
    code, out, _ = caller.call(*words)
    assert code == 0 and "accepted before" in out and ID in out
    told = caller.data("supervisor", "command", SESSION, "--role", "probe", "--command-id", ID)
    assert told["command"]["status"] == "accepted" and told["command"]["terminal"] is False
    code, text = caller.error("send", SESSION, "--role", "implementer", "--message", "x", "--command-id", ID)
    assert code == "broker_rejected" and "same id" in text


def test_a_message_from_a_file(caller: Caller, tmp_path: Path) -> None:
    team = caller.run.team()
    name = tmp_path / "message"
    name.write_text("\nFrom a file.\n")
    caller.data("send", SESSION, "--role", "reviewer", "--message-file", str(name))
    assert team["reviewer"].incoming()["content"].strip() == "From a file."


def test_nothing_is_said_to_be_sent_where_nobody_is(caller: Caller) -> None:
    team = caller.run.team()
    caller.run.leave(team["probe"])
    code, text = caller.error("send", SESSION, "--role", "probe", "--message", "x")
    assert code == "broker_uncertain" and "nothing was handed to probe" in text and "not connected" in text


def test_a_run_that_waits_takes_messages_for_the_one_it_waits_for(caller: Caller) -> None:
    team = caller.run.team()
    implementer = team["implementer"]
    implementer.begin("implementation")
    implementer.lifecycle("waiting")
    code, text = caller.error("send", SESSION, "--role", "reviewer", "--message", "x")
    assert code == "broker_rejected" and "waits for an answer to implementer" in text and "--role implementer" in text
    assert caller.data("send", SESSION, "--role", "implementer", "--message", "x")["sent"] is True


def test_abort_asks_the_worker(caller: Caller) -> None:
    team = caller.run.team()
    data = caller.data("abort", SESSION, "--role", "reviewer", "--command-id", ID)
    assert data.keys() == COMMON | {"aborted"} and data["aborted"] is True and data["command_id"] == ID
    assert team["reviewer"].recv()["type"] == "abort"


def test_continue_admits_one_more_round(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    with Run(harness="external", repairs=0) as run:
        environment(run, monkeypatch)
        caller = Caller(run, capfd)
        team = run.team()
        finish(team["implementer"], changed_paths=["a.py"])
        finish(team["reviewer"], verdict="changes_requested")
        assert caller.data("status")["broker"]["workflow"]["state"] == "needs_attention"
        code, text = caller.error("send", SESSION, "--role", "implementer", "--message", "x")
        assert code == "broker_rejected" and f"continue {SESSION}" in text
        words = ("continue", SESSION, "--yes", "--command-id", ID)
        data = caller.data(*words)
        assert data.keys() == COMMON | {"continued"} and data["continued"] is True
        assert caller.data(*words)["duplicate"] is True
        assert caller.data("status")["broker"]["workflow"]["round"] == 2
        code, text = caller.error("continue", SESSION, "--yes", "--command-id", "f" * 32)
        assert code == "broker_rejected" and "no round of repair waits" in text


def finish(worker: Worker, **members: Any) -> None:
    """Read what comes until there is an assignment, and report on it."""
    frame = worker.incoming()
    while frame["type"] != "assignment":
        worker.ack(frame["id"])
        frame = worker.incoming()
    worker.ack(frame["id"])
    worker.lifecycle("active")
    worker.report(frame, body(worker.role, **members))
    worker.lifecycle("idle")


def test_restart_of_a_worker_that_somebody_else_starts(caller: Caller) -> None:
    run = caller.run
    team = run.team()
    data = caller.data("restart", SESSION, "--role", "probe", "--thinking", "high", "--yes")
    assert data["restarted"] is True and data["generation"] == 2 and data["role"]["thinking"] == "high"
    team["probe"].waiting_until_end()
    manifest = json.loads((run.directory / "manifest.json").read_text())
    assert manifest["roles"]["probe"]["thinking"] == "high"
    run.returned("probe", generation=2)


def test_a_restart_that_the_broker_refuses_changes_no_model(caller: Caller) -> None:
    run = caller.run
    run.team()
    before = (run.directory / "manifest.json").read_bytes()
    # Without a memory file nobody can brief a successor.
    run.stop(signal.SIGKILL)
    run.start()
    run.worker("probe")
    code, text = caller.error("restart", SESSION, "--role", "probe", "--thinking", "high", "--yes")
    assert code == "broker_uncertain" and "probe was not let go" in text
    assert (run.directory / "manifest.json").read_bytes() == before


def test_redeliver_is_for_what_is_in_doubt(caller: Caller) -> None:
    run = caller.run
    team = run.team()
    code, text = caller.error("redeliver", SESSION, "--role", "implementer", "--yes")
    assert code == "broker_rejected" and "nothing about it is in doubt" in text
    implementer = team["implementer"]
    assignment = implementer.assignment("implementation")
    implementer.ack(assignment["id"], "uncertain")
    data = caller.data("redeliver", SESSION, "--role", "implementer", "--command-id", ID, "--yes")
    assert data.keys() == COMMON | {"redelivered"} and data["redelivered"] is True
    assert implementer.recv()["assignment_id"] == assignment["assignment_id"]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("send", "nobody", "--role", "probe", "--message", "x"), "orchestration_state_not_found", "list --all"),
        (("send", SESSION, "--role", "probe", "--message", " "), "invalid_arguments", "Message cannot be empty"),
        (("send", SESSION, "--role", "probe"), "invalid_arguments", "--message"),
        (
            ("send", SESSION, "--role", "probe", "--message", "x", "--message-file", "y"),
            "invalid_arguments",
            "--message",
        ),
        (("send", SESSION, "--role", "django", "--message", "x"), "invalid_arguments", "no django"),
        (
            ("send", SESSION, "--role", "probe", "--message", "x", "--command-id", "7"),
            "invalid_arguments",
            "hexadecimal",
        ),
        (
            ("send", SESSION, "--role", "probe", "--message", "x", "--run", "other"),
            "orchestration_error",
            "unavailable",
        ),
        (("send", SESSION, "--role", "probe", "--message", "x" * 40_000), "worker_context_too_large", "32768"),
        (("abort", SESSION), "invalid_arguments", "--role"),
        (("restart", SESSION, "--role", "probe"), "invalid_arguments", "--yes"),
        (("restart", SESSION, "--role", "probe", "--model", "", "--yes"), "invalid_arguments", "--model"),
        (("continue", SESSION, "--command-id", ID), "invalid_arguments", "--yes"),
        (("continue", SESSION, "--yes", "--command-id", "7"), "invalid_arguments", "hexadecimal"),
        (("redeliver", SESSION, "--role", "probe"), "invalid_arguments", "--yes"),
        (("stop", SESSION), "invalid_arguments", "--yes"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_changes_nothing(
    caller: Caller, words: tuple[str, ...], code: str, text: str
) -> None:
    caller.run.team()
    found = caller.error(*words)
    assert found[0] == code and text in found[1], found
    assert caller.run.rows("SELECT * FROM control_commands") == []


def test_a_run_that_has_ended_is_told_so(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    with Run() as run:
        environment(run, monkeypatch)
        caller = Caller(run, capfd)
        run.stop()
        for words in (("send", SESSION, "--role", "reviewer", "--message", "x"), ("stop", SESSION, "--yes")):
            code, text = caller.error(*words)
            assert code == "broker_not_live" and "list" in text
        run.start()
