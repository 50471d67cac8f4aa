# SPDX-License-Identifier: Apache-2.0
"""Jobs of the user's service manager, and the units of a run: workers that are started, ended and proven gone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mockmodel import Model
from tests.system import realpi
from tests.system.runs import Run
from tests.system.wire import UID, Door, until

PI = "/home/alice/.local/pi"
SECRETS = {"scope": "scope-canary-0f5b7a", "environment": "environment-canary-91c2"}

# Prints the value of the expression, or what was raised.
_ASK = """
import json, os
from agent_intercom.host.manager import JobFailed, Manager, ManagerRefused
from agent_intercom.orchestration import hosting, runtime
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.workers import hosted
from agent_intercom.workers.errors import WorkerError
where = runtime.runtime_dir(os.environ)
unit = sys.argv[2]
def start(role, generation):
    with hosted.service(manager, where) as client:
        hosted.start_role(client, unit, role, generation)
def stop(role):
    with hosted.service(manager, where) as client:
        hosted.stop_role(client, unit, role)
with Manager() as manager:
    try:
        told = eval(sys.argv[1])
    except JobFailed as error:
        told = ["JobFailed", error.unit, error.result]
    except ManagerRefused as error:
        told = ["ManagerRefused", error.name.rpartition(".")[2]]
    except Refusal as refusal:
        told = ["Refusal", refusal.code, refusal.text]
    except WorkerError as error:
        told = ["WorkerError", error.code, error.text]
print(json.dumps(told))
"""

# Gives a run that is there what its workers are made of.
_PROGRAMS = """
import os
import msgspec
from agent_intercom.orchestration import runtime
where = runtime.runtime_dir(os.environ)
place = runtime.read(where, sys.argv[1])
runtime.remove(where, sys.argv[1])
programs = {"pi": sys.argv[2], "pi-bridge": sys.argv[3]}
open_ = runtime.WorkerPlace(confined=False)
workers = dict.fromkeys(("implementer", "reviewer", "probe"), open_) if sys.argv[4] == "open" else {}
runtime.write(where, sys.argv[1], msgspec.structs.replace(place, programs=programs, workers=workers))
"""

# Stands in for Pi. With STUBBORN it has a child that left its session, and neither goes when asked to.
_PI = """\
#!/usr/bin/python3 -IS
import os, signal, sys
if "STUBBORN" in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open("/home/alice/.local/child", "w").write(str(os.getpid()))
            signal.pause()
        os._exit(0)
    os.wait()
if "SHORT" in os.environ:
    sys.exit(3)
open("/home/alice/.local/started-" + os.environ["PI_TMUX_ORCHESTRATOR_ROLE"], "w").close()
# What never ends is no reason to.
assert os.read(0, 1)
"""


class Hosting:
    """What a command of alice's asks of the manager about a run."""

    def __init__(self, bed: Any, door: Door) -> None:
        self.bed = bed
        self.door = door

    def ask(self, expression: str, unit: str = "none") -> Any:
        return json.loads(self.bed.python("alice", _ASK, expression, unit))

    def run(self, *specialists: str, programs: bool = True, **environment: str) -> Run:
        """A run with its socket, whose Pi is the stand-in."""
        environment |= {"KEY": SECRETS["environment"], "PATH": "/usr/bin"}
        run = Run(self.bed, self.door, *specialists, scope=SECRETS["scope"], environment=environment)
        program = self.path(PI)
        program.parent.mkdir(exist_ok=True)
        program.write_text(_PI)
        program.chmod(0o755)
        if programs:
            self.give(run)
        self.listen(run)
        return run

    def give(self, run: Run, program: str = PI, bridge: str = "/b.js", confined: bool = False) -> None:
        """Say what the workers of a run are made of; as a rule none is confined, so that it can say where it is."""
        self.bed.python("alice", _PROGRAMS, run.unit, program, bridge, "confined" if confined else "open")

    def listen(self, run: Run) -> None:
        assert self.ask("hosting.listen(manager, unit)", run.unit) is None

    def start(self, run: Run, role: str, generation: int = 1) -> Any:
        return self.ask(f"start({role!r}, {generation})", run.unit)

    def stop(self, run: Run, role: str) -> Any:
        return self.ask(f"stop({role!r})", run.unit)

    def started(self, role: str) -> None:
        until(lambda: self.path(f"/home/alice/.local/started-{role}").exists(), f"the worker {role}")

    def workers(self, run: Run) -> list[dict[str, Any]]:
        told = self.ask("[worker.as_json() for worker in hosted.workers(manager, where, unit)]", run.unit)
        assert isinstance(told, list)
        return told

    def end(self, run: Run) -> Any:
        return self.ask("hosting.end(manager, unit, where)", run.unit)

    def path(self, name: str) -> Path:
        return Path(self.bed.root) / name.lstrip("/")

    def loaded(self, run: Run) -> list[str]:
        """What the manager knows of a run."""
        patterns = f"'orchestrate@{run.unit}.*' 'orchestrate-{run.unit}.slice' 'orchestrate-{run.unit}-*'"
        command = f"systemctl --user list-units --all --plain --no-legend {patterns}"
        return [line.split()[0] for line in self.bed.as_user("alice", command).stdout.splitlines()]


