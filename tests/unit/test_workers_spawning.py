# SPDX-License-Identifier: Apache-2.0
"""Launchers from the side of the worker service: told, abandoned, reaped; and what is left when that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from agent_intercom.workers import places, spawning
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.spec import Launch
from tests.unit.launchstage import PATIENCE, SERVICE, Stage, wait_for_end

CANARY = "canary-90ab"


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path.resolve())


def with_gated(stage: Stage, body: Callable[[spawning.Gated], Awaitable[None]]) -> None:
    """Spawn a launcher, do something with it, and see it end."""

    async def run() -> None:
        gated = await spawning.spawn(stage.program)
        try:
            await body(gated)
        finally:
            gated.abandon()
            await asyncio.wait_for(gated.ended(), PATIENCE)

    asyncio.run(run())


def test_a_command_begins_and_its_end_is_told(stage: Stage) -> None:
    async def body(gated: spawning.Gated) -> None:
        await gated.release(stage.launch("/bin/sh", "-c", "exit 7"))
        assert await gated.ended() == (7, None)
        assert await gated.ended() == (7, None)
        found = places.read_exit(str(stage.exit_file))
        assert found is not None and found[:2] == (7, None)

    with_gated(stage, body)


def test_a_signal_is_told_as_one(stage: Stage) -> None:
    async def body(gated: spawning.Gated) -> None:
        await gated.release(stage.launch("/bin/sh", "-c", "kill -9 $$"))
        assert await gated.ended() == (None, signal.SIGKILL)
        found = places.read_exit(str(stage.exit_file))
        assert found is not None and found[:2] == (None, signal.SIGKILL)

    with_gated(stage, body)


def test_a_waiting_launcher_shows_and_has_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", CANARY)
    inherited, other = os.pipe()
    os.set_inheritable(inherited, True)
    # Only what it says itself tells that its execve(2) is over: before that nothing of it shows, whatever it has.
    up = stage.directory / "up"
    os.mkfifo(up)
    program = Path(stage.program).read_text()
    stage.script("orchestrate-launcher", program.replace("\nfrom ", f"\nopen({str(up)!r}, 'w').close()\nfrom ", 1))

    async def body(gated: spawning.Gated) -> None:
        assert up.read_text() == ""
        proc = Path(f"/proc/{gated.pid}")
        arguments = (proc / "cmdline").read_bytes().split(b"\0")[:-1]
        # A script is shown after the interpreter that its first line names.
        assert arguments in ([os.fsencode(stage.program)], [*arguments[:-1], os.fsencode(stage.program)])
        assert (proc / "environ").read_bytes() == b""
        assert os.readlink(proc / "cwd") == "/"
        assert os.getsid(gated.pid) == gated.pid
        for entry in (proc / "fd").iterdir():
            # It may be reading its own modules, which come and go.
            with contextlib.suppress(FileNotFoundError):
                assert int(entry.name) < 3 or not os.readlink(entry).startswith(("pipe:", "socket:"))

    try:
        with_gated(stage, body)
    finally:
        os.close(inherited)
        os.close(other)


def test_more_than_a_pipe_takes_arrives(stage: Stage) -> None:
    environment = {f"V{number}": "ä" * 40_000 for number in range(20)}

    async def body(gated: spawning.Gated) -> None:
        await gated.release(stage.launch(stage.probe, environment=environment))
        assert await gated.ended() == (0, None)

    with_gated(stage, body)
    assert len(stage.found()["environ"]) == 20


@pytest.mark.parametrize(
    ("launch", "code", "text"),
    [
        (lambda stage: stage.launch("no-such"), Code.COMMAND_NOT_FOUND, "the command was not found"),
        (
            lambda stage: stage.launch("/bin/true", directory="/no/such"),
            Code.START_FAILED,
            "the directory cannot be entered: No such file or directory",
        ),
        (
            lambda stage: stage.launch("/bin/true", f"{CANARY}\0"),
            Code.INVALID,
            "a path, an argument or a variable has a NUL in it",
        ),
    ],
)
def test_what_does_not_begin_is_told_with_its_code(
    stage: Stage, launch: Callable[[Stage], Launch], code: str, text: str
) -> None:
    async def body(gated: spawning.Gated) -> None:
        with pytest.raises(WorkerError) as caught:
            await gated.release(launch(stage))
        assert (caught.value.code, caught.value.text) == (code, text)
        ended, killer = await gated.ended()
        assert ended in {125, 127} and killer is None

    with_gated(stage, body)


def test_a_launcher_that_was_killed_says_so_by_saying_nothing(stage: Stage) -> None:
    async def body(gated: spawning.Gated) -> None:
        os.kill(gated.pid, signal.SIGKILL)
        wait_for_end(gated.pidfd)
        with pytest.raises(WorkerError, match="ended before the command began") as caught:
            # More than the pipe takes, so that it has to notice.
            await gated.release(stage.launch("/bin/true", environment={"A": "x" * 1_000_000}))
        assert caught.value.code == Code.START_FAILED
        assert await gated.ended() == (None, signal.SIGKILL)

    with_gated(stage, body)


def test_of_one_that_had_all_and_said_nothing_it_is_not_claimed_that_nothing_began(stage: Stage) -> None:
    """A command that kills its shim does so before that can say anything."""
    program = stage.script("silent-launcher", "#!/bin/sh\ncat > /dev/null\nkill -9 $$\n")

    async def run() -> None:
        gated = await spawning.spawn(program)
        try:
            with pytest.raises(WorkerError) as caught:
                await gated.release(stage.launch("/bin/true"))
            assert (caught.value.code, caught.value.field) == (Code.START_FAILED, "command")
            assert caught.value.text == "the launcher ended and said nothing: the command may have begun"
        finally:
            gated.abandon()
            assert await asyncio.wait_for(gated.ended(), PATIENCE) == (None, signal.SIGKILL)

    asyncio.run(run())


def test_one_that_does_not_begin_in_time_is_given_up(stage: Stage) -> None:
    async def body(gated: spawning.Gated) -> None:
        os.kill(gated.pid, signal.SIGSTOP)
        with pytest.raises(WorkerError, match="in time") as caught:
            await gated.release(stage.launch("/bin/sh", "-c", f"> {stage.told}"), timeout=0)
        assert caught.value.code == Code.START_FAILED

    with_gated(stage, body)
    assert not stage.told.exists()


def test_a_process_id_is_kept_until_its_end_was_heard(stage: Stage) -> None:
    async def body(gated: spawning.Gated) -> None:
        gated.abandon()
        wait_for_end(gated.pidfd)
        # Starting another reaps what subprocess believes to be forgotten.
        second = await spawning.spawn(stage.program)
        second.abandon()
        assert "State:\tZ" in Path(f"/proc/{gated.pid}/status").read_text()
        assert await gated.ended() == (None, signal.SIGKILL)
        assert await second.ended() == (None, signal.SIGKILL)
        gated.abandon()

    with_gated(stage, body)


def test_who_stops_waiting_for_the_end_stops_nobody_else(stage: Stage) -> None:
    async def body(gated: spawning.Gated) -> None:
        first, second = asyncio.ensure_future(gated.ended()), asyncio.ensure_future(gated.ended())
        await asyncio.sleep(0)
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        gated.abandon()
        assert await second == (None, signal.SIGKILL)

    with_gated(stage, body)


def test_a_gate_that_is_closed_before_anything_was_told_begins_nothing(stage: Stage) -> None:
    async def body(gated: spawning.Gated) -> None:
        task = asyncio.ensure_future(gated.release(stage.launch("/bin/true", environment={"A": "x" * 1_000_000})))
        os.kill(gated.pid, signal.SIGSTOP)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        os.kill(gated.pid, signal.SIGCONT)
        assert await gated.ended() == (125, None)

    with_gated(stage, body)


@pytest.mark.parametrize("program", ["gone", "project", "plain"])
def test_a_program_that_is_none_is_refused(stage: Stage, program: str) -> None:
    (stage.directory / "plain").write_text("")
    name = str(stage.directory / program.replace("project", "my project"))
    with pytest.raises(WorkerError, match="the launcher cannot be started") as caught:
        asyncio.run(spawning.spawn(name))
    assert caught.value.code == Code.START_FAILED
    assert str(stage.directory) not in caught.value.text


def test_many_at_once_do_not_hold_each_others_gates(stage: Stage) -> None:
    async def run() -> None:
        all_gated = [await spawning.spawn(stage.program) for _ in range(12)]
        # Were a gate held by a later launcher, its own would wait for ever.
        for gated in all_gated[:6]:
            gated._close_gate()
            assert await asyncio.wait_for(gated.ended(), PATIENCE) == (125, None)
        waiting = all_gated[6:]
        await asyncio.gather(*(gated.release(stage.launch("/bin/true")) for gated in waiting))
        assert await asyncio.gather(*(gated.ended() for gated in waiting)) == [(0, None)] * 6

    asyncio.run(run())


_PARENT = """\
import asyncio, json, os, signal, sys
sys.path.insert(0, {service!r})
from agent_intercom.workers import places, spawning
from agent_intercom.workers.spec import Launch
left = {left}
write = os.write

