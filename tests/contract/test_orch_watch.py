# SPDX-License-Identifier: Apache-2.0
"""`watch` and `attach`: events as they come, for a person and for a program."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.orchestration import rows
from agent_intercom.orchestration.contract import MAX_EVENTS
from tests.contract.orchpeer import body
from tests.contract.orchruns import SESSION, Run
from tests.contract.orchwatching import (
    COMPACT,
    FULL,
    NARROW,
    NOW,
    Quiet,
    completed,
    environment,
    finished,
    line_with,
    piped,
    terminal,
)
from tests.contract.ptyscreen import OnTerminal

JsonObject = dict[str, Any]


@pytest.fixture
def quiet() -> Iterator[Quiet]:
    with Quiet() as led:
        yield led


def data(line: str) -> JsonObject:
    """What is in the envelope of a line, which has to be compact and sorted."""
    envelope = json.loads(line)
    assert json.dumps(envelope, sort_keys=True, separators=(",", ":")) + "\n" == line
    found = envelope.pop("data")
    assert envelope == {"schema_version": "1", "command": "watch", "success": True, "error": None}
    assert isinstance(found, dict)
    return found


def until(process: subprocess.Popen[str], event: str, **keys: Any) -> JsonObject:
    """The next line with this event, and these values."""
    assert process.stdout is not None
    for line in process.stdout:
        found = data(line)
        if found["event"] == event and all(found[key] == value for key, value in keys.items()):
            return found
    raise AssertionError(f"it ended without {event}")


# In a terminal.


def test_events_scroll_above_where_the_run_stands() -> None:
    with Run() as run, terminal(run, "watch", size=COMPACT) as shown:
        screen = shown.until("CONNECTING", "broker started")
        assert not shown.glass.alternate and not shown.glass.cursor_shown
        assert screen.index("broker started") < screen.index("─────") < screen.index("CONNECTING")
        team = run.team()
        work = team["implementer"].begin("implementation")
        shown.until("NOW  LIVE [■·······]  implementer implementation r1")
        team["implementer"].report(work, body("implementer"))
        screen = shown.until("report accepted", "waiting for reviewer")
        # What was drawn over has left nothing, and what scrolled is there once.
        assert screen.count("─────") // 15 == 1 and screen.count("ACTIVE") == 1 and "CONNECTING" not in screen
        assert [line.split()[1:3] for line in screen.splitlines()][:2] == [
            ["broker", "initialized"],
            ["broker", "started"],
        ]
        assert screen.count("worker connected") == 2
        shown.press("q")
        assert shown.end() == 0
        assert shown.glass.text.startswith(screen)


def test_another_size_draws_the_block_again(quiet: Quiet) -> None:
    with terminal(quiet.run, "watch", SESSION) as shown:
        shown.until("STARTING", "LINK")
        shown.resize(*NARROW)
        shown.until("STARTING", but=["LINK"])
        shown.resize(*FULL)
        quiet.state("active")
        shown.until("ACTIVE", "LINK", but=["STARTING"])
        shown.press("q")
        assert shown.end() == 0


def test_a_run_that_stops_ends_the_watch(quiet: Quiet) -> None:
    with terminal(quiet.run, "watch", SESSION) as shown:
        shown.until("STARTING")
        quiet.stop()
        assert shown.end() == 0
        assert "STARTING  STOPPED" in shown.glass.text and shown.glass.cursor_shown


# In a pipe.


def test_every_event_is_a_line_and_none_is_missing() -> None:
    with Run() as run, piped(run, "watch", SESSION) as process:
        line_with(process, "broker started")
        team = run.team()
        team["implementer"].do("implementation")
        names = [name.replace("_", " ") for name in run.names()]
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in names[2:]]
        for line, name in zip(lines, names[2:], strict=True):
            assert line[9:].startswith(name) and "\x1b" not in line
        run.stop()
        code, out, err = finished(process)
        assert (code, err) == (0, "") and out.splitlines()[-1] == "the run is stopped"
        run.start()


def test_what_a_program_is_told(quiet: Quiet) -> None:
    with piped(quiet.run, "watch", SESSION, "--json") as process:
        assert process.stdout is not None
        assert data(process.stdout.readline()) == {
            "event": "broker_initialized",
            "sequence": 1,
            "timestamp": quiet.run.events()[0]["timestamp"],
            "role": None,
            "round": None,
            "assignment_id": None,
            "delivery_id": None,
            "status": "starting",
        }
        role = {"state": "disconnected", "connected": False, "generation": 1, "activity": None, "assignment": None}
        assert data(process.stdout.readline()) == {
            "event": "state",
            "session": SESSION,
            "run_id": quiet.run.directory.name,
            "life": "live",
            "workflow": {"state": "starting", "round": 1, "implementation_flow": "single"},
            "roles": [{"role": "implementer", **role}, {"role": "reviewer", **role}],
            "paused": [],
            "total_tokens": 0,
        }
        # An event that changes nothing else is told alone.
        quiet.commit("context_delivered", "delivered")
        assert data(process.stdout.readline())["event"] == "context_delivered"
        quiet.state("active")
        assert [data(process.stdout.readline())["event"] for _ in range(2)] == ["workflow_active", "state"]
        quiet.stop()
        found = until(process, "state", life="stopped")
        assert found["workflow"]["state"] == "active"
        code, out, err = finished(process)
        assert (code, err, data(out)) == (0, "", {"event": "stopped"})


def test_events_that_are_no_longer_kept_are_counted(quiet: Quiet) -> None:
    with piped(quiet.run, "watch", SESSION, "--json") as told, piped(quiet.run, "watch", SESSION) as lines:
        until(told, "state")
        line_with(lines, "broker initialized")
        made = [rows.Event(sequence=n, timestamp=NOW, event="x", status="y") for n in range(2, MAX_EVENTS + 12)]
        quiet.apply(made)
        found = until(told, "lost")
        assert found == {"event": "lost", "number": 10}
        assert until(told, "x")["sequence"] == 12
        assert "10 older events are not kept" in line_with(lines, "")
        until(told, "x", sequence=MAX_EVENTS + 11)
        told.terminate()
        lines.terminate()
        finished(told)
        finished(lines)


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_run_that_was_stopped_is_told_and_that_is_all(quiet: Quiet, more: tuple[str, ...]) -> None:
    for number in range(20):
        quiet.commit(f"event_{number}", "z")
    quiet.stop()
    code, out, err = completed(quiet.run, "watch", SESSION, *more)
    assert (code, err) == (0, "")
    assert out.count("event_" if more else "event ") == 8
    if more:
        assert [data(line)["event"] for line in out.splitlines(keepends=True)][-2:] == ["state", "stopped"]
    else:
        assert out.endswith("the run is stopped\n")


def test_nobody_is_written_to_who_has_gone(quiet: Quiet) -> None:
    """Without an event that would have to be written first."""
    with piped(quiet.run, "watch", SESSION) as process:
        line_with(process, "broker initialized")
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(30) == 141


def test_one_of_several_runs_is_watched_by_its_id(quiet: Quiet) -> None:
    quiet.stop()
    name = quiet.run.directory.name
    assert completed(quiet.run, "watch", SESSION, "--run", name)[0] == 0
    code, out, err = completed(quiet.run, "watch", SESSION, "--run", "20200101T000000Z-1")
    assert (code, out) == (2, "") and err.count("\n") == 1


# The dashboard of a run that is over, and what only a terminal can show.


def test_the_last_screen_of_a_run_that_is_over_stays(quiet: Quiet) -> None:
    quiet.state("ready")
    quiet.stop()
    with terminal(quiet.run, "dashboard", SESSION) as shown:
        assert shown.end() == 0
        assert "READY  STOPPED" in shown.glass.text and not shown.glass.alternate and shown.glass.cursor_shown
        assert "\x1b[?1049h" not in shown.raw
    code, out, err = completed(quiet.run, "dashboard", SESSION)
    assert (code, err, out.count("\n")) == (0, "", 1) and "READY  STOPPED" in out


def failure(run: Run, *arguments: str, **variables: str) -> tuple[int, str]:
    """Exit status and code of a command that fails as JSON."""
    code, out, err = completed(run, *arguments, "--json", **variables)
    answer = json.loads(out)
    assert err == "" and out.count("\n") == 1 and answer["success"] is False
    return code, answer["error"]["code"]


def test_what_needs_a_terminal_says_so(quiet: Quiet) -> None:
    assert failure(quiet.run, "dashboard", SESSION) == (2, "interactive_only")
    assert failure(quiet.run, "attach", SESSION) == (2, "interactive_only")
    code, out, err = completed(quiet.run, "attach", SESSION)
    assert (code, out) == (2, "") and err.startswith("orchestrate: attaching needs a terminal. ") and "watch" in err
    quiet.nobody_called()


def test_only_a_run_that_lives_is_attached_to(quiet: Quiet) -> None:
    assert failure(quiet.run, "attach", "nobody") == (2, "orchestration_state_not_found")
    quiet.stop()
    assert failure(quiet.run, "attach", SESSION) == (2, "broker_not_live")


def test_attaching_shows_the_dashboard_here(quiet: Quiet) -> None:
    with terminal(quiet.run, "attach", SESSION) as shown:
        shown.until("STARTING", "EVENTS")
        shown.press("q")
        assert shown.end() == 0


# In tmux.

FAKE = """#!/bin/sh
for each; do printf '%s\\0' "$each"; done > "$HOME/asked"
exit ${TESTS_TMUX_EXIT:-0}
"""


def tmux(run: Run, **more: str) -> dict[str, str]:
    """Variables of a person in a tmux of the tests' own, which keeps what it was asked."""
    bin_ = run.root / "bin"
    bin_.mkdir(exist_ok=True)
    (bin_ / "tmux").write_text(FAKE)
    (bin_ / "tmux").chmod(0o755)
    return {"TMUX": "/nowhere,1,0", "PATH": f"{bin_}:{os.environ['PATH']}", **more}