@pytest.fixture
def hosting(bed: Any) -> Iterator[Hosting]:
    with Door(bed) as door:
        yield Hosting(bed, door)
        bed.as_user("alice", "systemctl --user stop orchestrate.slice 'probe-*'; systemctl --user reset-failed")


# Jobs.


def transient(name: str, *command: str, timeout: float = 30, **more: Any) -> str:
    """The expression for a service that is started and waited for."""
    properties = {
        "Description": ("s", "probe"),
        "Type": ("s", "oneshot"),
        "ExecStart": ("a(sasb)", [(command[0], list(command), False)]),
        **more,
    }
    unit = f"probe-{name}.service"
    call: tuple[Any, ...] = ("StartTransientUnit", "ssa(sv)a(sa(sv))", unit, "fail", list(properties.items()), [])
    return f"manager._job({unit!r}, {timeout}, *{call!r})"


def test_a_job_is_waited_for(hosting: Hosting) -> None:
    assert hosting.ask(transient("a", "/bin/touch", "/home/alice/.touched")) is None
    assert hosting.path("/home/alice/.touched").exists()
    # However soon they end: an answer that came before somebody waited for it would never come again.
    many = f"[{transient('b', '/bin/true')} for _ in range(60)]"
    assert hosting.ask(many) == [None] * 60


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        (transient("f", "/bin/false"), ["JobFailed", "probe-f.service", "failed"]),
        (
            transient("t", "/bin/sleep", "1000", JobRunningTimeoutUSec=("t", 200_000)),
            ["JobFailed", "probe-t.service", "timeout"],
        ),
        (
            transient("u", "/bin/sleep", "1000", timeout=0.2),
            ["JobFailed", "probe-u.service", "unfinished"],
        ),
        (transient("p", "/bin/true", NoSuchProperty=("s", "")), ["ManagerRefused", "PropertyReadOnly"]),
        ("manager.start('no-such.service')", ["ManagerRefused", "NoSuchUnit"]),
        ("manager.start('orchestrate@none.socket')", ["JobFailed", "orchestrate@none.socket", "assert"]),
        ("manager.stop('no-such.service')", False),
        ("manager.stop('orchestrate-none.slice')", False),
        ("manager.reset_failed('no-such.service')", False),
        ("manager.processes('no-such.service')", []),
        ("manager.units('no-such*')", []),
        ("hosted.workers(manager, where, unit)", []),
        ("hosting.broker(manager, unit)", None),
    ],
)
def test_what_comes_of_a_job(hosting: Hosting, expression: str, told: Any) -> None:
    assert hosting.ask(expression) == told


def test_a_job_that_fails_for_another(hosting: Hosting) -> None:
    directory = hosting.path("/home/alice/.config/systemd/user")
    directory.mkdir(parents=True)
    (directory / "probe-x.service").write_text("[Service]\nType=oneshot\nExecStart=/bin/false\n")
    hosting.bed.as_user("alice", "systemctl --user daemon-reload")
    needed = ("as", ["probe-x.service"])
    told = hosting.ask(transient("d", "/bin/true", Requires=needed, After=needed))
    assert told == ["JobFailed", "probe-d.service", "dependency"]
    assert hosting.ask("manager.reset_failed('probe-x.service')") is True
    assert hosting.bed.show("alice", "probe-x.service", "ActiveState") == "inactive"


def test_what_the_manager_says(hosting: Hosting) -> None:
    hosting.bed.as_user("alice", ["systemd-run", "--user", "--quiet", "--unit=probe-s", "/bin/sleep", "1000"])
    pid = int(hosting.bed.show("alice", "probe-s.service", "MainPID"))
    group = hosting.bed.show("alice", "probe-s.service", "ControlGroup")
    assert hosting.ask("manager.processes('probe-s.service')") == [[pid, group]]
    assert hosting.ask("manager.units('probe-s.*')") == [["probe-s.service", "loaded", "active", "running"]]
    assert group.startswith(hosting.ask("manager.control_group()") + "/")
    version = hosting.bed.run("systemctl --version").stdout
    assert f"({hosting.ask('manager.version()')})" in version
    assert hosting.ask("manager.stop('probe-s.service')") is True
    assert hosting.ask("manager.units('probe-s.*')") == []


