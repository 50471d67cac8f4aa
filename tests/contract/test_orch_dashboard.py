# SPDX-License-Identifier: Apache-2.0
"""A run as a person watches it: on a terminal, in a pipe, and without the run ever noticing."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agent_intercom.orchestration import rows
from tests.contract.orchpeer import BACK, body, eventually
from tests.contract.orchruns import SESSION, Run
from tests.contract.orchwatching import (
    COMPACT,
    FULL,
    NARROW,
    Quiet,
    command,
    environment,
    finished,
    line_with,
    piped,
    terminal,
)
from tests.contract.ptyscreen import OnTerminal

COLOUR = re.compile(r"\x1b\[[0-9;]*[1-9][0-9;]*m")


def switches(pid: int) -> tuple[int, ...]:
    """How often a process was woken or interrupted, and how long it has run."""
    status = Path(f"/proc/{pid}/status").read_text()
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (*(int(n) for n in re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.M)), *map(int, times))


def asleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.fixture
def run() -> Iterator[Run]:
    with Run() as started:
        yield started


@pytest.fixture
def quiet() -> Iterator[Quiet]:
    with Quiet() as led:
        yield led


# The dashboard.


def test_the_dashboard_goes_along_with_a_run() -> None:
    with Run("probe") as run, terminal(run, "dashboard", SESSION) as shown:
        shown.until("waiting for implementer, reviewer, probe to connect", "CONNECTING", "q return")
        assert all(each in shown.glass.text for each in (SESSION, str(run.project), "p/m"))
        assert shown.glass.alternate and not shown.glass.cursor_shown
        run.worker("probe")
        shown.until("waiting for implementer, reviewer to connect")
        workers = {role: run.worker(role) for role in ("implementer", "reviewer")}
        shown.until("ACTIVE", "waiting for implementer")
        implementer, reviewer = workers["implementer"], workers["reviewer"]
        implementer.context("baseline")
        work = implementer.begin("implementation")
        shown.until("implementer implementation r1", "LIVE [■·······]", "assignment delivery")
        usage = {"input": 40_000, "output": 2, "cacheRead": 3, "cacheWrite": 4, "cost": {"total": 0.5}}
        usage["providerCalls"] = 1
        implementer.progress(work["assignment_id"], "tool", usage)
        shown.until("using a tool", "LIVE [·■······]", "tokens 40.0k of 600k")
        implementer.progress(work["assignment_id"], "tool")
        shown.until("LIVE [··■·····]")
        implementer.report(work, body("implementer"))
        shown.until("report accepted", "waiting for probe", but=["NOW"])
        run.leave(reviewer)
        shown.until("worker disconnected", "down g1")
        run.hang_up()
        run.stop()
        assert shown.end() == 0
        last = shown.glass
        assert not last.alternate and last.cursor_shown and "STOPPED" in last.text and SESSION in last.text
        assert shown.modes() == shown.before
        run.start()


def test_rounds_and_the_verdict() -> None:
    with Run() as run, terminal(run, "dashboard") as shown:
        team = run.team()
        team["implementer"].do("implementation")
        shown.until("waiting for reviewer")
        reviewer = team["reviewer"]
        reviewer.context("run_state")
        reviewer.do("review", 1, body("reviewer", **BACK))
        shown.until("round 2", "changes requested")
        team["implementer"].context("run_state")
        team["implementer"].do("implementation", 2)
        reviewer.context("run_state", 2)
        reviewer.do("review", 2)
        shown.until("READY", "round 2", "approved; nothing is waited for")
        shown.press("q")
        assert shown.end() == 0


def test_the_layout_follows_the_size(quiet: Quiet) -> None:
    with terminal(quiet.run, "dashboard", SESSION) as shown:
        shown.until("EVENTS", "MODEL")
        shown.resize(*COMPACT)
        shown.until("LINK", but=["MODEL", "EVENTS"])
        shown.resize(*NARROW)
        shown.until("implementer", "STARTING", but=["LINK"])
        shown.resize(*FULL)
        shown.until("EVENTS", "MODEL")
        shown.press("q")
        assert shown.end() == 0


def test_a_role_that_gets_another_model_is_shown_with_it(quiet: Quiet) -> None:
    with terminal(quiet.run, "dashboard", SESSION) as shown:
        shown.until("STARTING", "p/m")
        manifest = quiet.run.directory / "manifest.json"
        content = json.loads(manifest.read_text())
        content["roles"]["reviewer"]["model"] = "another"
        replacement = manifest.with_suffix(".tmp")
        replacement.write_text(json.dumps(content))
        replacement.rename(manifest)
        shown.until("p/another", "p/m ")
        shown.press("q")
        assert shown.end() == 0


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colours_can_be_refused(quiet: Quiet, no_color: str, coloured: bool) -> None:
    quiet.state("active")
    with terminal(quiet.run, "dashboard", SESSION, variables={"NO_COLOR": no_color}) as shown:
        shown.until("ACTIVE")
        shown.press("q")
        assert shown.end() == 0
        assert bool(COLOUR.search(shown.raw)) is coloured


@pytest.mark.parametrize(
    ("variables", "unicode"),
    [({"LANG": "C.UTF-8"}, True), ({"LC_ALL": "C"}, False), ({"LANG": "C"}, False), ({"LANG": "de_DE"}, False)],
)
def test_a_terminal_that_is_not_utf8_gets_ascii(quiet: Quiet, variables: dict[str, str], unicode: bool) -> None:
    with terminal(quiet.run, "dashboard", SESSION, variables=variables) as shown:
        shown.until("STARTING")
        shown.press("q")
        assert shown.end() == 0
        assert shown.raw.isascii() is not unicode


@pytest.mark.parametrize("name", ["dumb", ""])
@pytest.mark.parametrize("what", ["dashboard", "watch"])
def test_a_dumb_terminal_gets_lines(quiet: Quiet, name: str, what: str) -> None:
    with terminal(quiet.run, what, SESSION, size=(200, 30), variables={"TERM": name}) as shown:
        shown.glass.resize(100_000, 30)
        shown.wait_for(lambda text: "starting" in text.lower())
        quiet.state("active")
        shown.wait_for(lambda text: "active" in text.lower())
        quiet.stop()
        assert shown.end() == 0
        assert "\x1b" not in shown.raw and "stopped" in shown.glass.text.lower()


def test_in_a_pipe_every_change_is_a_line(quiet: Quiet) -> None:
    with piped(quiet.run, "dashboard", SESSION) as process:
        first = line_with(process, "STARTING")
        assert "implementer disconnected down g1 0 | reviewer" in first and "\x1b" not in first
        quiet.state("active")
        line_with(process, "ACTIVE", "12:00:00")
        # Nothing that is shown changes with this.
        quiet.commit("context_delivered", "delivered")
        quiet.state("ready")
        assert process.stdout is not None
        assert "READY" in process.stdout.readline()
        quiet.stop()
        code, out, err = finished(process)
        assert (code, err) == (0, "") and "STOPPED" in out and out.count("\n") == 1


@pytest.mark.parametrize("what", ["dashboard", "watch"])
@pytest.mark.parametrize("way", ["q", "ctrl-c", "ctrl-d", "terminate", "hang up"])
def test_every_way_out_gives_the_terminal_back(quiet: Quiet, what: str, way: str) -> None:
    with terminal(quiet.run, what, SESSION) as shown:
        shown.until("STARTING")
        assert shown.glass.alternate is (what == "dashboard") and not shown.glass.cursor_shown
        assert shown.modes() != shown.before
        match way:
            case "q":
                shown.press("q")
            case "ctrl-c":
                shown.press("\x03")
            case "ctrl-d":
                shown.press("\x04")
            case "terminate":
                shown.signal(signal.SIGTERM)
            case _:
                shown.signal(signal.SIGHUP)
        ended = {"terminate": 128 + signal.SIGTERM, "hang up": 128 + signal.SIGHUP}
        assert shown.end() == ended.get(way, 0)
        assert not shown.glass.alternate and shown.glass.cursor_shown
        assert shown.modes() == shown.before
        assert "Traceback" not in shown.raw


@pytest.mark.parametrize("what", ["dashboard", "watch"])
def test_it_ends_with_its_terminal(quiet: Quiet, what: str) -> None:
    with terminal(quiet.run, what, SESSION) as shown:
        shown.until("STARTING")
        # What it sees first, the signal or the end, is chance.
        assert shown.hang_up() in {0, 128 + signal.SIGHUP}


@pytest.mark.parametrize("what", ["dashboard", "watch"])
def test_it_can_be_suspended(quiet: Quiet, what: str) -> None:
    """Under a shell with job control: what it does with the terminal is the shell's until it goes on."""
    script = 'set -m; "$@"; echo BACK; fg >/dev/null; echo END $?'
    whole = ["bash", "-c", script, "bash", *command(what, SESSION)]
    with OnTerminal(whole, environment(quiet.run), quiet.run.root, FULL) as shown:
        shown.until("STARTING")
        shown.press("\x1a")
        # Its own next picture may be there in the same moment.
        shown.wait_for(lambda text: "BACK" in shown.raw)
        quiet.state("active")
        shown.until("ACTIVE")
        before, _, after = shown.raw.partition("BACK")
        assert before.count("\x1b[?25h") == 1 and "\x1b[?25l" in after
        assert ("\x1b[?1049h" in after) is (what == "dashboard")
        shown.press("q")
        shown.end()
        assert "END 0" in shown.glass.text and shown.glass.cursor_shown and not shown.glass.alternate


