# SPDX-License-Identifier: Apache-2.0
"""What managed workers have to show with a real systemd (managed-workers spec, section 10 and 7.4).

The scope id through everything that can happen to a worker (A-3), how a worker ended with a restart of the service in
between (A-11), budgets of paused workers (A-12, N-8), a user bus that goes and comes (N-12), a service that does
nothing where nothing happens (A-15), many at once, and an installation that cannot be written (A-18).

Where memory ran out is shown here only where the testbed has the memory controller on version 2; what the service makes
of the kernel's counters is in `tests/unit/test_workers_watching.py`, with counters that are written by the test.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.wire import until
from tests.system.workerbed import SCOPE, SERVICE, Workers, working

NAME = "AGENT_INTERCOM_SCOPE_ID"
POISON = "scope-poison-77aa77aa"
OTHER = "scope-of-another-one-1"
POISONED = {
    NAME: POISON,
    "AGENT_INTERCOM_WORKER_ID": "poison",
    "PI_TMUX_ORCHESTRATOR_TOKEN": "poison",
    "TOKEN": "poison",
}
FIFO = "/home/alice/.local/go"


@pytest.fixture
def workers(bed: Any) -> Iterator[Workers]:
    with working(bed) as found:
        yield found


@pytest.fixture
def poisoned(workers: Workers) -> Iterator[Workers]:
    """The service, with what a user manager should not hand on in its environment."""
    bed = workers.bed
    bed.as_user("alice", ["systemctl", "--user", "set-environment", *(f"{k}={v}" for k, v in POISONED.items())])
    try:
        workers.ask('told = ask("health")')
        # Otherwise it would be no wonder that nobody has it.
        assert variables(workers, workers.main_pid())[NAME] == POISON
        yield workers
    finally:
        bed.as_user("alice", ["systemctl", "--user", "unset-environment", *POISONED])


def variables(workers: Workers, pid: int) -> dict[str, str]:
    """The environment that a process was given."""
    text = workers.bed.run(["cat", f"/proc/{pid}/environ"]).stdout
    return dict(entry.partition("=")[::2] for entry in text.split("\0") if entry)


def scopes(workers: Workers, worker: str, who: str = "") -> set[str | None]:
    """The scope ids in the environments of all that runs in a worker, but for its shim, which has none."""
    told = workers.ask(f'told = ask("status", {{"worker": "{worker}"}}, override=True{who})')
    shim = told["worker"]["placed"]["pid"]
    others = [each["pid"] for each in told["processes"] if each["pid"] != shim]
    assert others, told
    given = [variables(workers, pid) for pid in others]
    assert all("poison" not in value for each in given for value in each.values())
    assert not {NAME, "TOKEN"} & set(variables(workers, shim))
    return {each.get(NAME) for each in given}


# The scope id (section 4.3).


def test_a_start_has_the_scope_id_of_whoever_asks_and_so_has_what_it_starts(poisoned: Workers) -> None:
    told = poisoned.ask(
        f"""
claims = {{"PATH": "/usr/bin:/bin", "{NAME}": "{OTHER}"}}
told = [
    start("/bin/sh", "-c", "/bin/sleep 7451 & wait", environment=claims)["worker"]["id"],
    ask("start", {{"command": ["/bin/sleep", "7451"], "directory": "/", "environment": {{}}}}, None)["worker"]["id"],
    ask("start", {{"command": ["/bin/sleep", "7451"], "directory": "/", "environment": claims}}, None)["worker"]["id"],
]
"""
    )
    until(lambda: len(poisoned.processes("/bin/sleep 7451")) >= 3, "they run")
    assert scopes(poisoned, told[0]) == {SCOPE}
    for unscoped in told[1:]:
        assert scopes(poisoned, unscoped, ", scope=None") == {None}


@pytest.mark.parametrize("restarted", [False, True])
def test_a_restart_has_the_scope_id_of_the_start(poisoned: Workers, restarted: bool) -> None:
    """Whoever asks for it, whatever the service's own environment says, and also after that has forgotten all."""
    told = poisoned.ask(
        """
sleep = {"command": ["/bin/sleep", "7452"], "directory": "/", "environment": {}}
told = [ask("start", sleep)["worker"]["id"], ask("start", sleep, None)["worker"]["id"]]
"""
    )
    if restarted:
        poisoned.kill_service()
    again = poisoned.ask(
        f"""
told = [ask("restart", {{"worker": "{told[0]}"}}), ask("restart", {{"worker": "{told[1]}"}}, None)]
"""
    )
    assert [each["worker"]["generation"] for each in again] == [2, 2]
    assert scopes(poisoned, told[0]) == {SCOPE}
    assert scopes(poisoned, told[1], ", scope=None") == {None}


