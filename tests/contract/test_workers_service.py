# SPDX-License-Identifier: Apache-2.0
"""The worker service over its socket: real launchers in real control groups, and a stand-in for systemd."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.workers.contract import MAX_FRAME
from agent_intercom.workers.errors import WorkerError
from tests.contract.workerhost import HANG, SERVICE, WorkerHost, unified

pytestmark = pytest.mark.skipif(unified() is None, reason="no control group can be made here")

SCOPE, OTHER = "scope-of-this-test-1", "scope-of-another-one"


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="w", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def host(directory: Path) -> Iterator[WorkerHost]:
    with WorkerHost(directory) as found:
        yield found


@pytest.fixture
def ask(host: WorkerHost) -> Iterator[Callable[..., dict[str, Any]]]:
    with host.client() as client:

        def request(action: str, params: dict[str, Any] | None = None, **who: Any) -> dict[str, Any]:
            found: dict[str, Any] = client.request(action, params or {}, timeout=HANG, **who)
            return found

        yield request


def refused(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(WorkerError) as caught:
        call()
    return str(caught.value.code), caught.value.field


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def raw(host: WorkerHost, *payloads: bytes) -> list[dict[str, Any]]:
    """The answers to payloads as they are."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(HANG)
        line.connect(host.address)
        line.sendall(b"".join(struct.pack(">I", len(payload)) + payload for payload in payloads))
        answers = []
        with line.makefile("rb") as stream:
            for _ in payloads:
                (length,) = struct.unpack(">I", stream.read(4))
                answers.append(json.loads(stream.read(length)))
        return answers


def request(**changes: Any) -> bytes:
    return json.dumps({"version": 1, "id": "a" * 32, "action": "list", "params": {}, "caller": {}, **changes}).encode()


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        (b"{", ""),
        (b"[]", ""),
        (request(version=2), "version"),
        (request(action="conquer"), "action"),
        (request(params={"al": True}), "al"),
        (request(params={"all": "yes"}), "all"),
        (request(action="status"), "worker"),
        (request(caller={"scope": "short"}), "AGENT_INTERCOM_SCOPE_ID"),
        (request(caller={"worker": "abc"}), "worker"),
        (request(action="logs", params={"worker": "abcd", "lines": 501}), "lines"),
    ],
)
def test_bad_requests_are_told_the_field(host: WorkerHost, payload: bytes, field: str) -> None:
    (answer,) = raw(host, payload)
    assert (answer["ok"], answer["error"]["code"], answer["error"]["field"]) == (False, "invalid_request", field)
    # The service goes on.
    assert raw(host, request())[0]["result"]["workers"] == []


def test_requests_of_a_connection_are_answered_in_order(host: WorkerHost) -> None:
    answers = raw(host, *(request(id=f"{number:032x}") for number in range(40)))
    assert [int(answer["id"], 16) for answer in answers] == list(range(40))


