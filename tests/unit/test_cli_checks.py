# SPDX-License-Identifier: Apache-2.0
"""`doctor`: verdicts on what the manager, the addresses and the kernel say, and a way out of each bad one."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.cli import checks, doctor, sockdiag, status
from agent_intercom.cli.checks import Units
from agent_intercom.cli.main import main
from agent_intercom.cli.sockdiag import Connection, DiagnosisUnavailable, Listener, Sockets
from agent_intercom.cli.verdicts import Check
from agent_intercom.host.manager import Manager, ManagerUnreachable
from agent_intercom.intercom.foreign import Probe

HEALTHY: dict[str, Any] = {"ActiveState": "active", "UnitFileState": "enabled", "Result": "success"}
MANAGER = 4711


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home with nothing in it, and no bus."""
    for name in ("AGENT_INTERCOM_SCOPE_ID", "AGENT_INTERCOM_SESSION_ID", "PI_CODING_AGENT_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("DBUS_SESSION_BUS_ADDRESS", "unix:path=/nowhere/bus")


def units(**changes: Any) -> Units:
    found: dict[str, dict[str, Any] | None] = {name: {**HEALTHY} for name in (*checks.SOCKETS, checks.SERVICE)}
    for name, change in changes.items():
        unit = name.replace("_socket", ".socket").replace("_service", ".service")
        found[unit] = None if change is None else {**HEALTHY, **change}
    return Units(MANAGER, found)


def by_name(found: list[Check]) -> dict[str, Check]:
    assert all(check.way_out for check in found if check.state in {"warn", "fail"}), "a verdict without a way out"
    return {check.name: check for check in found}


@pytest.mark.parametrize(
    ("change", "state", "hint"),
    [
        ({}, "ok", ""),
        (None, "fail", "install"),
        ({"ActiveState": "inactive"}, "fail", "enable --now intercom.socket"),
        ({"UnitFileState": "disabled"}, "warn", "enable intercom.socket"),
        ({"UnitFileState": ""}, "warn", "enable intercom.socket"),
        ({"ActiveState": "failed", "Result": "service-start-limit-hit"}, "fail", "reset-failed"),
        ({"ActiveState": "failed", "Result": "trigger-limit-hit"}, "fail", "reset-failed"),
        ({"ActiveState": "failed", "Result": "exit-code"}, "fail", "--take-over"),
    ],
)
def test_the_socket_unit(change: Any, state: str, hint: str) -> None:
    found = by_name(list(checks.sockets(units(intercom_socket=change))))
    assert found["intercom.socket"].state == state
    assert hint in found["intercom.socket"].way_out


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"StatusText": "3 sessions"}, {"intercom.service": "ok"}),
        ({"ActiveState": "inactive"}, {"intercom.service": "ok"}),
        ({"NRestarts": 2}, {"intercom.service": "warn"}),
        ({"ActiveState": "failed", "Result": "watchdog"}, {"intercom.service": "fail"}),
        (None, {"intercom.service": "fail"}),
        ({"StatusText": "1 session; degraded: STATE_LOCKED, NEW"}, {"degraded": "fail", "intercom.service": "ok"}),
    ],
)
def test_the_service(change: Any, expected: dict[str, str]) -> None:
    found = by_name(list(checks.service(units(intercom_service=change))))
    assert {name: check.state for name, check in found.items()} == expected