def test_a_scope_id_that_is_lost_is_never_taken_for_none(workers: Workers) -> None:
    begun = workers.ask('told = start("/bin/sleep", "7453")["worker"]["id"]')
    workers.bed.as_user("alice", f'rm "$XDG_RUNTIME_DIR/agent-intercom/worker/{begun}/place.json"')
    workers.kill_service()
    answers = workers.ask(
        f"""
told = [ask("restart", {{"worker": "{begun}"}}, scope) for scope in (None, "{SCOPE}", "{OTHER}")]
told.append(ask("restart", {{"worker": "{begun}"}}, None, override=True))
"""
    )
    assert [answer["error"] for answer in answers] == [*["worker_not_found"] * 3, "place_lost"]
    assert workers.processes("/bin/sleep 7453")


def test_adoption_is_within_a_scope_id_and_changes_none(workers: Workers) -> None:
    told = workers.ask(
        f"""
mine, yours, none = {{"session": "manager-1"}}, {{"session": "manager-2"}}, {{"scope": None, "session": "manager-2"}}
begun = ask("start", {{"command": ["/bin/sleep", "7454"], "directory": "/", "environment": {{}}}}, **mine)["worker"]
one = {{"worker": begun["id"]}}
ask("release", one, **mine)
refused = [ask("adopt", one, "{OTHER}", session="manager-2"), ask("adopt", one, **none)]
refused += [ask("adopt", one, "{OTHER}", session="manager-2", override=True), ask("adopt", one, override=True, **none)]
before = ask("status", one, **yours)["worker"]
adopted = ask("adopt", one, **yours)["worker"]
told = [begun["id"], refused, before["owner"]["kind"], adopted]
"""
    )
    worker, refused, before, adopted = told
    assert {answer["error"] for answer in refused} <= {"worker_not_found", "forbidden"}
    assert before == "none" and adopted["owner"]["name"] == "manager-2"
    assert scopes(workers, worker) == {SCOPE}
    again = workers.ask(f'told = ask("restart", {{"worker": "{worker}"}}, session="manager-2")["worker"]["generation"]')
    assert again == 2 and scopes(workers, worker) == {SCOPE}


@pytest.mark.parametrize("claims", [OTHER, ""])
def test_a_worker_of_a_worker_has_the_scope_id_of_its_parent(poisoned: Workers, claims: str) -> None:
    """Whatever it says itself."""
    script = f"{NAME}={claims} orchestrate worker start below --directory / -- /bin/sleep 7455; exec /bin/sleep 7456"
    parent = poisoned.ask(
        f"""
own = {{"PATH": "/usr/bin:/bin", "HOME": os.environ["HOME"], "XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"]}}
grant = {{"children": 1, "descendants": 1, "depth": 1, "subdelegate": False}}
told = start("/bin/sh", "-c", {script!r}, directory="/", environment=own, grant=grant)["worker"]["id"]
"""
    )
    until(lambda: poisoned.processes("^/bin/sleep 7455"), "the one below runs")
    listed = poisoned.ask('told = ask("list", {"all": True})["workers"]')
    (below,) = [worker for worker in listed if worker["id"] != parent]
    assert below["parent"] and scopes(poisoned, below["id"]) == {SCOPE}
    poisoned.kill_service()
    poisoned.ask(f'told = ask("restart", {{"worker": "{below["id"]}"}}, override=True)')
    assert scopes(poisoned, below["id"]) == {SCOPE}
    poisoned.ask(f'told = ask("stop", {{"worker": "{parent}"}}, override=True)')
    assert poisoned.processes("/bin/sleep 745") == []


# How it ended.

ENDS = {
    "exit": ("exit 7", {}, ("failed", "exited", 7, None)),
    "signal": ("kill -KILL $$", {}, ("failed", "signaled", None, 9)),
    "runtime": ("exec sleep 1000", {"runtime_ms": 2_000}, ("stopped", "timeout", None, 15)),
}


@pytest.mark.parametrize("service", ["stays", "killed", "away"])
@pytest.mark.parametrize("how", list(ENDS))
def test_how_it_ended_is_told_whatever_became_of_the_service(workers: Workers, how: str, service: str) -> None:
    bed = workers.bed
    last, lifetimes, expected = ENDS[how]
    bed.as_user("alice", f"mkdir -p ~/.local && mkfifo {FIFO}")
    command = last if how == "runtime" else f"read x <{FIFO}; {last}"
    begun = workers.ask(f'told = start("/bin/sh", "-c", {command!r}, lifetimes={lifetimes})["worker"]')
    if service == "killed":
        workers.kill_service()
    elif service == "away":
        bed.as_user("alice", ["systemctl", "--user", "stop", SERVICE])
    if how != "runtime":
        bed.as_user("alice", f"echo go >{FIFO}", timeout=10)
        until(lambda: begun["unit"] not in workers.units(), "it ended")
    ended = workers.ask(f'told = wait("{begun["id"]}")')
    told = ended["ended"] or {}
    assert (ended["state"], told["outcome"], told["exit_code"], told["exit_signal"]) == expected
    assert ended["stop_reason"] == ("runtime-expired" if how == "runtime" else "")
    until(lambda: workers.units() == [], "no unit is left")