def test_a_frame_that_is_too_long_ends_the_connection(host: WorkerHost) -> None:
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(HANG)
        line.connect(host.address)
        line.sendall(struct.pack(">I", MAX_FRAME + 1))
        assert line.recv(1) == b""


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed")
def test_another_user_is_refused_whatever_the_modes_say(host: WorkerHost) -> None:
    for opened in (host.directory, host.runtime, host.runtime / "agent-intercom"):
        opened.chmod(0o755)
    os.chmod(host.address, 0o777)
    script = "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(s.recv(1))"
    done = subprocess.run(
        ["/usr/bin/python3", "-I", "-c", script, host.address],
        user=65_534, group=65_534, extra_groups=[], capture_output=True, text=True, timeout=HANG, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "b''" or "Reset" in done.stderr


def test_a_worker_is_started_listed_and_stopped(host: WorkerHost, ask: Callable[..., dict[str, Any]]) -> None:
    wanted = host.wanted("/bin/sleep", "100", name="first", role="tester", task="do this")
    begun = ask("start", wanted, scope=SCOPE)["worker"]
    assert (begun["name"], begun["state"], begun["readiness"]) == ("first", "registering", "unverified")
    assert not {"directory_digest", "task_digest"} & begun.keys()
    assert len(host.group.members()) == 2
    assert [worker["id"] for worker in ask("list", scope=SCOPE)["workers"]] == [begun["id"]]
    assert ask("list")["workers"] == []
    assert refused(lambda: ask("stop", {"worker": "first"}, scope=OTHER))[0] == "worker_not_found"
    status = ask("status", {"worker": "first"}, scope=SCOPE)
    assert {process["name"] for process in status["processes"]} > {"sleep"}
    ended = ask("stop", {"worker": begun["id"][:4]}, scope=SCOPE)
    assert ended["worker"]["state"] == "stopped"
    assert ended["worker"]["ended"]["exit_signal"] == signal.SIGTERM
    assert host.group.members() == [] and host.files() == []
    kinds = [event["kind"] for event in ask("logs", {"worker": "first"}, scope=SCOPE)["events"]]
    assert kinds == ["provisioning", "placed", "started", "stop_requested", "stopped"]


def test_systemd_is_told_nothing_private(host: WorkerHost, ask: Callable[..., dict[str, Any]]) -> None:
    wanted = host.wanted("/bin/true", "argument-canary", name="label-canary", task="task-canary", tasks_max=9)
    ask("start", wanted, scope=SCOPE)
    (made,) = host.made
    assert made["properties"]["Description"][1] == "Agent Intercom, worker"
    assert made["properties"]["TasksMax"][1] == 9
    assert made["properties"]["CollectMode"][1] == "inactive-or-failed"
    assert "After" not in made["properties"] and "canary" not in json.dumps(made) and SCOPE not in json.dumps(made)
    stored = b"".join(file.read_bytes() for file in (host.state / "agent-intercom").glob("workers.sqlite3*"))
    for private in (b"argument-canary", b"task-canary", SCOPE.encode(), str(host.directory).encode()):
        assert private not in stored
    assert b"label-canary" in stored
    assert b"canary" not in (host.directory / "errors").read_bytes()


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("/nonexistent",), "command_not_found"),
        (("/etc/passwd",), "start_failed"),
        (("no-such-word",), "command_not_found"),
    ],
)
def test_what_does_not_start_leaves_nothing(
    host: WorkerHost, ask: Callable[..., dict[str, Any]], command: tuple[str, ...], code: str
) -> None:
    assert refused(lambda: ask("start", host.wanted(*command)))[0] == code
    assert host.files() == [] and host.group.members() == []
    (row,) = ask("list", {"history": True})["workers"]
    assert (row["state"], row["error_code"], row["stop_reason"]) == ("failed", code, "spawn-failed")


def test_a_manager_with_too_much_to_do_is_left_alone(host: WorkerHost, ask: Callable[..., dict[str, Any]]) -> None:
    (host.memory / "jobs").write_text("33")
    assert refused(lambda: ask("start", host.wanted("/bin/true")))[0] == "manager_busy"
    assert ask("list", {"history": True})["workers"] == []
    (host.memory / "jobs").write_text("32")
    assert ask("start", host.wanted("/bin/true"))["worker"]["generation"] == 1


def test_without_a_manager_workers_can_still_be_stopped(host: WorkerHost) -> None:
    with host.client() as client:
        client.request("start", host.wanted("/bin/sleep", "100", name="held"))
    host.kill()
    (host.memory / "no-bus").touch()
    host.start()
    with host.client() as client:
        assert refused(lambda: client.request("start", host.wanted("/bin/true")))[0] == "manager_unreachable"
        assert client.request("health", {})["systemd"] is None
        assert client.request("status", {"worker": "held"})["unit"]["active"] is None
        assert client.request("stop", {"worker": "held"})["worker"]["state"] == "stopped"
    assert host.group.members() == []


def test_a_worker_that_could_not_be_proved_is_proved_when_there_is_a_manager(host: WorkerHost) -> None:
    with host.client() as client:
        # Its leader ends, and somebody stays: then only the manager knows whose the control group is.
        held = client.request("start", host.wanted("/bin/sh", "-c", "setsid sleep 100 & read x <go"))["worker"]["id"]
    os.mkfifo(host.directory / "go")
    host.kill()
    (host.memory / "no-bus").touch()
    for pid in host.group.members():
        if b"sleep" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    until(lambda: len(host.group.members()) == 1, "the leader has ended")
    host.start()
    with host.client() as client:
        assert client.request("status", {"worker": held})["worker"]["state"] == "unreachable"
        (host.memory / "no-bus").unlink()
        client.request("health", {})
        blocked = {"worker": held, "until": "blocked", "timeout_ms": 20_000}
        assert client.request("wait", blocked)["worker"]["state_reason"] == "children_remain"
        assert client.request("stop", {"worker": held})["worker"]["state"] != "unreachable"
    assert host.group.members() == []


def test_two_starts_of_one_name_make_one_worker(host: WorkerHost) -> None:
    def start(_: int) -> str:
        with host.client() as client:
            try:
                client.request("start", host.wanted("/bin/sleep", "100", name="only"))
            except WorkerError as error:
                return str(error.code)
        return "started"

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        told = sorted(pool.map(start, range(6)))
    assert told == ["name_taken"] * 5 + ["started"]
    assert len(host.made) == 1


