# SPDX-License-Identifier: Apache-2.0
"""`list`, `status`, `events` and `usage`: their data key by key, and what a person sees at a glance."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, closing, nullcontext

import apsw
import pytest

from agent_intercom.cli.orchestrate import looking, steps
from agent_intercom.orchestration import reader, rows, runtime, snapshot, standing, tmux
from tests.unit.homeruns import SESSION, Runs, change
from tests.unit.orchcli import Home
from tests.unit.orchrows import NOW, event, role
from tests.unit.orchruns import ID, make, tree

ROLE = {"name", "transport", "provider", "model", "thinking", "tool_policy"}
PROVENANCE = {"project", "execution_profile", "project_config", "orchestration_config"}
LISTED = {"session", "valid", *PROVENANCE, "dashboard", "roles", "paths", "run_id", "live", "host", "unit"}
STATUS = {
    "session",
    "run_id",
    "created_at",
    *PROVENANCE,
    "paths",
    "roles",
    "panes",
    "broker",
    "files",
    "truncated",
    "availability",
    "host",
    "unit",
    "live",
    "broker_unit",
    "workers",
    "budget_exceeded",
    "budget_crossed",
    "external",
    "sessions",
    "programs",
    "silent",
    "reports",
    "awaited",
    "next",
}
WORK = "b" * 32


def state(name: str) -> rows.Meta:
    return rows.Meta(key="workflow_state", value=name)


def test_nothing_to_list(home: Home) -> None:
    assert home.json("list").data == {"sessions": [], "truncated": False, "total_sessions": 0}
    assert home.call("list").out == "No runs live. `orchestrate list --all` shows those that have ended.\n"
    assert home.call("list", "--all").out == "No runs.\n"
    assert not (home.root / "home/.local").exists()


def test_what_lives_is_listed(home: Home, runs: Runs) -> None:
    runs.make("ended")
    directory = runs.make()
    with runs.alive(directory):
        found = home.json("list").data
        told = home.call("list").out
    assert found.keys() == {"sessions", "truncated", "total_sessions"}
    [listed] = found["sessions"]
    assert listed.keys() == LISTED
    assert (listed["session"], listed["run_id"], listed["valid"]) == (SESSION, ID, True)
    assert (listed["live"], listed["host"], listed["unit"]) == (True, "systemd", "u1")
    assert listed["project"] == str(home.project) and listed["paths"] == {"coordination": str(directory)}
    assert listed["dashboard"] == snapshot.dashboard(reader.overview(str(directory / "broker.sqlite3")))
    assert [each["name"] for each in listed["roles"]] == ["implementer", "probe", "reviewer"]
    assert all(each.keys() == ROLE for each in listed["roles"])
    assert (found["total_sessions"], found["truncated"]) == (1, False)
    header, row = told.splitlines()
    assert header.split() == ["SESSION", "RUN", "STATE", "ROUND", "WORKERS", "TOKENS", "NOW", "PROJECT"]
    assert row.split() == [SESSION, ID, "active", "2", "2/3", "141!", "implementer", "at", "work", str(home.project)]


def test_everything_is_listed(home: Home, runs: Runs) -> None:
    original = home.root / "home/.pi/agent/orchestrations"
    runs.make("old", "20260701T120000Z-1")
    runs.make("old", "20260702T120000Z-1")
    make(original, "tmux", project=home.project, version=5, schema_version=8)
    make(original, "legacy", "20260601T120000Z-1", project=home.project, version=2)
    (make(runs.root, "broken", project=home.project) / "manifest.json").write_text("{")
    (runs.make("unreadable", "20260501T120000Z-1") / "broker.sqlite3").write_text("no database" * 99)
    live = runs.make()
    with runs.alive(live):
        found = home.json("list", "--all").data
        told = home.call("list", "--all").out
    by_name = {f"{each['session']}/{each.get('run_id', '')[:8]}": each for each in found["sessions"]}
    assert list(by_name) == [
        f"{SESSION}/20260801",
        "tmux/20260801",
        "old/20260702",
        "old/20260701",
        "legacy/20260601",
        "unreadable/20260501",
        "broken/",
    ]
    assert {name: each["live"] for name, each in by_name.items() if each["valid"]} == {
        name: name.startswith(SESSION) for name in by_name if name != "broken/"
    }
    assert by_name["tmux/20260801"]["host"] == "tmux"
    assert by_name["tmux/20260801"]["roles"][0].keys() == ROLE | {"pane_id"}
    assert by_name["legacy/20260601"]["dashboard"] == {"available": False, "reason": "legacy-run"}
    unavailable = {"available": False, "reason": "temporarily-unavailable"}
    assert by_name["unreadable/20260501"]["dashboard"] == unavailable
    assert by_name["broken/"] == {
        "session": "broken",
        "valid": False,
        "project": None,
        "roles": [],
        "paths": {"coordination": str(runs.root / "broken" / ID)},
        "error": {"code": "orchestration_error", "message": "the manifest is not strict JSON"},
    }
    assert (found["total_sessions"], found["truncated"]) == (7, False)
    cells = {line.split()[0]: line for line in told.splitlines()}
    assert "active, ended" in cells["old"] and "legacy run, ended" in cells["legacy"]
    assert "unreadable, ended" in cells["unreadable"] and "the manifest is not strict JSON" in cells["broken"]


def test_a_list_is_bounded(home: Home, runs: Runs) -> None:
    for number in range(102):
        make(runs.root, f"s{number}", project=home.project, schema_version=None)
    found = home.json("list", "--all").data
    assert len(found["sessions"]) == 100
    assert (found["total_sessions"], found["truncated"]) == (102, True)
    assert home.call("list", "--all").out.splitlines()[-1] == "(2 more, which are older)"


def test_what_lives_in_tmux_is_shown_as_such(home: Home, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    original = home.root / "home/.pi/agent/orchestrations"
    directory = make(original, "theirs", project=home.project, version=5, schema_version=8)
    home.program(
        "tmux",
        f"""#!/bin/sh