def counting(descriptor, content):
    global left
    written = write(descriptor, content[:left])
    left -= written
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return written

async def run():
    gated = await spawning.spawn({program!r})
    print(gated.pid, flush=True)
    sys.stdin.readline()
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    os.write = counting
    await gated.release(Launch(**json.loads({launch!r})))

asyncio.run(run())
"""


@contextlib.contextmanager
def killed(code: str) -> Iterator[int]:
    """The descriptor of the launcher whose parent, which ran this code, has killed itself."""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.stdin.write(b"\n")
            parent.stdin.flush()
            assert parent.wait(PATIENCE) == -signal.SIGKILL
            yield pidfd
        finally:
            os.close(pidfd)


@pytest.mark.parametrize("told", ["nothing", "1", "4", "half", "all but one", "all"])
def test_the_death_of_the_service_leaves_a_launcher_that_knows_all_or_one_that_begins_nothing(
    stage: Stage, told: str
) -> None:
    launch = stage.launch("/bin/sh", "-c", f"> {stage.told}; exit 3")
    length = len(launch.encode()) + 4
    left = {"nothing": 0, "half": length // 2, "all but one": length - 1, "all": length}.get(told)
    fields = {name: value for name, value in launch._asdict().items() if name != "confinement"}
    code = textwrap.dedent(_PARENT).format(
        service=str(SERVICE),
        left=int(told) if left is None else left,
        program=stage.program,
        launch=json.dumps(fields),
    )
    with killed(code) as pidfd:
        wait_for_end(pidfd)
    assert stage.told.exists() == (told == "all")
    found = places.read_exit(str(stage.exit_file))
    if told == "all":
        assert found is not None and found[:2] == (3, None)
    else:
        assert found is None and os.listdir(stage.place) == []


def test_a_shim_outlives_the_service(stage: Stage) -> None:
    up = stage.directory / "up"
    os.mkfifo(up)
    launch = stage.launch("/bin/sh", "-c", f"echo up > {up}; read end < {up}; exit 6")
    fields = {name: value for name, value in launch._asdict().items() if name != "confinement"}
    code = _PARENT.format(service=str(SERVICE), left=1 << 20, program=stage.program, launch=json.dumps(fields))
    code += "    os.kill(os.getpid(), signal.SIGKILL)\n"
    code = code.replace("asyncio.run(run())", "asyncio.run(run())\nif True:")
    with killed(code) as pidfd:
        assert up.read_text() == "up\n"
        assert not select.select([pidfd], [], [], 0)[0]
        up.write_text("end\n")
        wait_for_end(pidfd)
    found = places.read_exit(str(stage.exit_file))
    assert found is not None and found[:2] == (6, None)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('{"code":0,"signal":null,"at":5}', (0, None, 5)),
        ('{"code":null,"signal":9,"at":5}', (None, 9, 5)),
        ('{"code":null,"signal":null,"at":5}', None),
        ('{"code":1,"signal":9,"at":5}', None),
        ('{"code":true,"signal":null,"at":5}', None),
        ('{"code":-1,"signal":null,"at":5}', None),
        ('{"code":1,"signal":null,"at":1.5}', None),
        ('{"code":1,"signal":null}', None),
        ('{"code":1,"code":2,"signal":null,"at":5}', None),
        ("[]", None),
        ("", None),
        ("{" + " " * 5000 + "}", None),
    ],
)
def test_an_exit_file_is_read_or_taken_for_none(
    tmp_path: Path, content: str, found: tuple[int | None, int | None, int] | None
) -> None:
    name = tmp_path / "exit.json"
    name.write_text(content)
    name.chmod(stat.S_IRUSR)
    assert places.read_exit(str(name)) == found


def test_an_exit_file_that_is_not_there_or_a_link_tells_nothing(tmp_path: Path) -> None:
    name = tmp_path / "exit.json"
    assert places.read_exit(str(name)) is None
    (tmp_path / "other").write_text('{"code":0,"signal":null,"at":5}')
    name.symlink_to(tmp_path / "other")
    assert places.read_exit(str(name)) is None
