# SPDX-License-Identifier: Apache-2.0
"""`agent-intercom-fleet`: calls as agents make them, what the worker service is asked, and what comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.cli.orchestrate.worker import tool, toolterms
from agent_intercom.cli.orchestrate.worker.toolterms import ACTIONS, ELSEWHERE, PARAMETERS
from agent_intercom.workers import contract
from tests.unit.orchcli import Home
from tests.unit.toldservice import ID, INCARNATION, SCOPE, Refused, Service, ended, serving, worker

SERVICE = Path(__file__).resolve().parents[2] / "service"


@pytest.fixture
def service(home: Home) -> Iterator[Service]:
    """A worker service that listens."""
    with serving(home.runtime) as made:
        yield made


def answer(action: str | None = None, call: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
    """What a call is answered with."""
    said = {"params": {"action": action, **params}, **(call or {})}
    found = tool.answered(json.dumps(said).encode(), os.environ)
    assert json.loads(json.dumps(found)) == found
    return found


def done(action: str, call: dict[str, Any] | None = None, **params: Any) -> tuple[str, dict[str, Any]]:
    """The text and the details of a call that succeeds."""
    found = answer(action, call, **params)
    assert found.keys() == {"ok", "result"} and found["ok"] is True, found
    assert found["result"].keys() == {"text", "details"}
    return found["result"]["text"], found["result"]["details"]


def refused(action: str | None = None, call: dict[str, Any] | None = None, **params: Any) -> tuple[str, str]:
    """The code and the text of a call that fails."""
    found = answer(action, call, **params)
    assert found.keys() == {"ok", "error", "code"} and found["ok"] is False, found
    assert "\n" not in found["error"]
    return found["code"], found["error"]


def call(content: bytes, *words: str, home: Home) -> subprocess.CompletedProcess[bytes]:
    """The program itself."""
    command = [sys.executable, "-m", "agent_intercom.cli.orchestrate.worker.tool", *words]
    environment = {**home.environment, "PYTHONPATH": str(SERVICE)}
    return subprocess.run(command, input=content, capture_output=True, env=environment, timeout=60, check=False)


def test_the_program(home: Home, service: Service) -> None:
    service.answers["list"] = {"workers": [worker("caf\u00e9")], "hidden": 0}
    done_ = call(b'{"params": {"action": "list"}}\n', home=home)
    assert (done_.returncode, done_.stderr) == (0, b"")
    assert done_.stdout.endswith(b"\n") and done_.stdout.count(b"\n") == 1 and done_.stdout.isascii()
    assert json.loads(done_.stdout)["result"]["details"]["workers"][0]["id"] == ID
    failed = call(b"nonsense", home=home)
    assert (failed.returncode, failed.stderr) == (1, b"") and json.loads(failed.stdout)["ok"] is False


def test_the_program_tells_how_it_is_called(home: Home) -> None:
    told = call(b"", "--help", home=home)
    assert told.returncode == 0
    for name in (*ACTIONS, *PARAMETERS):
        assert f"  {name}: ".encode() in told.stdout
    schema = json.loads(call(b"", "--schema", home=home).stdout)
    assert schema == toolterms.schema()
    assert schema["properties"].keys() == {"action", *PARAMETERS} and "_heartbeat" not in str(schema)
    wrong = call(b"", "list", home=home)
    assert wrong.returncode == 2 and wrong.stdout == b"" and wrong.stderr.count(b"\n") == 1


def test_the_table_is_sound() -> None:
    for action in ACTIONS.values():
        assert set(action.needs) <= set(action.takes) <= set(PARAMETERS)
    assert {name for action in ACTIONS.values() for name in action.takes} == set(PARAMETERS)
    assert not ELSEWHERE.keys() & ACTIONS.keys() and not toolterms.RETIRED.keys() & PARAMETERS.keys()


def test_every_action_is_carried_out(home: Home, service: Service) -> None:
    """None is in the table that nothing stands behind."""
    one = {"worker": worker()}
    service.answers = {
        name: one for name in ("start", "stop", "restart", "rename", "adopt", "release", "pause", "resume", "notify")
    }
    service.answers |= {
        "list": {"workers": [worker()], "hidden": 1},
        "status": {"worker": ended(), "processes": [], "unit": None},
        "renew": {"workers": [worker()]},
        "heartbeat": {"workers": []},
        "logs": {"events": [], "output": None},
        "wait": {**one, "reached": True},
        "forget": {"forgotten": [ended()], "candidates": []},
        "prune": {"pruned": [ended()], "candidates": [], "errors": [], "kept": []},
        "cleanup": {"candidates": [], "handled": 0, "errors": 0, "deferred": 0},
        "health": {"version": "1", "live": 0, "systemd": 257, "confinement": []},
    }
    values: dict[str, Any] = {"command": ["true"], "name": "audit", "state": "ready", "acknowledge": True}
    for name, action in ACTIONS.items():
        given: dict[str, Any] = {each: values.get(each, "review") for each in action.needs}
        text, _ = done(name, **given)
        assert text, name


def test_spawn(home: Home, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.answers["start"] = {"worker": worker()}
    monkeypatch.setenv("AGENT_INTERCOM_SCOPE_ID", SCOPE)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    (home.project / "sub").mkdir()
    text, details = done(
        "spawn",
        {"managerSessionId": "mgr-1", "cwd": str(home.project)},
        id="review",
        command=["make", "test"],
        task="Test it.",
        role="audit",
        cwd="sub",
        readOnly=True,
        writable=["."],
        noNetwork=True,
        memoryMax="2G",
        memoryHigh=1 << 30,
        tasksMax=9,
        maxRuntime="2h",
        idleTimeout="infinity",
        grace="1min",
        keepOutput=True,
        key="k",
        harness="command",
        delegationGrant={"maxLiveDirectChildren": 2, "maxLiveDescendants": 4, "maxDepth": 2, "canSubdelegate": True},
    )
    assert text.startswith("review: started, ready") and details["worker"]["id"] == ID
    assert "output: kept, see logs with output\n" in text and "orchestrate worker status" not in text
    assert "for what is to stay, writable or keepOutput" in text
    params = service.params("start")
    assert params.pop("environment")["OPENAI_API_KEY"] == "secret"
    assert params == {
        "harness": "command",
        "command": ["make", "test"],
        "directory": str(home.project / "sub"),
        "name": "review",
        "role": "audit",
        "task": "Test it.",
        "writable": [str(home.project / "sub")],
        "network": False,
        "memory_max": 2 << 30,
        "memory_high": 1 << 30,
        "tasks_max": 9,
        "lifetimes": {"runtime_ms": 7_200_000, "idle_ms": 0, "grace_ms": 60_000},
        "grant": {"children": 2, "descendants": 4, "depth": 2, "subdelegate": True},
        "keep_output": True,
        "key": "k",
    }
    assert service.caller == {"scope": SCOPE, "session": "mgr-1", "override": False}


def test_a_task_is_as_long_as_the_service_takes_it(home: Home, service: Service) -> None:
    service.answers["start"] = {"worker": worker()}
    done("spawn", command=["true"], task="é" * contract.MAX_TASK)
    code, text = refused("spawn", command=["true"], task="é" * (contract.MAX_TASK + 1))
    assert code == "invalid_request" and text.startswith("a task has at most 262144 characters: put the rest")
    assert len(service.asked) == 1


def test_a_spawn_that_was_made_before_tells_what_became_of_it(home: Home, service: Service) -> None:
    failed = worker(state="failed", stop_reason="spawn-failed", error_code="command_not_found")
    service.answers["start"] = {"worker": failed, "repeated": True}
    code, text = refused("spawn", command=["true"], key="k")
    assert code == "command_not_found" and "has failed (command not found), and nothing is started now" in text
    service.answers["start"] = {"worker": ended(), "repeated": True}
    text, details = done("spawn", command=["true"], key="k")
    assert "nothing is started now: stopped" in text and details["worker"]["state"] == "stopped"


def test_what_strict_clients_make_up_says_nothing(home: Home, service: Service) -> None:
    service.answers["start"] = {"worker": worker()}
    done(
        "spawn",
        command=["true"],
        harness="auto",
        model=None,
        effort="off",
        profile="",
        subagents="not-required",
        requiresSubagents=False,
        delegationGrant={},
        writable=[],
        fresh=False,
        all=False,
        acknowledge=False,
    )
    params = service.params("start")
    assert params["writable"] is None and params["network"] is True and params["grant"] is None
    assert "name" not in params and params["directory"] == str(home.project)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"action": None}, "params.action is missing; it is one of spawn, list"),
        ({"action": 1}, "params.action is missing"),
        ({"action": "dance"}, "there is no such action; there are spawn, list"),
        ({"action": "route"}, "route is not available: there is nothing to choose from"),
        ({"action": "spawn"}, "spawn needs command"),
        ({"action": "spawn", "command": "make test"}, "command is not a list of texts"),
        ({"action": "spawn", "command": [""]}, "the name of the program to run is empty"),
        ({"action": "spawn", "command": ["a"], "harness": "pi"}, "only command is driven"),
        ({"action": "spawn", "command": ["a"], "model": "big"}, "model is not available: put it into command"),
        ({"action": "spawn", "command": ["a"], "permissionProfile": "x"}, "give readOnly, writable and noNetwork"),
        ({"action": "spawn", "command": ["a"], "id": "../x"}, "a name has 2 to 80"),
        ({"action": "spawn", "command": ["a"], "cwd": "gone"}, "/gone is not a directory that is there"),
        ({"action": "spawn", "command": ["a"], "noNetwork": True}, "noNetwork takes a worker with readOnly"),
        ({"action": "spawn", "command": ["a"], "memoryMax": "lots"}, "memoryMax must be a size"),
        ({"action": "spawn", "command": ["a"], "memoryMax": True}, "memoryMax is not a number or a text"),
        ({"action": "spawn", "command": ["a"], "tasksMax": 1.5}, "tasksMax is not a whole number"),
        ({"action": "spawn", "command": ["a"], "tasksMax": -1}, "tasksMax must be a whole number"),
        ({"action": "spawn", "command": ["a"], "grace": "5m"}, "grace must be a time"),
        (
            {"action": "spawn", "command": ["a"], "delegationGrant": {"maxDepth": 2}},
            "a grant needs maxLiveDirectChildren",
        ),
        ({"action": "spawn", "command": ["a"], "delegationGrant": {"roles": []}}, "a grant has no roles"),
        (
            {"action": "spawn", "command": ["a"], "childGrant": {"maxLiveDirectChildren": 1, "expiresAt": "now"}},
            "expiresAt of a grant",
        ),
        (
            {"action": "spawn", "command": ["a"], "childGrant": {"maxLiveDirectChildren": 1, "expiresAt": 1}},
            "expiresAt of a grant is over already",
        ),
        (
            {
                "action": "spawn",
                "command": ["a"],
                "childGrant": {"maxLiveDirectChildren": 1},
                "delegationGrant": {"maxLiveDirectChildren": 2},
            },
            "say the same thing",
        ),
        ({"action": "stop"}, "stop needs id"),
        ({"action": "stop", "id": 7}, "id is not text"),
        ({"action": "stop", "id": "x1", "execute": True}, "stop takes no execute; it takes id"),
        ({"action": "stop", "id": "x1", "nonsense": 1}, "there is no parameter nonsense; stop takes id"),
        ({"action": "stop", "id": "x1", "override": True}, "there is no parameter override"),
        ({"action": "wait", "id": "x1", "timeout": "30"}, "timeout must be a time"),
    ],
)
def test_a_call_that_makes_no_sense_asks_nobody(
    home: Home, service: Service, params: dict[str, Any], text: str
) -> None:
    code, told = refused(**params)
    assert code == "invalid_request" and text in told
    assert service.asked == []


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "standard input is not one JSON object"),
        (b"{} {}", "standard input is not one JSON object"),
        (b"\xff", "standard input is not one JSON object"),
        (b"[" * 100_000, "standard input is not one JSON object"),
        (b"[]", 'not an object with "params"'),
        (b'{"params": []}', 'not an object with "params"'),
        (b'{"params": {}, "env": {}}', "there is no env beside params"),
        (b'{"params": {}, "cwd": 1}', "cwd is not text"),
        (b'{"params": {"action": "list"}, "cwd": "here"}', "cwd is not an absolute path"),
        (b'{"params": {"action": "list"}, "managerSessionId": "a b"}', "the session is no id of a session"),
        (b" " * (tool.MAX_INPUT + 1), "standard input has more than"),
    ],
)
def test_what_is_no_call(home: Home, content: bytes, text: str) -> None:
    found = tool.answered(content, os.environ)
    assert found["ok"] is False and text in found["error"], found


def test_an_error_of_the_service_is_told_with_its_code(home: Home, service: Service) -> None:
    service.answers["stop"] = Refused("not_owner", "the worker is another's")
    assert refused("stop", id="x1") == ("not_owner", "the worker is another's")


def test_an_answer_that_is_none_is_told_as_that(home: Home, service: Service) -> None:
    service.answers["stop"] = {}
    assert refused("stop", id="x1")[0] == "workers_unreachable"


def test_a_fault_of_the_program_is_an_answer_too(home: Home, service: Service) -> None:
    odd = {**worker(), "entered_at": "secret"}
    service.answers["status"] = {"worker": odd, "processes": [], "unit": None}
    code, text = refused("status", id="x1")
    assert code == "internal_error" and "TypeError" in text and "secret" not in text


def test_an_empty_session_is_none(home: Home, service: Service) -> None:
    service.answers["list"] = {"workers": [], "hidden": 0}
    done("list", {"managerSessionId": ""})
    assert service.caller["session"] is None


def test_settings_that_cannot_be_used_are_told(home: Home, service: Service) -> None:
    home.config("nonsense = 1\n")
    code, text = refused("spawn", command=["true"])
    assert code == "invalid_request" and "nonsense" in text


def test_where_nobody_listens_looking_finds_nothing(home: Home) -> None:
    for action in ("list", "history", "status", "renew", "_heartbeat"):
        text, _ = done(action)
        assert text == "Nothing to show: no worker service listens."
    assert refused("status", id="x1")[0] == "workers_unreachable"
    assert refused("stop", id="x1")[0] == "workers_unreachable"
    assert refused("spawn", command=["true"])[0] == "manager_unreachable"


def test_lists(home: Home, service: Service) -> None:
    service.answers["list"] = {"workers": [worker("evil\x1b[2J")], "hidden": 2}
    text, details = done("list", all=True)
    assert "evil\\x1b[2J" in text
    assert (details["scope"], details["view"], details["hidden"]) == ("all", "current", 2)
    assert done("history")[1]["view"] == "history"
    assert [each["params"] for each in service.asked] == [
        {"all": True, "history": False},
        {"all": False, "history": True},
    ]


def test_logs_take_as_many_lines_as_there_may_be(home: Home, service: Service) -> None:
    service.answers["logs"] = {"events": [], "output": "x"}
    for lines, expected in ((0, 1), (9_999, 500), (7.0, 7)):
        done("logs", id="x1", lines=lines, output=True)
        assert service.asked[-1]["params"] == {"worker": "x1", "lines": expected, "output": True}


def test_removal_is_acknowledged(home: Home, service: Service) -> None:
    nothing: dict[str, Any] = {"pruned": [], "candidates": [], "errors": [], "kept": [], "more": 0}
    service.answers["prune"] = {**nothing, "candidates": [ended("old")]}
    text, details = done("prune")
    assert "acknowledge:true removes these" in text and [each["name"] for each in details["candidates"]] == ["old"]
    assert service.params("prune") == {"all": False, "preview": True}
    service.answers["forget"] = {"forgotten": [], "candidates": [ended("old")], "why": "its work tree was changed"}
    text, details = done("forget", id="old")
    assert "its work tree was changed\n" in text and text.endswith("Nothing was removed; acknowledge:true removes it.")
    assert details["dry_run"] is True and [each["name"] for each in details["candidates"]] == ["old"]
    assert service.params("forget") == {"worker": "old", "preview": True}
    service.answers["forget"] = Refused("not_owner", "the worker is another's")
    assert refused("forget", id="old")[0] == "not_owner"
    service.answers["prune"] = {**nothing, "pruned": [ended()]}
    assert done("prune", acknowledge=True, id="old")[0].startswith("pruned review")
    assert service.asked[-1]["params"] == {"all": False, "acknowledge": True, "worker": "old"}


def test_what_is_not_there_is_named(home: Home, service: Service) -> None:
    service.answers["start"] = Refused("command_not_found", "the command was not found", "command")
    told = refused("spawn", command=["nosuch\n", "x"])
    assert told == ("command_not_found", "the command was not found: nosuch\\x0a")
    missing: dict[str, Any] = {"writable": ["gone"], "cwd": "gone"}
    for name, value in missing.items():
        code, text = refused("spawn", command=["a"], **{name: value})
        assert code == "invalid_request" and text == f"{name}: {home.project}/gone is not a directory that is there"


def test_wait_tells_whether_it_was_worth_it(home: Home, service: Service) -> None:
    service.answers["wait"] = {"worker": worker(), "reached": False}
    text, details = done("wait", id="x1", until="idle", timeout="1ms")
    assert text.endswith("it is ready and not idle yet") and details["reached"] is False


def test_a_heartbeat_tells_who_was_asked_for_a_checkpoint_lately(home: Home, service: Service) -> None:
    now = int(time.time() * 1000)
    asked: dict[str, Any] = {"checkpoint_requested_at": now - 600_000, "checkpoint_deadline_at": now + 300_500}
    service.answers["list"] = {
        "workers": [
            worker(**asked, checkpoint_attempted_at=now - 1_000, checkpoint_attempts=2),
            worker("earlier", id="eeeeeeeeeeee", **asked),
            worker("quiet", id="cccccccccccc"),
            ended("gone", id="dddddddddddd", **asked),
        ],
        "hidden": 0,
    }
    service.answers["heartbeat"] = {"workers": [worker("quiet", id="cccccccccccc")]}
    _, details = done("_heartbeat", {"managerSessionId": "mgr-1"})
    assert details["renewed"] == ["cccccccccccc"] and service.asked[0]["action"] == "heartbeat"
    (request,) = details["checkpointRequests"]
    assert details["checkpointRequested"] == [ID, "eeeeeeeeeeee"]
    assert (request["workerId"], request["runId"], request["target"]) == (ID, INCARNATION, "review")
    assert request["attempt"] == 2 and "ended in 5 min" in request["message"]
    assert service.caller["session"] == "mgr-1"
    service.answers["heartbeat"] = Refused("store_unusable")
    _, details = done("_heartbeat", {"managerSessionId": "mgr-1"})
    assert details["renewed"] == [] and len(details["checkpointRequests"]) == 1
    service.answers["heartbeat"] = Refused("forbidden")
    assert refused("_heartbeat")[0] == "forbidden"


@pytest.mark.parametrize(
    ("ends", "deadline", "said"),
    [
        ({"checkpoint_deadline_at": 330_000}, 330_000, "for a while and will be ended in 5 min. Stop new work, save"),
        (
            {"checkpoint_deadline_at": 330_000, "runtime_deadline_at": 150_000},
            150_000,
            "for a while; you will be ended in 2 min, for your time is over then. Save what you have",
        ),
        (
            {"checkpoint_deadline_at": None, "runtime_deadline_at": 7_230_000},
            7_230_000,
            "for a while; you will be ended in 2 h, for your time is over then. Save what you have",
        ),
        ({"checkpoint_deadline_at": None}, None, "for a while, which does not end you. Save what you have, and report"),
    ],
)
def test_a_message_tells_the_end_that_comes(
    home: Home, service: Service, ends: dict[str, Any], deadline: int | None, said: str
) -> None:
    now = int(time.time() * 1000)
    asked = {"checkpoint_requested_at": now, **{name: at and now + at for name, at in ends.items()}}
    service.answers |= {"list": {"workers": [worker(**asked)], "hidden": 0}, "heartbeat": {"workers": []}}
    (found,) = done("_heartbeat")[1]["checkpointRequests"]
    assert found["deadlineAt"] == (None if deadline is None else now + deadline)
    assert said in found["message"]


@pytest.mark.parametrize("state", ["paused", "unreachable", "blocked"])
def test_what_stands_still_or_is_being_ended_is_told_of_no_end(home: Home, service: Service, state: str) -> None:
    now = int(time.time() * 1000)
    standing = worker(state=state, checkpoint_requested_at=now, checkpoint_deadline_at=now + 9_000)
    service.answers |= {"list": {"workers": [standing], "hidden": 0}, "heartbeat": {"workers": []}}
    assert done("_heartbeat")[1]["checkpointRequests"] == []
