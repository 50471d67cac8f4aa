# SPDX-License-Identifier: Apache-2.0
"""Supervisor API, version 2, key by key (orchestration spec, sections 11.5 and 11.6), and that it only reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from agent_intercom.orchestration import reader, rows, runs, snapshot, supervisor
from agent_intercom.orchestration.errors import Refusal
from tests.unit.orchcli import Home
from tests.unit.orchrows import NOW, event
from tests.unit.orchruns import ID, SPECIALIST, WORKING, Alive, make, tree
from tests.unit.test_orch_snapshot import CONTEXT, RUN, TOTALS, USAGE

TEAM = ("implementer", "reviewer", "probe")
ROLE = {"name", "transport", "provider", "model", "thinking", "tool_policy"}
SNAPSHOT = RUN | {
    "api_version",
    "coordination",
    "host_adapter",
    "workflow",
    "specialist_activations",
    "guardrails",
    "usage",
}
COMMAND = "d" * 32

CAPABILITIES = """
{"api_version":"2","envelope_schema_version":"1","state_plane":"metadata-only-sqlite",
 "worker_transport":"tui-or-rpc-with-shared-bridge",
 "coordination_protocol":{"name":"broker-v1","transport":"owner-only-unix-socket","payload_files":false,"polling":false},
 "host_adapter":{"name":"systemd","attachment":"terminal-only","runtime_observed_by_read_api":false},
 "read_operations":["capabilities","sessions","runs","snapshot","usage","events","command"],
 "control_semantics":{"acknowledgement":"acceptance-or-queueing","completion_observed_via":["events","command"],
   "crash_ambiguity":"uncertain","exactly_once":false},
 "control_commands":{"send":{"command":"send","deliveries":["steer","follow-up"],"exact_run_option":"--run"},
   "abort":{"command":"abort","exact_run_option":"--run"},
   "continue":{"command":"continue","confirmation":"--yes","idempotency_key":"--command-id",
     "scope":"one-additional-repair-round"}},
 "event_cursor":{"scope":"role","initial":0,"argument":"--cursor ROLE=SEQUENCE","retention_gap_reported":true},
 "execution_profiles":{"manifest_metadata_since":4,"legacy":"unavailable",
   "provider_usage_and_quality_evidence":"unavailable"},
 "project_configuration":{"manifest_metadata_since":5,"legacy":"unavailable","matching":"exact-canonical-directory"},
 "usage_accounting":{"cumulative_role_usage":true,"latest_assignment_usage":true,"bounded_assignment_usage_page":true,
   "assignment_result_immutable":true,"legacy_assignment_usage":"unavailable","provider_reported_only":true,
   "in_assignment_guardrails":true,"guardrail_metadata":true,"guardrail_mode":"observational",
   "budget_routing_gates":false},
 "limits":{"page_items":100,"events_per_role":100,"commands_per_role":4096,"state_scan_entries":4096},
 "metadata_only":true}
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    return tmp_path.resolve() / "state"


def run(root: Path, session: str = "s", run_id: str = ID, **options: Any) -> runs.Entry:
    given: dict[str, Any] = {"project": root.parent / "project", "roles": TEAM, "changes": WORKING + SPECIALIST}
    return runs.at(str(make(root, session, run_id, **given | options)))