def test_memory_that_ran_out_is_told_where_the_kernel_limits_it(workers: Workers) -> None:
    greedy = "import sys; held = b'x' * (256 << 20); sys.exit(7)"
    ended = workers.ask(
        f'told = wait(start("/usr/bin/python3", "-c", {greedy!r}, memory_max=64 << 20)["worker"]["id"])["ended"]'
    )
    limited = "memory" in workers.bed.run(["cat", "/sys/fs/cgroup/cgroup.controllers"]).stdout.split()
    expected = ("oom-kill", None, 9) if limited else ("exited", 7, None)
    assert (ended["outcome"], ended["exit_code"], ended["exit_signal"]) == expected


# Budgets (A-12, N-8).


def test_what_is_paused_keeps_its_budgets(workers: Workers) -> None:
    """Another one that began later, and may run as long, shows that the time of the paused one would be over."""
    held, paused = workers.ask(
        """
lifetimes = {"runtime_ms": 2_000, "idle_ms": 3_600_000}
held = start("/bin/sleep", "7457", name="held", lifetimes=lifetimes)["worker"]
told = [held, ask("pause", {"worker": "held"})["worker"]]
"""
    )
    left = held["runtime_deadline_at"] - paused["paused_at"]
    assert paused["runtime_left_ms"] == left and paused["runtime_deadline_at"] is None
    workers.kill_service()
    clock, later = workers.ask(
        """
clock = start("/bin/sleep", "7458", lifetimes={"runtime_ms": 2_000})["worker"]
told = [wait(clock["id"]), ask("status", {"worker": "held"})]
"""
    )
    assert clock["ended"]["outcome"] == "timeout" and clock["ended"]["at"] > held["runtime_deadline_at"]
    assert later["worker"] == paused and later["unit"]["freezer"] == "frozen"
    resumed, ended = workers.ask('told = [ask("resume", {"worker": "held"})["worker"], wait("held")]')
    now = resumed["updated_at"]
    assert resumed["runtime_deadline_at"] == now + left
    assert resumed["idle_deadline_at"] == held["idle_deadline_at"] + now - paused["paused_at"]
    assert resumed["checkpoint_deadline_at"] == held["checkpoint_deadline_at"] + now - paused["paused_at"]
    assert (ended["ended"]["outcome"], ended["stop_reason"]) == ("timeout", "runtime-expired")


# The user's bus (N-12).


def test_a_bus_that_goes_and_comes_takes_no_worker_along(bed: Any) -> None:
    with working(bed, "bob") as workers:
        stays, ends = workers.ask('told = [start("/bin/sleep", each)["worker"] for each in ("7459", "7460")]')
        service = workers.main_pid()
        bed.as_user("bob", "systemctl --user stop dbus.socket dbus.service")
        try:
            (pid,) = workers.processes("^/bin/sleep 7460")
            bed.run(["kill", "-KILL", str(pid)])
            refused, ended, listed = workers.ask(
                f'told = [start("/bin/true"), wait("{ends["id"]}"), ask("list", {{"all": True}})["workers"]]'
            )
            assert refused["error"] == "manager_unreachable"
            assert (ended["ended"]["outcome"], ended["ended"]["exit_signal"]) == ("signaled", 9)
            assert stays["id"] in {worker["id"] for worker in listed}
            assert workers.processes("^/bin/sleep 7459")
        finally:
            bed.as_user("bob", "systemctl --user start dbus.socket")
        begun = until(lambda: workers.ask('told = start("/bin/sleep", "7461")').get("worker"), "a start that works")
        assert begun["state"] == "registering" and begun["unit"] in workers.units()
        for worker in (stays, begun):
            stopped = workers.ask(f'told = ask("stop", {{"worker": "{worker["id"]}"}})["worker"]["state"]')
            assert stopped == "stopped"
        assert workers.main_pid() == service
        # What it was started with is kept for whoever wants it again.
        workers.ask(f'told = ask("forget", {{"worker": "{ends["id"]}", "acknowledge": True}})["forgotten"][0]["id"]')
        workers.nothing_left()


