# SPDX-License-Identifier: Apache-2.0
"""The installed `intercom` command where systemd has the sockets."""

from __future__ import annotations

import json
from typing import Any

JsonObject = dict[str, Any]


def intercom(bed: Any, user: str, *arguments: str, env: str = "") -> tuple[int, JsonObject]:
    """Exit code and what `--json` printed."""
    line = " ".join(("env", env, "/usr/bin/intercom", *arguments, "--json"))
    done = bed.as_user(user, line, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def checks(found: JsonObject) -> dict[str, JsonObject]:
    return {check["check"]: check for check in found["checks"]}


def test_status_and_doctor_of_a_healthy_machine(bed: Any) -> None:
    bed.as_user("alice", "systemctl --user enable --now intercom.socket intercom-gateway.socket")
    code, found = intercom(bed, "alice", "status")
    assert code == 0, found
    broker = found["broker"]
    assert (broker["activation"], broker["degraded"], found["sessions"]) == ("systemd", [], 0)
    assert broker["statusText"]
    code, found = intercom(bed, "alice", "doctor")
    assert code == 0, found
    seen = checks(found)
    for name in ("intercom.socket", "intercom-gateway.socket", "intercom.service", "journal"):
        assert seen[name]["state"] == "ok", seen[name]
    for name in ("agent-directory", "runtime-directory", "lingering", "connections", "settings"):
        assert seen[name]["state"] == "ok", seen[name]
    for name in ("canonical-path", "compatibility-path"):
        assert seen[name]["listener"] == "compatible", seen[name]


def test_a_degraded_broker_is_told(bed: Any) -> None:
    bed.as_user("alice", "mkdir -p ~/.config/agent-intercom")
    bed.as_user("alice", "echo max_sessions=0 >~/.config/agent-intercom/intercom.toml")
    bed.as_user("alice", "systemctl --user enable --now intercom.socket intercom-gateway.socket")
    code, found = intercom(bed, "alice", "status")
    assert (code, found["broker"]["degraded"]) == (6, ["CONFIG_INVALID"])
    code, found = intercom(bed, "alice", "doctor")
    assert (code, checks(found)["degraded"]["state"], checks(found)["settings"]["state"]) == (6, "fail", "fail")
    assert intercom(bed, "alice", "list")[0] == 0
    code, found = intercom(bed, "alice", "config check")
    assert (code, found["problems"][0]["key"]) == (2, "max_sessions")


def test_doctor_where_nothing_is_started(bed: Any) -> None:
    code, found = intercom(bed, "alice", "doctor")
    assert code == 6
    seen = checks(found)
    assert (seen["intercom.socket"]["state"], seen["compatibility-path"]["state"]) == ("fail", "fail")
    assert "systemctl --user enable --now intercom.socket" in seen["intercom.socket"]["wayOut"]
    code, found = intercom(bed, "alice", "status")
    assert (code, found["broker"]["state"]) == (3, "absent")


def test_doctor_without_a_bus(bed: Any) -> None:
    bed.enable("alice")
    code, found = intercom(bed, "alice", "doctor", env="DBUS_SESSION_BUS_ADDRESS=unix:path=/nowhere")
    seen = checks(found)
    assert (code, seen["intercom.socket"]["state"], seen["compatibility-path"]["state"]) == (0, "unknown", "ok")


def test_doctor_tells_of_a_failed_socket_and_how_to_get_out(bed: Any) -> None:
    bed.drop_in("alice", "intercom.service", "[Service]\nExecStart=\nExecStart=/bin/false\nRestart=no\n")
    bed.drop_in("alice", "intercom.socket", "[Socket]\nTriggerLimitIntervalSec=60s\nTriggerLimitBurst=2\n")
    bed.enable("alice")
    intercom(bed, "alice", "list")
    wait_for(bed, "intercom.socket", "failed")
    code, found = intercom(bed, "alice", "doctor")
    socket = checks(found)["intercom.socket"]
    assert (code, socket["state"]) == (6, "fail")
    assert "reset-failed" in socket["wayOut"]


def wait_for(bed: Any, unit: str, state: str) -> None:
    command = f"until [ $(systemctl --user show -P ActiveState {unit}) = {state} ]; do sleep 0.05; done"
    bed.as_user("alice", command, timeout=30)


def test_a_foreign_broker_is_told_and_taken_over(bed: Any) -> None:
    bed.drop_in("alice", "intercom.service", "")
    broker = bed.popen("alice", "AGENT_INTERCOM_IDLE_EXIT_MS=600000 exec /usr/bin/intercom broker")
    assert broker.stdout.readline().startswith("Intercom broker started")
    done = bed.as_user("alice", "systemctl --user start intercom.socket", check=False)
    assert done.returncode != 0, "a foreign broker was pushed aside"
    code, found = intercom(bed, "alice", "doctor")
    assert code == 6
    assert "doctor --take-over" in checks(found)["intercom.socket"]["wayOut"]
    assert "take-over" in checks(found)["compatibility-path"]["wayOut"]
    code, found = intercom(bed, "alice", "doctor", "--take-over")
    assert code == 0, found
    bed.as_user("alice", found["next"])
    assert intercom(bed, "alice", "status")[1]["broker"]["activation"] == "systemd"
    assert intercom(bed, "alice", "doctor", "--take-over")[1]["error"]["code"] == "NOTHING_TO_TAKE_OVER"


def test_setup_moves_the_compatibility_path_and_back(bed: Any) -> None:
    island = "PI_CODING_AGENT_DIR=/home/alice/island"
    bed.as_user("alice", "systemctl --user enable --now intercom.socket intercom-gateway.socket")
    code, found = intercom(bed, "alice", "doctor", env=island)
    assert (code, checks(found)["agent-directory"]["state"]) == (6, "fail")
    _, found = intercom(bed, "alice", "setup", env=island)
    bed.as_user("alice", found["next"])
    code, found = intercom(bed, "alice", "doctor", env=island)
    assert code == 0, found
    assert intercom(bed, "alice", "list", env=island)[0] == 0
    owner = (bed.root / "home/alice/island/intercom/broker.owner").read_text()
    assert owner.isdigit()
    seen = checks(intercom(bed, "alice", "doctor")[1])
    assert seen["agent-directory"]["state"] == "fail"
    assert "owner-file" not in seen
    assert not (bed.root / "home/alice/.pi/agent/intercom/broker.owner").exists()
    _, found = intercom(bed, "alice", "setup", "--undo")
    bed.as_user("alice", found["next"])
    alone = bed.popen("alice", f"{island} exec /usr/bin/intercom broker")
    assert alone.stdout.readline().startswith("Intercom broker started")
    assert intercom(bed, "alice", "doctor")[0] == 0


def test_the_seat_outlives_a_restart_of_the_broker(bed: Any) -> None:
    bed.enable("alice")
    watch = bed.popen("alice", ["/usr/bin/intercom", "watch", "--json"])
    session_id = json.loads(watch.stdout.readline())["sessionId"]
    bed.as_user("alice", "systemctl --user restart intercom.service")
    assert intercom(bed, "alice", "send", session_id, "after")[1]["state"] == "delivered"
    event = json.loads(watch.stdout.readline())
    assert (event["event"], event["message"]["text"]) == ("message", "after")


def test_the_other_user_gets_nothing(bed: Any) -> None:
    bed.enable("alice")
    bed.run("chmod a+rwx /home/alice /run/user/4000; chmod -R a+rwx /run/user/4000/agent-intercom /home/alice/.pi")
    code, found = intercom(bed, "bob", "list", env="XDG_RUNTIME_DIR=/run/user/4000")
    assert (code, found["error"]["code"]) == (5, "PEER_FOREIGN")
    code, found = intercom(bed, "bob", "status", env="XDG_RUNTIME_DIR=/run/user/4000")
    assert (code, found["broker"]["state"]) == (5, "foreign")
    bed.run("chmod 700 /run/user/4000 /home/alice")