case "$2" in
list-windows) printf '%s\\n' 'theirs:agents:{directory}' 'gone:agents:{directory}x' 'mine:vim:' ;;
show-options) [ "$7" = =theirs:=agents ] && echo '{directory}' ;;
esac
""",
    )
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(home.root / "tmux"))
    monkeypatch.setenv("TMUX", f"{home.root}/tmux,1,0")
    listed, gone = home.json("list").data["sessions"]
    assert (listed["session"], listed["live"], listed["host"], listed["unit"]) == ("theirs", True, "tmux", None)
    assert (gone["session"], gone["valid"]) == ("gone", False)
    assert "active, in tmux" in home.call("list").out
    found = home.json("status", "theirs").data
    assert (found["live"], found["host"], found["unit"], found["next"]) == (True, "tmux", None, [])
    assert found["awaited"] and found["workers"] is None
    assert "lives in tmux, under the program that started it" in home.call("status", "theirs").out


def test_a_run_in_tmux_is_counted_once(home: Home, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is older than everything that a page of retained runs has room for."""
    original = home.root / "home/.pi/agent/orchestrations"
    retained = make(original, "t", "20250101T120000Z-1", project=home.project, version=5, schema_version=None)
    elsewhere = make(home.root / "else", "u", project=home.project, version=5, schema_version=None)
    for number in range(101):
        make(runs.root, f"s{number}", project=home.project, schema_version=None)
    monkeypatch.setattr(tmux, "hosted", lambda environ: {str(retained): "t", str(elsewhere): "u", "/gone/v/r": "v"})
    live = make(home.root / "third", "w", project=home.project, schema_version=None)
    with runs.alive(live):
        assert home.json("list").data["total_sessions"] == 4
        found = home.json("list", "--all").data
    assert (found["total_sessions"], found["truncated"], len(found["sessions"])) == (105, True, 100)


