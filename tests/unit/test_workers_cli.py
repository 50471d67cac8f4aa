# SPDX-License-Identifier: Apache-2.0
"""`orchestrate worker`: what the worker service is asked, and what is said of its answers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from agent_intercom.cli.orchestrate import completing
from agent_intercom.host import manager
from agent_intercom.workers.contract import EXITS, SOCKET_UNIT, Code
from tests.unit.orchcli import Home, Said
from tests.unit.toldservice import ID, IDLE, SCOPE, Refused, Service, clock, ended, serving, stand, worker


@pytest.fixture
def service(home: Home) -> Iterator[Service]:
    """A worker service that listens."""
    with serving(home.runtime) as made:
        yield made


@pytest.fixture(autouse=True)
def a_time_that_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute that does not end in the middle of a test."""
    stand(monkeypatch)


# start


def started(service: Service) -> None:
    service.answers["start"] = {"worker": worker(state="registering", readiness="", enforced=("files-read-only",))}


def test_start(home: Home, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    started(service)
    monkeypatch.setenv("AGENT_INTERCOM_SCOPE_ID", SCOPE)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("NOT_FOR_WORKERS", "1")
    said = home.call("worker", "start", "review", "--task", "Look at it.", "--", "make", "--", "-j2")
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines() == [
        "review: launched, registering, generation 1",
        f"id: {ID}, unit: worker-ba9876543210.scope",
        "enforced by the kernel: files-read-only",
        f"is ended at {clock(IDLE)} if idle; alive is what uses the processor,"
        " or says so (worker notify, worker renew)",
        "output: not kept (--keep-output keeps it)",
        "next: orchestrate worker status review",
    ]
    params = service.params("start")
    environment = params.pop("environment")
    assert environment["OPENAI_API_KEY"] == "secret" and environment["PATH"] == os.environ["PATH"]
    assert not environment.keys() & {"NOT_FOR_WORKERS", "AGENT_INTERCOM_SCOPE_ID"}
    assert params == {
        "harness": "command",
        "command": ["make", "--", "-j2"],
        "directory": str(home.project),
        "name": "review",
        "task": "Look at it.\n",
        "writable": None,
        "network": True,
        "lifetimes": {},
        "grant": None,
        "keep_output": False,
    }
    assert service.caller == {"scope": SCOPE, "session": None, "override": False}


def test_start_hands_on_every_flag(home: Home, service: Service) -> None:
    started(service)
    (home.project / "out").mkdir()
    home.file("task.md", "Do it.")
    words = (
        "worker start --role audit --directory out --task-file ../task.md --read-only --writable out --no-network"
        " --memory-max 2G --memory-high 1G --tasks-max 64 --max-runtime 2h --idle-timeout 90min --grace infinity"
        " --may-start 2/5 --depth 2 --keep-output --key k1 --as mgr_1 --json -- ./run --json"
    )
    assert home.call(*words.split()).data["worker"]["id"] == ID
    said = home.call(*words.replace("--json --", "--").split())
    assert "output: kept, see `orchestrate worker logs review --output`\n" in said.out
    assert "scratch: AGENT_INTERCOM_SCRATCH, which is deleted when it ends; for what is to stay, --writable" in said.out
    del service.asked[1:]
    params = service.params("start")
    del params["environment"]
    assert params == {
        "harness": "command",
        "command": ["./run", "--json"],
        "directory": str(home.project / "out"),
        "role": "audit",
        "task": "Do it.\n",
        "writable": [str(home.project / "out")],
        "network": False,
        "memory_max": 2 << 30,
        "memory_high": 1 << 30,
        "tasks_max": 64,
        "lifetimes": {"runtime_ms": 7_200_000, "idle_ms": 5_400_000, "grace_ms": 0},
        "grant": {"children": 2, "descendants": 5, "depth": 2, "subdelegate": True},
        "keep_output": True,
        "key": "k1",
    }
    assert service.caller["session"] == "mgr_1"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--read-only", {"writable": [], "network": True}),
        ("--writable .", {"network": True}),
        ("--may-start 3", {"grant": {"children": 3, "descendants": 3, "depth": 1, "subdelegate": False}}),
    ],
)
def test_what_a_flag_of_start_leads_to(home: Home, service: Service, words: str, expected: dict[str, Any]) -> None:
    started(service)
    home.call("worker", "start", *words.split(), "--", "true")
    params = service.params("start")
    assert {key: params[key] for key in expected} == expected
    if "." in words:
        assert params["writable"] == [str(home.project)]


