# SPDX-License-Identifier: Apache-2.0
"""What a person is told of runs that hold what nobody should have written, cannot be read, or are in trouble."""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

from agent_intercom.cli.orchestrate import looking, steps
from agent_intercom.orchestration import budget, manifest, reader, rootscan, rows, runtime, snapshot, standing
from agent_intercom.orchestration import runs as runs_of
from agent_intercom.tui import view
from agent_intercom.tui.source import RunSource, facts_of
from agent_intercom.workers import pauses
from agent_intercom.workers.bridge import traces
from tests.unit.homeruns import SESSION, TEAM, Runs, change
from tests.unit.orchcli import Home
from tests.unit.orchrows import NOW, event, role
from tests.unit.orchruns import ID

EVIL = "x\x1b]0;OWNED\x07\nnext: rm -rf \u202e"
DEEP = "[" * 100_000


def write(directory: Path, sql: str, *values: str | float) -> None:
    """Write what no broker would."""
    with closing(apsw.Connection(str(directory / "broker.sqlite3"))) as db:
        db.execute("PRAGMA foreign_keys = OFF")
        db.execute(sql, values)


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT OR REPLACE INTO meta VALUES ('workflow_state', ?)",
        "INSERT OR REPLACE INTO meta VALUES ('implementation_flow', ?)",
        "UPDATE roles SET role = ?, state = 'waiting' WHERE role = 'implementer'",
        "UPDATE roles SET state = ? WHERE role = 'implementer'",
        "UPDATE assignments SET kind = ?",
        "UPDATE assignments SET state = ?",
        "UPDATE reports SET kind = ?",
        "UPDATE reports SET verdict = ?",
        "UPDATE events SET event = ?",
        "UPDATE events SET status = ?",
        "UPDATE events SET role = ?",
        "UPDATE specialist_activations SET rule_id = ?",
        "UPDATE assignment_guardrails SET metric = ?",
        "UPDATE assignment_guardrails SET role = ?",
    ],
)
def test_what_a_database_holds_steers_no_terminal(home: Home, runs: Runs, sql: str) -> None:
    directory = runs.make()
    write(directory, sql, EVIL)
    with runs.alive(directory):
        for words in (["list"], ["list", "--all"], ["status"], ["events"], ["usage"], ["supervisor", "snapshot"]):
            said = home.call(*words, SESSION) if words[0] != "list" else home.call(*words)
            for line in (said.out + said.err).splitlines():
                assert line.isprintable() and not line.startswith("next: rm")


def test_no_command_is_suggested_for_a_role_that_nobody_has() -> None:
    found = [standing.Awaited(name, standing.MESSAGE, None) for name in ("reviewer", "rev;rm -rf ~", EVIL)]
    told = list(steps.steps(found, "s", "orchestrate", ready=False, down=(), new_id=""))
    assert [each["command"] for each in told] == ["orchestrate send s --role reviewer --message TEXT"]
    told = list(steps.steps(found[:1], "a b", "orchestrate", ready=True, down=(), new_id=""))
    assert all(" 'a b' " in each["command"] for each in told)


@pytest.mark.parametrize("key", ["forced_specialists", "continuation_policy", "worker_context_policy"])
def test_nesting_without_end_is_damage(home: Home, runs: Runs, key: str) -> None:
    write(runs.make("deep"), "INSERT OR REPLACE INTO meta VALUES (?, ?)", key, DEEP)
    runs.make("other")
    found = {each["session"]: each["dashboard"]["available"] for each in home.json("list", "--all").data["sessions"]}
    assert found == {"deep": False, "other": True}
    assert home.json("status", "deep").error[0] == "orchestration_error"