@pytest.mark.parametrize("words", [["list"], ["list", "--all"]], ids=" ".join)
def test_a_directory_of_runs_that_is_none_is_refused(
    home: Home, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("AGENT_INTERCOM_RUNS_DIR", "relative")
    code, text = home.json(*words).error
    assert code == "orchestration_error" and text.startswith("AGENT_INTERCOM_RUNS_DIR must be an absolute path. ")


def test_status(home: Home, runs: Runs) -> None:
    directory = runs.make()
    with runs.alive(directory) as alive:
        before = tree(home.root)
        found = home.json("status").data
        told = home.call("status", SESSION).out.splitlines()
        assert tree(home.root) == before
    assert found.keys() == STATUS
    assert (found["session"], found["run_id"], found["live"], found["unit"]) == (SESSION, ID, True, "u1")
    assert found["paths"] == {"coordination": str(directory), "observer_socket": alive.path}
    broker = snapshot.broker(reader.overview(str(directory / "broker.sqlite3")))
    assert found["broker"] == broker and found["availability"] == "available"
    for shown, row in zip(found["roles"], broker["roles"], strict=True):
        assert shown.keys() == ROLE | {"broker_state", "rpc_state", "rpc_registry"}
        assert shown["name"] == row["role"] and shown["broker_state"] == row
    assert found["panes"] == [] and found["truncated"] == {"panes": False, "files": False}
    assert found["files"] == sorted(os.listdir(directory))
    assert found["budget_exceeded"] == ["implementer"]
    assert found["awaited"] == [{"role": "implementer", "what": "report", "since": NOW}]
    assert found["next"] == []
    # No service manager answers here.
    assert (found["broker_unit"], found["workers"]) == (None, None)
    assert told[0].startswith(f"run: {SESSION}, {ID}, lives") and told[1] == "unit: orchestrate@u1.service"
    assert any(line.startswith("state: active, round 2, single flow") for line in told)
    assert "tokens: 141 of 1.0k, 4 calls, cost 0.2500" in told
    assert "over budget: implementer, warning: operational tokens 130 of 100 (nothing is stopped by it)" in told
    assert "probe: skips this round (probe-docs)" in told
    assert "guardrail: implementer, warning: provider calls 5 of 4 (nothing is stopped by it)" in told
    assert [line.split()[0] for line in told[-6:-2]] == ["ROLE", "implementer", "reviewer", "probe"]
    assert "approved r1" in told[-5] and "changes requested r1" in told[-4]
    assert told[-2].startswith(f"sessions: {directory}/sessions/ROLE ")
    assert told[-1].startswith("now: implementer at work (since ")


def test_status_of_what_has_ended(home: Home, runs: Runs) -> None:
    runs.make(run_id="20260701T120000Z-1")
    runs.make(version=8)
    found = home.json("status").data
    assert (found["run_id"], found["live"], found["unit"]) == (ID, False, None)
    assert (found["awaited"], found["next"], found["paths"]["observer_socket"]) == ([], [], None)
    told = home.call("status").out
    assert "has ended" in told and "unit:" not in told and "state: active when it ended" in told
    # Nothing is claimed of workers that nobody has seen for long.
    assert "up, g1" not in told and "now: " not in told
    assert home.json("status", SESSION, "--run", "20260701T120000Z-1").data["run_id"] == "20260701T120000Z-1"


@pytest.mark.parametrize(
    ("changes", "awaited", "command"),
    [
        (
            [state("needs_attention"), role("implementer", state="waiting", connected=True, active_assignment_id=WORK)],
            ("implementer", "message"),
            f"orchestrate send {SESSION} --role implementer --message TEXT",
        ),
        (
            [state("uncertain"), role("implementer", state="uncertain", connected=True, active_assignment_id=WORK)],
            ("implementer", "redelivery"),
            f"orchestrate redeliver {SESSION} --role implementer --yes",
        ),
        (
            [state("uncertain"), role("implementer", state="idle", connected=True)],
            (None, "redelivery"),
            f"orchestrate redeliver {SESSION} --role ROLE --yes",
        ),
        (
            [
                state("needs_attention"),
                role("implementer", state="idle", connected=True),
                rows.Meta(key="pending_repair_round", value="3"),
                rows.Meta(key="continuation_policy", value='{"version":1,"max_repair_rounds":1}'),
            ],
            ("implementer", "continuation"),
            f"orchestrate continue {SESSION} --yes --command-id ",
        ),
    ],
)
def test_what_a_person_does_next(
    home: Home, runs: Runs, changes: list[rows.Change], awaited: tuple[str | None, str], command: str
) -> None:
    directory = runs.make(SESSION, ID, *changes)
    with runs.alive(directory):
        found = home.json("status").data
        told = home.call("status").out
        listed = home.call("list").out
    assert (found["awaited"][0]["role"], found["awaited"][0]["what"]) == awaited
    step = found["next"][0]
    assert step["command"].startswith(command) and f"next: {step['why']}: {command}" in told
    phrase = standing.Awaited(*awaited, None).phrase
    assert phrase.startswith("waiting for a person") and phrase in listed and f"now: {phrase}" in told
    assert ("repair rounds: 1 of 1" in told) == (awaited[1] == "continuation")


def test_a_run_that_is_ready(home: Home, runs: Runs) -> None:
    directory = runs.make(SESSION, ID, state("ready"), role("implementer", state="idle", connected=True))
    with runs.alive(directory):
        found = home.json("status").data
    assert found["awaited"] == []
    assert [each["command"].split()[1] for each in found["next"]] == ["send", "stop"]


@pytest.mark.parametrize("down", [True, False])
def test_a_worker_that_has_ended_can_be_started_again(down: bool) -> None:
    away = [standing.Awaited("reviewer", standing.CONNECTION, None)]
    gone = {"reviewer"} if down else set()
    found = list(steps.steps(away, "s", "orchestrate", ready=False, down=gone, new_id=""))
    assert [each["command"] for each in found] == (["orchestrate restart s --role reviewer --yes"] if down else [])


def test_what_a_program_printed_is_named_where_it_ended_or_waits() -> None:
    label = {"reviewer": "a1/reviewer"}

    def told(found: list[standing.Awaited], down: set[str]) -> list[str]:
        made = steps.steps(found, "s", "orchestrate", ready=False, down=down, new_id="", printing=label)
        return [each["command"] for each in made]

    printed = "orchestrate worker logs a1/reviewer --output"
    assert told([standing.Awaited("reviewer", standing.CONNECTION, None)], {"reviewer"})[0] == printed
    assert told([standing.Awaited("reviewer", standing.MESSAGE, None)], set())[0] == printed
    assert told([standing.Awaited("reviewer", standing.REPORT, None)], set()) == []
    # What Pi said is in its sessions.
    assert printed not in told([standing.Awaited("implementer", standing.MESSAGE, None)], {"implementer"})


def test_what_units_tell(home: Home, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = runs.make(SESSION, ID, state("connecting"), role("reviewer", state="disconnected"))
    common = {"generation": 1, "unit": "worker-0123456789ab.scope", "sub": "", "pid": 0, "status_text": ""}
    up = {"active": "active", "result": "success", "enforced": ["nothing"], "exit": None}
    ended = {"active": "inactive", "result": "exit-code", "enforced": [], "exit": {"code": 3, "signal": None, "at": 1}}
    units = [{**common, **up, "role": "implementer"}, {**common, **ended, "role": "reviewer"}]
    broker = {"active": "active", "sub": "running", "status_text": "2 of 3 workers", "pid": 1, "result": "success"}
    monkeypatch.setattr(looking, "_units", lambda entry: (broker, units))
    with runs.alive(directory):
        found = home.json("status").data
        told = home.call("status").out
    assert (found["broker_unit"], found["workers"]) == (broker, units)
    assert "broker: runs (2 of 3 workers)\n" in told and "worker: reviewer has ended, with exit status 3\n" in told
    assert "enforced: implementer: nothing\n" in told
    commands = [each["command"] for each in found["next"]]
    assert f"orchestrate restart {SESSION} --role reviewer --yes" in commands


def test_status_of_a_legacy_run_and_while_the_database_is_written(
    home: Home, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(runs.root, "legacy", project=home.project, version=1)
    found = home.json("status", "legacy").data
    assert (found["broker"], found["availability"]) == (None, "legacy-run")
    assert found["roles"][0]["broker_state"] is None and found["roles"][0].keys() == ROLE | {"pane_id", "broker_state"}
    assert "before brokers" in home.call("status", "legacy").out
    directory = runs.make()
    monkeypatch.setattr(reader, "BUSY_TIMEOUT_MS", 1)
    with closing(apsw.Connection(str(directory / "broker.sqlite3"))) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        found = home.json("status").data
        assert found.keys() == STATUS
        assert (found["broker"], found["availability"]) == (None, "temporarily-unavailable")
        assert "try again" in home.call("status").out
        assert "temporarily unavailable" in home.call("list", "--all").out


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["status", "nobody"], "orchestration_state_not_found"),
        (["status", "no name"], "orchestration_error"),
        (["status", SESSION, "--run", "x"], "orchestration_error"),
        (["events", "nobody"], "orchestration_state_not_found"),
        (["events", SESSION, "--role", "django"], "invalid_arguments"),
        (["events", "legacy"], "orchestration_error"),
        (["usage", "nobody"], "orchestration_state_not_found"),
        (["status", "damaged"], "orchestration_error"),
        (["status", "lost"], "broker_not_ready"),
    ],
)
def test_questions_without_an_answer(home: Home, runs: Runs, words: list[str], code: str) -> None:
    runs.make()
    make(runs.root, "legacy", project=home.project, version=1)
    (runs.make("damaged") / "broker.sqlite3").write_text("no database" * 99)
    (runs.make("lost") / "broker.sqlite3").unlink()
    found = home.json(*words)
    assert found.error[0] == code and found.code == 2
    told = home.call(*words)
    assert told.out == "" and told.err.count("\n") == 1 and told.err.startswith("orchestrate: ")