def test_the_environment_is_what_the_settings_let_pass(
    home: Home, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(service)
    home.config('[environment]\npass = ["FOR_WORKERS"]\ndrop = ["EDITOR"]\n')
    monkeypatch.setenv("FOR_WORKERS", "1")
    monkeypatch.setenv("EDITOR", "vi")
    assert home.call("worker", "start", "--", "true").code == 0
    environment = service.params("start")["environment"]
    assert environment["FOR_WORKERS"] == "1" and "EDITOR" not in environment


def test_bytes_that_are_no_text_reach_the_worker_as_they_are(
    home: Home, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(service)
    monkeypatch.setenv("OPENAI_API_KEY", os.fsdecode(b"caf\xe9"))
    assert home.call("worker", "start", "--", "echo", os.fsdecode(b"\xff")).code == 0
    params = service.params("start")
    assert os.fsencode(params["environment"]["OPENAI_API_KEY"]) == b"caf\xe9"
    assert os.fsencode(params["command"][1]) == b"\xff"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("start", "nothing is to run. `orchestrate worker start NAME -- COMMAND…`"),
        ("start review --", "nothing is to run"),
        ("start review make", "make: what is to run stands behind two dashes"),
        ("start review --nonsense -- make", "unrecognized: --nonsense"),
        ("start x -- make", "a name has 2 to 80"),
        ("start ../x -- make", "a name has 2 to 80"),
        ("start --key= -- make", "a key has 1 to 64"),
        ("start --directory gone -- make", "--directory: "),
        ("start --directory= -- make", "--directory is empty"),
        ("start --writable gone -- make", "/gone is not a directory that is there"),
        ("start --no-network -- make", "--no-network takes a worker that may not change every file. Say --read-only"),
        ("start --depth 2 -- make", "--depth says nothing without --may-start"),
        ("start --task= -- make", "the task cannot be empty"),
        ("start --task x --task-file y -- make", "--task and --task-file say the same thing"),
        ("start --as a/b -- make", "the session is no id of a session"),
        ("list --as=", "the session is no id of a session"),
        ("run", "nothing is to run"),
        ("prune --all", "prune --all removes what is not yours. Say --override"),
        ("stop review", "Say --yes"),
        ("restart review", "Say --yes"),
        ("rename review", "NAME"),
        ("notify asleep", "ready|working|waiting"),
        ("wait review --until nonsense", "'ready', 'idle', 'end', 'checkpoint', 'provisioning', 'registering'"),
        ("", "OPERATION"),
    ],
)
def test_wrong_usage_is_one_line_and_asks_nobody(home: Home, service: Service, words: str, text: str) -> None:
    before = home.tree()
    said = home.call("worker", *words.split())
    assert (said.code, said.out) == (2, "") and said.err.count("\n") == 1 and text in said.err, said
    assert service.asked == [] and home.tree() == before


def test_settings_that_cannot_be_used_are_told(home: Home, service: Service) -> None:
    home.config("nonsense = 1\n")
    said = home.call("worker", "start", "--", "true")
    assert said.code == 2 and "nonsense" in said.err and said.err.count("\n") == 1 and service.asked == []