# Workers.


def test_a_worker_is_in_a_scope_unit_in_the_slice_of_its_run(hosting: Hosting) -> None:
    run = hosting.run()
    assert hosting.start(run, "reviewer", 3) is None
    hosting.started("reviewer")
    (found,) = hosting.workers(run)
    pid = found.pop("pid")
    name = found.pop("unit")
    assert name.startswith("worker-") and name.endswith(".scope")
    assert found == {
        "role": "reviewer",
        "generation": 3,
        "active": "active",
        "sub": "running",
        "result": "success",
        "status_text": "",
        "enforced": [],
        "unenforced": [],
        "exit": None,
        "paused": False,
    }
    group = hosting.bed.run(["cat", f"/proc/{pid}/cgroup"]).stdout
    assert f"/orchestrate.slice/{run.slice}/{name}" in group
    limits = hosting.bed.run(["cat", f"/proc/{pid}/limits"]).stdout
    (core,) = [line.split()[4:6] for line in limits.splitlines() if line.startswith("Max core")]
    assert core == ["1", "1"]
    # It talks to nobody, so no broker was started for it.
    assert hosting.ask("hosting.broker(manager, unit).active", run.unit) == "inactive"
    run.connect()
    until(lambda: run.shown("SubState") == "running", "the broker")
    told = hosting.ask("hosting.broker(manager, unit)._asdict()", run.unit)
    assert (told["active"], told["sub"], told["pid"], told["result"]) == ("active", "running", run.pid, "success")
    assert told["status_text"] == run.shown("StatusText")


def test_nothing_private_is_where_others_look(hosting: Hosting) -> None:
    run = hosting.run()
    secrets = [*SECRETS.values(), run.tokens["implementer"], run.control]
    hosting.start(run, "implementer")
    hosting.started("implementer")
    (worker,) = hosting.workers(run)
    shim = hosting.bed.run(f"tr '\\0' '\\n' < /proc/{worker['pid']}/environ").stdout
    agent = hosting.bed.run(f"pgrep -P {worker['pid']}").stdout.strip()
    environ = hosting.bed.run(f"tr '\\0' '\\n' < /proc/{agent}/environ").stdout
    # It has what it needs, so that its absence elsewhere says something.
    assert all(secret in environ for secret in secrets[:3]) and run.control not in environ
    assert not [secret for secret in secrets if secret in shim]
    shown = hosting.bed.as_user("alice", f"systemctl --user show --all '*'; systemctl --user cat {worker['unit']}")
    assert "Description=Agent Intercom, worker\n" in shown.stdout
    hosting.end(run)
    hosting.bed.run("journalctl --sync")
    journal = hosting.bed.run("journalctl -o json --all").stdout
    assert worker["unit"] in journal
    commands = hosting.bed.run("cat /proc/[0-9]*/cmdline", check=False).stdout
    for place in (shown.stdout, journal, commands):
        assert not [secret for secret in secrets if secret in place]


def test_the_reason_is_told_and_nothing_stays(hosting: Hosting) -> None:
    run = hosting.run(programs=False)
    code, text = hosting.start(run, "reviewer")[1:]
    assert (code, text) == ("start_failed", "the worker reviewer did not start: the run does not say where pi is")
    assert hosting.workers(run) == []
    # The same one can be started as soon as the cause is mended.
    hosting.give(run)
    assert hosting.start(run, "reviewer") is None
    hosting.started("reviewer")
    assert hosting.start(run, "reviewer")[:2] == ["WorkerError", "conflict"]
    assert len(hosting.workers(run)) == 1


def test_how_a_worker_ended_is_told(hosting: Hosting) -> None:
    run = hosting.run(SHORT="1")
    hosting.start(run, "reviewer")
    until(lambda: [worker["active"] for worker in hosting.workers(run)] == ["inactive"], "the end of the worker")
    (found,) = hosting.workers(run)
    assert (found["result"], found["pid"]) == ("exit-code", 0)
    assert (found["exit"]["code"], found["exit"]["signal"]) == (3, None)


def test_only_workers_of_the_role_are_ended(hosting: Hosting) -> None:
    run = hosting.run("probe")
    for role, generation in (("reviewer", 12), ("probe", 1)):
        assert hosting.start(run, role, generation) is None
        hosting.started(role)
    names = [(worker["role"], worker["generation"]) for worker in hosting.workers(run)]
    assert names == [("probe", 1), ("reviewer", 12)]
    pids = [worker["pid"] for worker in hosting.workers(run)]
    assert hosting.stop(run, "reviewer") is None
    assert [worker["role"] for worker in hosting.workers(run)] == ["probe"]
    alive = [hosting.path(f"/proc/{pid}").exists() for pid in pids]
    assert alive == [True, False]
    assert run.states()[::2] == ("active", "active")