def test_without_any_run(home: Home) -> None:
    said = home.call("status")
    assert said.err == (
        "orchestrate: no session is named, and no run lives. `orchestrate list --all` shows what there is.\n"
    )


def test_events(home: Home, runs: Runs) -> None:
    directory = runs.make()
    found = home.json("events", SESSION).data
    assert found.keys() == {"session", "run_id", "roles", "events", "cursor", "paths"}
    assert [each["sequence"] for each in found["events"]] == [1, 2, 3, 4, 5]
    assert found["events"][0].keys() == {
        "sequence",
        "timestamp",
        "event",
        "role",
        "round",
        "assignment_id",
        "delivery_id",
        "status",
    }
    whole = {"earliest_retained": 1, "latest": 5, "gap": False, "truncated": False}
    assert found["cursor"] == {"after": 0, "next": 5, **whole}
    found = home.json("events", "--role", "implementer", "--role", "reviewer", "--after", "2", "--limit", "1").data
    assert [each["sequence"] for each in found["events"]] == [3]
    assert found["cursor"] == {"after": 2, "next": 3, **whole | {"truncated": True}}
    told = home.call("events", "--limit", "2").out.splitlines()
    assert told[0].split() == ["NUMBER", "TIME", "ROLE", "EVENT", "ROUND", "STATUS"]
    assert len(told) == 4 and told[-1] == f"(more: orchestrate events {SESSION} --run {ID} --after 2)"
    assert "worker lifecycle" in told[2]
    assert home.call("events", "--after", "9").out == "No events.\n"
    change(directory, *[event(number) for number in range(6, 4_200)])
    assert home.json("events", "--after", "7").data["cursor"]["gap"]
    assert home.call("events", "--after", "0").out.startswith("(events before 104 are not retained)\n")