def test_only_the_owner_s_status_file_counts(tmp_path: Path) -> None:
    (tmp_path / "broker.owner").write_text("99")
    (tmp_path / "broker.status").write_text("1 session; degraded: STATE_FULL")
    address = str(tmp_path / "broker.sock")
    assert status._status_text(address, Probe("compatible", True, 98, os.geteuid())) is None
    assert status._status_text(address, Probe("absent", False, 99)) is None
    found = status._status_text(address, Probe("compatible", True, 99, os.geteuid()))
    assert status.degraded(found) == ["STATE_FULL"]
    # One that was killed left it, and the process has its number by now.
    (tmp_path / "broker.owner").write_text(str(os.getpid()))
    mine = Probe("compatible", True, os.getpid(), os.geteuid())
    assert status._status_text(address, mine) is not None
    os.utime(tmp_path / "broker.status", (1, 1))
    assert status._status_text(address, mine) is None
    (tmp_path / "broker.owner").write_text("99")
    (tmp_path / "broker.status").unlink()
    assert status._status_text(address, Probe("compatible", True, 99, os.geteuid())) is None


def test_a_service_that_stopped_has_no_last_words() -> None:
    stale = {"ActiveState": "inactive", "StatusText": "1 session; degraded: STATE_FULL"}
    found = by_name(list(checks.service(units(intercom_service=stale))))
    assert set(found) == {"intercom.service"}
    assert found["intercom.service"].text == "inactive"


def test_the_brokers_status_line_is_understood() -> None:
    assert status.degraded("2 sessions") == []
    assert status.degraded(None) == []
    assert status.degraded("2 sessions; degraded: A, B") == ["A", "B"]


@pytest.mark.parametrize(
    ("probe", "active", "state", "hint"),
    [
        (Probe("absent"), True, "fail", "intercom setup --undo"),
        (Probe("unreachable"), True, "fail", "permissions"),
        (Probe("compatible", True, MANAGER, os.geteuid()), True, "ok", ""),
        (Probe("unreachable", True, MANAGER, os.geteuid()), True, "fail", "restart intercom.service"),
        (Probe("incompatible", True, MANAGER, os.geteuid()), True, "fail", "restart intercom.service"),
        (Probe("unreachable", True, 99, os.geteuid(), "other"), True, "fail", "--take-over"),
        (Probe("compatible", True, 99, os.geteuid()), False, "warn", "intercom broker"),
        (Probe("compatible", True, 99, os.geteuid()), True, "fail", "--take-over"),
        (Probe("incompatible", True, 99, os.geteuid()), False, "fail", "--take-over"),
        (Probe("compatible", True, 99, os.geteuid() + 1), True, "fail", "who made"),
    ],
)
def test_who_listens(probe: Probe, active: bool, state: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "probe", lambda address, timeout: probe)
    for module in (checks, status):
        monkeypatch.setattr(module, "is_manager", lambda pid: pid == MANAGER)
    change = {} if active else {"ActiveState": "inactive"}
    found = by_name(list(checks.addresses(units(intercom_socket=change), checks.hear())))
    assert found["compatibility-path"].state == state
    assert hint in found["compatibility-path"].way_out
    assert found["compatibility-path"].result()["state"] == state


def test_where_the_agents_of_this_shell_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = units(intercom_socket={"Listen": [("Stream", f"{tmp_path}/.pi/agent/intercom/broker.sock")]})
    assert by_name(list(checks.agent_directory(plain)))["agent-directory"].state == "ok"
    monkeypatch.setenv("PI_CODING_AGENT_DIR", "/island")
    assert "intercom setup &&" in by_name(list(checks.agent_directory(plain)))["agent-directory"].way_out
    moved = units(intercom_socket={"Listen": [("Stream", "/island/intercom/broker.sock")]})
    assert by_name(list(checks.agent_directory(moved)))["agent-directory"].state == "ok"
    monkeypatch.delenv("PI_CODING_AGENT_DIR")
    assert "setup --undo" in by_name(list(checks.agent_directory(moved)))["agent-directory"].way_out


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        (Probe("unreachable", True, 99), "TIMEOUT", "does not answer in time"),
        (Probe("unreachable", True, 99, heard="closed"), "CONNECTION_LOST", "closed the connection without an answer"),
        (Probe("unreachable", True, 99, heard="other"), "INCOMPATIBLE", "does not speak pi-intercom version 4"),
        (Probe("incompatible", True, 99), "INCOMPATIBLE", "does not speak pi-intercom version 4"),
    ],
)
def test_a_listener_is_judged_in_the_words_of_the_client(found: Probe, code: str, words: str) -> None:
    said = status.verdict(found)
    assert (said.code, words in said.text, "99" in said.text) == (code, True, True)


