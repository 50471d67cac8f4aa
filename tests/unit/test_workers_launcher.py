# SPDX-License-Identifier: Apache-2.0
"""The launcher and shim, as processes: what a command finds, how its end is told, and what begins nothing."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_intercom.workers import confinement, launcher
from agent_intercom.workers.contract import Code
from agent_intercom.workers.spec import Confinement, Launch
from tests.unit.launchstage import PATIENCE, SERVICE, Stage, wait_for_end

CANARY = "canary-77d0"
LIBC = 1 << 31 | 1 << 32
"""Signals 32 and 33, which the C library keeps for itself: who inherits them ignored cannot change that."""


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path.resolve())


def frame(launch: Launch) -> bytes:
    content = launch.encode()
    return len(content).to_bytes(4, "big") + content


def run(stage: Stage, sent: bytes, **arguments: Any) -> subprocess.CompletedProcess[bytes]:
    """Send `sent` through the gate and close that; what is on standard output is the report."""
    return subprocess.run(
        [stage.program], input=sent, capture_output=True, timeout=PATIENCE, check=False, env={}, **arguments
    )


@contextlib.contextmanager
def running(stage: Stage, launch: Launch) -> Iterator[subprocess.Popen[bytes]]:
    """A shim whose command has begun; both are ended afterwards."""
    with subprocess.Popen([stage.program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}) as process:
        assert process.stdin is not None and process.stdout is not None
        commands: list[int] = []
        try:
            process.stdin.write(frame(launch))
            process.stdin.close()
            assert process.stdout.read() == launcher.STARTED
            commands = children(process.pid)
            yield process
        finally:
            for command in commands:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(command, signal.SIGKILL)
            process.wait(PATIENCE)


def children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def ending(stage: Stage) -> tuple[Any, Any]:
    record = json.loads(stage.exit_file.read_text())
    assert set(record) == {"code", "signal", "at"}
    assert stat.S_IMODE(stage.exit_file.stat().st_mode) == 0o600
    assert os.listdir(stage.place) == [stage.exit_file.name]
    return record["code"], record["signal"]


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 40, -1])
def test_a_gate_that_ends_early_ends_it_without_a_word_or_a_trace(stage: Stage, length: int) -> None:
    sent = frame(stage.launch("/bin/sh", "-c", f"> {stage.told}"))
    ended = run(stage, sent[:length])
    assert (ended.returncode, ended.stdout, ended.stderr) == (launcher.REFUSED, b"", b"")
    assert not stage.told.exists()
    assert os.listdir(stage.place) == []


def test_a_gate_that_stays_closed_keeps_everything_waiting(stage: Stage) -> None:
    sent = frame(stage.launch("/bin/sh", "-c", f"> {stage.told}"))
    with subprocess.Popen([stage.program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(sent[:-1])
        process.stdin.flush()
        assert children(process.pid) == []
        process.stdin.write(sent[-1:])
        process.stdin.flush()
        # The gate itself need not end.
        assert process.stdout.read() == launcher.STARTED
        assert process.wait(PATIENCE) == 0
    assert stage.told.exists()


def test_a_command_finds_what_it_was_given_and_nothing_else(stage: Stage) -> None:
    environment = {"KEY": f"{CANARY} =ä\n", "ODD": os.fsdecode(b"\xff\xfe"), "EMPTY": ""}
    sent = frame(stage.launch(stage.probe, "", "two words", os.fsdecode(b"\xfe"), environment=environment))
    poisoned = {
        "NOTIFY_SOCKET": "/run/notify", "LISTEN_FDS": "2", "INVOCATION_ID": CANARY, "JOURNAL_STREAM": "8:1",
        "LANG": "de_DE.ISO-8859-1", "PYTHONPATH": "/nowhere", "PYTHONSTARTUP": "/nowhere", "LD_BIND_NOW": "1",
    }  # fmt: skip
    reading, writing = os.pipe()
    hup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGTERM])
    umask = os.umask(0o027)
    try:
        with open(os.devnull, "wb") as null:
            ended = subprocess.run(
                [stage.program], input=sent, stdout=null, check=False, env=poisoned, pass_fds=[reading, writing]
            )
    finally:
        os.umask(umask)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGHUP, hup)
        os.close(reading)
        os.close(writing)
    assert ended.returncode == 0
    found = stage.found()
    assert found["argv"] == [stage.probe, "", "two words", os.fsdecode(b"\xfe")]
    variables = {bytes.fromhex(variable) for variable in found["environ"]}
    assert variables == {os.fsencode(f"{name}={value}") for name, value in environment.items()}
    assert found["cwd"] == str(stage.project)
    assert found["descriptors"] == {"0": "/dev/null", "1": "/dev/null", "2": "/dev/null"}
    assert found["stdin_ends"]
    assert found["sid"] == found["pgrp"] == found["pid"]
    assert int(found["blocked"], 16) == 0
    assert found["ignored"] & ~LIBC == (1 << signal.SIGPIPE - 1) | (1 << signal.SIGXFSZ - 1)
    assert found["umask"] == 0o027
    may = resource.getrlimit(resource.RLIMIT_CORE)[1] != 0
    assert found["core"] == ([1, 1] if may else [0, 0])
    assert found["no_new_privs"] == "0"


def test_python_is_told_of_no_signal_to_ignore(stage: Stage) -> None:
    """The probe is Python, which ignores two: another program shows that these came from itself."""
    ended = run(stage, frame(stage.launch("/bin/sh", "-c", f"grep SigIgn /proc/self/status > {stage.told}")))
    assert ended.returncode == 0
    assert int(stage.told.read_text().split()[1], 16) & ~LIBC == 0


def test_an_input_that_is_asked_for_neither_ends_nor_says_anything(stage: Stage) -> None:
    assert run(stage, frame(stage.launch(stage.probe, stdin=True))).returncode == 0
    found = stage.found()
    assert not found["stdin_ends"]
    assert found["descriptors"]["0"].startswith("pipe:")
    assert sorted(found["descriptors"]) == ["0", "1", "2"]


def test_output_is_kept_where_that_is_asked_for(stage: Stage) -> None:
    script = "echo one; echo two >&2; (trap '' HUP; exec sleep 1000) & echo $!; exit 3"
    ended = run(stage, frame(stage.launch("/bin/sh", "-c", script, output=True)))
    try:
        assert ended.returncode == 3
        name = stage.place / "output"
        lines = name.read_bytes().splitlines()
        assert lines[:2] == [b"one", b"two"]
        assert stat.S_IMODE(name.stat().st_mode) == 0o600
    finally:
        # The shim did not wait for it.
        os.kill(int((stage.place / "output").read_text().split()[-1]), signal.SIGKILL)


@pytest.mark.parametrize("code", [0, 7, 125, 255])
def test_it_exits_as_the_command_did(stage: Stage, code: int) -> None:
    ended = run(stage, frame(stage.launch("/bin/sh", "-c", f"exit {code}")))
    assert (ended.returncode, ended.stdout) == (code, launcher.STARTED)
    assert ending(stage) == (code, None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGHUP, signal.SIGRTMAX])
def test_it_ends_by_the_signal_that_ended_the_command(stage: Stage, number: int) -> None:
    ended = run(stage, frame(stage.launch("/bin/sh", "-c", f"kill -{int(number)} $$")), cwd=stage.project)
    assert (ended.returncode, ended.stdout) == (-number, launcher.STARTED)
    assert ending(stage) == (None, number)
    assert os.listdir(stage.project) == []


def failing(stage: Stage, name: str) -> Launch:
    """A launch that fails in the way that `name` says."""
    noted = stage.script("noted", f"#!/bin/sh\n> {stage.told}\n")
    if name == "directory":
        return stage.launch(noted, directory=str(stage.directory / "gone"))
    if name == "place":
        return stage.launch(noted)._replace(exit_file=str(stage.directory / "gone" / "exit.json"))
    if name == "ring":
        return stage.launch(noted)._replace(output=str(stage.directory / "gone"))
    if name == "nothing":
        return stage.launch()
    if name == "searched":
        return stage.launch("no-such-command", environment={"PATH": f"/usr/bin:{stage.directory}"})
    if name == "missing":
        return stage.launch(str(stage.directory / "gone"))
    if name == "interpreter":
        return stage.launch(stage.script("script", "#!/no/such/interpreter\n"))
    if name == "mode":
        return stage.launch(stage.script("script", "#!/bin/sh\n", 0o644))
    if name == "a directory":
        return stage.launch(str(stage.project))
    if name == "format":
        return stage.launch(stage.script("script", "no magic\n"))
    assert name == "too long"
    return stage.launch(noted, "x" * (1 << 18))


@pytest.mark.parametrize(
    ("name", "status", "code", "text"),
    [
        ("directory", 125, Code.START_FAILED, "the directory cannot be entered: No such file or directory"),
        ("place", 125, Code.START_FAILED, "the worker's private place cannot be written"),
        ("ring", 125, Code.START_FAILED, "the worker's private place cannot be written"),
        ("nothing", 127, Code.COMMAND_NOT_FOUND, "there is no command"),
        ("searched", 127, Code.COMMAND_NOT_FOUND, "the command was not found"),
        ("missing", 127, Code.COMMAND_NOT_FOUND, "the command was not found"),
        ("interpreter", 127, Code.COMMAND_NOT_FOUND, "what interprets the command was not found"),
        ("mode", 126, Code.START_FAILED, "the command cannot be executed: it is not marked as executable"),
        ("a directory", 126, Code.START_FAILED, "the command cannot be executed: it is a directory"),
        (
            "format",
            126,
            Code.START_FAILED,
            "the command cannot be executed: it is neither a program nor a script that names its interpreter",
        ),
        ("too long", 126, Code.START_FAILED, "the command cannot be executed: Argument list too long"),
    ],
)
def test_why_a_command_did_not_begin_is_told(stage: Stage, name: str, status: int, code: str, text: str) -> None:
    ended = run(stage, frame(failing(stage, name)))
    assert ended.stdout.decode() == f"{code}\n{text}"
    assert (ended.returncode, ended.stderr) == (status, b"")
    assert not stage.told.exists()
    if name != "place":
        assert ending(stage) == (status, None)


@pytest.mark.parametrize("content", [b"\0", b"1\0x", b"{}", b"9\0x", b"0\x000\x000\x000", b"-1\0x"])
def test_what_it_cannot_read_begins_nothing(stage: Stage, content: bytes) -> None:
    ended = run(stage, len(content).to_bytes(4, "big") + content)
    assert ended.returncode == launcher.REFUSED
    assert ended.stdout == b"start_failed\nthe launcher was told what it cannot read"


def test_a_command_is_searched_in_its_own_path(stage: Stage) -> None:
    stage.script("found-by-name", f"#!/bin/sh\n> {stage.told}\n")
    ended = run(stage, frame(stage.launch("found-by-name", environment={"PATH": f"/nowhere:{stage.directory}"})))
    assert ended.returncode == 0
    assert stage.told.exists()


@pytest.mark.skipif(confinement.abi() < 1, reason="the kernel has no Landlock")
def test_a_confined_command_cannot_write_and_its_end_is_told_all_the_same(stage: Stage) -> None:
    script = (
        f"echo no > '{stage.project}/file'; echo yes > {stage.place}/yes; rm {stage.place}/yes; {stage.probe}; exit 9"
    )
    wanted = Confinement((str(stage.directory),))
    ended = run(stage, frame(stage.launch("/bin/sh", "-c", script, confinement=wanted)))
    assert (ended.returncode, (stage.project / "file").exists()) == (9, True)
    assert stage.found()["no_new_privs"] == "1"
    (stage.project / "file").unlink()
    ended = run(stage, frame(stage.launch("/bin/sh", "-c", script, confinement=Confinement(()))))
    assert (ended.returncode, ended.stdout) == (9, launcher.STARTED)
    assert os.listdir(stage.project) == []
    assert ending(stage) == (9, None)


def test_a_confinement_that_is_refused_begins_nothing(stage: Stage) -> None:
    wanted = Confinement((str(stage.directory / "gone"),))
    ended = run(stage, frame(stage.launch("/bin/sh", "-c", f"> {stage.told}", confinement=wanted)))
    code, _, text = ended.stdout.decode().partition("\n")
    assert code in {Code.INVALID, Code.CONFINEMENT_UNAVAILABLE}
    assert text and str(stage.directory) not in text
    assert ended.returncode == launcher.REFUSED
    assert not stage.told.exists()


_COUNTING = """\
trap 'echo term >> {told}; echo parent > {up}' TERM
trap 'echo int >> {told}; kill -9 $child; exit 4' INT
trap 'echo hup > {up}' HUP
(trap 'echo child > {up}' TERM; trap '' HUP; echo up > {up}; while :; do read x < {fifo}; done) &
child=$!
echo ready > {up}
while :; do wait; done
"""


@pytest.fixture
def counting(stage: Stage) -> Iterator[tuple[Stage, subprocess.Popen[bytes]]]:
    """A command that notes signals, and has a child in its process group that does."""
    up, fifo = stage.directory / "up", stage.directory / "fifo"
    os.mkfifo(up)
    os.mkfifo(fifo)
    script = _COUNTING.format(told=stage.told, up=up, fifo=fifo)
    with running(stage, stage.launch("/bin/sh", "-c", script)) as shim:
        assert two_lines(up) == ["ready", "up"]
        yield stage, shim


def two_lines(fifo: Path) -> list[str]:
    """What two processes say, in whatever order."""
    heard = b""
    while heard.count(b"\n") < 2:
        heard += fifo.read_bytes()
    return sorted(heard.decode().split())


def test_signals_reach_the_whole_process_group_of_the_command(
    counting: tuple[Stage, subprocess.Popen[bytes]],
) -> None:
    stage, shim = counting
    shim.send_signal(signal.SIGTERM)
    assert two_lines(stage.directory / "up") == ["child", "parent"]
    shim.send_signal(signal.SIGINT)
    assert shim.wait(PATIENCE) == 4
    assert stage.told.read_text().split() == ["term", "int"]
    assert ending(stage) == (4, None)


def test_a_signal_from_the_service_manager_is_not_passed_on_again(
    counting: tuple[Stage, subprocess.Popen[bytes]],
) -> None:
    """systemd sends it to everybody in the unit, so a command would get it twice."""
    stage, shim = counting
    code = "import os, sys; open('/proc/self/comm', 'w').write('systemd'); os.kill(int(sys.argv[1]), 15)\n"
    code += "print('sent', flush=True); sys.stdin.read()"
    sender = subprocess.Popen(
        [sys.executable, "-IS", "-c", code, str(shim.pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert sender.stdout is not None
        assert sender.stdout.readline() == b"sent\n"
        # What comes next has to wait for what it does with that.
        shim.send_signal(signal.SIGHUP)
        assert (stage.directory / "up").read_bytes() == b"hup\n"
        shim.send_signal(signal.SIGINT)
        assert shim.wait(PATIENCE) == 4
    finally:
        sender.communicate(timeout=PATIENCE)
    assert stage.told.read_text().split() == ["int"]


def test_the_shim_ends_with_the_command_whoever_else_is_left(stage: Stage) -> None:
    left = stage.directory / "left"
    script = f"setsid sleep 1000 & echo $! > {left}; exit 5"
    ended = run(stage, frame(stage.launch("/bin/sh", "-c", script)))
    pid = int(left.read_text())
    pidfd = os.pidfd_open(pid)
    try:
        assert ended.returncode == 5
        assert ending(stage) == (5, None)
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        wait_for_end(pidfd)
        os.close(pidfd)


def test_the_exit_file_is_replaced_and_never_followed(stage: Stage) -> None:
    other = stage.directory / "other"
    other.write_text("kept")
    stage.exit_file.symlink_to(other)
    assert run(stage, frame(stage.launch("/bin/true"))).returncode == 0
    assert other.read_text() == "kept"
    assert ending(stage) == (0, None)


def test_its_usage_is_told_to_people(stage: Stage) -> None:
    helped = subprocess.run([stage.program, "--help"], capture_output=True, text=True, check=False)
    assert (helped.returncode, helped.stdout) == (0, launcher.USAGE)
    assert subprocess.run([stage.program, "x"], capture_output=True, check=False).returncode == launcher.REFUSED


def test_next_to_nothing_is_imported(stage: Stage) -> None:
    code = f"import sys; sys.path.insert(0, {str(SERVICE)!r}); from agent_intercom.workers import launcher, ring\n"
    code += "print(*sys.modules)"
    listed = subprocess.run([sys.executable, "-IS", "-c", code], capture_output=True, text=True, check=True).stdout
    ours = {name for name in listed.split() if name.startswith("agent_intercom")}
    assert ours == {
        "agent_intercom", "agent_intercom.workers", "agent_intercom.workers.launcher", "agent_intercom.workers.ring"
    }  # fmt: skip
    assert not {"typing", "enum", "re", "json", "signal", "collections", "functools", "ctypes"} & set(listed.split())


def test_codes_are_those_of_the_contract() -> None:
    assert {launcher._START_FAILED, launcher._COMMAND_NOT_FOUND} == {Code.START_FAILED, Code.COMMAND_NOT_FOUND}


_NO_NUL = st.binary(max_size=40).map(lambda content: content.replace(b"\0", b""))
_TEXT = _NO_NUL.map(os.fsdecode)
_NAMES = st.binary(min_size=1, max_size=20).map(lambda name: os.fsdecode(name.translate(None, b"\0=") or b"N"))
_CONFINEMENT = st.builds(Confinement, st.lists(_TEXT, max_size=3), st.booleans(), st.booleans())


@given(
    st.builds(
        Launch,
        arguments=st.lists(_TEXT, max_size=5),
        environment=st.dictionaries(_NAMES, _TEXT, max_size=5),
        directory=_TEXT,
        exit_file=_TEXT,
        scratch=_TEXT,
        confinement=st.none() | _CONFINEMENT,
        output=st.none() | _TEXT.filter(bool),
        stdin=st.booleans(),
    )
)
def test_what_is_told_arrives_as_it_was(launch: Launch) -> None:
    told = launcher.Told(launch.encode())
    assert [os.fsdecode(argument) for argument in told.arguments] == launch.arguments
    assert {os.fsdecode(name): os.fsdecode(value) for name, value in told.environment.items()} == launch.environment
    places = (told.directory, told.exit_file, told.scratch)
    assert tuple(map(os.fsdecode, places)) == (launch.directory, launch.exit_file, launch.scratch)
    assert (os.fsdecode(told.ring) or None, bool(told.stdin)) == (launch.output, launch.stdin)
    if launch.confinement is None:
        assert told.confinement == []
    else:
        network, required, *writable = told.confinement
        found = Confinement([os.fsdecode(name) for name in writable], bool(network), bool(required))
        assert found == launch.confinement


@given(st.binary(max_size=60))
def test_other_bytes_are_refused_or_read_and_nothing_else(content: bytes) -> None:
    with contextlib.suppress(ValueError):
        launcher.Told(content)


@pytest.mark.parametrize(
    "change",
    [
        {"arguments": ["a\0b"]},
        {"environment": {"A": f"{CANARY}\0"}},
        {"environment": {"A=B": CANARY}},
        {"environment": {"": CANARY}},
        {"environment": {"A": f"{CANARY}\ud800"}},
        {"directory": f"/{CANARY}\0"},
    ],
)
def test_what_no_command_can_be_given_is_refused_without_its_value(stage: Stage, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="has a") as caught:
        stage.launch("/bin/true")._replace(**change).encode()
    assert CANARY not in str(caught.value)
    assert not isinstance(caught.value, UnicodeError)
    assert "Launch()" in repr(stage.launch(CANARY))