@pytest.mark.parametrize(("error", "issues"), [(PermissionError(13, "no"), ["shut"]), (FileNotFoundError(2, "no"), [])])
def test_a_session_that_cannot_be_read_hides_no_other(
    home: Home, runs: Runs, monkeypatch: pytest.MonkeyPatch, error: OSError, issues: list[str]
) -> None:
    runs.make("shut")
    runs.make("open")
    names = rootscan._names

    def refusing(directory: str) -> Any:
        if os.path.basename(directory) == "shut":
            raise error
        return names(directory)

    monkeypatch.setattr(rootscan, "_names", refusing)
    found = home.json("list", "--all").data["sessions"]
    assert [each["session"] for each in found if each["valid"]] == ["open"]
    assert [each["session"] for each in found if not each["valid"]] == issues
    assert all("session shut cannot be read: Permission denied" in each["error"]["message"] for each in found[1:])
    listed = home.json("supervisor", "sessions").data
    assert [each["session"] for each in listed["sessions"]] == ["open"]
    assert [each["session"] for each in listed["issues"]] == ["shut"]
    assert home.json("status", "open").envelope["success"]
    assert home.json("status", "shut").error[0] == "orchestration_error"


@pytest.mark.parametrize(
    "words", [["status"], ["events"], ["usage"], ["supervisor", "snapshot"], ["supervisor", "usage"]], ids=" ".join
)
def test_a_fault_of_a_database_names_the_run(home: Home, runs: Runs, words: list[str]) -> None:
    directory = runs.make()
    (directory / "broker.sqlite3").write_text("no database" * 99)
    code, text = home.json(*words, SESSION).error
    assert code == "orchestration_error"
    assert text.startswith(f"the state of {SESSION}, {ID} cannot be read: Broker database is damaged. ")
    assert str(directory) in text and "`orchestrate list --all`" in text
    (directory / "broker.sqlite3").unlink()
    code, text = home.json(*words, SESSION).error
    assert code == "broker_not_ready" and text.startswith(f"the state of {SESSION}, {ID} cannot be read: ")
    assert "`orchestrate doctor`" in text


POLICY = budget.merge(
    budget.PACKAGED,
    budget.overrides(
        [
            "warning.role.provider_calls=1",
            "warning.role.cost_total=0.1",
            "hard.role.cost_total=0.2",
            "hard.run.output_tokens=19",
            "warning.assignment.context_percent=20",
            "warning.run.operational_tokens=off",
            "warning.role.operational_tokens=off",
            "warning.assignment.provider_calls=4",
        ]
    ),
)


def test_every_threshold_that_is_crossed_is_told(home: Home, runs: Runs) -> None:
    directory = runs.make(SESSION, ID, rows.Meta(key="budget_policy", value=budget.to_json(POLICY)))
    with runs.alive(directory):
        found = home.json("status").data
        told = home.call("status").out.splitlines()
        listed = home.call("list").out
        used = home.call("usage").out
    assert found["budget_exceeded"] == ["run", "implementer"]
    assert [tuple(each[key] for key in budget.Crossed._fields) for each in found["budget_crossed"]] == [
        ("run", None, "hard", "output_tokens", 20, 19),
        ("role", "implementer", "warning", "provider_calls", 3, 1),
        ("role", "implementer", "hard", "cost_total", 0.25, 0.2),
        ("assignment", "implementer", "warning", "context_percent", 20.0, 20),
    ]
    lines = [line for line in told if line.startswith("over budget: ")]
    assert lines == [
        "over budget: run, hard: output tokens 20 of 19 (nothing is stopped by it)",
        "over budget: implementer, warning: provider calls 3 of 1 (nothing is stopped by it)",
        "over budget: implementer, hard: cost total 0.2500 of 0.2000 (nothing is stopped by it)",
        "over budget: implementer's assignment, warning: context percent 20% of 20% (nothing is stopped by it)",
    ]
    assert all(line in used for line in lines) and "141!" in listed
    # The contract's flags are about soft budgets of tokens, and stay so.
    assert not any(row["soft_budget_exceeded"] for row in found["broker"]["roles"] if row["role"] != "implementer")


