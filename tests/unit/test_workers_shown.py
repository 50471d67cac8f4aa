# SPDX-License-Identifier: Apache-2.0
"""`orchestrate worker list`, `status`, `logs` and `wait`: what a person sees of workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from agent_intercom.cli.orchestrate.worker import looking
from agent_intercom.orchestration import runtime
from agent_intercom.workers import places
from agent_intercom.workers.records import Ending, Grant, Owner
from tests.unit.orchcli import Home
from tests.unit.toldservice import ID, IDLE, INCARNATION, HungUp, Refused, Service, clock, ended, serving, stand, worker


@pytest.fixture
def service(home: Home) -> Iterator[Service]:
    """A worker service that listens."""
    with serving(home.runtime) as made:
        yield made


@pytest.fixture(autouse=True)
def a_time_that_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute that does not end in the middle of a test."""
    stand(monkeypatch)


def test_list(home: Home, service: Service) -> None:
    now = int(time.time() * 1000)
    service.answers["list"] = {
        "workers": [
            worker(role="reviewer", runtime_deadline_at=now + 2 * IDLE),
            ended("old", id="ffffffffffff", dirty=True),
            worker("evil\x1b[31m", state="blocked", state_reason="stop_in_progress", error_code="stop_failed"),
        ],
        "hidden": 2,
    }
    said = home.call("worker", "list", "--all")
    header, first, third, more = said.out.splitlines()
    assert header.split() == ["WORKER", "ID", "ROLE", "STATE", "FOR", "OWNER", "NOTE"]
    assert " ".join(first.split()) == (
        f"review {ID} reviewer ready 2 min person is ended at {clock(IDLE)} if idle, at {clock(2 * IDLE)} in any case"
    )
    assert third.startswith("evil\\x1b[31m  ") and "blocked: stop in progress" in third and "stop failed" in third
    assert more == "(3 more have ended: --history)"
    assert service.params("list") == {"all": True, "history": False}
    found = home.json("worker", "list").data
    assert [each["name"] for each in found["workers"]] == ["review", "evil\x1b[31m"] and found["hidden"] == 3
    said = home.call("worker", "list", "--history")
    assert said.out.splitlines()[2].endswith("  person  exit 3, on request, work tree changed")
    assert "--history)" not in said.out and home.json("worker", "list", "--history").data["hidden"] == 0
    service.answers["list"] = {"workers": [ended()], "hidden": 0, "more": 7}
    assert "(7 that ended before are left out" in home.call("worker", "list", "--history").out
    assert "(8 more have ended: --history)" in home.call("worker", "list").out


def test_a_list_of_nothing_tells_where_to_look(home: Home, service: Service) -> None:
    service.answers["list"] = {"workers": [], "hidden": 0}
    assert "`orchestrate worker list --all`" in home.call("worker", "list").out
    assert home.call("worker", "list", "--all").out == "No workers.\n"
    service.answers["list"] = {"workers": [ended()], "hidden": 0}
    assert home.call("worker", "list", "--all").out == "No workers live.\n(1 more has ended: --history)\n"
    assert "You have no workers that live" in home.call("worker", "list").out


def test_workers_of_a_run_are_told_with_its_session(home: Home, service: Service) -> None:
    directory = str(home.root / "home/state/parser/20261130T000000Z-1")
    unit = "0123456789abcdef0123"
    runtime.write(
        str(home.runtime),
        unit,
        runtime.RunPlace(directory=directory, scope=None, environment={}, observer_report_usage=False),
    )
    of_run = {"run": unit, "role": "reviewer", "owner": Owner(kind="run", name=unit)}
    other = {**of_run, "run": "f" * 20, "owner": Owner(kind="run", name="f" * 20)}
    service.answers["list"] = {"workers": [worker(f"{unit}/reviewer", **of_run), worker("x/x", **other)], "hidden": 0}
    said = home.call("worker", "list")
    assert "  run of parser  " in said.out and f"  run {'f' * 20}  " in said.out
    service.answers["status"] = {"worker": worker(f"{unit}/reviewer", **of_run), "processes": [], "unit": None}
    assert f"run: session parser, orchestrate@{unit}.service\n" in home.call("worker", "status", "review").out


def test_a_list_tells_where_the_workers_of_workers_are(home: Home, service: Service) -> None:
    service.answers["list"] = {"workers": [worker(grant=Grant(children=1, descendants=1))], "hidden": 0}
    hint = "(what they have started themselves: `orchestrate worker list --all`)\n"
    assert home.call("worker", "list").out.endswith(hint)
    assert hint not in home.call("worker", "list", "--all").out
    hint = hint.replace("--all", "--all --history")
    assert home.call("worker", "list", "--history").out.endswith(hint)
    service.answers["list"] = {"workers": [], "hidden": 0}
    assert "`orchestrate worker list --all --history` shows" in home.call("worker", "list", "--history").out