def test_where_nobody_listens_the_path_and_one_way_out_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "probe", lambda address, timeout: Probe("absent"))
    compat = f"{tmp_path}/.pi/agent/intercom/broker.sock"

    def told(found: Units) -> Check:
        check = by_name(list(checks.addresses(found, checks.hear())))["compatibility-path"]
        assert "broker.sock" in check.text
        return check

    there = units(intercom_socket={"ActiveState": "inactive", "Listen": [("Stream", compat)]})
    assert told(there).text == f"nobody listens at {compat}"
    assert checks.START_COMMAND in told(there).way_out
    assert "make install" in told(units(intercom_socket=None)).way_out
    monkeypatch.setenv("PI_CODING_AGENT_DIR", "/island")
    elsewhere = told(there).way_out
    assert elsewhere == f"intercom setup && {checks.RELOAD}; or `intercom broker`"


@pytest.mark.parametrize(("state", "way_out"), [("inactive", "kill 99"), ("failed", "--take-over")])
def test_our_own_broker_is_ended_by_hand_unless_it_is_in_the_way(
    state: str, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "probe", lambda address, timeout: Probe("compatible", True, 99, os.geteuid()))
    monkeypatch.setattr(checks, "is_manager", lambda pid: False)
    monkeypatch.setattr(checks.ownership, "self_bound", lambda directory, pid: True)
    found = by_name(list(checks.addresses(units(intercom_socket={"ActiveState": state}), checks.hear())))
    assert way_out in found["compatibility-path"].way_out
    assert "`intercom broker` runs in the foreground" in found["compatibility-path"].text


def test_a_broker_in_the_foreground_needs_no_canonical_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(address: str, timeout: float) -> Probe:
        if address.endswith("broker.sock"):
            return Probe("compatible", True, 99, os.geteuid())
        return Probe("absent")

    monkeypatch.setattr(checks, "probe", look)
    monkeypatch.setattr(checks, "is_manager", lambda pid: pid == MANAGER)
    found = by_name(list(checks.addresses(units(intercom_socket={"ActiveState": "inactive"}), checks.hear())))
    assert (found["canonical-path"].state, found["compatibility-path"].state) == ("ok", "warn")


def test_addresses_are_probed_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def look(address: str, timeout: float) -> Probe:
        both.wait(20.0)
        return Probe("absent")

    monkeypatch.setattr(checks, "probe", look)
    assert len(checks.hear()) == 2


def test_a_listener_that_does_not_answer_is_told_by_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "probe", lambda address, timeout: Probe("unreachable", True, 99, os.geteuid()))
    found = by_name(list(checks.addresses(units(intercom_socket={"ActiveState": "inactive"}), checks.hear())))
    assert "process 99" in found["compatibility-path"].text
    assert "kill -KILL 99" in found["compatibility-path"].way_out


def test_an_address_that_is_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PI_CODING_AGENT_DIR", "/" + "x" * 110)
    found = by_name(list(checks.addresses(units(), checks.hear())))
    assert "107 bytes" in found["compatibility-path"].text


