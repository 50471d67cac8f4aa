# SPDX-License-Identifier: Apache-2.0
"""`orchestrate worker` and `agent-intercom-fleet` as installed, with a real systemd and the real worker service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.conftest import Bed
from tests.system.wire import until

UNITS = ("orchestrate-workers.socket", "orchestrate-workers.service", "orchestrate-workers.slice")
SCOPE = "scope-0123456789abcdef"


@pytest.fixture(autouse=True)
def ended(bed: Bed) -> Iterator[None]:
    """Nothing of the worker service is left for the next test."""
    yield
    bed.as_user("alice", ["systemctl", "--user", "stop", *UNITS], check=False)


def told(bed: Bed, *words: str, code: int = 0) -> dict[str, Any]:
    """What `orchestrate worker … --json` says, which ends with `code`."""
    command = ["env", f"AGENT_INTERCOM_SCOPE_ID={SCOPE}", "/usr/bin/orchestrate", "--json", "worker", *words]
    done = bed.as_user("alice", command, check=False)
    assert (done.returncode, done.stderr) == (code, ""), done.stdout + done.stderr
    envelope: dict[str, Any] = json.loads(done.stdout)
    assert envelope["command"] == "worker" and envelope["success"] is (code == 0)
    found: dict[str, Any] = envelope["error" if code else "data"]
    return found


def fleet(bed: Bed, action: str, **params: Any) -> dict[str, Any]:
    """What `agent-intercom-fleet` answers."""
    call = {"managerSessionId": "mgr-1", "cwd": "/home/alice", "params": {"action": action, **params}}
    script = f"printf %s '{json.dumps(call)}' | /usr/bin/agent-intercom-fleet"
    found: dict[str, Any] = json.loads(bed.as_user("alice", script, check=False).stdout)
    return found


def test_a_worker_from_its_start_to_its_end(bed: Bed) -> None:
    assert told(bed, "list") == {"workers": [], "hidden": 0, "service": False}
    started = told(
        bed, "start", "review", "--read-only", "--keep-output", "--task", "Look.", "--directory", "/home/alice",
        "--", "sh", "-c", "cat $AGENT_INTERCOM_TASK_FILE; touch /home/alice/no; exec sleep 1000",
    )["worker"]  # fmt: skip
    assert started["name"] == "review" and started["state"] == "registering"
    assert told(bed, "start", "review", "--", "true", code=5)["code"] == "name_taken"
    status = told(bed, "status", "review")
    assert status["given"]["directory"] == "/home/alice" and status["given"]["command"][:2] == ["sh", "-c"]
    assert status["unit"]["active"] == "active" and "sleep" in {each["name"] for each in status["processes"]}
    assert [each["name"] for each in told(bed, "list")["workers"]] == ["review"]
    assert told(bed, "pause", started["id"][:6])["worker"]["state"] == "paused"
    assert told(bed, "resume", "review")["worker"]["state"] != "paused"
    assert told(bed, "rename", "review", "audit")["worker"]["name"] == "audit"
    until(lambda: "/home/alice/no" in told(bed, "logs", "audit", "--output")["output"], "it has printed all")
    assert told(bed, "logs", "audit", "--output")["output"].startswith("Look.\n")
    assert not (bed.root / "home/alice/no").exists()
    assert fleet(bed, "stop", id="audit")["code"] == "worker_not_found"
    assert told(bed, "wait", "audit", "--timeout", "1ms", code=1)["code"] == "timed_out"
    assert told(bed, "forget", "audit", "--yes", code=5)["code"] == "worker_live"
    assert told(bed, "stop", "audit", "--yes")["worker"]["state"] == "stopped"
    assert told(bed, "wait", "audit")["reached"] is True
    assert told(bed, "status", "audit")["unit"] is None
    assert [each["name"] for each in told(bed, "prune")["candidates"]] == ["audit"]
    preview = told(bed, "forget", "audit")
    assert preview["dry_run"] is True and [each["name"] for each in preview["candidates"]] == ["audit"]
    assert told(bed, "list")["workers"] == [] and told(bed, "list")["hidden"] == 1
    assert [each["name"] for each in told(bed, "list", "--history")["workers"]] == ["audit"]
    assert [each["name"] for each in told(bed, "forget", "audit", "--yes")["forgotten"]] == ["audit"]
    assert told(bed, "status", "audit", code=4)["code"] == "worker_not_found"


def test_a_limit_that_is_none_is_told(bed: Bed) -> None:
    """What counts is the file of the worker's own control group; this machine may have the controller or not."""
    words = ("--memory-max", "64M", "--tasks-max", "64", "--", "sleep", "1000")
    begun = told(bed, "start", "small", *words)
    group = f"/sys/fs/cgroup{begun['worker']['placed']['control_group']}"
    there = bed.run(["ls", group]).stdout.split()
    lacks = [name for name, file in (("memory_max", "memory.max"), ("tasks_max", "pids.max")) if file not in there]
    assert begun["unenforced"] == told(bed, "status", "small")["unenforced"] == lacks
    said = bed.as_user("alice", f"AGENT_INTERCOM_SCOPE_ID={SCOPE} orchestrate worker status small").stdout
    assert ("not enforced: memory" in said) is ("memory_max" in lacks)
    doctor = bed.as_user("alice", "orchestrate doctor --json --skip-model-check", check=False).stdout
    checks = {each["check"]: each for each in json.loads(doctor)["data"]["checks"]}
    assert (checks["limits"]["state"] == "ok") is (not lacks)