@pytest.mark.parametrize(
    ("changed", "note"),
    [
        ({"checkpoint_deadline_at": None}, ""),
        ({"checkpoint_deadline_at": None, "checkpoint_requested_at": -1}, "asked for a checkpoint"),
        ({"state": "registering", "readiness": "unverified", "checkpoint_deadline_at": None}, "says nothing of itself"),
        ({"checkpoint_deadline_at": None, "runtime_deadline_at": IDLE}, "is ended at IDLE in any case"),
        ({"runtime_deadline_at": IDLE - 1}, "is ended at IDLE in any case"),
        ({"checkpoint_deadline_at": IDLE + 60_000}, "is ended at MORE if idle"),
        ({"checkpoint_deadline_at": None, "runtime_deadline_at": 90_000_000}, "is ended at LATER in any case"),
        (
            {"state": "stopped", "stop_reason": "manager-requested", "error_code": "left_unit"},
            "on request, what had left",
        ),
        (
            {"state": "lost", "stop_reason": "parent-ended", "error_code": "unit_changed"},
            "what had started it ended, a unit of its name is somebody else's now, and was left alone",
        ),
        ({"state": "paused"}, "its times stand still"),
        ({"state": "failed", "stop_reason": "spawn-failed", "error_code": "command_not_found"}, "command not found"),
        ({"state": "failed", "error_code": "signaled", "ended": ("signaled", 9)}, "killed by SIGKILL"),
        ({"state": "failed", "error_code": "oom-kill", "ended": ("oom-kill", 9)}, "its memory was full, killed by"),
        ({"state": "stopped", "stop_reason": "idle-grace-expired", "ended": ("signaled", 15)}, "was idle for too long"),
        (
            {"state": "stopped", "stop_reason": "runtime-expired", "ended": ("timeout", 15), "error_code": "timeout"},
            "its time was over",
        ),
        ({"state": "stopped", "stop_reason": "runtime-expired", "ended": ("timeout", 9)}, "had to be killed, its time"),
        ({"state": "stopped", "stop_reason": "manager-requested", "ended": ("signaled", 9)}, "had to be killed, on re"),
        # The command had been killed before anybody asked; what it had left behind was ended.
        (
            {
                "state": "failed",
                "error_code": "signaled",
                "stop_reason": "children-remained",
                "stop_requested_at": 1,
                "ended": ("signaled", 9),
            },
            "killed by SIGKILL, its command had left processes behind",
        ),
        (
            {
                "state": "blocked",
                "state_reason": "children_remain",
                "children_deadline_at": 8_500,
                "runtime_deadline_at": IDLE,
                "ended": ("signaled", 9),
            },
            "its command has ended (killed by SIGKILL), what it left behind is ended in 8 s",
        ),
        ({"state": "blocked", "state_reason": "stop_in_progress", "runtime_deadline_at": IDLE}, ""),
        ({"state": "unreachable", "state_reason": "unproved", "runtime_deadline_at": IDLE}, ""),
        ({"state": "lost", "error_code": "unknown", "ended": ("unknown", None)}, ""),
    ],
)
def test_a_note_says_each_thing_once(home: Home, service: Service, changed: dict[str, Any], note: str) -> None:
    now = int(time.time() * 1000)
    given = {key: now + value if value and key.endswith("_at") else value for key, value in changed.items()}
    if "ended" in given:
        outcome, number = given["ended"]
        given["ended"] = Ending(at=1, outcome=outcome, exit_signal=number)
    service.answers["list"] = {"workers": [worker(**given)], "hidden": 0}
    row = home.call("worker", "list", "--history").out.splitlines()[1]
    later = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + 90_000))
    for word, at in (("IDLE", clock(IDLE)), ("MORE", clock(IDLE + 60_000)), ("LATER", later)):
        note = note.replace(word, at)
    assert row.partition("  person")[2].strip().startswith(note) and (note or row.endswith("person"))
    assert "signaled" not in row and "unknown" not in row and "spawn" not in row