# Without the run noticing, and for nothing.


def test_nobody_calls_the_broker_and_the_run_is_left_as_it_is(quiet: Quiet) -> None:
    def files() -> dict[str, tuple[int, int]]:
        found = {p.name: p.stat() for p in quiet.run.directory.iterdir()}
        return {name: (each.st_mtime_ns, each.st_mode) for name, each in found.items()}

    before = files()
    with terminal(quiet.run, "dashboard", SESSION) as shown, terminal(quiet.run, "watch", SESSION) as watched:
        shown.until("STARTING")
        watched.until("STARTING")
        assert files() == before
        for state in ("connecting", "active", "ready"):
            quiet.state(state)
            shown.until(state.upper())
            watched.until(state.upper())
        for each in (shown, watched):
            each.press("q")
            assert each.end() == 0
    quiet.nobody_called()


def test_a_real_broker_has_nobody_more_to_talk_to(run: Run) -> None:
    def descriptors() -> int:
        return len(os.listdir(f"/proc/{run.pid}/fd"))

    before = descriptors()
    with terminal(run, "dashboard", SESSION) as shown:
        shown.until("CONNECTING")
        assert descriptors() == before
        shown.press("q")
        assert shown.end() == 0


@pytest.mark.parametrize("what", ["dashboard", "watch"])
def test_nothing_is_done_while_nothing_happens(run: Run, what: str) -> None:
    with terminal(run, what, SESSION) as shown:
        shown.until("CONNECTING", "broker started")
        eventually(lambda: asleep(shown.pid))
        before = switches(shown.pid)
        # The broker serves meanwhile, and commits nothing.
        for _ in range(200):
            run.watch().close()
        assert switches(shown.pid) == before
        run.worker("implementer")
        eventually(lambda: switches(shown.pid) != before)
        shown.until("worker connected")