def test_a_start_that_is_repeated_is_one_start(host: WorkerHost, ask: Callable[..., dict[str, Any]]) -> None:
    wanted = host.wanted("/bin/sleep", "100", key="once")
    first, second = ask("start", wanted)["worker"], ask("start", wanted)["worker"]
    assert first["incarnation"] == second["incarnation"] and len(host.made) == 1


def test_a_service_that_is_killed_finds_its_workers(host: WorkerHost) -> None:
    os.mkfifo(host.directory / "go")
    with host.client() as client:
        begun = client.request("start", host.wanted("/bin/sleep", "100", name="stays"), scope=SCOPE)["worker"]
        short = client.request("start", host.wanted("/bin/sh", "-c", "read x <go; exit 7"), scope=SCOPE)["worker"]
    host.kill()
    (host.directory / "go").write_text("go\n")
    until(lambda: len(host.group.members()) == 2, "the short one ended")
    host.start()
    with host.client() as client:
        found = client.request("status", {"worker": "stays"}, scope=SCOPE)["worker"]
        assert (found["placed"], found["state"]) == (begun["placed"], "registering")
        until_end = {"worker": short["id"], "until": "end", "timeout_ms": 20_000}
        ended = client.request("wait", until_end, scope=SCOPE)["worker"]
        assert (ended["state"], ended["ended"]["exit_code"]) == ("failed", 7)
        assert client.request("stop", {"worker": "stays"}, scope=SCOPE)["worker"]["state"] == "stopped"


def test_a_unit_of_somebody_else_s_is_left_alone(host: WorkerHost) -> None:
    with host.client() as client:
        begun = client.request("start", host.wanted("/bin/sleep", "100", name="ours"))["worker"]
    host.kill()
    # The same name, started again by whoever: systemd gives each start another number.
    (host.memory / begun["unit"]).write_text("f" * 32)
    host.start()
    with host.client() as client:
        found = client.request("status", {"worker": "ours"})["worker"]
        # Somebody is in it: that ours is gone is not proved.
        assert (found["state"], found["state_reason"]) == ("unreachable", "unit_changed")
        assert len(host.group.members()) == 2
        ended = client.request("stop", {"worker": "ours"})["worker"]
        assert (ended["state"], ended["error_code"]) == ("lost", "unit_changed")
    assert len(host.group.members()) == 2


def test_who_is_in_a_worker_is_that_worker(host: WorkerHost, ask: Callable[..., dict[str, Any]]) -> None:
    ask("start", host.wanted("/bin/sleep", "100", name="outside"), scope=SCOPE)
    report = host.directory / "report"
    script = f"""
import json, os, sys
sys.path.insert(0, {str(SERVICE)!r})
sys.path += {[path for path in sys.path if "site-packages" in path]!r}
from agent_intercom.workers.client import Client
from agent_intercom.workers.errors import WorkerError
told = {{}}
with Client(os.environ["SOCKET"]) as client:
    def ask(name, action, params, **who):
        try:
            told[name] = client.request(action, params, **who)
        except WorkerError as error:
            told[name] = str(error.code)
    given = {{"command": ["/bin/sleep", "100"], "directory": {str(host.directory)!r}, "environment": {{}}}}
    ask("stranger", "stop", {{"worker": "outside"}}, scope={SCOPE!r}, override=True)
    ask("itself", "stop", {{"worker": os.environ["AGENT_INTERCOM_WORKER_ID"]}}, scope={SCOPE!r})
    ask("role", "start_role", {{"run": "abc", "role": "reviewer", "generation": 1}})
    ask("ready", "notify", {{"state": "ready"}})
    ask("child", "start", given, scope={OTHER!r}, session="forged")
    ask("second", "start", given)
    ask("all", "list", {{"all": True, "history": True}}, override=True)
open({str(report)!r} + ".new", "w").write(json.dumps(told))
os.rename({str(report)!r} + ".new", {str(report)!r})
import signal
signal.pause()
"""
    grant = {"children": 1, "descendants": 1, "depth": 1}
    parent = ask("start", host.wanted(sys.executable, "-c", script, name="parent", grant=grant), scope=SCOPE)["worker"]
    until(report.exists, "the worker reports")
    told = json.loads(report.read_text())
    assert told["stranger"] == told["itself"] == "worker_not_found"
    assert told["role"] == "forbidden"
    assert (told["ready"]["worker"]["state"], told["ready"]["worker"]["readiness"]) == ("ready", "verified")
    child = told["child"]["worker"]
    assert (child["parent"], child["depth"]) == (parent["incarnation"], 1)
    assert child["owner"]["kind"] == "worker"
    assert told["second"] == "grant_exceeded"
    assert [worker["id"] for worker in told["all"]["workers"]] == [child["id"]]
    made = {unit["unit"]: unit["properties"] for unit in host.made}
    assert made[child["unit"]]["PartOf"][1] == [parent["unit"]]
    # It has the scope id of its parent, whatever that said: whoever has it sees the child.
    seen = ask("list", {"all": True}, scope=SCOPE)["workers"]
    assert child["id"] in {worker["id"] for worker in seen}
    ended = ask("stop", {"worker": "parent"}, scope=SCOPE)["stopped"]
    assert [worker["id"] for worker in ended] == [child["id"], parent["id"]]