def test_the_reports_tell_what_an_assignment_used(home: Home, runs: Runs) -> None:
    idle = role("implementer", state="idle", connected=True)
    policy = budget.overrides(["warning.assignment.input_tokens=50", "warning.assignment.context_tokens=60"])
    runs.make(SESSION, ID, idle, rows.Meta(key="budget_policy", value=budget.to_json(policy)))
    found = home.json("status").data["budget_crossed"]
    assert [(each["scope"], each["role"], each["metric"]) for each in found] == [
        ("assignment", "implementer", "input_tokens"),
        ("assignment", "implementer", "context_tokens"),
    ]


def test_a_cost_that_nobody_has_is_told_in_few_digits_and_adds_up_to_a_number(home: Home, runs: Runs) -> None:
    policy = budget.merge(budget.PACKAGED, budget.overrides(["warning.run.cost_total=1", "warning.role.cost_total=1"]))
    directory = runs.make(SESSION, ID, rows.Meta(key="budget_policy", value=budget.to_json(policy)))
    write(directory, "UPDATE roles SET cost_total = ?", 1.5e308)
    with runs.alive(directory):
        crossed = home.json("status").data["budget_crossed"]
        assert [each["observed"] for each in crossed if each["scope"] == "run"] == [sys.float_info.max]
        assert home.json("list").data["sessions"][0]["dashboard"]["usage"]["cost_total"] == sys.float_info.max
        for words in (["status"], ["list"], ["usage"]):
            home.json(*words)
            assert max(map(len, home.call(*words).out.split())) < 200
        assert "cost 1.8e+308" in home.call("status").out


def test_of_a_policy_that_is_damaged_the_soft_budgets_are_left(home: Home, runs: Runs) -> None:
    runs.make(SESSION, ID, rows.Meta(key="budget_policy", value=DEEP))
    assert home.json("status", SESSION).data["budget_exceeded"] == ["implementer"]


def units(monkeypatch: pytest.MonkeyPatch, **roles: str) -> None:
    """What the service manager says of workers, and their places of those that have ended."""
    common: dict[str, Any] = {
        "generation": 1,
        "unit": "worker-0123456789ab.scope",
        "sub": "",
        "pid": 0,
        "status_text": "",
    }
    common |= {"result": "signal", "enforced": ["nothing"], "exit": {"code": None, "signal": 9, "at": 1}}
    found = [{**common, "role": name, "active": active} for name, active in roles.items()]
    monkeypatch.setattr(looking, "_units", lambda entry: (None, found))