def test_many_changes_are_few_pictures(quiet: Quiet) -> None:
    with terminal(quiet.run, "dashboard", SESSION) as shown:
        shown.until("STARTING")
        shown.signal(signal.SIGSTOP)
        drawn = shown.raw.count("\x1b[H")
        for number in range(2, 62):
            quiet.commit("x", "y", rows.Meta(key="round", value=str(number)))
        shown.signal(signal.SIGCONT)
        shown.until("round 61")
        assert shown.raw.count("\x1b[H") - drawn <= 5
        shown.press("q")
        assert shown.end() == 0


# What goes wrong.


def test_a_database_that_is_busy_is_read_again_when_it_is_free(quiet: Quiet) -> None:
    with closing(sqlite3.connect(quiet.run.database, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with terminal(quiet.run, "dashboard", SESSION) as shown, piped(quiet.run, "watch", "--json") as told:
            shown.until("metadata temporarily unavailable", SESSION)
            line_with(told, '"event":"unavailable"')
            other.execute("UPDATE meta SET value = 'ready' WHERE key = 'workflow_state'")
            other.execute("COMMIT")
            shown.until("READY", but=["unavailable"])
            line_with(told, '"event":"state"', '"state":"ready"')
            quiet.stop()
            assert shown.end() == 0 and finished(told)[0] == 0


def test_a_database_that_is_gone_and_comes_back(quiet: Quiet) -> None:
    quiet.state("active")
    with terminal(quiet.run, "dashboard", SESSION) as shown:
        shown.until("ACTIVE")
        away = quiet.run.database.with_name("away")
        os.rename(quiet.run.database, away)
        quiet.touch()
        # What was known stays.
        shown.until("metadata temporarily unavailable", "ACTIVE")
        os.rename(away, quiet.run.database)
        quiet.touch()
        shown.until("ACTIVE", but=["unavailable"])
        shown.press("q")
        assert shown.end() == 0
