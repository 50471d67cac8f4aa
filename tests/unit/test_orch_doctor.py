# SPDX-License-Identifier: Apache-2.0
"""`orchestrate doctor`: the shape of its answer, and every fault with its way out."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import agent_intercom
from agent_intercom.cli import checks as checking
from agent_intercom.cli import dependencies
from agent_intercom.cli.dependencies import DEPENDENCIES
from agent_intercom.cli.orchestrate import examining, findings
from agent_intercom.cli.orchestrate.findings import Systemd
from agent_intercom.host.manager import UnitState
from agent_intercom.orchestration import hosting, inventory, models, runtime, tmux
from agent_intercom.workers import confinement
from tests.unit.orchcli import Home, Said
from tests.unit.test_orch_pruning import half_made, make, place, root_of

VERSION = "257.9-1"
CONTRACT = {"commands", "tmux", "model_checks", "model_policy", "budget_policy", "paths"}
MEMBERS = CONTRACT | {"systemd", "confinement", "runs", "checks", "checks_total"}


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Home]:
    """One with a path that is short enough for addresses of sockets."""
    with tempfile.TemporaryDirectory(prefix="h", dir="/tmp") as directory:
        yield Home(Path(directory), monkeypatch, capfd)


def programs(home: Home) -> str:
    """Launchers as installed; the path of the broker's."""
    for name in ("orchestrate-broker", "orchestrate-workers", "orchestrate-launcher", "orchestrate-bridge"):
        home.program(name, "#!/bin/sh\n")
    return str(home.bin / "orchestrate-broker")


def well(home: Home, **changes: Any) -> Systemd:
    """A manager that has everything."""
    service = {"ExecStart": [(programs(home), [], False)], "NeedDaemonReload": False}
    units: dict[str, Any] = {"orchestrate@0.socket": {}, "orchestrate@0.service": service}
    units |= {"orchestrate-reaper@0.service": {}, "orchestrate-prune.timer": {"ActiveState": "inactive"}}
    workers = {"ExecStart": [(str(home.bin / "orchestrate-workers"), [], False)], "NeedDaemonReload": False}
    units |= {"orchestrate-workers.socket": {}, "orchestrate-workers.service": workers}
    states = [UnitState("orchestrate-workers.socket", "loaded", "active", "listening")]
    found = Systemd(version=VERSION, lingering=True, units=units, service=states, freezer=True)
    return found._replace(**changes)