def test_usage(home: Home, runs: Runs) -> None:
    runs.make()
    found = home.json("usage").data
    assert found["cumulative"]["operational_tokens"] == 141 and found["assignment_count"] == 2
    told = home.call("usage", SESSION, "--run", ID).out.splitlines()
    assert told[1].split()[:4] == ["ROLE", "CALLS", "INPUT", "OUTPUT"]
    assert [line.split()[:2] for line in told[2:6]] == [
        ["implementer", "3"],
        ["reviewer", "1"],
        ["probe", "0"],
        ["all", "4"],
    ]
    assert [line.split()[:4] for line in told[9:11]] == [
        ["1", "implementer", "implementation", "2"],
        ["1", "reviewer", "review", "-"],
    ]
    assert "(the newest 1 assignments; there are more)" in home.call("usage", "--limit", "1").out
    make(runs.root, "legacy", project=home.project, version=1)
    assert "nothing was counted" in home.call("usage", "legacy").out
    make(runs.root, "fresh", project=home.project)
    assert "No assignment has been reported yet." in home.call("usage", "fresh").out


def test_names_of_others_steer_no_terminal(home: Home, runs: Runs) -> None:
    project = home.root / "a\x1b[31m\nb"
    project.mkdir()
    directory = runs.make(project=project)
    (runs.root / "x\x1b[2J").mkdir()
    with runs.alive(directory):
        for words in (["list"], ["list", "--all"], ["status", SESSION], ["events", SESSION], ["usage", SESSION]):
            said = home.call(*words)
            assert said.code == 0 and all(line.isprintable() for line in said.out.splitlines())
    assert home.json("status", SESSION).data["project"] == str(project)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59, "59 s"), (60, "1 min"), (3_599, "59 min"), (7_200, "2 h"), (200_000, "2 d"), (-5, "0 s")],
)
def test_how_long_ago(seconds: int, text: str) -> None:
    assert steps.ago("2026-01-01T00:00:00+00:00", (1_767_225_600 + seconds) * 1_000) == text
    assert steps.ago("2026-01-01T00:00:00", (1_767_225_600 + seconds) * 1_000) == text
    assert steps.ago("then", 0) == steps.ago(None, 0) == ""