def test_a_parent_that_ends_takes_its_children_along(host: WorkerHost, ask: Callable[..., dict[str, Any]]) -> None:
    script = f"""
import os, sys
sys.path.insert(0, {str(SERVICE)!r})
sys.path += {[path for path in sys.path if "site-packages" in path]!r}
from agent_intercom.workers.client import Client
with Client(os.environ["SOCKET"]) as client:
    given = {{"command": ["/bin/sleep", "100"], "directory": {str(host.directory)!r}, "environment": {{}}}}
    client.request("start", given)
"""
    grant = {"children": 1, "descendants": 1, "depth": 1}
    parent = ask("start", host.wanted(sys.executable, "-c", script, grant=grant))["worker"]
    ask("wait", {"worker": parent["id"], "until": "end", "timeout_ms": 20_000})
    until(lambda: host.group.members() == [], "nobody is left")
    (child,) = [row for row in ask("list", {"history": True, "all": True})["workers"] if row["parent"]]
    until(lambda: ask("status", {"worker": child["id"]})["worker"]["state"] == "stopped", "the child is stopped")
    assert ask("status", {"worker": child["id"]})["worker"]["stop_reason"] == "parent-ended"


def test_a_worker_whose_time_is_over_is_ended(host: WorkerHost, ask: Callable[..., dict[str, Any]]) -> None:
    begun = ask("start", host.wanted("/bin/sleep", "100", lifetimes={"runtime_ms": 200}))["worker"]
    ended = ask("wait", {"worker": begun["id"], "until": "end", "timeout_ms": 20_000})["worker"]
    assert (ended["stop_reason"], ended["ended"]["outcome"]) == ("runtime-expired", "timeout")
    assert host.group.members() == []


def test_pausing_is_verified(host: WorkerHost, ask: Callable[..., dict[str, Any]]) -> None:
    ask("start", host.wanted("/bin/sleep", "100", name="held"))
    assert ask("pause", {"worker": "held"})["worker"]["state"] == "paused"
    assert ask("resume", {"worker": "held"})["worker"]["state"] == "registering"
    (host.memory / "no-freezer").touch()
    assert refused(lambda: ask("pause", {"worker": "held"}))[0] == "freeze_unavailable"
    assert ask("status", {"worker": "held"})["worker"]["state"] == "registering"


def test_a_worker_finds_orchestrate(host: WorkerHost, ask: Callable[..., dict[str, Any]]) -> None:
    command = host.library / "orchestrate"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    script = ("/bin/sh", "-c", "command -v orchestrate; echo $PATH")
    worker = ask("start", host.wanted(*script, keep_output=True, environment={"PATH": "/nowhere"}))["worker"]["id"]
    ask("wait", {"worker": worker, "until": "end", "timeout_ms": 20_000})
    printed = ask("logs", {"worker": worker, "output": True})["output"]
    assert printed == f"{command}\n/nowhere:{host.library}\n"


def test_output_is_kept_for_who_asks_for_it(host: WorkerHost, ask: Callable[..., dict[str, Any]]) -> None:
    kept = ask("start", host.wanted("/bin/sh", "-c", "echo one; echo two", keep_output=True))["worker"]["id"]
    silent = ask("start", host.wanted("/bin/sh", "-c", "echo one"))["worker"]["id"]
    for worker in (kept, silent):
        ask("wait", {"worker": worker, "until": "end", "timeout_ms": 20_000})
    assert ask("logs", {"worker": kept})["output"] is None
    assert ask("logs", {"worker": kept, "lines": 1, "output": True})["output"] == "two\n"
    assert ask("logs", {"worker": silent, "output": True})["output"] is None
    ask("restart", {"worker": kept})
    ask("wait", {"worker": kept, "until": "end", "timeout_ms": 20_000})
    printed = ask("logs", {"worker": kept, "output": True})["output"].splitlines()
    assert printed[:2] == printed[3:] == ["one", "two"] and printed[2].startswith("--- started again, ")