@pytest.mark.parametrize("state", ["active", "ready", "uncertain"])
def test_a_worker_that_was_killed(home: Home, runs: Runs, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    idle = [role(name, state="idle", connected=True) for name in ("implementer", "probe")]
    gone = role("reviewer", state="uncertain" if state == "uncertain" else "disconnected")
    directory = runs.make(SESSION, ID, rows.Meta(key="workflow_state", value=state), *idle, gone)
    units(monkeypatch, implementer="active", reviewer="failed", probe="active")
    with runs.alive(directory):
        found = home.json("status").data
        told = home.call("status").out
        _, row = home.call("list").out.splitlines()
    assert "worker: reviewer has ended, by signal 9\n" in told
    assert found["next"][0]["command"] == f"orchestrate restart {SESSION} --role reviewer --yes"
    assert row.removesuffix(str(home.project)).rstrip()[-1].isalpha() and "reviewer" in row


def test_a_worker_that_left_processes_behind(home: Home, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = runs.make(SESSION, ID, role("implementer", state="disconnected"))
    units(monkeypatch, implementer="active")
    with runs.alive(directory):
        told = home.call("status").out
    text = "worker: implementer has ended, by signal 9; what it left behind is ended within seconds\n"
    assert text in told


def test_a_worker_that_is_paused(home: Home, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    works = role("implementer", state="active", connected=True, active_assignment_id="b" * 32)
    directory = runs.make(SESSION, ID, works)
    units(monkeypatch, implementer="active", reviewer="active", probe="active")
    _, found = looking._units(None)  # type: ignore[arg-type]
    for each in found or ():
        each["paused"] = each["role"] in {"implementer", "probe"}
    monkeypatch.setattr(pauses, "roles", lambda runtime_dir, unit: ["implementer"])
    with runs.alive(directory):
        unit = home.json("status").data["unit"]
        told = home.call("status").out.splitlines()
        listed = home.call("list").out
        monkeypatch.setattr(pauses, "roles", lambda runtime_dir, unit: [])
        assert "paused" not in home.call("list").out
    rows_ = {line.split()[0]: line for line in told if line}
    assert "paused" in rows_["implementer"] and "paused" in rows_["probe"] and "paused" not in rows_["reviewer"]
    assert "now: waiting for a person: implementer paused" in told and "at work" not in "".join(told)
    assert "waiting for a person: implementer paused" in listed
    assert f"next: to have implementer go on: orchestrate worker resume {unit}/implementer" in told
    assert f"next: to have probe go on: orchestrate worker resume {unit}/probe" in told


def test_where_words_can_be_read(home: Home, runs: Runs) -> None:
    waiting = role("implementer", state="waiting", connected=True, active_assignment_id="b" * 32)
    directory = runs.make(SESSION, ID, rows.Meta(key="workflow_state", value="needs_attention"), waiting)
    sessions = directory / "sessions"
    for name in ("implementer", "reviewer"):
        (sessions / name).mkdir(parents=True)
    for name in ("2026-01_a.jsonl", "2026-02_b.jsonl", "x"):
        (sessions / "implementer" / name).touch()
    with runs.alive(directory):
        told = home.call("status").out.splitlines()
        found = home.json("status").data["sessions"]
    assert f"sessions: {sessions}/ROLE has what the agent of a role said and did" in told
    why = "why implementer stopped without a report, such as an error of its provider"
    assert f"read: {why}: {sessions}/implementer/2026-02_b.jsonl" in told
    assert "what the reviewer said" not in "".join(told), "it has said nothing yet"
    assert found["implementer"] == f"{sessions}/implementer/2026-02_b.jsonl" and found["probe"] == f"{sessions}/probe"


def test_what_the_reviewer_said_is_named_once_it_has(home: Home, runs: Runs) -> None:
    directory = runs.make(SESSION, ID, rows.Meta(key="workflow_state", value="ready"))
    said = directory / "sessions/reviewer/2026-01_a.jsonl"
    with runs.alive(directory):
        assert "read: " not in home.call("status").out
        said.parent.mkdir(parents=True)
        said.touch()
        assert f"read: what the reviewer said: {said}\n" in home.call("status").out


def of_programs(directory: Path) -> None:
    """Have every role be a program's."""
    path = directory / "manifest.json"
    record = json.loads(path.read_text())
    for entry in record["roles"].values():
        entry["harness"] = "command"
    path.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    for name in TEAM:
        os.makedirs(directory / "sessions" / name, 0o700)


def test_what_programs_have_left_to_read(home: Home, runs: Runs) -> None:
    waiting = role("implementer", state="waiting", connected=True, active_assignment_id="b" * 32)
    directory = runs.make(SESSION, ID, rows.Meta(key="workflow_state", value="needs_attention"), waiting)
    of_programs(directory)
    sessions = directory / "sessions"
    with runs.alive(directory) as alive:
        told = home.call("status").out
        assert "read: " not in told and "its program" not in told and "sessions: " not in told
        traces.fell_silent(str(sessions / "implementer"), traces.Silent("implementation", 2, 7, None, 5))
        traces.fell_silent(str(sessions / "probe"), traces.Silent("probe", 1, None, 9, 5))
        traces.publish(str(sessions / "reviewer"), 1, "review", {"kind": "review", "summary": "Not yet."})
        found, told = home.json("status").data, home.call("status").out
    assert (
        "worker: implementer: its program ended with exit status 7, without a report (implementation, round 2)" in told
    )
    assert "worker: probe: its program was ended by signal 9, without a report (probe, round 1)\n" in told
    assert f"read: what reviewer reported last: {sessions}/reviewer/report-1-review.json\n" in told
    label = f"{os.path.basename(alive.path).removesuffix('.sock')}/implementer"
    assert f"next: to read what the program of implementer printed: orchestrate worker logs {label} --output\n" in told
    silent = {"kind": "implementation", "round": 2, "code": 7, "signal": None, "at": 5}
    assert found["silent"]["implementer"] == silent and set(found["silent"]) == {"implementer", "probe"}
    assert found["reports"] == {"reviewer": f"{sessions}/reviewer/report-1-review.json"}
    # What a program writes there itself steers nothing.
    (sessions / "probe/silent.json").write_text('{"kind":"\\u001b]0;x","round":1,"code":1,"signal":null,"at":1}')
    os.symlink("/etc/passwd", sessions / "probe/report-1-probe.json")
    told = home.call("status").out
    assert "\x1b" not in told and "/probe/" not in told


def test_a_program_has_no_model(home: Home, runs: Runs) -> None:
    directory = runs.make(SESSION, ID, role("reviewer", usage=rows.Usage()))
    of_programs(directory)
    with runs.alive(directory) as alive:
        unit = os.path.basename(alive.path).removesuffix(".sock")
        place = runtime.RunPlace(
            directory=str(directory),
            scope=None,
            environment={},
            observer_report_usage=True,
            workers={"reviewer": runtime.WorkerPlace(command=("/opt/my-reviewer", "--key=secret"))},
        )
        runtime.remove(str(home.runtime), unit)
        runtime.write(str(home.runtime), unit, place)
        found, told = home.json("status").data, home.call("status").out
        shown = view.make(
            snapshot.broker(reader.overview(str(directory / "broker.sqlite3"))),
            RunSource(runs_of.at(str(directory))._replace(unit=unit), home.environment).read().facts,
            [],
            view.Life.LIVE,
        )
    cells = {line.split()[0]: line for line in told.splitlines()}
    assert cells["reviewer"].endswith("program my-reviewer") and cells["implementer"].endswith("program")
    assert " - " in cells["reviewer"] and "secret" not in told and "secret" not in json.dumps(found)
    assert found["programs"] == {"implementer": "", "probe": "", "reviewer": "my-reviewer"}
    assert {each["name"]: each["model"] for each in found["roles"]}["reviewer"]
    models = {each.name: (each.model, each.thinking, each.total) for each in shown.roles}
    assert models["reviewer"] == ("program my-reviewer", "", "")
    # The run is over, and what it was told is gone; what a bridge has left is there.
    traces.works(str(directory / "sessions/reviewer"), "/opt/my-\x1breviewer")
    assert home.json("status", SESSION).data["programs"] == {**found["programs"], "reviewer": "my-\x1breviewer"}
    assert "program my-\\x1breviewer" in home.call("status", SESSION).out
    assert facts_of(manifest.read(str(directory)), {}).models["reviewer"].model == "program my-\x1breviewer"


def test_a_worker_of_somebody_else(home: Home, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = runs.make(SESSION, ID, role("reviewer", state="disconnected", generation=3))
    path = directory / "manifest.json"
    record = json.loads(path.read_text())
    for name, entry in record["roles"].items():
        entry["harness"] = "external" if name == "reviewer" else "pi"
    path.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    units(monkeypatch, implementer="active", probe="active")
    with runs.alive(directory) as alive:
        told = home.call("status").out
        found = home.json("status").data
        change(directory, role("reviewer", connected=True, generation=3))
        assert "it connects to" not in home.call("status").out
    assert "away, g3, external" in told and "reviewer" not in found["sessions"]
    assert f"it connects to {alive.path} as generation 3, with the token in {directory}/reviewer.token" in told
    assert "restart" not in told
    place = {"socket": alive.path, "token_file": f"{directory}/reviewer.token", "generation": 3}
    assert found["external"] == {"reviewer": place}


def test_a_worker_on_its_way_is_not_away(home: Home, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    away = [role(name, state="disconnected") for name in TEAM]
    directory = runs.make(SESSION, ID, *away, rows.Meta(key="workflow_state", value="connecting"))
    units(monkeypatch, implementer="active", probe="activating", reviewer="failed")
    with runs.alive(directory):
        cells = {line.split()[0]: line for line in home.call("status").out.splitlines()}
        assert "starting, g1" in cells["implementer"] and "starting, g1" in cells["probe"]
        assert "disconnected" not in cells["implementer"] and "away, g1" in cells["reviewer"]
        change(directory, rows.Meta(key="workflow_state", value="active"))
        assert "starting" not in home.call("status").out


def sign(number: int, name: str) -> rows.Event:
    return rows.Event(sequence=number, timestamp=NOW, event="worker_progress", role=name, round=2, status="tool")


def numbers(out: str) -> list[int]:
    return [int(line.split()[0]) for line in out.splitlines() if line[0].isdigit()]


def test_the_newest_events(home: Home, runs: Runs) -> None:
    directory = runs.make(SESSION, ID, *[event(number) for number in range(6, 101)])
    told = home.call("events").out
    assert numbers(told) == list(range(51, 101))
    assert told.splitlines()[0] == f"(50 older: orchestrate events {SESSION} --run {ID} --after 0)"
    assert numbers(home.call("events", "--last", "2").out) == [99, 100]
    found = home.json("events", "--last", "2").data
    assert [each["sequence"] for each in found["events"]] == [99, 100]
    whole = {"earliest_retained": 1, "latest": 100, "gap": False, "truncated": False}
    assert found["cursor"] == {"after": 98, "next": 100, **whole}
    assert [each["sequence"] for each in home.json("events", "--last", "1", "--role", "reviewer").data["events"]] == [3]
    assert [each["sequence"] for each in home.json("events").data["events"]] == list(range(1, 51))
    assert numbers(home.call("events", "--after", "0").out) == list(range(1, 51))
    for words in (["--last", "2", "--limit", "2"], ["--last", "2", "--after", "2"], ["--last", "0"]):
        assert home.json("events", *words).error[0] == "invalid_arguments"
    change(directory, *[event(number) for number in range(101, 4_300)])
    assert not home.json("events", "--last", "2").data["cursor"]["gap"]


def test_of_signs_of_life_a_person_sees_the_newest(home: Home, runs: Runs) -> None:
    more = [sign(number, "probe" if number % 2 else "implementer") for number in range(6, 200)]
    runs.make(SESSION, ID, *more)
    assert numbers(home.call("events").out) == [1, 2, 3, 4, 5, 198, 199]
    assert len(home.json("events", "--last", "100").data["events"]) == 100
    assert home.call("events", "--after", "150").out.count("worker progress") == 2


def test_which_command_was_decided_on(home: Home, runs: Runs) -> None:
    command = rows.Command(
        id="1" * 32,
        action="send",
        role="reviewer",
        delivery="steer",
        status="uncertain",
        received_at=NOW,
        updated_at=NOW,
    )
    decided = event(6, event="control_command", role="reviewer", delivery_id="1" * 32, status="uncertain")
    unknown = event(7, event="control_command", role="reviewer", delivery_id="2" * 32, status="accepted")
    runs.make(SESSION, ID, command, decided, unknown)
    *_, sent, other = home.call("events").out.splitlines()
    assert "command: send" in sent and "not handed over" in sent and "uncertain" not in sent
    assert "control command" in other and other.endswith("accepted")
    assert home.json("events", "--last", "2").data["events"][0]["status"] == "uncertain"