def test_an_invalid_scope_or_session_is_refused_without_its_value(
    home: Home, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AGENT_INTERCOM_SCOPE_ID", "AGENT_INTERCOM_SESSION_ID"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "is/wrong")
            said = home.call("worker", "list")
            assert said.code == 2 and name in said.err and "is/wrong" not in said.err
    assert service.asked == []


def test_the_session_is_that_of_the_shell(home: Home, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_INTERCOM_SESSION_ID", "agent-7")
    service.answers["list"] = {"workers": [], "hidden": 0}
    assert home.call("worker", "list").code == 0
    assert service.caller["session"] == "agent-7"
    assert home.call("worker", "list", "--as", "other").code == 0
    assert service.caller["session"] == "other"


# Nobody listens


class Systemd:
    """A service manager that listens for the worker service when it is told to."""

    def __init__(self, service: Service, refusal: manager.ManagerError | None = None) -> None:
        self.service = service
        self.refusal = refusal
        self.listens = True
        self.started: list[str] = []

    def __call__(self, environ: object = None) -> Systemd:
        return self

    def __enter__(self) -> Systemd:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def start(self, unit: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.started.append(unit)
        if self.listens:
            self.service.listen()


def test_start_has_the_service_listened_for(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(home.runtime, listening=False) as service:
        systemd = Systemd(service)
        monkeypatch.setattr(manager, "Manager", systemd)
        started(service)
        assert home.call("worker", "start", "--", "true").code == 0
        assert systemd.started == [SOCKET_UNIT]


def test_a_socket_unit_whose_address_was_removed_is_told(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(home.runtime, listening=False) as service:
        systemd = Systemd(service)
        systemd.listens = False
        monkeypatch.setattr(manager, "Manager", systemd)
        said = home.json("worker", "start", "--", "true")
        assert said.code == 3 and said.error[0] == "workers_unreachable"
        assert f"`systemctl --user restart {SOCKET_UNIT}`" in said.error[1]


@pytest.mark.parametrize(
    ("refusal", "code", "text"),
    [
        (manager.ManagerRefused(manager.NO_SUCH_UNIT), Code.UNREACHABLE, "make install-user"),
        (manager.JobFailed(SOCKET_UNIT, "failed"), Code.UNREACHABLE, f"systemctl --user status {SOCKET_UNIT}"),
        (manager.ManagerUnreachable("there is no user bus"), Code.MANAGER_UNREACHABLE, "there is no user bus"),
    ],
)
def test_a_service_that_cannot_be_listened_for(
    home: Home, monkeypatch: pytest.MonkeyPatch, refusal: manager.ManagerError, code: str, text: str
) -> None:
    with serving(home.runtime, listening=False) as service:
        monkeypatch.setattr(manager, "Manager", Systemd(service, refusal))
        said = home.json("worker", "start", "--", "true")
        assert said.code == 3 and said.error[0] == code and text in said.error[1]


def test_looking_says_that_there_is_no_service_and_starts_none(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(home.runtime, listening=False) as service:
        systemd = Systemd(service)
        monkeypatch.setattr(manager, "Manager", systemd)
        for words in (["list"], ["status"], ["prune"], ["cleanup"]):
            said = home.call("worker", *words)
            assert said.code == 0 and said.out.startswith("Nothing to show: no worker service listens. `systemctl")
            assert home.json("worker", *words).data == {"workers": [], "hidden": 0, "service": False}
        for words in (
            ["status", "x1"],
            ["logs", "x1"],
            ["stop", "x1", "--yes"],
            ["cleanup", "--yes"],
            ["prune", "--yes"],
        ):
            said = home.json("worker", *words)
            assert said.code == 3 and said.error[0] == "workers_unreachable", words
            assert f"systemctl --user start {SOCKET_UNIT}" in said.error[1]
        assert systemd.started == []


def test_who_has_no_runtime_directory_is_told(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    said = home.call("worker", "list")
    assert said.code == 3 and "XDG_RUNTIME_DIR" in said.err and said.err.count("\n") == 1


# What is changed


@pytest.mark.parametrize(
    ("words", "params", "text"),
    [
        ("stop review --yes", {"worker": "review"}, "review: stopped; nobody is left in its unit"),
        ("restart review --yes", {"worker": "review", "fresh": False}, "started again"),
        ("restart review --yes --fresh", {"worker": "review", "fresh": True}, "started again"),
        ("rename review audit", {"worker": "review", "name": "audit"}, "now called review"),
        ("adopt review --as s2", {"worker": "review"}, "yours from now on"),
        ("release review", {"worker": "review"}, "can adopt it"),
        ("pause review", {"worker": "review"}, "paused"),
        ("resume review", {"worker": "review"}, "goes on"),
        ("notify working", {"state": "working"}, "told"),
    ],
)
def test_a_change(home: Home, service: Service, words: str, params: dict[str, Any], text: str) -> None:
    action = words.split(maxsplit=1)[0]
    service.answers[action] = {"worker": ended(), "stopped": [ended()]} if action == "stop" else {"worker": worker()}
    said = home.call("worker", *words.split())
    assert said.code == 0 and text in said.out, said
    assert service.params(action) == params and service.caller["override"] is False
    if "--as" in words:
        assert service.caller["session"] == "s2"
    if action != "notify":
        home.call("worker", *words.split(), "--override")
        assert service.caller["override"] is True


def test_what_was_stopped_with_a_worker_is_named(home: Home, service: Service) -> None:
    service.answers["stop"] = {"worker": ended(), "stopped": [ended("child", id="cccccccccccc"), ended()]}
    said = home.call("worker", "stop", "review", "--yes")
    assert said.out.splitlines() == ["review: stopped; nobody is left in its unit", "child: stopped with it"]
    left = ended(dirty=True, error_code="left_unit")
    service.answers["stop"] = {"worker": left, "stopped": [left]}
    said = home.call("worker", "stop", "review", "--yes")
    assert said.out.splitlines() == [
        "review: stopped; nobody is left in its unit"
        " (what had left the unit before may go on elsewhere, work tree changed)",
    ]


def test_a_stop_of_one_that_had_ended_says_so(home: Home, service: Service) -> None:
    service.answers["stop"] = {"worker": ended(), "stopped": [], "recorded": True}
    said = home.call("worker", "stop", "review", "--yes")
    assert said.out == "review: had ended before; nobody is left in its unit (stopped, exit 3, on request)\n"


def test_a_restart_that_is_not_meant_says_what_it_does_to_one_that_has_ended_too(home: Home) -> None:
    said = home.call("worker", "restart", "review")
    assert said.code == 2 and "starts the worker again, and ends first what still runs of it. Say --yes" in said.err


def test_a_stop_that_is_not_written_down_is_told_as_that(home: Home, service: Service) -> None:
    service.answers["stop"] = {"worker": ended(), "stopped": [ended()], "recorded": False}
    said = home.call("worker", "stop", "review", "--yes")
    assert said.code == 0 and said.out.splitlines()[0] == "review: stopped; nobody is left in its unit"
    assert "cannot write this down now" in said.out
    service.answers["stop"] = {"worker": ended(), "stopped": [], "recorded": True}
    assert "write this down" not in home.call("worker", "stop", "review", "--yes").out


def test_what_was_done_is_said_once(home: Home, service: Service) -> None:
    service.answers["pause"] = {"worker": worker(state="paused")}
    assert home.call("worker", "pause", "review").out == "review: paused; its times stand still\n"


def test_renew(home: Home, service: Service) -> None:
    service.answers["renew"] = {"workers": [worker()]}
    assert home.call("worker", "renew").out == f"review: renewed, is ended at {clock(IDLE)} if idle\n"
    assert service.params("renew") == {}
    service.answers["renew"] = {"workers": []}
    assert "Nothing to renew" in home.call("worker", "renew", "review").out
    assert service.asked[-1]["params"] == {"worker": "review"}
    service.answers["renew"] = {"workers": [], "left": [worker(state="paused")]}
    assert home.call("worker", "renew").out == "review: not renewed (paused, its times stand still)\n"


# What is removed


WHY = "its record and private files are deleted"


def test_forget_without_yes_only_tells(home: Home, service: Service) -> None:
    below = ended(f"{ID}/check", id="9" * 12)
    service.answers["forget"] = {"forgotten": [], "candidates": [below, ended()], "why": WHY}
    said = home.call("worker", "forget", "review", "--override")
    assert (said.code, said.err) == (0, "") and said.out.splitlines() == [
        f"would be forgotten: {ID}/check, {'9' * 12}",
        f"would be forgotten: review, {ID}: {WHY}",
        "Nothing was removed; `orchestrate worker forget review --override --yes` does it.",
    ]
    assert service.params("forget") == {"worker": "review", "preview": True}
    data = home.json("worker", "forget", "review").data
    assert data["dry_run"] is True and data["candidates"][1]["id"] == ID and data["forgotten"] == []
    for code in ("not_owner", "worker_live"):
        service.answers["forget"] = Refused(code)
        assert home.json("worker", "forget", "review").error[0] == code


def test_forget(home: Home, service: Service) -> None:
    service.answers["forget"] = {"forgotten": [ended()], "candidates": []}
    assert home.call("worker", "forget", "review", "--yes").out == f"forgot review, {ID}\n"
    assert service.params("forget") == {"worker": "review", "acknowledge": True}


NONE: dict[str, Any] = {"pruned": [], "candidates": [], "errors": [], "kept": [], "more": 0}


def test_prune_shows_what_would_go_and_removes_nothing(home: Home, service: Service) -> None:
    kept = {"worker": "9" * 12, "name": "lead", "code": "worker_live"}
    service.answers["prune"] = {**NONE, "candidates": [ended("old")], "kept": [kept]}
    said = home.call("worker", "prune", "--all", "--override")
    assert said.code == 0 and "old" in said.out
    assert f"kept: lead, {'9' * 12}: a worker below it lives\n" in said.out
    assert "Would remove 1. Nothing was removed; `orchestrate worker prune --all --override --yes`" in said.out
    assert service.params("prune") == {"all": True, "preview": True}
    data = home.json("worker", "prune").data
    assert data["dry_run"] is True and [each["name"] for each in data["candidates"]] == ["old"]
    service.answers["prune"] = {**NONE, "kept": [kept]}
    assert home.call("worker", "prune").out.splitlines()[1:] == ["Nothing to remove."]
    service.answers["prune"] = NONE
    assert home.call("worker", "prune").out == "Nothing to remove: no worker of yours that has ended is retained.\n"


def test_prune_of_one(home: Home, service: Service) -> None:
    service.answers["prune"] = Refused("worker_live")
    said = home.json("worker", "prune", "review")
    assert said.code == 5 and said.error[0] == "worker_live"
    service.answers["prune"] = {**NONE, "candidates": [ended()]}
    assert "`orchestrate worker prune review --yes`" in home.call("worker", "prune", "review").out
    assert service.asked[-1]["params"] == {"all": False, "preview": True, "worker": "review"}


def test_prune(home: Home, service: Service) -> None:
    service.answers["prune"] = {**NONE, "pruned": [ended()]}
    assert home.call("worker", "prune", "--yes").out == f"pruned review, {ID}\n"
    assert service.params("prune") == {"all": False, "acknowledge": True}
    service.answers["prune"] = {**NONE, "pruned": [ended()], "more": 9}
    assert "9 more are left for the next time.\n" in home.call("worker", "prune", "--yes").out
    service.answers["prune"] = {**NONE, "kept": [{"worker": ID, "name": "lead", "code": "conflict"}]}
    assert home.call("worker", "prune", "--yes").out == f"Nothing was removed.\nkept: lead, {ID}: conflict\n"
    service.answers["prune"] = {**NONE, "errors": [{"worker": ID, "code": "store_unusable"}]}
    said = home.json("worker", "prune", "review", "--yes")
    assert said.code == 3 and said.error[0] == "store_unusable" and "1 of them" in said.error[1]
    assert service.asked[-1]["params"]["worker"] == "review"


def test_cleanup(home: Home, service: Service) -> None:
    due = [{"worker": ID, "name": "review", "work": "stop", "reason": "idle-grace-expired"}]
    service.answers["cleanup"] = {"candidates": due, "handled": 0, "errors": 0, "deferred": 3}
    said = home.call("worker", "cleanup")
    assert said.out.splitlines()[1].split() == ["review,", ID, "stop", "idle-grace-expired"]
    assert "Nothing was done; `orchestrate worker cleanup --yes`" in said.out and "3 more are left" in said.out
    assert service.params("cleanup") == {"execute": False}
    service.answers["cleanup"] = {"candidates": [], "handled": 0, "errors": 0, "deferred": 0, "others": 2}
    said = home.call("worker", "cleanup")
    assert "2 more are of another scope id" in said.out and "2 due. Nothing was done; `" in said.out
    service.answers["cleanup"] = {"candidates": due, "handled": 1, "errors": 0, "deferred": 0}
    assert "Handled 1." in home.call("worker", "cleanup", "--execute").out
    assert service.asked[-1]["params"] == {"execute": True}
    service.answers["cleanup"] = {"candidates": [], "handled": 0, "errors": 2, "deferred": 0, "left": 2}
    said = home.json("worker", "cleanup", "--yes")
    assert said.code == 1 and "2 of them could not be handled" in said.error[1]
    left = "2 scratch directories of workers that have ended could not be removed"
    assert f"{left}; `orchestrate worker cleanup --yes` tries again." in home.call("worker", "cleanup").out
    health = {"version": "1", "live": 0, "systemd": 252, "confinement": [], "left": 2}
    service.answers |= {"health": health, "list": {"workers": [], "hidden": 0}}
    assert f"{left}: `orchestrate worker cleanup --yes` tries again" in home.call("worker", "status").out


def test_workers_without_a_record_are_told_with_the_way_out(home: Home, service: Service) -> None:
    strays = [{"unit": "worker-00ff.scope", "run": None, "programs": ["make", "evil\x1b[2J"]}]
    answer = {"candidates": [], "handled": 0, "errors": 0, "deferred": 0, "strays": strays}
    service.answers["cleanup"] = answer
    said = home.call("worker", "cleanup")
    assert said.out.splitlines()[1].split() == ["worker-00ff.scope", "-", "make,", "evil\\x1b[2J"]
    assert "1 live worker of which there is no record" in said.out
    assert "`orchestrate worker cleanup --yes --override` ends it" in said.out
    service.answers["cleanup"] = {**answer, "strays_ended": ["worker-00ff.scope"]}
    said = home.call("worker", "cleanup", "--yes", "--override")
    assert "Ended 1 of them." in said.out and "--override" not in said.out
    assert service.caller["override"] is True
    health = {"version": "1", "live": 0, "systemd": 252, "confinement": [], "lacking": ["OOMPolicy"], "strays": 2}
    aside = {"set_aside": "workers.sqlite3.damaged-1"}
    service.answers |= {"health": {**health, **aside}, "list": {"workers": [], "hidden": 0, **aside}}
    for command in ("list", "status"):
        assert home.call("worker", command).out.count("set aside as workers.sqlite3.damaged-1") == 1
    said = home.call("worker", "status")
    assert "knows no OOMPolicy= for scope units" in said.out
    assert "2 live workers of which there is no record: `orchestrate worker cleanup` shows them" in said.out


def test_the_end_of_what_a_stopped_worker_was_started_with_is_told(home: Home, service: Service) -> None:
    assert "started anew with `worker start`" in home.call("worker", "stop", "--help").out
    service.answers["restart"] = Refused("place_lost", "what it was started with is gone: start it anew", "worker")
    said = home.call("worker", "restart", "review", "--yes")
    assert said.code == 1 and said.err.endswith("start it anew. `orchestrate worker start` does that.\n")


# Errors, and the rest


@pytest.mark.parametrize("code", sorted(Code))
def test_every_code_has_its_exit_code_and_an_envelope(home: Home, service: Service, code: str) -> None:
    service.answers["status"] = Refused(code, "it cannot be", "params")
    said = home.json("worker", "status", "review")
    assert said.code == EXITS.get(Code(code), 1) and said.envelope["command"] == "worker"
    assert said.error[0] == code and "it cannot be" in said.error[1]
    told = home.call("worker", "status", "review")
    assert told.code == said.code and told.err.count("\n") == 1 and told.out == ""


@pytest.mark.parametrize(
    ("words", "refused", "texts"),
    [
        (
            "start x1 -- make",
            ("name_taken", "a live worker has this name already", "name"),
            ("`orchestrate worker status x1`", "`orchestrate worker restart x1 --yes`"),
        ),
        ("start -- nothere", ("command_not_found", "no", "command"), ("'nothere' was looked for in PATH.",)),
        ("start -- ./x", ("command_not_found", "no", "command"), ("'./x' was looked for in the directory that it",)),
        ("resume r1", ("conflict", "the worker is not paused", "worker"), ("r1: the worker is not paused",)),
        (
            "release r1",
            ("not_owner", "the worker is somebody else's; adopt it", "worker"),
            ("r1: the worker is somebody else's. `orchestrate worker adopt r1` makes it yours", "--override"),
        ),
        (
            "forget r1 --yes",
            ("not_owner", "the worker is somebody else's, and has ended", "worker"),
            ("r1: the worker is somebody else's, and has ended. A person may say --override.\n",),
        ),
        (
            "adopt r1",
            ("worker_not_live", "the worker has ended, and only one that lives can be adopted", "worker"),
            ("adopted. Its owner restarts or forgets it; a person may with --override.\n",),
        ),
        (
            "rename r1 r2 --override",
            ("worker_not_live", "the worker has ended", "worker"),
            ("`orchestrate worker restart r1 --yes --override` starts it again",),
        ),
        (
            "restart u/reviewer --yes",
            ("forbidden", "a worker of a run is changed by its run alone", "worker"),
            ("u/reviewer: ", "`orchestrate restart SESSION --role ROLE --yes`", "`orchestrate stop SESSION --yes`"),
        ),
        (
            "pause r1",
            ("worker_not_live", "the worker has ended", "worker"),
            ("`orchestrate worker restart r1 --yes`", "one that was stopped, `orchestrate worker start` anew"),
        ),
        (
            "stop r1 --yes --override --as m",
            ("forbidden", "only a person can override, and a session asks", "override"),
            ("As a person, leave out --as and unset AGENT_INTERCOM_SESSION_ID.",),
        ),
        ("forget r1 --yes", ("worker_live", "it has not ended", "worker"), ("`orchestrate worker stop r1 --yes`",)),
    ],
)
def test_a_fault_is_told_with_the_way_out(
    home: Home, service: Service, words: str, refused: tuple[str, str, str], texts: tuple[str, ...]
) -> None:
    service.answers = {words.split(maxsplit=1)[0]: Refused(*refused)}
    said = home.call("worker", *words.split())
    assert said.code != 0 and said.out == "" and said.err.count("\n") == 1
    for text in texts:
        assert text in said.err
    assert "{" not in said.err


def test_a_line_for_a_shell_that_was_given_as_a_program_is_told(home: Home, service: Service) -> None:
    service.answers["start"] = Refused("command_not_found", "the command was not found", "command")
    said = home.call("worker", "start", "--", "make test")
    assert "a line for a shell is run with `-- sh -c 'make test'`" in said.err


def test_a_text_of_the_service_steers_no_terminal(home: Home, service: Service) -> None:
    service.answers["status"] = Refused("worker_not_found", "a\x1b[2J\nb")
    said: Said = home.call("worker", "status", "review")
    assert said.err.count("\n") == 1 and "\x1b" not in said.err


def test_a_code_that_nobody_knows_is_a_failure(home: Home, service: Service) -> None:
    service.answers["status"] = Refused("what is no code", "odd")
    said = home.json("worker", "status", "review")
    assert said.code == 3 and said.error[0] == "workers_unreachable"


@pytest.mark.parametrize("words", ["list", "status", "status x1", "logs x1", "wait x1", "stop x1 --yes", "renew"])
@pytest.mark.parametrize("result", [{}, {"worker": {}, "workers": [{}], "reached": True}, {"worker": 1, "workers": 2}])
def test_an_answer_that_is_none_is_told_as_that(
    home: Home, service: Service, words: str, result: dict[str, Any]
) -> None:
    for action in ("list", "status", "logs", "wait", "stop", "renew", "health"):
        service.answers[action] = result
    said = home.json("worker", *words.split())
    assert said.code == 3 and said.error[0] == "workers_unreachable" and "something else" in said.error[1]


def test_names_of_workers_complete(home: Home, service: Service, capfd: pytest.CaptureFixture[str]) -> None:
    def offered(line: str) -> list[str]:
        capfd.readouterr()
        assert completing.print_words("orchestrate", line.split(" ")) == 0
        return capfd.readouterr().out.splitlines()

    assert offered("worker start x -- ma") == [":files"]
    assert offered("worker start --directory ") == [":directories"]
    assert offered("worker start ") == offered("worker start --as ") == offered("worker stop --as ") == []
    assert offered("worker notify w") == ["waiting", "working"]
    assert offered("worker forg") == ["forget"]
    assert "--keep-output" in offered("worker start --k")
    assert service.asked == []
    service.answers["list"] = {"workers": [worker(), ended("old"), worker("-x"), worker("two words")], "hidden": 0}
    assert offered("worker stop ") == ["review"]
    assert offered("worker forget ") == ["old"]
    assert offered("worker restart o") == ["old"]
    assert offered("worker status ") == ["old", "review"]
    service.answers["list"] = Refused("store_unusable")
    assert offered("worker stop ") == []


def test_names_complete_from_nobody_where_nobody_listens(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    assert completing.print_words("orchestrate", ["worker", "stop", ""]) == 0
    assert capfd.readouterr().out == ""


def test_run_hands_over_to_the_bridge(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[str]] = []

    def main(words: list[str]) -> int:
        told.append(words)
        return 3

    monkeypatch.setattr("agent_intercom.workers.bridge.main.main", main)
    said = home.call("worker", "run", "--", "./agent")
    assert said.code == 2 and "a run starts this itself" in said.err and "orchestrate worker start" in said.err
    assert told == [] and "PI_TMUX" not in said.err
    monkeypatch.setenv("PI_TMUX_ORCHESTRATOR_ROLE", "implementer")
    assert home.call("worker", "run", "--", "--odd", "--json", "--").code == 3
    assert told == [["--", "--odd", "--json", "--"]]