def test_the_real_pi_works_and_is_replaced(hosting: Hosting) -> None:
    """Started and ended as a person's commands do it, with nothing in its environment but what the run was given."""
    bed, home = hosting.bed, "/home/alice/.local/worker"
    programs = realpi.programs(bed.root)
    bed.as_user("alice", ["mkdir", "-p", home])
    environment = {"HOME": home, "PI_CODING_AGENT_DIR": f"{home}/agent", "PI_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    with Model({}) as model:
        realpi.prepare(hosting.path(f"{home}/agent"), model.url)
        realpi.executable(hosting.path(f"{home}/bin"), programs)
        run = Run(bed, hosting.door, environment=environment)
        hosting.give(run, f"{home}/bin/pi", str(programs.bridge), confined=True)
        hosting.listen(run)
        for role in ("implementer", "reviewer"):
            assert hosting.start(run, role) is None
        run.told("ready, round 1; 2 of 2 workers connected")
        nothing: Any = None
        assert run.send("reviewer", nothing, action="restart")["success"]
        assert hosting.stop(run, "reviewer") is None
        assert hosting.start(run, "reviewer", 2) is None
        query = "SELECT generation, connected FROM roles WHERE role = 'reviewer'"
        until(lambda: run.rows(query) == [{"generation": 2, "connected": 1}], "the reviewer of generation 2")
        found = [(worker["role"], worker["generation"], worker["active"]) for worker in hosting.workers(run)]
        assert found == [("implementer", 1, "active"), ("reviewer", 2, "active")]
    assert hosting.end(run) is None
    assert bed.run(["pgrep", "-u", "alice", "-f", "orchestrator-worker"], check=False).stdout == ""


# The end.


def test_the_end_of_a_run_is_proven(hosting: Hosting) -> None:
    run = hosting.run(STUBBORN="1")
    hosting.start(run, "implementer")
    hosting.started("implementer")
    run.connect()
    until(lambda: run.pid, "the broker")
    child = hosting.path("/home/alice/.local/child").read_text()
    pids = [child, str(hosting.workers(run)[0]["pid"]), str(run.pid)]
    assert all(hosting.path(f"/proc/{pid}").exists() for pid in pids)
    assert hosting.end(run) is None
    assert not any(hosting.path(f"/proc/{pid}").exists() for pid in pids)
    assert hosting.loaded(run) == []
    assert not run.place.exists() and not hosting.path(run.socket).exists()
    # There is nothing to end any more, and that is the same.
    assert hosting.end(run) is None


def test_a_broker_that_does_not_end_by_itself(hosting: Hosting) -> None:
    run = hosting.run()
    hosting.start(run, "reviewer")
    run.connect()
    until(lambda: run.shown("SubState") == "running", "the broker")
    run.systemctl("kill", "--kill-who=main", "--signal=STOP", run.service)
    assert hosting.end(run) is None
    assert hosting.loaded(run) == []


def test_who_else_listens_is_told(hosting: Hosting) -> None:
    run = hosting.run()
    script = "import os, socket, time; os.unlink(sys.argv[1]); s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1])"
    command = hosting.bed.python_command(
        f"{script}; s.listen(); print('ready', flush=True); time.sleep(1000)", run.socket
    )
    listener = hosting.bed.popen("alice", command)
    assert listener.stdout.readline() == "ready\n"
    assert hosting.end(run) == ["Refusal", "stop_failed", "somebody else listens at the address of the run"]


def test_who_is_left_is_counted(hosting: Hosting) -> None:
    """The manager believes that a slice is gone, and it is not."""
    run = hosting.run()
    assert hosting.end(run) is None
    manager = hosting.ask("manager.control_group()")
    group = f"/sys/fs/cgroup{manager}/orchestrate.slice/{run.slice}/left"
    hosting.bed.run(f"mkdir -p {group}")
    for _ in range(2):
        hosting.bed.popen(
            None, ["sh", "-c", f"echo 0 > {group}/cgroup.procs && echo in && exec sleep 1000"]
        ).stdout.readline()
    assert hosting.end(run) == ["Refusal", "stop_failed", "the run was stopped, and 2 processes of it are left"]
    hosting.bed.run(f"echo 1 > {group}/cgroup.kill")
    assert hosting.end(run) is None
    hosting.bed.run(f"rmdir {group} {group.rpartition('/')[0]}", check=False)
    assert f"user@{UID}.service" in manager