def test_a_manager_that_ends_with_the_last_login_is_said(bed: Any) -> None:
    command = "/usr/bin/orchestrate doctor --skip-model-check"
    assert "end with the last logout" not in bed.as_user("alice", command, check=False).stdout
    uid = bed.as_user("alice", "id -u").stdout.strip()
    session = f"HOME=/home/alice USER=alice PATH=/usr/bin:/bin XDG_RUNTIME_DIR=/run/user/{uid}"
    session += f" DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/{uid}/bus"
    become = f"setpriv --reuid {uid} --regid {uid} --clear-groups env -i {session} {command}"
    # Nobody lingers in what this one command sees; logind, which would act on it, sees what is so.
    script = f"mount -t tmpfs none /var/lib/systemd/linger && cd / && exec {become}"
    said = bed.run(f"unshare -m sh -c {shlex.quote(script)}", check=False)
    assert "end with the last logout" in said.stdout + said.stderr


# Doing nothing, and much at once.


def test_a_service_whose_workers_do_nothing_does_nothing(workers: Workers) -> None:
    """Not even once in the time in which somebody else sleeps, which is seen again and again until it is so."""
    workers.ask('told = [start("/bin/sleep", "7462")["worker"]["id"] for _ in range(3)]')
    pid = workers.main_pid()

    def switches() -> list[str]:
        words = f"cat /proc/{pid}/task/*/status | grep ctxt_switches"
        return workers.bed.run(words).stdout.split()  # type: ignore[no-any-return]

    def quiet() -> bool:
        before = switches()
        workers.bed.run(["sleep", "2"])
        assert len(before) >= 4
        return switches() == before

    until(quiet, "a service at rest")
    assert len(workers.processes("^/bin/sleep 7462")) == 3 and workers.main_pid() == pid


def test_forty_at_once(workers: Workers) -> None:
    begun = workers.ask(
        """
import concurrent.futures
def one(number):
    with from_environment(os.environ) as client:
        order = {"command": ["/bin/sleep", "7463"], "directory": "/", "environment": {}, "name": f"many-{number}"}
        try:
            return client.request("start", order, scope="scope-canary-0f5b7a")["worker"]
        except WorkerError as error:
            return {"error": str(error.code), "text": error.text}
with concurrent.futures.ThreadPoolExecutor(40) as pool:
    told = list(pool.map(one, range(40)))
"""
    )
    assert [worker for worker in begun if "error" in worker] == []
    assert len(set(workers.units()) & {worker["unit"] for worker in begun}) == 40
    assert len(workers.processes("^/bin/sleep 7463")) == 40
    ended = workers.ask(
        """
import concurrent.futures
def one(number):
    with from_environment(os.environ) as client:
        return client.request("stop", {"worker": f"many-{number}"}, scope="scope-canary-0f5b7a")["worker"]["state"]
with concurrent.futures.ThreadPoolExecutor(40) as pool:
    told = list(pool.map(one, range(40)))
"""
    )
    assert ended == ["stopped"] * 40
    assert workers.processes("/bin/sleep 7463") == []
    workers.nothing_left()


# Where it writes.


def test_an_installation_that_cannot_be_written_is_enough_and_no_configuration_is_touched(workers: Workers) -> None:
    bed = workers.bed
    # The state directory is made with those above it, where they are not there.
    bed.as_user("alice", "mkdir -p ~/work ~/.config/agent-intercom ~/.local/state/agent-intercom")
    bed.as_user("alice", "echo '# mine' >~/.config/agent-intercom/orchestrate.toml")
    see = "cd ~ && find . -path ./.local/state/agent-intercom -prune -o -printf '%p %m %s %T@ %l\\n' | sort"
    before = bed.as_user("alice", see).stdout
    assert "./.config/agent-intercom/orchestrate.toml" in before
    bed.run("mount --bind /usr /usr && mount -o remount,bind,ro /usr")
    try:
        assert bed.run("touch /usr/lib/agent-intercom/x", check=False).returncode != 0
        bed.as_user(
            "alice",
            """set -e
cd ~/work
orchestrate worker start job --read-only --keep-output --directory ~/work -- /bin/sh -c 'exec sleep 7464'
orchestrate worker status job
orchestrate worker pause job
orchestrate worker resume job
orchestrate worker restart job --yes
orchestrate worker list --all
orchestrate worker logs job
orchestrate worker stop job --yes
orchestrate worker forget job --yes
orchestrate worker cleanup --yes
systemctl --user start orchestrate-cleanup.service
""",
        )
        entries = bed.journal("alice", f"_SYSTEMD_USER_UNIT={SERVICE}")
        assert entries and [entry["MESSAGE"] for entry in entries if int(entry["PRIORITY"]) < 5] == []
    finally:
        bed.run("umount -l /usr")
    assert bed.as_user("alice", see).stdout == before
    workers.nothing_left()