@pytest.mark.parametrize(
    ("change", "told"),
    [({"ActiveState": "inactive"}, True), ({"Listen": [("Stream", "/elsewhere")]}, True), ({}, False)],
)
def test_what_the_manager_left_behind_is_told(
    change: dict[str, Any], told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / ".pi/agent/intercom"
    directory.mkdir(parents=True)
    (directory / "broker.owner").write_text(str(MANAGER))
    monkeypatch.setattr(checks, "is_manager", lambda pid: pid == MANAGER)
    here = {"Listen": [("Stream", str(directory / "broker.sock"))]}
    found = by_name(list(checks.owner_file(units(intercom_socket={**here, **change}))))
    assert ("owner-file" in found) is told
    assert not told or found["owner-file"].way_out == f"rm {directory}/broker.owner"
    assert list(checks.owner_file(Units(problem="no bus"))) == []


def test_an_invalid_scope_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_INTERCOM_SCOPE_ID", "tiny")
    found = by_name(list(checks.environment()))
    assert found["scope"].state == "fail"
    assert "16 to 128 characters" in found["scope"].text
    assert "AGENT_INTERCOM_SCOPE_ID" in found["scope"].way_out


@pytest.mark.parametrize(("lingers", "state"), [(True, "ok"), (False, "warn"), (None, "unknown")])
def test_lingering(lingers: bool | None, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "lingering", lambda: lingers)
    assert by_name(list(checks.login()))["lingering"].state == state


def test_the_runtime_directory_has_to_be_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, state in (("tmpfs", "ok"), ("ext4", "warn"), (None, "unknown")):
        monkeypatch.setattr(checks, "file_system", lambda path, kind=kind: kind)
        assert by_name(list(checks.environment()))["runtime-directory"].state == state
    for value, words in (("relative", "not an absolute path"), ("/nowhere", "names no directory")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        assert words in by_name(list(checks.environment()))["runtime-directory"].text
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("AGENT_INTERCOM_SESSION_ID", "not valid")
    found = by_name(list(checks.environment()))
    assert (found["runtime-directory"].state, found["session-id"].state) == ("warn", "fail")


def test_file_systems_are_told_apart() -> None:
    assert checks.file_system("/proc") == "proc"
    assert checks.file_system("/nowhere") is None


# Connections.


def connection(inode: int, unread: int) -> Connection:
    return Connection(unread, 0, inode, inode, f"c{inode}")


def looking(monkeypatch: pytest.MonkeyPatch, *looks: Sockets) -> list[Check]:
    found = iter(looks)
    monkeypatch.setattr(doctor, "look", lambda addresses: next(found))
    monkeypatch.setattr(doctor, "SECOND_LOOK", 0.0)
    return list(doctor._connections())


def test_only_a_client_that_reads_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Sockets([Listener(0, 128)], [connection(1, 50), connection(2, 50), connection(3, 0), connection(4, 50)])
    second = Sockets([Listener(0, 128)], [connection(1, 50), connection(2, 10), connection(3, 60), connection(4, 90)])
    total, *deaf = looking(monkeypatch, first, second)
    assert (total.state, total.result()["backlog"], len(total.result()["connections"])) == ("ok", 0, 4)
    assert [check.result()["pid"] for check in deaf] == [1, 4]
    assert "process 1 (c1)" in deaf[0].text


def test_a_backlog_that_stays_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, none = Sockets([Listener(3, 128)], []), Sockets([Listener(0, 128)], [])
    assert looking(monkeypatch, waiting, waiting)[0].state == "warn"
    assert looking(monkeypatch, waiting, none)[0].state == "ok"


def test_without_socket_diagnosis_the_rest_still_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unavailable(addresses: list[str]) -> Sockets:
        raise DiagnosisUnavailable("pyroute2 is not installed")

    monkeypatch.setattr(doctor, "look", unavailable)
    assert main(["doctor", "--json"]) == 6
    found = {check["check"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found["connections"]["state"] == "unknown"
    assert found["intercom.socket"]["state"] == "unknown"
    assert found["compatibility-path"]["state"] == "fail"
    assert found["contract"]["version"] == 4


def test_missing_libraries_are_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "jeepney.io.blocking", None)
    monkeypatch.setitem(sys.modules, "pyroute2", None)
    with pytest.raises(ManagerUnreachable):
        Manager().__enter__()
    with pytest.raises(DiagnosisUnavailable):
        sockdiag.look([])