def test_status_of_a_worker(home: Home, service: Service) -> None:
    service.answers["status"] = {
        "worker": worker(
            readiness="unverified",
            parent="00000000beef",
            depth=1,
            idle_ms=3_600_000,
            grace_ms=900_000,
            runtime_ms=43_200_000,
            checkpoint_requested_at=1,
            checkpoint_deadline_at=int(time.time() * 1000) + 60_000,
        ),
        "processes": [{"pid": 7, "name": "make\n"}],
        "unit": {
            "active": "active",
            "sub": "running",
            "result": "success",
            "freezer": "frozen",
            "memory_bytes": 1_572_864,
            "tasks": 3,
            "cpu_usec": 2_500_000,
        },
    }
    said = home.call("worker", "status", "review")
    assert said.code == 0
    assert "state: ready, unverified, for 2 min" in said.out
    assert f"note: asked for a checkpoint, is ended at {clock(60_000)} if idle\n" in said.out
    assert "2 min ago; generation 1\nharness: command\nowner: person\n" in said.out
    assert "lives on for: 1 h without a sign of life and 15 min more, 12 h in all\n" in said.out
    assert "started by: worker 00000000beef, depth 1" in said.out
    assert ".scope, active (running), frozen, 1.5 MiB, 3 tasks, 2.5 s of processor" in said.out
    assert said.out.splitlines()[-1] == "7    make\\x0a"
    service.answers["status"] = {"worker": ended(), "processes": [], "unit": None}
    assert ".scope, gone" in home.call("worker", "status", "review").out
    silent = worker(state="registering", readiness="unverified", idle_ms=1, grace_ms=0)
    service.answers["status"] = {"worker": silent, "processes": [], "unit": None}
    said = home.call("worker", "status", "review")
    assert "unverified: it says nothing of itself (`orchestrate worker notify`, from inside it)\n" in said.out
    assert "lives on for: ever\n" in said.out and said.out.count("says nothing") == 1


def test_a_start_that_was_made_before_says_so(home: Home, service: Service) -> None:
    service.answers["start"] = {"worker": worker(), "repeated": True}
    first = "review: was started under this key before, nothing is started now: ready, generation 1"
    assert home.call("worker", "start", "--key", "k", "--", "make").out.splitlines()[0] == first
    service.answers["start"] = {"worker": ended(), "repeated": True}
    said = home.call("worker", "start", "--key", "k", "--", "make")
    told = said.out.splitlines()
    assert told[0].endswith("now: stopped, generation 1") and told[1] == "note: exit 3, on request"
    assert said.code == 5 and "has ended, and nothing is started now; another start takes another key" in said.err
    found = home.json("worker", "start", "--key", "k", "--", "make")
    assert found.error[0] == "worker_not_live" and found.envelope["data"]["repeated"] is True
    failed = worker(state="failed", stop_reason="spawn-failed", error_code="command_not_found")
    service.answers["start"] = {"worker": failed, "repeated": True}
    said = home.call("worker", "start", "--key", "k", "--", "make")
    assert said.code == 1 and "the start under this key has failed (command not found)" in said.err
    assert said.out.startswith("review: could not be started under this key before, nothing is started now: failed")
    assert "\nnote: command not found\n" in said.out
    assert home.json("worker", "start", "--key", "k", "--", "make").error[0] == "command_not_found"
    # One that is started for the first time and is over by now was started.
    service.answers["start"] = {"worker": ended(), "repeated": False}
    assert home.call("worker", "start", "--key", "k", "--", "make").code == 0
    service.answers["start"] = Refused("conflict", f"{ID} was started under this key, with something else", "key")
    said = home.call("worker", "start", "--key", "k", "--", "make")
    assert ID in said.err and "status ID` shows that worker; another start takes another key." in said.err


def test_what_is_being_ended_has_no_time_left_to_live(home: Home, service: Service) -> None:
    left = worker(role="audit", state="blocked", state_reason="children_remain", idle_ms=3_600_000, grace_ms=1)
    service.answers["status"] = {"worker": left, "processes": [], "unit": None}
    said = home.call("worker", "status", "review")
    assert "lives on" not in said.out and "role: audit\nharness: command\n" in said.out


