# SPDX-License-Identifier: Apache-2.0
"""Every line of the sandbox is shown to hold by what a process under it can no longer do.

The same probe runs three times: as a bare service, with the lines of intercom.service, and with those and the
mount drop-in. A line counts as proved when the bare service could and the other could not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

PROBE = Path(__file__).with_name("hardening_probe.py")
INSTALLED = "usr/lib/systemd/user"
# What intercom.service is for rather than what confines it; tests/system/test_broker*.py have these.
NOT_CONFINEMENT = {
    "Type",
    "NotifyAccess",
    "ExecStart",
    "Sockets",
    "FileDescriptorStoreMax",
    "Restart",
    "RestartSec",
    "WatchdogSec",
    "WatchdogSignal",
    "TimeoutStartSec",
    "TimeoutStopSec",
}
ALLOWED, REFUSED = True, "EPERM"

# directive → what the probe reports → (as a bare service, under the directive)
BASE: dict[str, dict[str, tuple[Any, Any]]] = {
    "Slice": {"slice": (False, True)},
    "UMask": {"mode": (0o644, 0o600)},
    "LimitCORE": {"core": (None, [1, 1])},
    "MemorySwapMax": {},  # see test_swap
    "NoNewPrivileges": {"effective_uid": ("0", "4000")},
    "LockPersonality": {"personality": (0, 1)},
    "MemoryDenyWriteExecute": {"wx": (ALLOWED, REFUSED)},
    "RestrictAddressFamilies": {
        "inet": (ALLOWED, "EAFNOSUPPORT"),
        "netlink": (ALLOWED, "EAFNOSUPPORT"),
        "unix": (ALLOWED, ALLOWED),
    },
    "RestrictNamespaces": {"namespace": (0, 1)},
    "RestrictRealtime": {"realtime": ("EINVAL", REFUSED)},
    "RestrictSUIDSGID": {"make_setuid": (ALLOWED, REFUSED)},
    "SystemCallArchitectures": {},  # see test_foreign_architecture
    "SystemCallFilter": {"filtered_call": (ALLOWED, REFUSED)},
    "SystemCallErrorNumber": {"filtered_call": (ALLOWED, REFUSED)},
}
MOUNTS: dict[str, dict[str, tuple[Any, Any]]] = {
    "PrivateUsers": {"root_uid": (0, 65534)},
    "ProtectSystem": {"elsewhere": (ALLOWED, "EROFS")},
    "ProtectHome": {"home": (ALLOWED, "EROFS"), "runtime_outside": (ALLOWED, "EROFS")},
    "ReadWritePaths": {
        "state": (ALLOWED, ALLOWED),
        "runtime": (ALLOWED, ALLOWED),
        "clients": (ALLOWED, ALLOWED),
        "other_home_config": (ALLOWED, "EROFS"),
    },
    "PrivateTmp": {"tmp": (True, False)},
    "PrivateDevices": {"devices": (True, False)},
    "PrivateNetwork": {},  # see test_namespaces_of_its_own
    "ProtectControlGroups": {"own_cgroup": (ALLOWED, "EROFS")},
    "ProtectHostname": {},  # likewise
    "ProtectKernelLogs": {"kernel_log": ("0o400", "0o0")},
    "ProtectKernelModules": {"modules": (ALLOWED, "EACCES")},
    "ProtectKernelTunables": {"tunables_readonly": (False, True)},
    "CapabilityBoundingSet": {"capabilities": (None, 0)},
}


def service_lines(text: str) -> list[str]:
    """The lines of [Service] that confine."""
    _, _, section = text.partition("[Service]\n")
    return [
        line
        for line in section.splitlines()
        if line and not line.startswith("#") and line.partition("=")[0] not in NOT_CONFINEMENT
    ]


def names(lines: list[str]) -> set[str]:
    return {line.partition("=")[0] for line in lines}


@pytest.fixture(scope="module")
def lines(staged: Path) -> tuple[list[str], list[str]]:
    """Confining lines of the unit and of the drop-in, as installed."""
    base = (staged / INSTALLED / "intercom.service").read_text()
    mounts = (staged / INSTALLED / "intercom.service.d/50-mounts.conf").read_text()
    return service_lines(base), service_lines(mounts)


@pytest.fixture(scope="module")
def reports(booted: Any, lines: tuple[list[str], list[str]]) -> dict[str, dict[str, Any]]:
    booted.reset()
    (booted.root / "usr/local/lib/probe.py").write_bytes(PROBE.read_bytes())
    booted.run("install -m 4755 /usr/bin/id /usr/local/bin/probe-suid")
    booted.run("mkdir -p /usr/lib/modules && touch /tmp/probe-outside && install -d -o alice /srv/probe")
    booted.as_user("alice", "mkdir -p ~/.pi/agent/intercom ~/.local/state/agent-intercom /run/user/4000/agent-intercom")
    base, mounts = lines
    found = {}
    for name, confined in {"bare": [], "base": base, "mounts": base + mounts}.items():
        unit = booted.root / f"home/alice/.config/systemd/user/probe-{name}.service"
        unit.parent.mkdir(parents=True, exist_ok=True)
        output = f"/home/alice/probe-{name}.json"
        own = "Type=oneshot\nExecStart=/usr/bin/python3 -I /usr/local/lib/probe.py"
        unit.write_text("\n".join(["[Service]", own, f"StandardOutput=truncate:{output}", *confined, ""]))
        booted.as_user("alice", f"systemctl --user daemon-reload; systemctl --user start probe-{name}.service")
        found[name] = json.loads((booted.root / output[1:]).read_text())
    return found


def test_every_line_has_a_proof(lines: tuple[list[str], list[str]]) -> None:
    base, mounts = lines
    assert names(base) == BASE.keys()
    assert names(mounts) == MOUNTS.keys()


@pytest.mark.parametrize("directive", [name for name, proof in BASE.items() if proof])
def test_base(reports: dict[str, dict[str, Any]], directive: str) -> None:
    for key, (bare, confined) in BASE[directive].items():
        assert reports["base"][key] == confined == reports["mounts"][key], key
        if bare is not None:
            assert reports["bare"][key] == bare, key


@pytest.mark.parametrize("directive", [name for name, proof in MOUNTS.items() if proof])
def test_mounts(reports: dict[str, dict[str, Any]], directive: str) -> None:
    for key, (bare, confined) in MOUNTS[directive].items():
        assert reports["mounts"][key] == confined, key
        if bare is not None:
            assert reports["bare"][key] == bare, key


def test_swap(bed: Any, reports: dict[str, dict[str, Any]]) -> None:
    """In force where the manager has the memory controller, and at least accepted where it has not."""
    assert reports["base"]["swap_max"] in {"0", None}
    assert bed.show("alice", "intercom.service", "MemorySwapMax") == "0"


def test_foreign_architecture(reports: dict[str, dict[str, Any]]) -> None:
    """A 32-bit program cannot make a system call; a kernel that runs none has nothing to refuse."""
    assert reports["base"]["elf32"] != 42
    assert reports["bare"]["elf32"] in {42, "ENOEXEC"}


def test_namespaces_of_its_own(reports: dict[str, dict[str, Any]]) -> None:
    for key in ("network_namespace", "uts_namespace"):
        assert reports["mounts"][key] != reports["bare"][key]