def test_a_parent_in_tmux_gets_a_window(quiet: Quiet) -> None:
    run = quiet.run
    code, out, err = completed(run, "attach", SESSION, "--json", **tmux(run))
    answer = json.loads(out)
    assert (code, err, answer["success"], answer["command"]) == (0, "", True, "attach")
    assert answer["data"] == {
        "session": SESSION,
        "project": str(run.project),
        "transport": "rpc",
        "mode": "switch-client",
        "return_hint": "q closes the dashboard and its window",
    }
    asked = (run.root / "asked").read_text().split("\0")[:-1]
    assert asked[0] == "new-window"
    # What a window would have: nothing of the parent's but what was handed on.
    handed = dict(each[2:].split("=", 1) for each in asked if each.startswith("-e"))
    words = [each for each in asked[1:] if not each.startswith("-e")]
    assert words[:2] == ["-n", "orchestrate"]
    with OnTerminal(words[2:], {**handed, "TERM": "screen", "PATH": os.environ["PATH"]}, Path("/"), FULL) as shown:
        shown.until("STARTING", SESSION)
        shown.press("q")
        assert shown.end() == 0


def test_a_tmux_that_refuses_is_told(quiet: Quiet) -> None:
    assert failure(quiet.run, "attach", SESSION, **tmux(quiet.run, TESTS_TMUX_EXIT="1")) == (1, "local_runtime_error")


def test_without_tmux_there_is_no_window(quiet: Quiet) -> None:
    empty = quiet.run.root / "empty"
    empty.mkdir()
    found = failure(quiet.run, "attach", SESSION, TMUX="/nowhere,1,0", PATH=str(empty))
    assert found == (1, "missing_prerequisite")


def test_the_environment_of_a_window_is_what_is_needed(quiet: Quiet) -> None:
    """Nothing private goes through the arguments of another program."""
    completed(quiet.run, "attach", SESSION, "--json", **tmux(quiet.run, ANTHROPIC_API_KEY="secret", LANG="C"))
    handed = (quiet.run.root / "asked").read_text()
    assert "secret" not in handed and "-eLANG=C\0" in handed
    assert f"-eXDG_RUNTIME_DIR={environment(quiet.run)['XDG_RUNTIME_DIR']}\0" in handed