def test_a_time_of_another_day_has_its_date(
    home: Home, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    evening = time.mktime((2026, 11, 30, 23, 30, 0, 0, 0, -1))
    monkeypatch.setattr(time, "time", lambda: evening)
    now = int(evening * 1000)
    told = worker(checkpoint_deadline_at=now + 60_000, runtime_deadline_at=now + 3_600_000)
    service.answers["status"] = {"worker": told, "processes": [], "unit": None}
    text = "note: is ended at 23:31 if idle, at 2026-12-01 00:30 in any case\n"
    assert text in home.call("worker", "status", "review").out


def test_status_tells_its_owner_what_a_worker_was_started_with(
    home: Home, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = places.of_worker(str(home.runtime), ID)
    places.make(place)
    told = places.Place(arguments=("sh", "-c", "a b\n"), directory="/src", environment={"KEY": "secret"}, tasks_max=9)
    places.write(place, msgspec.structs.replace(told, memory_max=512 << 20))
    service.answers["status"] = {"worker": worker(), "processes": [], "unit": None}
    said = home.call("worker", "status", "review")
    assert "command: sh -c 'a b\\x0a'\ndirectory: /src\nlimits: memory 512 MiB, 9 tasks\n" in said.out
    assert home.json("worker", "status", "review").data["given"]["command"][0] == "sh"
    assert "secret" not in said.out and "KEY" not in home.json("worker", "status", "review").out
    assert home.json("worker", "status", "review", "--as", "mgr-1").data["given"] is None
    for owner in (Owner(kind="session", name="mgr-1"), Owner(kind="worker", name=INCARNATION), Owner(kind="none")):
        service.answers["status"] = {"worker": worker(owner=owner), "processes": [], "unit": None}
        assert home.json("worker", "status", "review").data["given"] is None
    service.answers["status"] = {"worker": worker(owner=Owner(kind="session", name="m")), "processes": [], "unit": None}
    assert "command: sh" in home.call("worker", "status", "review", "--as", "m").out
    monkeypatch.setenv("AGENT_INTERCOM_WORKER_ID", ID)
    assert home.json("worker", "status", "review", "--as", "m").data["given"] is None


def test_status_of_a_worker_tells_of_its_children(home: Home, service: Service) -> None:
    parent = worker(grant=Grant(children=2, descendants=2))
    service.answers["status"] = {"worker": parent, "processes": [], "unit": None}
    child = worker(f"{ID}/child", id="cccccccccccc", parent=INCARNATION, incarnation="cccccccccccd")
    others = [parent, worker("other", id="dddddddddddd"), ended("gone", id="eeeeeeeeeeee", parent=INCARNATION)]
    service.answers["list"] = {"workers": [child, *others], "hidden": 0}
    said = home.call("worker", "status", "review")
    header, row = said.out.splitlines()[-2:]
    assert header.split() == ["CHILD", "ID", "STATE", "NOTE"] and row.startswith(f"{ID}/child  cccccccccccc  ready")
    assert service.params("list") == {"all": True, "history": False}
    assert [each["id"] for each in home.json("worker", "status", "review").data["children"]] == ["cccccccccccc"]


def test_status_of_all(home: Home, service: Service) -> None:
    service.answers["health"] = {"version": "0.1.0", "live": 1, "systemd": 257, "confinement": ["files-read-only"]}
    service.answers["list"] = {"workers": [worker()], "hidden": 0}
    said = home.call("worker", "status")
    assert said.out.startswith("worker service: version 0.1.0, 1 live, systemd 257\n") and ID in said.out
    assert home.json("worker", "status").data["health"]["live"] == 1
    service.answers["health"] = {"version": "0.1.0", "live": 0, "systemd": None, "confinement": []}
    assert "no service manager answers it\nthe kernel can enforce: nothing\n" in home.call("worker", "status").out
    health = {"version": "0.1.0", "live": 0, "systemd": None, "confinement": [], "store": "store_unusable"}
    service.answers["health"] = health
    assert "its registry cannot be written (store unusable): " in home.call("worker", "status").out
    service.answers["health"] = {**health, "unusable": "another program holds it open"}
    assert "its registry cannot be used (another program holds it open): " in home.call("worker", "status").out


@pytest.mark.parametrize(
    ("state", "error", "said"),
    [
        ("failed", "exited", "has ended; nobody is left in its unit (failed, exit 3)"),
        ("lost", "unknown", "has ended; nobody is left in its unit (lost, exit 3, unknown)"),
        ("lost", "unit_changed", "has ended (lost, exit 3, a unit of its name is somebody else's now"),
        ("blocked", "stop_failed", "is being ended (blocked, stop failed)"),
    ],
)
def test_a_stop_says_of_no_worker_what_a_list_does_not(
    home: Home, service: Service, state: str, error: str, said: str
) -> None:
    found = ended(state=state, stop_reason="", error_code=error, checkpoint_deadline_at=None)
    child = {**found, "id": "cccccccccccc", "name": "child"}
    service.answers["stop"] = {"worker": found, "stopped": [child, found]}
    first, second = home.call("worker", "stop", "review", "--yes").out.splitlines()
    assert first.startswith(f"review: {said}")
    with_it = said.replace("; nobody is left in its unit", "").replace("ended", "ended with it")
    assert second.startswith(f"child: {with_it.removeprefix('has ')}")
    service.answers["stop"] = {"worker": found, "stopped": []}
    (only,) = home.call("worker", "stop", "review", "--yes").out.splitlines()
    assert only.startswith(f"review: {said.replace('has ended', 'had ended before')}")


def test_cleanup_tells_why_it_would_delete(home: Home, service: Service) -> None:
    kept = {"worker": ID, "name": "review", "work": "prune", "reason": "", "deadline": 1_700_000_000_000}
    service.answers["cleanup"] = {"candidates": [kept], "handled": 0, "errors": 0, "deferred": 0}
    until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1_700_000_000))
    assert home.call("worker", "cleanup").out.splitlines()[1].endswith(f"prune  it was kept until {until}")