@contextmanager
def busy(entry: runs.Entry, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The moment of a commit that takes too long for a reader."""
    monkeypatch.setattr(reader, "BUSY_TIMEOUT_MS", 1)
    writer = apsw.Connection(entry.database)
    writer.execute("BEGIN EXCLUSIVE")
    yield
    writer.execute("ROLLBACK")
    writer.close()


def refused(work: Callable[[], object]) -> str:
    with pytest.raises(Refusal) as caught:
        work()
    return caught.value.code


def test_capabilities() -> None:
    found = supervisor.capabilities()
    # What the contract does not have is under one key.
    extensions = found.pop("extensions")
    assert found == json.loads(CAPABILITIES)
    assert extensions["workflow_events"]["argument"] == "--cursor workflow=SEQUENCE"
    assert extensions["snapshot_specialist_activations"] is True
    assert extensions["control_commands"].keys() == {"redeliver"}


def test_sessions(root: Path) -> None:
    run(root, "b", "20260701T120000Z-1")
    newest = run(root, "b")
    run(root, "a", version=1)
    (root / "c").mkdir()
    (root / "b" / "lost").mkdir()
    found = supervisor.sessions([str(root)])
    assert found.keys() == {"api_version", "sessions", "issues", "truncated"}
    assert found["api_version"] == "2" and found["truncated"] is False
    assert found["issues"] == [{"session": "c", "message": "no run is retained"}]
    first, second = found["sessions"]
    assert first.keys() == second.keys() == RUN | {"runs_truncated", "run_issue_count"}
    assert (first["session"], second["session"], second["run_id"]) == ("a", "b", ID)
    assert (second["runs_truncated"], second["run_issue_count"]) == (False, 1)
    public = snapshot.run_object(newest.manifest, ID)
    assert second == public | {"runs_truncated": False, "run_issue_count": 1}
    assert supervisor.sessions([str(root.parent / "nothing")])["sessions"] == []


def test_runs_of_a_session(root: Path) -> None:
    for number in range(3):
        run(root, "s", f"2026070{number}T120000Z-1", changes=())
    (root / "s" / "20260101T120000Z-1").mkdir()
    found = supervisor.runs_of("s", [str(root)])
    assert found.keys() == {"api_version", "session", "runs", "issues", "truncated"}
    assert [each["run_id"][6:8] for each in found["runs"]] == ["02", "01", "00"]
    assert all(each.keys() == RUN for each in found["runs"])
    assert found["issues"] == [{"run_id": "20260101T120000Z-1", "message": "the run has no manifest"}]
    assert found["truncated"] is False and found["session"] == "s"
    limited = supervisor.runs_of("s", [str(root)], 2)
    assert limited["runs"] == found["runs"][:2] and limited["truncated"] and not limited["issues"]
    assert refused(lambda: supervisor.runs_of("t", [str(root)])) == "orchestration_state_not_found"
    for limit in (0, 101):
        assert refused(lambda limit=limit: supervisor.runs_of("s", [str(root)], limit)) == "invalid_arguments"  # type: ignore[misc]


def test_a_snapshot(root: Path) -> None:
    entry = run(root)
    found = supervisor.snapshot_of(entry)
    assert found.keys() == SNAPSHOT
    broker = snapshot.broker(reader.overview(entry.database))
    for key in ("workflow", "specialist_activations", "guardrails", "usage"):
        assert found[key] == broker[key]
    assert found["host_adapter"] == {"name": "systemd", "runtime_status": "not_observed"}
    assert (found["coordination"], found["durable_workers"]) == ("broker-v1", True)
    assert [role["name"] for role in found["roles"]] == ["implementer", "probe", "reviewer"]
    for role, row in zip(found["roles"], broker["roles"], strict=True):
        assert role.keys() == ROLE | {"runtime", "worker", "event_cursor"}
        assert role["runtime"] == {"source": "retained-broker-state", "liveness": "not-observed", "state": row}
        assert role["worker"] is None and role["event_cursor"] == {"earliest_retained": 1, "latest": 5}


@pytest.mark.parametrize("version", range(3, 8))
def test_a_snapshot_of_the_originals(root: Path, version: int) -> None:
    found = supervisor.snapshot_of(run(root, version=version, schema_version=version))
    assert found.keys() == SNAPSHOT
    assert found["host_adapter"]["name"] == "tmux"
    assert found["roles"][0]["runtime"]["state"]["role"] == "implementer"


def test_a_snapshot_while_the_database_is_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = run(root)
    with busy(entry, monkeypatch):
        found = supervisor.snapshot_of(entry)
        assert refused(lambda: supervisor.command(entry, "reviewer", COMMAND)) == "broker_not_ready"
    assert found.keys() == SNAPSHOT | {"availability"}
    assert found["availability"] == "temporarily-unavailable"
    for key in ("workflow", "specialist_activations", "guardrails", "usage"):
        assert found[key] is None
    assert all(role["runtime"]["state"] is None and role["event_cursor"] is None for role in found["roles"])
    (Path(entry.database)).unlink()
    assert refused(lambda: supervisor.snapshot_of(entry)) == "broker_not_ready"


def test_usage(root: Path) -> None:
    found = supervisor.usage(run(root))
    assert found.keys() == {
        "api_version",
        "session",
        "run_id",
        "available",
        "availability",
        "semantics",
        "cumulative",
        "roles",
        "assignment_count",
        "assignment_usage_unavailable",
        "truncated",
        "limit",
        "paths",
    }
    assert (found["available"], found["availability"]) == (True, "available")
    texts = dict(found["semantics"])
    assert texts.pop("payload_bodies_included") is False
    assert texts.keys() == {"cumulative", "assignment", "operational_tokens", "cost"} and all(texts.values())
    assert found["cumulative"].keys() == USAGE | TOTALS
    assert found["cumulative"]["operational_tokens"] == 141
    assert (found["assignment_count"], found["assignment_usage_unavailable"]) == (2, 1)
    assert (found["truncated"], found["limit"]) == (False, 100)
    implementer, probe, reviewer = found["roles"]
    assert implementer.keys() == {"role", "cumulative", "assignments"}
    assert implementer["cumulative"].keys() == USAGE | CONTEXT | TOTALS
    [assignment] = implementer["assignments"]
    assert assignment.keys() == {"assignment_id", "round", "kind", "usage"}
    assert assignment["usage"].keys() == USAGE | CONTEXT | TOTALS | {"peak_context_tokens"}
    assert reviewer["assignments"] == [{"assignment_id": "c" * 32, "round": 1, "kind": "review", "usage": None}]
    assert probe["assignments"] == []


def test_usage_has_the_newest_assignments_in_order(root: Path) -> None:
    def report(number: int, round: int, kind: str) -> list[rows.Change]:
        id = f"{number:032x}"
        assignment = rows.Assignment(
            id=id,
            role="implementer",
            round=round,
            kind=kind,
            state="completed",
            delivery_id=id,
            created_at=NOW,
            updated_at=NOW,
        )
        counts: dict[str, Any] = dict.fromkeys(("summary_chars", "changed_path_count", "check_count"), 0)
        counts |= dict.fromkeys(("finding_count", "risk_count", "limitation_count"), 0)
        made = rows.Report(
            id=id, assignment_id=id, role="implementer", round=round, kind=kind, verdict=None, created_at=NOW, **counts
        )
        return [assignment, made]

    reports = [report(1, 1, "plan"), report(2, 1, "implementation"), report(4, 2, "plan"), report(3, 2, "plan")]
    entry = run(root, changes=[each for pair in reports for each in pair])
    found = supervisor.usage(entry)["roles"][0]["assignments"]
    assert [int(each["assignment_id"], 16) for each in found] == [2, 1, 3, 4]
    page = supervisor.usage(entry, 2)
    assert [int(each["assignment_id"], 16) for each in page["roles"][0]["assignments"]] == [3, 4]
    assert (page["truncated"], page["limit"], page["assignment_count"]) == (True, 2, 2)
    assert not supervisor.usage(entry, 4)["truncated"]
    for limit in (0, 101):
        assert refused(lambda limit=limit: supervisor.usage(entry, limit)) == "invalid_arguments"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("version", "availability"), [(1, "unavailable_legacy_coordination"), (8, "temporarily-unavailable")]
)
def test_usage_that_is_not_there(root: Path, monkeypatch: pytest.MonkeyPatch, version: int, availability: str) -> None:
    entry = run(root, version=version)
    with busy(entry, monkeypatch):
        found = supervisor.usage(entry)
    assert found.keys() == supervisor.usage(run(root, "t")).keys()
    assert (found["available"], found["availability"]) == (False, availability)
    assert (found["cumulative"], found["roles"], found["assignment_count"]) == (None, [], 0)
    assert (found["assignment_usage_unavailable"], found["truncated"]) == (0, False)


def test_events_by_role(root: Path) -> None:
    found = supervisor.events(run(root))
    assert found.keys() == {"api_version", "session", "run_id", "roles", "workflow", "paths"}
    assert [role["role"] for role in found["roles"]] == ["implementer", "probe", "reviewer"]
    for role in found["roles"]:
        assert role.keys() == {"role", "runtime", "worker", "events", "cursor"}
        assert role["runtime"] == {"source": "retained-broker-state", "liveness": "not-observed"}
        assert role["worker"] is None
    implementer, probe, _ = found["roles"]
    assert implementer["events"] == [
        {
            "sequence": 2,
            "timestamp": NOW,
            "event": "worker_lifecycle",
            "role": "implementer",
            "round": 1,
            "assignment_id": "a" * 32,
            "delivery_id": "1" * 32,
            "status": "idle",
        },
        {
            "sequence": 5,
            "timestamp": NOW,
            "event": "worker_lifecycle",
            "role": "implementer",
            "round": 2,
            "assignment_id": None,
            "delivery_id": None,
            "status": "idle",
        },
    ]
    whole = {"earliest_retained": 1, "latest": 5, "gap": False, "truncated": False}
    assert implementer["cursor"] == {"after": 0, "next": 5, **whole}
    assert probe == probe | {"events": [], "cursor": {"after": 0, "next": 0, **whole}}
    assert found["workflow"].keys() == {"events", "cursor"}
    assert [each["sequence"] for each in found["workflow"]["events"]] == [1, 4]
    assert found["workflow"]["cursor"] == {"after": 0, "next": 4, **whole}


def test_every_stream_has_a_cursor_of_its_own(root: Path) -> None:
    entry = run(root)
    found = supervisor.events(entry, ["reviewer", "implementer"], ["implementer=2", "workflow=0"], 1)
    reviewer, implementer = found["roles"]
    assert (reviewer["role"], implementer["role"]) == ("reviewer", "implementer")
    assert [each["sequence"] for each in implementer["events"]] == [5]
    assert implementer["cursor"] | {"gap": None} == {
        "after": 2,
        "next": 5,
        "earliest_retained": 1,
        "latest": 5,
        "gap": None,
        "truncated": False,
    }
    assert found["workflow"]["cursor"]["truncated"] and found["workflow"]["cursor"]["next"] == 1
    beyond = supervisor.events(entry, ["probe"], ["probe=99"])["roles"][0]
    assert beyond["cursor"]["next"] == 99 and not beyond["events"]


def test_a_gap_is_told(root: Path) -> None:
    entry = run(root, changes=[event(number, role="probe") for number in range(2, 4_100)])
    found = supervisor.events(entry, [], ["probe=3", "reviewer=2"])
    by_role = {role["role"]: role["cursor"] for role in found["roles"]}
    assert by_role["probe"]["earliest_retained"] == 4
    assert {role: cursor["gap"] for role, cursor in by_role.items()} == {
        "implementer": True,
        "probe": False,
        "reviewer": True,
    }
    assert by_role["probe"] | {"truncated": True, "next": 53} == by_role["probe"]


@pytest.mark.parametrize(
    ("roles", "cursors", "limit"),
    [
        (["nobody"], [], 50),
        (["django"], [], 50),
        (["probe", "probe"], [], 50),
        ([], ["probe=1", "probe=1"], 50),
        ([], ["workflow=1", "workflow=2"], 50),
        (["probe"], ["reviewer=1"], 50),
        ([], ["django=1"], 50),
        ([], ["probe"], 50),
        ([], ["probe="], 50),
        ([], ["probe=-1"], 50),
        ([], ["probe=+1"], 50),
        ([], ["probe=1.0"], 50),
        ([], ["probe=٣"], 50),
        ([], ["probe=" + "9" * 19], 50),
        ([], ["=1"], 50),
        ([], [], 0),
        ([], [], 101),
    ],
)
def test_questions_that_make_no_sense(root: Path, roles: list[str], cursors: list[str], limit: int) -> None:
    entry = run(root, changes=())
    assert refused(lambda: supervisor.events(entry, roles, cursors, limit)) == "invalid_arguments"


def test_events_that_are_not_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = run(root)
    with busy(entry, monkeypatch):
        found = supervisor.events(entry, [], ["probe=7"])
    assert found["availability"] == "temporarily-unavailable"
    cursor = {"earliest_retained": None, "latest": None, "gap": False, "truncated": False}
    assert found["roles"][1]["cursor"] == {"after": 7, "next": 7, **cursor}
    assert found["workflow"] == {"events": [], "cursor": {"after": 0, "next": 0, **cursor}}
    legacy = supervisor.events(run(root, "legacy", version=2))
    assert legacy["availability"] == "unavailable_legacy_coordination"
    assert legacy.keys() == found.keys()


def test_a_command(root: Path) -> None:
    entry = run(root)
    found = supervisor.command(entry, "reviewer", COMMAND)
    assert found == {
        "api_version": "2",
        "session": "s",
        "run_id": ID,
        "role": "reviewer",
        "command": {
            "id": COMMAND,
            "action": "send",
            "role": "reviewer",
            "delivery": "steer",
            "status": "accepted",
            "received_at": NOW,
            "updated_at": NOW,
            "terminal": False,
        },
        "paths": {"coordination": entry.directory},
    }
    for role, id in (("implementer", COMMAND), ("reviewer", "0" * 32)):
        call: Callable[[], object] = lambda role=role, id=id: supervisor.command(entry, role, id)  # type: ignore[misc]  # noqa: E731
        assert refused(call) == "broker_command_not_found"
    for role, id in (("django", COMMAND), ("reviewer", "D" * 32), ("reviewer", "d" * 31)):
        call = lambda role=role, id=id: supervisor.command(entry, role, id)  # type: ignore[misc]  # noqa: E731
        assert refused(call) == "invalid_arguments"
    legacy = run(root, "legacy", version=1)
    assert refused(lambda: supervisor.command(legacy, "reviewer", COMMAND)) == "broker_command_not_found"


@pytest.mark.parametrize(
    ("status", "terminal"), [("accepted", False), ("conflict", False), ("rejected", True), ("uncertain", True)]
)
def test_the_end_of_a_command(root: Path, status: str, terminal: bool) -> None:
    entry = run(root)
    database = apsw.Connection(entry.database)
    database.execute("UPDATE control_commands SET status = ?", (status,))
    database.close()
    assert supervisor.command(entry, "reviewer", COMMAND)["command"]["terminal"] is terminal


OPERATIONS = (
    ["capabilities"],
    ["sessions"],
    ["runs", "s"],
    ["runs", "s", "--limit", "1"],
    ["snapshot", "s"],
    ["snapshot", "s", "--run", ID],
    ["usage", "s", "--run", ID, "--limit", "1"],
    ["events", "s", "--run", ID, "--role", "probe", "--cursor", "probe=1", "--cursor", "workflow=2", "--limit", "3"],
    ["command", "s", "--run", ID, "--role", "reviewer", "--command-id", COMMAND],
)


def in_home(home: Home) -> Path:
    return Path(make(home.root / "home/.local/state/agent-intercom/runs", "s", project=home.project, roles=TEAM,
                     changes=WORKING + SPECIALIST))  # fmt: skip


@pytest.mark.parametrize("words", OPERATIONS, ids=lambda words: " ".join(words[:1]))
def test_the_command_line(home: Home, words: list[str]) -> None:
    in_home(home)
    found = home.json("supervisor", *words)
    assert found.envelope["command"] == "supervisor" and found.data["api_version"] == "2"
    told = home.call("supervisor", *words)
    assert told.code == 0 and told.out.startswith("api_version: 2\n") and told.out.isprintable() is False
    assert all(line.isprintable() for line in told.out.splitlines())
    assert len(json.dumps(found.data)) <= 262_144


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["runs", "t"], "orchestration_state_not_found"),
        (["snapshot", "t"], "orchestration_error"),
        (["snapshot", "s", "--run", "x"], "orchestration_error"),
        (["usage", "s", "--limit", "0"], "invalid_arguments"),
        (["events", "s", "--role", "probe", "--role", "probe"], "invalid_arguments"),
        (["events", "s", "--cursor", "nobody=1"], "invalid_arguments"),
        (["command", "s", "--role", "probe", "--command-id", COMMAND], "broker_command_not_found"),
        (["command", "s", "--role", "probe", "--command-id", "x"], "invalid_arguments"),
    ],
)
def test_the_command_line_refuses(home: Home, words: list[str], code: str) -> None:
    in_home(home)
    found = home.json("supervisor", *words)
    assert found.error[0] == code and found.code == 2
    told = home.call("supervisor", *words)
    assert told.out == "" and told.err.count("\n") == 1


WATCHED = """
import os, sys
allowed = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_DIRECTORY
refused = {
    "os.chmod", "os.chown", "os.exec", "os.fork", "os.link", "os.mkdir", "os.posix_spawn", "os.remove", "os.rename",
    "os.rmdir", "os.symlink", "os.truncate", "os.utime", "socket.__new__", "socket.connect", "subprocess.Popen",
}
def hook(event, arguments):
    if event in refused or event == "open" and isinstance(arguments[2], int) and arguments[2] & ~allowed:
        os.write(2, f"{event} {arguments}".encode())
        os._exit(9)
import agent_intercom.cli.orchestrate.main as program
sys.addaudithook(hook)
code = program.main(sys.argv[1:])
sys.stdout.flush()
heavy = {"asyncio", "jeepney", "pydantic", "pyroute2", "subprocess", "socket", "shutil"}
print(sorted(heavy & sys.modules.keys()), flush=True)
os._exit(code)
"""


@pytest.mark.parametrize("words", OPERATIONS, ids=lambda words: " ".join(words[:1]))
def test_nothing_is_asked_written_or_woken(home: Home, words: list[str]) -> None:
    directory = in_home(home)
    with Alive(home.runtime, "u1", directory):
        before = tree(home.root)
        done = subprocess.run(
            [sys.executable, "-B", "-c", WATCHED, "--json", "supervisor", *words],
            env={**home.environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert tree(home.root) == before
    assert done.stdout.splitlines()[1] == "[]"
    assert "live" not in json.loads(done.stdout.splitlines()[0])["data"]
