# SPDX-License-Identifier: Apache-2.0
"""What the unit files say. Whether the lines hold is shown by behaviour, in tests/system/test_units.py."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from agent_intercom.intercom.contract import Limits

UNITS = Path(__file__).resolve().parents[2] / "units"
SOCKETS = ("intercom.socket", "intercom-gateway.socket")

Unit = dict[str, dict[str, list[str]]]


def read(name: str) -> Unit:
    """A unit as section → key → values in order (systemd.syntax(7); configparser would drop repeated keys)."""
    unit: Unit = defaultdict(lambda: defaultdict(list))
    section = ""
    for line in (UNITS / name).read_text().splitlines():
        if re.fullmatch(r"\[\w+\]", line):
            section = line[1:-1]
        elif line and line[0] not in "#;":
            key, _, value = line.partition("=")
            unit[section][key].append(value)
    return unit


def value(unit: Unit, section: str, key: str) -> str:
    (only,) = unit[section][key]
    return only


def test_addresses_and_trust() -> None:
    local, remote = (read(name)["Socket"] for name in SOCKETS)
    assert local["ListenStream"] == ["%t/agent-intercom/intercom.sock", "%h/.pi/agent/intercom/broker.sock"]
    assert remote["ListenStream"] == ["%t/agent-intercom/gateway.sock", "%h/.pi/agent/intercom/remote-gateway.sock"]
    assert (local["FileDescriptorName"], remote["FileDescriptorName"]) == (["local"], ["remote"])
    assert remote["Service"] == ["intercom.service"]


@pytest.mark.parametrize("name", SOCKETS)
def test_sockets_are_private_and_stay(name: str) -> None:
    unit = read(name)
    assert value(unit, "Socket", "SocketMode") == "0600"
    assert value(unit, "Socket", "DirectoryMode") == "0700"
    assert not {"Accept", "RemoveOnStop", "FlushPending"} & unit["Socket"].keys()
    assert value(unit, "Install", "WantedBy") == "sockets.target"


def test_service_belongs_to_its_sockets() -> None:
    unit = read("intercom.service")
    both = " ".join(SOCKETS)
    assert value(unit, "Unit", "Requires") == value(unit, "Unit", "After") == value(unit, "Service", "Sockets") == both
    assert "Install" not in unit


def test_limits_let_a_broker_start_for_every_client() -> None:
    """The limits must be out of reach of a broker that exits at once, at ten starts a second."""
    service = read("intercom.service")
    pairs = [(service["Unit"], "StartLimit")] + [(read(name)["Socket"], "TriggerLimit") for name in SOCKETS]
    for section, prefix in pairs:
        (interval,), (burst,) = section[f"{prefix}IntervalSec"], section[f"{prefix}Burst"]
        assert int(burst) >= 10 * int(interval.removesuffix("s"))


def test_store_holds_what_the_contract_admits() -> None:
    limits = Limits()
    memory_files = 2  # while one is replaced, both are there
    room = int(value(read("intercom.service"), "Service", "FileDescriptorStoreMax"))
    assert room >= limits.sessions + limits.unregistered + memory_files


def test_nothing_newer_than_systemd_252() -> None:
    newer = {"FileDescriptorStorePreserve", "RestartSteps", "RestartMaxDelaySec", "PollLimitBurst", "PrivatePIDs"}
    for name in ("intercom.service", *SOCKETS, "intercom.service.d/50-mounts.conf"):
        unit = read(name)
        assert not newer & {key for section in unit.values() for key in section}
        assert value(unit, "Service", "Type") == "notify" if name == "intercom.service" else True


def test_mount_hardening_is_apart() -> None:
    """Without PrivateUsers= these are ignored, or fail the start, under an unprivileged manager."""
    base = read("intercom.service")["Service"]
    mounts = read("intercom.service.d/50-mounts.conf")["Service"]
    assert mounts["PrivateUsers"] == ["yes"]
    assert not [key for key in base if key.startswith(("Private", "Protect", "ReadOnly", "ReadWrite", "Capability"))]


def test_preset_enables_the_sockets_and_nothing_else() -> None:
    text = (UNITS / "90-agent-intercom.preset").read_text()
    lines = [line for line in text.splitlines() if line[:1] not in {"", "#"}]
    timers = ("orchestrate-prune.timer", "orchestrate-cleanup.timer")
    assert lines == [
        *(f"enable {name}" for name in (*SOCKETS, "orchestrate-workers.socket")),
        *(f"disable {name}" for name in timers),
    ]


def test_old_runs_are_removed_daily_where_somebody_asks_for_it() -> None:
    timer, service = read("orchestrate-prune.timer"), read("orchestrate-prune.service")
    assert value(timer, "Timer", "OnCalendar") == "daily"
    assert value(timer, "Install", "WantedBy") == "timers.target"
    assert value(service, "Service", "ExecStart") == "/usr/bin/orchestrate prune --yes"
    # It names sessions and files.
    assert value(service, "Service", "StandardOutput") == value(service, "Service", "StandardError") == "null"
    assert "Install" not in service


@pytest.mark.parametrize("name", ["intercom.service", "orchestrate@.service", "orchestrate-workers.service"])
def test_a_crash_calls_no_program_that_keeps_the_memory(name: str) -> None:
    """At 0, core(5), one that kernel.core_pattern names is called all the same; and nobody can raise a hard limit."""
    assert value(read(name), "Service", "LimitCORE") == "1"


def test_worker_service_takes_nothing_from_what_it_forks() -> None:
    """Children keep filters, limits and masks for ever, and workers are confined one by one."""
    service = read("orchestrate-workers.service")["Service"]
    assert service["Type"] == ["notify"] and service["KillMode"] == ["mixed"] and service["Restart"] == ["on-failure"]
    taken = ("NoNew", "Private", "Protect", "Restrict", "SystemCall", "Capability", "ReadOnly", "ReadWrite", "Memory")
    assert [key for key in service if key.startswith(taken)] == ["MemorySwapMax"]
    assert not {"UMask", "Nice", "LimitNOFILE", "TasksMax", "Slice"} & service.keys()


def test_worker_service_starts_for_every_client() -> None:
    service, listener = read("orchestrate-workers.service"), read("orchestrate-workers.socket")
    assert value(listener, "Socket", "ListenStream") == "%t/agent-intercom/workers.sock"
    assert value(listener, "Socket", "SocketMode") == "0600"
    assert value(listener, "Socket", "DirectoryMode") == "0700"
    assert value(listener, "Socket", "Accept") == "no"
    assert value(listener, "Install", "WantedBy") == "sockets.target"
    assert value(service, "Unit", "Requires") == value(service, "Unit", "After") == "orchestrate-workers.socket"
    assert int(value(service, "Unit", "StartLimitBurst")) >= 10 * 60
    assert int(value(listener, "Socket", "TriggerLimitBurst")) >= 2 * 10 * 60


def test_workers_are_cleaned_up_daily_where_somebody_asks_for_it() -> None:
    timer, service = read("orchestrate-cleanup.timer"), read("orchestrate-cleanup.service")
    assert value(timer, "Timer", "OnCalendar") == "daily"
    assert value(timer, "Install", "WantedBy") == "timers.target"
    assert value(service, "Service", "ExecStart") == "/usr/bin/orchestrate worker cleanup --execute"
    # Where nobody listens, the command fails: it begins nothing itself.
    assert value(service, "Unit", "Wants") == value(service, "Unit", "After") == "orchestrate-workers.socket"
    assert value(service, "Service", "StandardOutput") == value(service, "Service", "StandardError") == "null"
    assert "Install" not in service