def test_a_worker_of_a_worker_is_told_with_it(bed: Bed) -> None:
    child = "orchestrate worker start child -- sleep 1000; exec sleep 1000"
    started = told(bed, "start", "parent", "--may-start", "1", "--", "sh", "-c", child)["worker"]
    until(lambda: told(bed, "status", "parent")["children"] != [], "it has started one")
    (found,) = told(bed, "status", "parent")["children"]
    assert found["name"] == f"{started['id']}/child" and found["parent"] == started["incarnation"]
    assert told(bed, "stop", "parent", "--yes")["stopped"]
    preview = told(bed, "prune")["candidates"]
    assert {found["id"], started["id"]} <= {each["id"] for each in preview}
    done = told(bed, "prune", "--yes")
    assert [each["id"] for each in done["pruned"]] == [each["id"] for each in preview] and done["kept"] == []
    assert told(bed, "list", "--history")["workers"] == []


def test_how_a_worker_ended_is_told_as_it_was(bed: Bed) -> None:
    def said(*words: str) -> str:
        return bed.as_user("alice", ["env", f"AGENT_INTERCOM_SCOPE_ID={SCOPE}", "orchestrate", "worker", *words]).stdout

    start = ("start", "short", "--max-runtime", "1s", "--key", "once", "--", "sleep", "1000")
    assert [told(bed, *start)["repeated"] for _ in range(2)] == [False, True]
    assert said("wait", "short") == "short: stopped (its time was over)\n"
    assert said("stop", "short", "--yes").startswith("short: had ended before; nobody is left in its unit")
    assert "its time was over" in said("status", "short", "--override")
    command = "trap '' TERM HUP; sleep 1000 & kill -9 $$"
    told(bed, "start", "left", "--", "sh", "-c", command)
    told(bed, "wait", "left", "--until", "blocked")
    note = said("status", "left")
    assert "its command has ended (killed by SIGKILL), what it left behind is ended in " in note
    assert "lives on" not in note
    told(bed, "wait", "left")
    assert "note: killed by SIGKILL, its command had left processes behind" in said("status", "left")


def test_the_same_start_again_tells_that_nothing_runs_now(bed: Bed) -> None:
    failing = ("start", "--key", "none", "--", "/no/such")
    assert [told(bed, *failing, code=1)["code"] for _ in range(2)] == ["command_not_found"] * 2
    start = ("start", "once", "--key", "once", "--", "sleep", "1000")
    assert [told(bed, *start)["repeated"] for _ in range(2)] == [False, True]
    told(bed, "stop", "once", "--yes")
    assert told(bed, *start, code=5)["code"] == "worker_not_live"


def test_a_wait_outlives_the_service(bed: Bed) -> None:
    command = "until [ -e /home/alice/go ]; do sleep 0.1; done; orchestrate worker notify ready; exec sleep 1000"
    begun = told(bed, "start", "held", "--max-runtime", "11year", "--", "sh", "-c", command)["worker"]
    script = f"""
        export AGENT_INTERCOM_SCOPE_ID={SCOPE}
        orchestrate worker wait held --until ready --timeout 1min & waiting=$!
        until ls -l /proc/$waiting/fd | grep -q socket; do sleep 0.1; done
        systemctl --user restart orchestrate-workers.service && touch /home/alice/go && wait $waiting
    """
    assert bed.as_user("alice", script).stdout.startswith("held: ready")
    renamed = told(bed, "rename", "held", "other")["worker"]
    assert renamed["updated_at"] > renamed["entered_at"] > begun["entered_at"]


def test_what_was_printed_can_be_piped(bed: Bed) -> None:
    told(bed, "start", "printer", "--keep-output", "--", "printf", "a\\tb\\n  c\\n")
    told(bed, "wait", "printer")
    script = f"AGENT_INTERCOM_SCOPE_ID={SCOPE} orchestrate worker logs printer --output"
    assert bed.as_user("alice", script).stdout == "a\tb\n  c\n"


def test_a_worker_of_an_agent(bed: Bed) -> None:
    spawned = fleet(bed, "spawn", id="job", command=["sh", "-c", "exit 7"])
    assert spawned["ok"] is True, spawned
    assert spawned["result"]["details"]["worker"]["owner"]["name"] == "mgr-1"
    waited = fleet(bed, "wait", id="job")["result"]
    assert waited["details"]["worker"]["ended"]["exit_code"] == 7 and "exit 7" in waited["text"]
    assert fleet(bed, "spawn", command=["/no/such"])["code"] == "command_not_found"
    again = fleet(bed, "restart", id="job")
    assert again["result"]["details"]["worker"]["generation"] == 2
    fleet(bed, "wait", id="job")
    assert "job" in fleet(bed, "prune", acknowledge=True)["result"]["text"]
    assert fleet(bed, "doctor")["result"]["details"]["live"] == 0
    assert fleet(bed, "cleanup")["result"]["details"]["candidates"] == []
    assert fleet(bed, "_heartbeat")["result"]["details"]["checkpointRequests"] == []