def test_logs(home: Home, service: Service) -> None:
    event = {"at": 1_700_000_000_000, "worker": ID, "incarnation": "x", "kind": "stop_failed", "code": ""}
    service.answers["logs"] = {"events": [event], "output": None}
    said = home.call("worker", "logs", "review", "--lines", "5", "--override")
    assert said.out.splitlines()[1].endswith("stop failed  -")
    assert service.params("logs") == {"worker": "review", "lines": 5, "output": False}
    assert service.caller["override"] is True
    said = home.call("worker", "logs", "review", "--output")
    assert said.code == 0 and said.out == "" and "not kept" in said.err and said.err.count("\n") == 1
    assert home.json("worker", "logs", "review", "--output").data["output"] is None
    service.answers["logs"] = {"events": [event], "output": "a\tb\r\n\x1b[2Jc\n\n"}
    assert home.call("worker", "logs", "review", "--output").out == "a\tb\n\\x1b[2Jc\n\n"
    service.answers["logs"] = {"events": [event], "output": "no end of a line"}
    assert home.call("worker", "logs", "review", "--output").out == "no end of a line\n"
    service.answers["logs"] = {"events": [event], "output": ""}
    said = home.call("worker", "logs", "review", "--output")
    assert (said.code, said.out, said.err) == (0, "", "orchestrate: it has printed nothing\n")


def test_wait(home: Home, service: Service) -> None:
    service.answers["wait"] = {"worker": ended(), "reached": True}
    said = home.call("worker", "wait", "review")
    assert (said.code, said.out) == (0, "review: stopped (exit 3, on request)\n")
    assert service.params("wait") == {"worker": "review", "until": "end", "timeout_ms": 60_000}


def test_wait_asks_again_and_by_the_id(home: Home, service: Service) -> None:
    answers = iter([False, True])
    service.answers["wait"] = lambda params: {"worker": worker(), "reached": next(answers)}
    assert home.call("worker", "wait", "review", "--until", "idle").code == 0
    assert [each["params"]["worker"] for each in service.asked] == ["review", ID]


def test_wait_goes_on_with_a_service_that_was_started_again(
    home: Home, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "_PAUSE", 0)
    left: list[Any] = [{"reached": False}, HungUp(), HungUp(), Refused("store_unusable"), {"reached": True}]

    def answer(params: dict[str, Any]) -> dict[str, Any]:
        found = left.pop(0)
        if isinstance(found, Exception):
            raise found
        return {"worker": worker(), **found}

    service.answers["wait"] = answer
    assert home.call("worker", "wait", "review", "--until", "ready").code == 0
    assert [each["params"]["worker"] for each in service.asked] == ["review", ID, ID, ID, ID]
    left[:] = [Refused("store_unusable")]
    assert home.call("worker", "wait", "review").code == 3
    monkeypatch.setattr(looking, "_PATIENCE", 0)
    left[:] = [HungUp()]
    said = home.call("worker", "wait", "review")
    assert said.code == 3 and "closed the connection: ask again" in said.err and not left


def test_what_was_waited_for_in_vain_is_told(home: Home, service: Service) -> None:
    service.answers["wait"] = {"worker": worker(), "reached": False}
    said = home.json("worker", "wait", "review", "--until", "idle", "--timeout", "1ms")
    assert said.code == 1 and said.error == ("timed_out", "it is ready and not idle yet")
    assert said.envelope["data"]["worker"]["id"] == ID
    for until, text in (
        ("end", "it is ready and has not ended yet"),
        ("checkpoint", "it is ready and was not asked for a checkpoint yet"),
    ):
        assert home.json("worker", "wait", "review", "--until", until, "--timeout", "1ms").error[1] == text
    service.answers["wait"] = {"worker": ended(), "reached": False}
    said = home.call("worker", "wait", "review", "--until", "checkpoint")
    assert "it is stopped and will not be asked for a checkpoint any more" in said.err
    said = home.call("worker", "wait", "review", "--until", "idle")
    assert said.code == 5 and "it is stopped and will not be idle any more" in said.err