PROBE = """
import sys
import agent_intercom.cli.orchestrate.main as program
program.main(sys.argv[1:])
heavy = {"asyncio", "jeepney", "pydantic", "pydantic_settings", "pyroute2", "subprocess", "ssl", "sqlite3", "logging",
    "concurrent", "tempfile", "shutil", "socket", "selectors"}
print(sorted(heavy & sys.modules.keys()))
"""


@pytest.mark.parametrize("words", [["status"], ["list", "--all"], ["events"], ["usage"]], ids=" ".join)
def test_nothing_is_imported_that_is_not_needed(home: Home, runs: Runs, words: list[str]) -> None:
    runs.make()
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *words],
        env={**home.environment, "TMUX_TMPDIR": str(home.root), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_nobody_is_connected_to(home: Home, runs: Runs) -> None:
    with ExitStack() as stack:
        for number in range(3):
            directory = runs.make(f"s{number}", unit=f"v{number}")
            stack.enter_context(runs.alive(directory, f"v{number}"))
        for words in (["list", "--all"], ["status", "s1"], ["events", "s1"], ["usage", "s1"]):
            assert home.json(*words).envelope["success"]
        assert runtime.live(str(home.runtime))


OPENED = """
import sys
import agent_intercom.cli.orchestrate.main as program
opened = []
def heard(event, arguments):
    if event in {"open", "os.listdir", "os.scandir"} and sys.argv[1] in str(arguments[0]):
        opened.append(str(arguments[0]))
sys.addaudithook(heard)
program.main(sys.argv[2:])
print(*opened, sep="\\n")
"""


def opened(home: Home, runs: Runs, *words: str) -> list[str]:
    """What a command opens below the directories of runs; the database, whoever opens it, aside."""
    done = subprocess.run(
        [sys.executable, "-c", OPENED, str(runs.root), *words, "--json"],
        env={**home.environment, "TMUX_TMPDIR": str(home.root), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    envelope, *paths = done.stdout.splitlines()
    assert json.loads(envelope)["success"]
    return [each for each in paths if not each.endswith("/broker.sqlite3")]


@pytest.mark.parametrize("lives", [True, False])
def test_what_is_opened_does_not_grow_with_what_is_retained(home: Home, runs: Runs, lives: bool) -> None:
    directory = runs.make()
    commands = (["status"], ["status", SESSION], ["events"], ["usage"], ["supervisor", "snapshot", SESSION])
    with runs.alive(directory) if lives else nullcontext():
        few = {" ".join(words): opened(home, runs, *words) for words in commands}
        for number in range(200):
            runs.make(f"other{number}" if number % 2 else SESSION, f"202607{number:02}T120000Z-1", schema_version=None)
        many = {" ".join(words): opened(home, runs, *words) for words in commands}
    assert many == few
    listed = [] if lives else [str(directory.parent)]
    assert few["status"] == [*listed, f"{directory}/manifest.json", str(directory)]