def test_a_worker_is_restarted_with_what_it_had(host: WorkerHost, ask: Callable[..., dict[str, Any]]) -> None:
    script = "cat $AGENT_INTERCOM_TASK_FILE >>seen; echo $AGENT_INTERCOM_SCOPE_ID >>seen; exec sleep 100"
    seen = host.directory / "seen"
    first = ask("start", host.wanted("/bin/sh", "-c", script, name="again", task="the task\n"), scope=SCOPE)["worker"]
    until(lambda: seen.exists() and len(seen.read_text().splitlines()) == 2, "the first one reports")
    second = ask("restart", {"worker": "again"}, scope=SCOPE)["worker"]
    until(lambda: len(seen.read_text().splitlines()) == 4, "the second one reports")
    assert seen.read_text() == f"the task\n{SCOPE}\n" * 2
    assert (second["id"], second["generation"]) == (first["id"], 2)
    ask("stop", {"worker": "again"}, scope=SCOPE)
    assert refused(lambda: ask("restart", {"worker": "again"}, scope=SCOPE))[0] == "place_lost"
    assert host.files() == []


def test_what_has_ended_is_forgotten_with_its_files(host: WorkerHost, ask: Callable[..., dict[str, Any]]) -> None:
    begun = ask("start", host.wanted("/bin/true"))["worker"]
    ask("wait", {"worker": begun["id"], "until": "end", "timeout_ms": 20_000})
    until(lambda: len(host.files()) == 1, "its scratch directory is gone, its place is kept")
    assert refused(lambda: ask("forget", {"worker": begun["id"]}))[0] == "acknowledge_required"
    assert [row["id"] for row in ask("forget", {"worker": begun["id"], "acknowledge": True})["forgotten"]] == [
        begun["id"]
    ]
    assert host.files() == []
    assert refused(lambda: ask("status", {"worker": begun["id"]}))[0] == "worker_not_found"


def test_who_waits_is_told_at_once_and_who_leaves_is_forgotten(host: WorkerHost) -> None:
    with host.client() as client, host.client() as other:
        begun = client.request("start", host.wanted("/bin/sleep", "100"))["worker"]["id"]
        waiting = {"worker": begun, "until": "end", "timeout_ms": 20_000}
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            told = pool.submit(other.request, "wait", waiting)
            client.request("stop", {"worker": begun})
            assert told.result(HANG)["reached"]
        assert client.request("wait", waiting)["reached"]
        short = {"worker": begun, "until": "ready", "timeout_ms": 0}
        assert not client.request("wait", short)["reached"]


def test_a_service_without_a_registry_says_so(directory: Path) -> None:
    state = directory / "s/agent-intercom"
    with WorkerHost(directory) as host:
        host.end()
        database = state / "workers.sqlite3"
        content = bytearray(database.read_bytes())
        content[60:64] = (99).to_bytes(4, "big")
        database.write_bytes(content)
        host.start()
        with host.client() as client:
            health = client.request("health", {})
            assert health["live"] == 0 and health["unusable"] == "the registry was written by a newer version"
            assert refused(lambda: client.request("start", host.wanted("/bin/true")))[0] == "store_unusable"
            assert refused(lambda: client.request("list", {}))[0] == "store_unusable"
        host.end()
        assert database.read_bytes() == bytes(content)


def test_a_registry_that_was_set_aside_is_told_as_long_as_its_file_is_there(directory: Path) -> None:
    with WorkerHost(directory) as host:
        with host.client() as client:
            assert client.request("health", {})["set_aside"] is None
        host.end()
        (directory / "s/agent-intercom/workers.sqlite3").write_bytes(b"damaged")
        host.start()
        host.end()
        host.start()
        with host.client() as client:
            for action in ("health", "list"):
                assert client.request(action, {})["set_aside"] == "workers.sqlite3.damaged-1"
    errors = (directory / "errors").read_text()
    assert errors.count("Registry of workers was damaged and is set aside") == 1
    assert "working without it" not in errors


def test_it_ends_when_nothing_is_to_be_watched(directory: Path) -> None:
    with WorkerHost(directory, idle=0.2) as host:
        with host.client() as client:
            begun = client.request("start", host.wanted("/bin/sh", "-c", "read x <go"))["worker"]["id"]
        process = host.process
        assert process is not None
        os.mkfifo(directory / "go")
        with host.client() as client:
            client.request("stop", {"worker": begun})
        assert process.wait(HANG) == 0
        # The next connection waits for the next one.
        with host.client() as client:
            host.end()
            host.start()
            assert client.request("health", {})["live"] == 0