@pytest.fixture
def machine(home: Home, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A machine on which everything is well."""
    monkeypatch.setattr(findings, "ask_manager", lambda runtime_dir: well(home))
    monkeypatch.setattr(findings, "file_system", lambda directory: "tmpfs")
    monkeypatch.setattr(confinement, "abi", lambda: 7)
    monkeypatch.setattr(confinement, "filters", lambda: True)
    return home


def say(monkeypatch: pytest.MonkeyPatch, found: Systemd) -> None:
    monkeypatch.setattr(findings, "ask_manager", lambda runtime_dir: found)


def checks(home: Home, *words: str) -> dict[str, tuple[str, str, str]]:
    """Name to state, text and way out; what is told of twice is there once, by the worst."""
    told: dict[str, tuple[str, str, str]] = {}
    worse = ["ok", "unknown", "warn", "fail"]
    for check in home.json("doctor", *words).envelope["data"]["checks"]:
        assert check.keys() - {"wayOut"} == {"check", "state", "text"}
        assert "wayOut" in check or check["state"] in {"ok", "unknown"}
        new = (check["state"], check["text"], check.get("wayOut", ""))
        if worse.index(new[0]) >= worse.index(told.get(check["check"], ("ok", "", ""))[0]):
            told[check["check"]] = new
    return told


def test_the_shape_of_the_answer(machine: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    data = machine.json("doctor").data
    assert data.keys() == MEMBERS
    commands = {command["name"]: command for command in data["commands"]}
    assert commands["pi"] == {"name": "pi", "status": "ok", "path": str(machine.bin / "pi")}
    assert commands["pi-bridge"]["path"] == str(machine.root / "package/extensions/orchestrator-worker.js")
    assert data["tmux"].keys() == {"version", "server_running", "extended_keys", "extended_keys_format"}
    assert data["model_checks"] == [
        {"role": role, "provider": "openai-codex", "model": model, "available": True, "detail": "available"}
        for role, model in (("implementer", "gpt-5.6-sol"), ("reviewer", "gpt-5.4"))
    ]
    assert data["model_policy"].keys() == {"config_path", "configured", "execution_profile", "project_config"}
    assert data["model_policy"]["execution_profile"]["name"] == "thorough"
    assert data["model_policy"]["configured"] is False
    assert data["model_policy"]["project_config"]["matched"] is False
    assert data["budget_policy"].keys() == {"config_path", "configured", "effective"}
    assert data["budget_policy"]["effective"]["version"] == 1
    state = machine.root / "home/.local/state/agent-intercom/runs"
    pi = machine.root / "home/.pi/agent"
    assert data["paths"] == {
        "state_root": str(state),
        "config": str(machine.root / "home/.config/agent-intercom/orchestrate.toml"),
        "model_config": str(pi / "tmux-orchestrator.json"),
        "budget_config": str(pi / "tmux-orchestrator-budgets.json"),
        "project": str(machine.project),
    }
    expected = {"reachable": True, "version": VERSION, "lingering": True}
    assert data["systemd"] == expected | {"units_installed": True, "units_current": True}
    assert data["runs"] == {"live": 0, "failed": 0, "leftovers": 0, "retained": 0, "bytes": 0}
    assert {check["state"] for check in data["checks"]} == {"ok"}


def test_nothing_is_made_by_looking(machine: Home) -> None:
    before = machine.tree()
    assert machine.json("doctor").code == 0
    assert machine.tree() == before


def test_what_a_person_reads(machine: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    said = machine.call("doctor", "--skip-model-check")
    assert (said.code, said.err) == (0, "")
    assert all(line.startswith("ok      ") for line in said.out.splitlines())
    say(monkeypatch, Systemd("the user's bus does not answer", lingering=False))
    said = machine.call("doctor")
    assert said.code == 1
    # What is wrong with it stands above.
    assert said.err == "orchestrate: failed checks: systemd\n" and "no user service manager answers" in said.out
    assert "-> `loginctl enable-linger`, if they" in said.out


def test_a_missing_prerequisite_has_data_all_the_same(machine: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, Systemd("the user's bus does not answer"))
    said = machine.json("doctor")
    assert said.code == 1
    assert said.error[0] == "missing_prerequisite"
    data = said.envelope["data"]
    assert data["tmux"] is None
    assert data["systemd"]["reachable"] is False and data["systemd"]["units_installed"] is None
    assert data["paths"]["project"] == str(machine.project)


@pytest.mark.parametrize(
    ("changes", "status", "detail"),
    [
        ({"version": "251.4"}, "fail", "251.4"),
        ({"version": "252"}, "ok", "252"),
        ({"version": "v257-rc1"}, "ok", "v257"),
    ],
)
def test_old_managers(
    machine: Home, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], status: str, detail: str
) -> None:
    say(monkeypatch, well(machine, **changes))
    told = checks(machine)["systemd"]
    assert told[0] == status and detail in told[1]


def test_units_that_are_missing_old_or_lead_nowhere(machine: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    good = well(machine)
    say(monkeypatch, good._replace(units={**good.units, "orchestrate@0.socket": None}))
    assert checks(machine)["units"][:2] == ("fail", "not installed: orchestrate@.socket")
    assert machine.json("doctor").envelope["data"]["systemd"]["units_installed"] is False
    say(monkeypatch, good._replace(units={**good.units, "orchestrate@0.socket": {"NeedDaemonReload": True}}))
    assert checks(machine)["units"][::2] == ("warn", "`systemctl --user daemon-reload`")
    assert machine.json("doctor").data["systemd"]["units_current"] is False
    (machine.bin / "orchestrate-launcher").unlink()
    say(monkeypatch, good)
    status, detail, _ = checks(machine)["units"]
    assert (status, detail) == ("fail", f"cannot be run: {machine.bin}/orchestrate-launcher")


def test_the_runtime_directory(machine: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "file_system", lambda directory: "ext4")
    assert checks(machine)["runtime-directory"][0] == "warn"
    machine.runtime.chmod(0o755)
    assert "others may enter" in checks(machine)["runtime-directory"][1]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(machine.root / "none"))
    assert checks(machine)["runtime-directory"][:2] == ("fail", "XDG_RUNTIME_DIR names no directory")
    long = machine.root / ("x" * 90)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert "too long" in checks(machine)["runtime-directory"][1]
    monkeypatch.setattr(confinement, "SHARED_MEMORY", str(machine.root))
    (short := machine.root / "r").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    assert checks(machine)["runtime-directory"][0] == "warn"
    assert "confined workers may change" in checks(machine)["runtime-directory"][1]
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(runtime, "LOGIND", "/nowhere")
    said = machine.json("doctor")
    assert said.error[0] == "missing_prerequisite"
    assert said.envelope["data"]["runs"]["retained"] is None


BLOCKED = """
import sys
from agent_intercom.cli import checks as checking
from agent_intercom.cli import dependencies

blocked = set(sys.argv[1].split(","))


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


sys.meta_path.insert(0, Blocker())
find = dependencies.find_spec
dependencies.find_spec = lambda name: None if name in blocked else find(name)
from agent_intercom.cli.orchestrate.main import main

sys.exit(main(sys.argv[2:]))
"""
"""Runs the command line in a Python that lacks some modules."""


def lacking(home: Home, names: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED, names, *words]
    source = Path(agent_intercom.__file__).parent.parent
    environ = {**home.environment, "PYTHONPATH": str(source)}
    return subprocess.run(command, env=environ, cwd=home.project, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("names", [*(each.module for each in DEPENDENCIES), ",".join(e.module for e in DEPENDENCIES)])
def test_modules_that_are_missing(home: Home, names: str) -> None:
    done = lacking(home, names, "doctor", "--json", "--skip-model-check")
    said = Said(done.returncode, done.stdout, done.stderr)
    code, message = said.error
    assert (said.code, code) == (1, "missing_prerequisite")
    data = said.envelope["data"]
    assert data.keys() == MEMBERS
    (told,) = [check for check in data["checks"] if check["check"] == "modules"]
    assert (told["state"], told["text"]) == ("fail", f"missing: {names.replace(',', ', ')}")
    for each in DEPENDENCIES:
        wanted = each.module in names.split(",")
        assert (f" {each.debian} " in told["wayOut"].replace("`", " ")) is wanted
        assert (f" {each.pypi} " in told["wayOut"].replace("`", " ")) is wanted
    assert "modules" in message and "report it" not in message


def test_what_a_failed_import_comes_to() -> None:
    text = dependencies.missing_module(ModuleNotFoundError("No module", name="pydantic_settings.sources"))
    assert text.startswith("the Python module pydantic_settings is missing: install")
    assert "apt install python3-pydantic-settings" in text and "pip install pydantic-settings" in text
    assert dependencies.missing_module(ModuleNotFoundError("No module", name="agent_intercom.none")) == ""
    assert dependencies.missing_module(ImportError("cannot import name", name="msgspec")) == ""


def test_every_module_that_is_declared_is_known() -> None:
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = [*declared["dependencies"], *declared["optional-dependencies"]["systemd"]]
    names = {re.split(r"[<>=]", each)[0] for each in wanted} | {"pydantic"}
    assert {each.pypi for each in DEPENDENCIES} == names - {"pyroute2"}


def test_the_harness(machine: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine.bin / "pi").unlink()
    monkeypatch.setenv("AGENT_INTERCOM_PI_PACKAGE", "/nowhere")
    told = checks(machine)
    assert told["pi"][0] == told["worker-bridge"][0] == "fail"
    for name in ("pi", "worker-bridge"):
        assert '[defaults] harness = "command" or "external"' in told[name][2]
        assert "--worker-command ROLE=PROGRAM" in told[name][2]
    # That the models cannot be asked for then is no news.
    assert "model" not in told
    machine.config('[defaults]\nharness = "external"\n')
    told = checks(machine)
    assert told["harness"][0] == "ok" and "pi" not in told
    said = machine.json("doctor").data
    assert {row["name"] for row in said["commands"]}.isdisjoint({"pi", "pi-bridge"}) and not said["model_checks"]
    machine.config("".join(f'[roles.{role}]\nharness = "external"\n' for role in ("implementer", "reviewer")))
    assert "pi" not in checks(machine)


@pytest.mark.parametrize(("kind", "state"), [("command", "warn"), ("external", "warn"), ("pi", "fail"), (None, "fail")])
def test_who_works_without_pi_is_not_refused_for_it(
    machine: Home, monkeypatch: pytest.MonkeyPatch, kind: str | None, state: str
) -> None:
    (machine.bin / "pi").unlink()
    monkeypatch.setenv("AGENT_INTERCOM_PI_PACKAGE", "/nowhere")
    run = make(machine, "team", "r1", 0)
    record = json.loads((Path(run) / "manifest.json").read_text())
    for entry in record["roles"].values():
        entry["harness"] = kind
    (Path(run) / "manifest.json").write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    with socket.socket(socket.AF_UNIX) as listener:
        if kind:
            listener.bind(place(machine, run))
            listener.listen()
        told = checks(machine)
        assert (told["pi"][0], told["worker-bridge"][0]) == (state, state)
        assert machine.json("doctor").code == (1 if state == "fail" else 0)


def test_models_that_are_not_there(machine: Home) -> None:
    machine.program("pi", "#!/bin/sh\nprintf 'provider model\\nopenai-codex gpt-5.4\\n'\n")
    said = machine.json("doctor").data
    assert [row["available"] for row in said["model_checks"]] == [False, True]
    told = checks(machine)
    assert told["model"][0] == "warn" and told["model"][1].startswith("implementer: openai-codex/gpt-5.6-sol")
    assert told["models"][1] == "available for reviewer"
    assert machine.json("doctor", "--skip-model-check").data["model_checks"] == []


def test_settings_that_are_wrong(machine: Home) -> None:
    machine.config("[retention]\nkeep_days = 'x'\n")
    said = machine.json("doctor")
    assert said.error[0] == "orchestration_error"
    told = checks(machine)["settings"]
    assert told[0] == "fail" and "retention.keep_days" in told[1]
    data = said.envelope["data"]
    assert data["model_policy"]["execution_profile"] is None and data["budget_policy"]["effective"] is None
    assert data["tmux"] is not None


def test_which_of_two_files_counts(machine: Home) -> None:
    original = machine.file("home/.pi/agent/tmux-orchestrator.json", '{"version": 1}')
    told = checks(machine)
    assert "settings-unused" not in told and f"{original} (models)" in told["settings"][1]
    assert machine.json("doctor").data["model_policy"] == machine.json("doctor").data["model_policy"] | {
        "config_path": original,
        "configured": True,
    }
    machine.config('default_profile = "economy"\n')
    told = checks(machine)
    assert told["settings-unused"][:2] == (
        "warn",
        f"{original} does not count: orchestrate.toml says something about models",
    )
    assert "orchestrate.toml (models)" in told["settings"][1]


def test_a_run_whose_broker_does_not_work(machine: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(machine, "team", "r1", 0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place(machine, run))
        listener.listen()
        assert checks(machine)["runs"][:2] == ("ok", "1 live")
        for broker, words in (
            (hosting.BrokerUnit("active", "running", "active, round 2; degraded: STATE_FULL", 7, ""), "STATE_FULL"),
            (hosting.BrokerUnit("failed", "failed", "", 0, "exit-code"), "its broker has failed (exit-code)"),
        ):
            say(monkeypatch, well(machine, brokers={"teamr1": broker}))
            said = machine.json("doctor")
            assert said.code == 2 and said.error[0] == "orchestration_error"
            status, detail, way_out = checks(machine)["run"]
            assert status == "fail" and detail.startswith("team: ") and words in detail
            assert "orchestrate@teamr1.service" in way_out
            assert said.envelope["data"]["runs"] == said.envelope["data"]["runs"] | {"live": 1, "failed": 1}
        well_broker = hosting.BrokerUnit("active", "running", "active, round 1; 2 of 2 workers connected", 7, "")
        say(monkeypatch, well(machine, brokers={"teamr1": well_broker}))
        assert machine.json("doctor").code == 0


def test_a_run_that_lives_and_cannot_be_read(machine: Home) -> None:
    run = make(machine, "team", "r1", 0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place(machine, run))
        listener.listen()
        (run / "manifest.json").write_text("{")
        status, detail, way_out = checks(machine)["run"]
    assert status == "fail" and detail.startswith("team: it lives, and cannot be read")
    assert way_out == f"look at {run}; to end it: `systemctl --user stop orchestrate-teamr1.slice`"


def test_a_run_that_lives_and_of_which_nobody_can_tell_where(machine: Home) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        (machine.runtime / "agent-intercom/run").mkdir(parents=True, mode=0o700)
        listener.bind(str(machine.runtime / "agent-intercom/run/x1.sock"))
        listener.listen()
        status, _, way_out = checks(machine)["run"]
    assert (status, way_out) == ("fail", "to end it: `systemctl --user stop orchestrate-x1.slice`")


def test_what_listens_in_the_file_system_of_somebody_else_is_no_run_of_ours(machine: Home) -> None:
    address = place(machine, make(machine, "team", "r1", 0))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        # As from a container: the address is known to the kernel, and its file is not here.
        os.unlink(address)
        assert checks(machine)["runs"][:2] == ("ok", "none lives")


def test_processes_that_nobody_listens_for(machine: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    place(machine, make(machine, "team", "r1", 0))
    say(monkeypatch, well(machine, left={"teamr1": 2}))
    said = machine.json("doctor")
    assert said.code == 2
    told = checks(machine)
    assert told["left-running"][:2] == ("fail", "team: 2 processes are left of it, and nobody listens for it")
    assert told["left-running"][2].startswith(
        "`orchestrate stop team --yes`; or `systemctl --user stop orchestrate-teamr1"
    )
    # That it was not stopped is the same fault.
    assert "stale-place" not in told
    say(monkeypatch, well(machine, left={"unknown1": 1}))
    assert checks(machine)["left-running"][1:] == (
        "run unknown1: 1 process is left of it, and nobody listens for it",
        "`systemctl --user stop orchestrate-unknown1.slice`",
    )


class Units(NamedTuple):
    """A manager that has units and processes."""

    states: list[UnitState]
    counts: dict[str, int]

    def processes(self, unit: str) -> list[tuple[int, str]]:
        return [(number, unit) for number in range(self.counts.get(unit, 0))]


def test_whose_processes_are_left(home: Home) -> None:
    units = ("gone", "live", "empty", "ending")
    states = [UnitState(f"orchestrate-{unit}.slice", "loaded", "active", "active") for unit in units]
    states.append(UnitState("orchestrate-ending-probe-g1.service", "loaded", "deactivating", "stop-sigterm"))
    states.append(UnitState("orchestrate-gone-probe-g1.service", "loaded", "active", "running"))
    counts = {f"orchestrate-{unit}.slice": 1 for unit in units if unit != "empty"}
    manager: Any = Units(states, counts)
    with socket.socket(socket.AF_UNIX) as listener:
        (home.runtime / "agent-intercom/run").mkdir(parents=True)
        listener.bind(str(home.runtime / "agent-intercom/run/live.sock"))
        listener.listen()
        assert findings._left_running(manager, states, str(home.runtime)) == {"gone": 1}


@pytest.fixture
def hangs() -> Iterator[Callable[..., Any]]:
    """What never comes to an end, but with the test."""
    end = threading.Event()

    def wait(*arguments: object, **options: object) -> Any:
        end.wait()
        raise OSError

    yield wait
    end.set()


def test_whatever_hangs_is_not_waited_for(
    machine: Home, monkeypatch: pytest.MonkeyPatch, hangs: Callable[..., Any]
) -> None:
    monkeypatch.setattr(examining, "PATIENCE_S", 0.0)
    monkeypatch.setattr(findings, "ask_manager", hangs)
    monkeypatch.setattr(inventory, "take", hangs)
    told = checks(machine, "--skip-model-check")
    assert told["systemd"][:2] == (
        "unknown",
        "no user service manager answers: it does not answer in reasonable time",
    )
    assert told["state-root"][:2] == ("fail", "the files of runs cannot be read in reasonable time")
    said = machine.json("doctor", "--skip-model-check")
    assert said.error[0] == "missing_prerequisite"
    assert said.envelope["data"]["runs"] == dict.fromkeys(("live", "leftovers", "retained", "bytes")) | {"failed": 0}


def test_the_limits_of_all_together_are_below_that_of_the_caller() -> None:
    """Programs are asked one after the other; everything else is asked meanwhile."""
    one_after_the_other = models.TIMEOUT_S + tmux.TIMEOUT_S
    assert max(one_after_the_other, examining.PATIENCE_S) + examining.TMUX_TIMEOUT_S < 28


def test_a_tmux_that_hangs_is_asked_once(machine: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "TMUX_TIMEOUT_S", 0.3)
    log = machine.root / "asked"
    (machine.root / f"tmux-{os.geteuid()}").mkdir()
    (machine.root / f"tmux-{os.geteuid()}/default").touch()
    monkeypatch.setenv("TMUX_TMPDIR", str(machine.root))
    machine.program("tmux", f"#!/bin/sh\necho $1 >>{log}\n[ $1 = -V ] && echo 'tmux 3.5a' && exit\nexec sleep 60\n")
    monkeypatch.setattr(tmux, "hosted", lambda environ: {})
    data = machine.json("doctor", "--skip-model-check").data
    assert data["tmux"]["server_running"] is False
    assert len(log.read_text().split()) <= 2


def test_what_cannot_be_told_is_unknown_as_with_the_other_doctor(
    machine: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same fact, the same words, by `intercom doctor` and by `orchestrate doctor`."""
    say(monkeypatch, Systemd("the user's bus does not answer"))
    monkeypatch.setattr(findings, "file_system", lambda directory: None)
    ours = {check["check"]: check for check in machine.json("doctor").envelope["data"]["checks"]}
    monkeypatch.setattr(checking, "lingering", lambda: None)
    monkeypatch.setattr(checking, "file_system", lambda directory: None)
    without = checking.Units(problem="the user's bus does not answer")
    told = [*checking.sockets(without), *checking.service(without), *checking.environment(), *checking.login()]
    theirs = {check.name: check.result() for check in told}
    for name in ("intercom.socket", "intercom.service"):
        assert theirs[name] == ours["systemd"] | {"check": name} == ours["units"] | {"check": name}
    for name in ("lingering", "runtime-directory"):
        assert theirs[name] == ours[name]
    assert {ours[name]["state"] for name in ("systemd", "units", "lingering", "runtime-directory")} == {"unknown"}


def test_hints_name_the_program_that_was_called(machine: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_INTERCOM_CALLED_AS", "pi-tmux-agents")
    make(machine, "a", "old", 40)
    make(machine, "b", "new", 1, begun=False)
    half_made(machine, "a", "20260801T120000Z-42", 3)
    say(monkeypatch, well(machine, left={"x1": 1, "anew": 1}, failed=["orchestrate-prune.service"]))
    machine.program("pi", "#!/bin/sh\nprintf 'provider model\\n'\n")
    monkeypatch.setattr(tmux, "hosted", lambda environ: {"/somewhere/old/r": "old"})
    told = checks(machine)
    assert {"startup-files", "leftovers", "retained", "prune", "model", "tmux-runs"} <= told.keys()
    machine.config("[retention]\nkeep_days = 'x'\n")
    told |= checks(machine)
    for state, text, way_out in told.values():
        assert re.search(r"\borchestrate (?!again)[a-z]", f"{text} {way_out}") is None, (state, text, way_out)


def test_units_that_have_failed(machine: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = ["orchestrate@a1.service", "orchestrate-a1-probe-g2.service", "orchestrate-prune.service"]
    say(monkeypatch, well(machine, failed=failed))
    status, detail, way_out = checks(machine)["failed-units"]
    assert (status, detail) == ("warn", f"have failed: {failed[0]}, {failed[1]}")
    assert checks(machine)["prune"][::2] == ("warn", "`orchestrate prune --yes` tells why")
    assert "systemctl --user reset-failed 'orchestrate*'" in way_out
    assert machine.json("doctor").data["runs"]["failed"] == 1


def test_what_runs_have_left(machine: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = make(machine, "a", "kept", 1, begun=False)
    half = half_made(machine, "a", "20260801T120000Z-42", 3)
    broken = make(machine, "b", "broken", 3)
    (broken / "manifest.json").write_text("{")
    stale = make(machine, "c", "stale", 3)
    place(machine, stale)
    told = checks(machine)
    assert told["startup-files"][1].startswith("1 run that has ended still has its task")
    assert told["leftovers"][:2] == ("warn", "1 directory belongs to no run")
    assert told["unreadable"][2] == f"look at {broken}"
    assert told["stale-place"][1].startswith("run cstale was started and not stopped")
    assert f"rm -r {machine.runtime}/agent-intercom/run/cstale" in told["stale-place"][2]
    runs = machine.json("doctor").data["runs"]
    assert (runs["live"], runs["leftovers"], runs["retained"]) == (0, 3, 2)
    assert runs["bytes"] > 0
    assert kept.exists() and half.exists()


def test_more_runs_than_the_settings_keep(machine: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    make(machine, "a", "old", 40)
    make(machine, "a", "new", 1)
    status, detail, way_out = checks(machine)["retained"]
    assert status == "warn" and detail.startswith("2 runs lie there, ") and "do not keep 1 of them" in detail
    assert "systemctl --user enable --now orchestrate-prune.timer" in way_out
    good = well(machine)
    say(monkeypatch, good._replace(units={**good.units, "orchestrate-prune.timer": {"ActiveState": "active"}}))
    assert "enable --now" not in checks(machine)["retained"][2]
    machine.config("[retention]\nkeep_days = 90\n")
    assert checks(machine)["retained"][0] == "ok"


def test_a_state_root_that_is_a_link(machine: Home) -> None:
    root_of(machine).parent.mkdir(parents=True)
    root_of(machine).symlink_to(machine.root)
    assert checks(machine)["state-root"][0] == "fail"


def test_runs_in_tmux(machine: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine.root / f"tmux-{os.geteuid()}").mkdir()
    (machine.root / f"tmux-{os.geteuid()}/default").touch()
    monkeypatch.setenv("TMUX_TMPDIR", str(machine.root))
    script = """#!/bin/sh
case "$1" in
    -V) echo 'tmux 3.5a' ;;
    list-sessions) echo ;;
    show-options) [ "$4" = extended-keys ] && echo on || echo csi-u ;;
esac
"""
    machine.program("tmux", script)
    monkeypatch.setattr(tmux, "hosted", lambda environ: {"/somewhere/old/r": "old"})
    assert "1 run of the tmux program goes on: old" in checks(machine)["tmux-runs"][1]
    expected = {"version": "3.5a", "server_running": True}
    assert machine.json("doctor").data["tmux"] == expected | {"extended_keys": "on", "extended_keys_format": "csi-u"}


def test_where_there_is_no_tmux(machine: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(machine.bin))
    data = machine.json("doctor", "--skip-model-check").data
    expected = {"version": None, "server_running": False}
    assert data["tmux"] == expected | {"extended_keys": None, "extended_keys_format": None}
    assert "tmux" not in {command["name"] for command in data["commands"]}


def test_a_project_can_be_named(machine: Home) -> None:
    other = machine.root / "other"
    other.mkdir()
    assert machine.json("doctor", "--project", str(other)).data["paths"]["project"] == str(other)
    assert machine.json("doctor", "--project", str(other / "none")).error[0] == "invalid_arguments"


def test_texts_from_files_cannot_move_the_cursor(machine: Home) -> None:
    machine.config('default_profile = "a\\u001b[2J"\n')
    said = machine.call("doctor")
    assert "\x1b" not in said.out + said.err and "settings" in said.out


def test_no_manager_is_one_line(home: Home) -> None:
    """Without a bus, as the function itself says it."""
    found = findings.ask_manager(None)
    assert not found.reachable and found.problem and "\n" not in found.problem
    assert found.result()["units_current"] is None
