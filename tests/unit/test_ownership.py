# SPDX-License-Identifier: Apache-2.0
"""Never two brokers: the probe, the owner and PID files, the socket unit's guard, taking over."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.host import journal, standalone
from agent_intercom.intercom import foreign, ownership
from agent_intercom.intercom.ownership import Guard, OwnershipError, Probe

SERVICE = str(Path(ownership.__file__).parents[2])
HEALTHY = {
    "type": "health_ok",
    "protocol": "pi-intercom",
    "version": 4,
    "endpoint": "local",
    "remoteAccess": {
        "feature": "remote-access-v1",
        "policySemanticsVersion": 2,
        "policySemanticsHash": "f3b00e503631bc91123aedfbcf1df72cc9913e1893c09728b2c598f3dcdfdfe0",
    },
}
Answer = Callable[[dict[str, Any]], "list[Any] | bytes | None"]


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose name is short enough for the address of a socket."""
    with tempfile.TemporaryDirectory(prefix="ai-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def intercom(short: Path) -> Path:
    directory = short / ".pi" / "agent" / "intercom"
    directory.mkdir(parents=True, mode=0o700)
    return directory


@pytest.fixture
def environ(short: Path) -> dict[str, str]:
    return {"HOME": str(short), "XDG_RUNTIME_DIR": str(short / "run"), "PATH": os.environ["PATH"]}


def pack(frame: Any) -> bytes:
    payload = frame if isinstance(frame, bytes) else json.dumps(frame).encode()
    return struct.pack(">I", len(payload)) + payload


def healthy(frame: dict[str, Any]) -> list[Any]:
    return [{**HEALTHY, "requestId": frame["requestId"]}]


def serve(listener: socket.socket, answer: Answer) -> None:
    """Answer every frame of every connection, one connection after the other, until the listener is shut down."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError):
            while header := connection.recv(4, socket.MSG_WAITALL):
                (size,) = struct.unpack(">I", header)
                frames = answer(json.loads(connection.recv(size, socket.MSG_WAITALL)))
                if frames is None:
                    continue
                connection.sendall(frames if isinstance(frames, bytes) else b"".join(map(pack, frames)))


@contextlib.contextmanager
def broker(address: Path, answer: Answer = healthy) -> Iterator[None]:
    """A broker in a thread: it is this process that listens."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener, answer))
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
    address.unlink(missing_ok=True)


CHILD = """
import json, os, signal, socket, struct, sys
address, mode = sys.argv[1:]
if mode == 'stubborn': signal.signal(signal.SIGTERM, signal.SIG_IGN)
listener = socket.socket(socket.AF_UNIX)
listener.bind(address)
listener.listen()
print('listening', flush=True)
healthy = json.loads(os.environ['HEALTHY'])
while True:
    connection, _ = listener.accept()
    while mode != 'silent' and (header := connection.recv(4, socket.MSG_WAITALL)):
        frame = json.loads(connection.recv(struct.unpack('>I', header)[0], socket.MSG_WAITALL))
        payload = json.dumps({**healthy, 'requestId': frame['requestId']}).encode()
        connection.sendall(struct.pack('>I', len(payload)) + payload)
"""


@contextlib.contextmanager
def process(address: Path, mode: str = "healthy") -> Iterator[subprocess.Popen[str]]:
    """A broker that is a process of its own."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(address), mode],
        env={**os.environ, "HEALTHY": json.dumps(HEALTHY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "listening\n"
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def ended_pid() -> int:
    """The number of a process that existed and does not any more."""
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


@pytest.fixture
def other() -> Iterator[int]:
    """A live process that is not a broker."""
    child = subprocess.Popen(["sleep", "infinity"])
    yield child.pid
    child.kill()
    child.wait()


# The probe


def test_nothing_there(short: Path) -> None:
    assert ownership.probe(str(short / "s")) == Probe("absent")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(short / "s"))
    assert ownership.probe(str(short / "s")) == Probe("absent")
    assert ownership.probe(str(short / "s" / "below")) == Probe("absent")


def test_an_address_that_cannot_be_tried(short: Path) -> None:
    assert ownership.probe(str(short / ("x" * 120))) == Probe("unreachable")


def test_compatible(short: Path) -> None:
    with broker(short / "s"):
        assert ownership.probe(str(short / "s")) == Probe("compatible", True, os.getpid(), os.geteuid())


def test_the_listener_is_named_by_the_kernel(short: Path) -> None:
    with process(short / "s") as child:
        assert ownership.probe(str(short / "s")) == Probe("compatible", True, child.pid, os.geteuid())


def altered(**changes: Any) -> Answer:
    def answer(frame: dict[str, Any]) -> list[Any]:
        whole = {**HEALTHY, "requestId": frame["requestId"], **changes}
        return [{key: value for key, value in whole.items() if value is not None}]

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        altered(version=3),
        altered(version="4"),
        altered(protocol="other"),
        altered(endpoint="remote"),
        altered(remoteAccess=None),
        altered(remoteAccess={**HEALTHY["remoteAccess"], "policySemanticsVersion": 1}),  # type: ignore[dict-item]
    ],
)
def test_incompatible(short: Path, answer: Answer) -> None:
    with broker(short / "s", answer):
        assert ownership.probe(str(short / "s")).state == "incompatible"


def test_the_gateway_says_remote(short: Path) -> None:
    with broker(short / "s", altered(endpoint="remote")):
        assert ownership.probe(str(short / "s"), endpoint="remote").state == "compatible"


@pytest.mark.parametrize(
    "answer",
    [
        lambda frame: None,
        lambda frame: [{"type": "error", "error": "x"}],
        lambda frame: [{**HEALTHY, "requestId": "another"}],
        lambda frame: [b"not json"],
        lambda frame: [b"[" * 100_000],
        lambda frame: [b"3"],
        lambda frame: struct.pack(">I", 0),
        lambda frame: struct.pack(">I", 2_000_000) + bytes(100),
        lambda frame: pack(HEALTHY)[:-1],
    ],
)
def test_unreachable_but_listening(short: Path, answer: Answer) -> None:
    with broker(short / "s", answer):
        found = ownership.probe(str(short / "s"), timeout=0.1)
        assert found._replace(heard="") == Probe("unreachable", True, os.getpid(), os.geteuid())


@pytest.mark.parametrize(
    ("answer", "heard"),
    [
        (lambda frame: [{"type": "error", "error": "x"}], "other"),
        (lambda frame: [b"not json"], "other"),
        (lambda frame: b"220 ready\r\n", "other"),
    ],
)
def test_what_says_something_else_is_told_from_what_is_silent(short: Path, answer: Answer, heard: str) -> None:
    with broker(short / "s", answer):
        assert ownership.probe(str(short / "s"), timeout=20.0).heard == heard
    with broker(short / "t", lambda frame: None):
        assert ownership.probe(str(short / "t"), timeout=0.05).heard == ""


def test_what_closes_is_told_from_what_is_silent(short: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short / "s"))
        listener.listen()

        def close() -> None:
            listener.accept()[0].close()

        closing = threading.Thread(target=close)
        closing.start()
        assert ownership.probe(str(short / "s"), timeout=20.0).heard == "closed"
        closing.join()


def test_a_listener_whose_backlog_is_full_listens(short: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as clients:
        listener.bind(str(short / "s"))
        listener.listen(0)
        clients.enter_context(socket.socket(socket.AF_UNIX)).connect(str(short / "s"))
        assert ownership.probe(str(short / "s"), timeout=0.05) == Probe("unreachable", True)


# The files


def test_the_owner_file_is_exactly_the_contract_s(intercom: Path) -> None:
    ownership.acquire_owner(str(intercom), 4711)
    assert (intercom / "broker.owner").read_bytes() == b"4711"
    assert (intercom / "broker.owner").stat().st_mode & 0o777 == 0o600
    ownership.write_pid(str(intercom), 4711)
    assert (intercom / "broker.pid").read_bytes() == b"4711"
    assert (intercom / "broker.pid").stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in intercom.iterdir()) == ["broker.owner", "broker.pid"]


def test_a_live_owner_is_respected(intercom: Path, other: int) -> None:
    ownership.acquire_owner(str(intercom), other)
    with pytest.raises(OwnershipError) as caught:
        ownership.acquire_owner(str(intercom), os.getpid())
    assert (caught.value.code, str(caught.value)) == (
        "OWNED",
        f"Intercom broker already owned by live process {other}",
    )
    assert ownership.owner(str(intercom)) == other


@pytest.mark.parametrize("content", [b"", b"x", b"-4", b"0", b"1.5", b"9" * 30, b"\xff", b"1" * 100])
def test_a_stale_owner_is_replaced(intercom: Path, content: bytes) -> None:
    (intercom / "broker.owner").write_bytes(content)
    ownership.acquire_owner(str(intercom), os.getpid())
    assert ownership.owner(str(intercom)) == os.getpid()


def test_a_dead_owner_is_replaced(intercom: Path) -> None:
    (intercom / "broker.owner").write_text(str(ended_pid()))
    ownership.acquire_owner(str(intercom), os.getpid())
    assert ownership.owner(str(intercom)) == os.getpid()


def test_ones_own_number_from_a_former_life_is_replaced(intercom: Path) -> None:
    (intercom / "broker.owner").write_text(str(os.getpid()))
    ownership.acquire_owner(str(intercom), os.getpid())


def test_a_number_that_was_given_away_since_counts_only_while_something_listens(intercom: Path, other: int) -> None:
    (intercom / "broker.owner").write_text(str(other))
    os.utime(intercom / "broker.owner", (1_000_000_000, 1_000_000_000))
    with broker(intercom / "broker.sock"), pytest.raises(OwnershipError):
        ownership.acquire_owner(str(intercom), os.getpid())
    ownership.acquire_owner(str(intercom), os.getpid())
    assert ownership.owner(str(intercom)) == os.getpid()


def test_an_owner_that_cannot_be_removed(intercom: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (intercom / "broker.owner").write_text("stale")
    monkeypatch.setattr(ownership, "_create", lambda name, pid: False)
    with pytest.raises(OwnershipError) as caught:
        ownership.acquire_owner(str(intercom), os.getpid())
    assert (caught.value.code, str(caught.value)) == ("UNOBTAINABLE", "Could not acquire intercom broker ownership")


def test_one_that_was_faster_with_a_stale_owner_keeps_the_directory(
    intercom: Path, monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    name = intercom / "broker.owner"
    name.write_text("stale")
    read = ownership._read_pid

    def overtaken(file: str) -> int | None:
        found = read(file)
        if found is None:
            name.unlink()
            ownership.acquire_owner(str(intercom), other)
        return found

    monkeypatch.setattr(ownership, "_read_pid", overtaken)
    with pytest.raises(OwnershipError, match=f"live process {other}"):
        ownership.acquire_owner(str(intercom), os.getpid())
    assert name.read_text() == str(other)
    assert [file.name for file in intercom.iterdir()] == ["broker.owner"]


def release_with(intercom: Path, *, pid_file: str, bound: bool) -> list[str]:
    """What is left after the owner 4711 has released a directory in which everything lies."""
    for name in ("broker.status", "broker-asks.json"):
        (intercom / name).write_text("1")
    (intercom / "broker.owner").write_text("4711")
    (intercom / "broker.pid").write_text(pid_file)
    address = str(intercom / "broker.sock")
    with standalone.bind(address):
        sockets = {address: standalone.identity(address)} if bound else {}
        assert not ownership.release(str(intercom), 4712, sockets)
        assert len(list(intercom.iterdir())) == 5
        assert ownership.release(str(intercom), 4711, sockets)
    assert not ownership.release(str(intercom), 4711, sockets)
    return sorted(file.name for file in intercom.iterdir())


def test_release_takes_only_ones_own(intercom: Path) -> None:
    assert release_with(intercom, pid_file="4711", bound=True) == ["broker-asks.json"]


def test_release_by_one_that_was_refused_leaves_the_other_s(intercom: Path) -> None:
    left = ["broker-asks.json", "broker.pid", "broker.sock", "broker.status"]
    assert release_with(intercom, pid_file="4712", bound=False) == left


def test_release_leaves_a_socket_that_another_bound_since(intercom: Path) -> None:
    (intercom / "broker.owner").write_text("4711")
    address = str(intercom / "broker.sock")
    with standalone.bind(address):
        mine = standalone.identity(address)
        with standalone.bind(address):
            assert ownership.release(str(intercom), 4711, {address: mine})
    assert os.path.exists(address)


# The guard


def test_check_closes_both_directories_to_others(intercom: Path, environ: dict[str, str], other: int) -> None:
    runtime = Path(environ["XDG_RUNTIME_DIR"]) / "agent-intercom"
    runtime.mkdir(parents=True, exist_ok=True)
    for directory in (runtime, intercom):
        directory.chmod(0o777)
    assert Guard(environ, other).check() is None
    assert [directory.stat().st_mode & 0o777 for directory in (runtime, intercom)] == [0o700, 0o700]


def test_check_reserves_own_keeps_release_removes(intercom: Path, environ: dict[str, str], other: int) -> None:
    guard = Guard(environ, other)
    assert guard.check() is None
    assert ownership.owner(str(intercom)) == other
    with pytest.raises(OwnershipError):
        ownership.acquire_owner(str(intercom), os.getpid())
    guard.own()
    assert (intercom / "broker.owner").read_bytes() == str(other).encode()
    assert (intercom / "broker.owner").stat().st_mode & 0o777 == 0o600
    assert not (intercom / "broker.pid").exists()
    Guard(environ, other + 1).release()
    assert ownership.owner(str(intercom)) == other
    guard.release()
    assert list(intercom.iterdir()) == []


def test_check_makes_the_directory_private(short: Path, environ: dict[str, str]) -> None:
    assert Guard(environ, os.getpid()).check() is None
    assert (short / ".pi" / "agent" / "intercom").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", [".pi/agent/intercom/broker.sock", "run/agent-intercom/intercom.sock"])
@pytest.mark.parametrize("mode", ["healthy", "silent"])
def test_check_refuses_while_another_listens(
    short: Path, intercom: Path, environ: dict[str, str], name: str, mode: str
) -> None:
    address = short / name
    address.parent.mkdir(parents=True, exist_ok=True)
    with process(address, mode) as child:
        found = Guard(environ, os.getpid()).check()
    assert found is not None and found.pid == child.pid
    assert not (intercom / "broker.owner").exists()
    assert "intercom doctor --take-over" in ownership.refusal(found)
    assert str(short) not in ownership.refusal(found) and "\n" not in ownership.refusal(found)


def test_check_refuses_at_the_gateway_too(intercom: Path, environ: dict[str, str]) -> None:
    with broker(intercom / "remote-gateway.sock", altered(endpoint="remote")):
        found = Guard(environ, ended_pid()).check()
    assert found is not None and found.state == "compatible"


def test_check_does_not_mind_its_own_listeners_and_dead_sockets(intercom: Path, environ: dict[str, str]) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(intercom / "remote-gateway.sock"))
    with broker(intercom / "broker.sock"):
        assert Guard(environ, os.getpid()).check() is None


def test_check_waits_for_an_owner_that_is_just_starting(
    intercom: Path, environ: dict[str, str], other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (intercom / "broker.owner").write_text(str(other))
    with contextlib.ExitStack() as stack:

        def starting(_: float) -> None:
            stack.enter_context(broker(intercom / "broker.sock"))

        monkeypatch.setattr(time, "sleep", starting)
        found = Guard(environ, ended_pid()).check()
    assert found is not None and found.state == "compatible"
    assert ownership.owner(str(intercom)) == other


def test_check_replaces_an_owner_that_never_listens(
    intercom: Path, environ: dict[str, str], other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "START_SECONDS", 0.0)
    (intercom / "broker.owner").write_text(str(other))
    assert Guard(environ, os.getpid()).check() is None
    assert ownership.owner(str(intercom)) == os.getpid()


def test_check_gives_back_what_another_took_first(
    intercom: Path, environ: dict[str, str], other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "START_SECONDS", 0.0)
    answers = iter([None, Probe("compatible", True, other)])
    monkeypatch.setattr(Guard, "_occupied", lambda self: next(answers))
    (intercom / "broker.owner").write_text(str(other))
    (intercom / "broker.pid").write_text(str(other))
    assert Guard(environ, os.getpid()).check() == Probe("compatible", True, other)
    assert ownership.owner(str(intercom)) == other
    assert (intercom / "broker.pid").read_text() == str(other)


def test_own_removes_a_pid_file_that_would_get_somebody_killed(
    intercom: Path, environ: dict[str, str], other: int
) -> None:
    pid = intercom / "broker.pid"
    guard = Guard(environ, os.getpid())
    for content in (str(os.getpid()), str(ended_pid()), "nonsense"):
        pid.write_text(content)
        guard.own()
        assert not pid.exists(), content
    pid.write_text(str(other))
    guard.own()
    assert pid.read_text() == str(other)
    os.utime(pid, (1_000_000_000, 1_000_000_000))
    guard.own()
    assert not pid.exists()


def test_the_unit_s_directory_wins_over_the_environment(short: Path, environ: dict[str, str]) -> None:
    elsewhere = short / "elsewhere"
    both = {**environ, "PI_CODING_AGENT_DIR": str(short / "agent"), "AGENT_INTERCOM_COMPAT_DIR": str(elsewhere)}
    Guard(both, 4711).own()
    assert ownership.owner(str(elsewhere)) == 4711
    Guard({**environ, "PI_CODING_AGENT_DIR": str(short / "agent")}, 4712).own()
    assert ownership.owner(str(short / "agent" / "intercom")) == 4712


def run(environ: dict[str, str], *verbs: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from agent_intercom.intercom.ownership import main; status = main(); print(*sys.modules)"
    return subprocess.run(
        [sys.executable, "-c", f"{code}; sys.exit(status)", *verbs],
        env={**environ, "PYTHONPATH": SERVICE},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_line_acts_for_its_parent(intercom: Path, environ: dict[str, str]) -> None:
    assert (run(environ, "check").returncode, ownership.owner(str(intercom))) == (0, os.getpid())
    assert (run(environ, "own").returncode, ownership.owner(str(intercom))) == (0, os.getpid())
    assert (run(environ, "release").returncode, ownership.owner(str(intercom))) == (0, None)
    assert run(environ, "destroy").returncode == run(environ).returncode == 2


def test_the_command_line_refuses_in_one_line(intercom: Path, environ: dict[str, str]) -> None:
    with process(intercom / "broker.sock") as child:
        ran = run(environ, "check")
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert f"(process {child.pid})" in ran.stderr and "intercom doctor --take-over" in ran.stderr


def test_the_command_line_leaves_an_event(
    intercom: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[tuple[journal.Event, dict[str, Any]]] = []
    monkeypatch.setattr(journal.Journal, "emit", lambda self, event, **fields: events.append((event, fields)))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PI_CODING_AGENT_DIR", raising=False)
    with process(intercom / "broker.sock") as child:
        assert ownership.main(["check"]) == 1
    assert events == [(journal.Event.FOREIGN_BROKER, {"pid": child.pid})]


def test_a_directory_that_is_not_ours_refuses(short: Path, environ: dict[str, str]) -> None:
    (short / ".pi" / "agent").mkdir(parents=True)
    (short / ".pi" / "agent" / "intercom").symlink_to(short)
    ran = run(environ, "check")
    assert ran.returncode == 1 and ran.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", ["check", "own", "release"])
def test_the_guard_is_light(intercom: Path, environ: dict[str, str], verb: str) -> None:
    heavy = {"asyncio", "msgspec", "apsw", "json", "logging", "subprocess", "tempfile"}
    ran = run(environ, verb)
    assert ran.returncode == 0
    loaded = set(ran.stdout.split())
    assert not heavy & loaded
    of_host = {name for name in loaded if name.startswith("agent_intercom.host")}
    assert of_host <= {"agent_intercom.host", "agent_intercom.host.privatefiles", "agent_intercom.host.scopeid"}


# Taking over


def listing(frame: dict[str, Any]) -> list[Any] | None:
    match frame["type"]:
        case "health":
            return healthy(frame)
        case "register":
            return [{"type": "registered", "sessionId": frame["sessionId"], "protocol": "pi-intercom", "version": 4}]
        case "list":
            own = {"id": frame["requestId"], "name": "intercom-doctor"}
            sessions = [{"id": "A1", "name": "alpha"}, {"id": "B1"}, own]
            return [
                {"type": "session_joined", "session": {"id": "C1"}},
                {"type": "sessions", "requestId": frame["requestId"], "sessions": sessions},
            ]
    return None


def test_the_sessions_of_a_foreign_broker(short: Path) -> None:
    with broker(short / "s", listing):
        assert ownership.foreign_sessions(str(short / "s")) == [("A1", "alpha"), ("B1", "")]


@pytest.mark.parametrize("answer", [lambda frame: [{"type": "error"}], lambda frame: None, lambda frame: [b"x"]])
def test_the_sessions_of_a_broker_that_does_not_tell(short: Path, answer: Answer) -> None:
    with broker(short / "s", answer):
        assert ownership.foreign_sessions(str(short / "s"), timeout=0.1) is None
    assert ownership.foreign_sessions(str(short / "s")) is None


def test_take_over_ends_the_listener_and_nobody_else(intercom: Path, other: int) -> None:
    (intercom / "broker.pid").write_text(str(other))
    with process(intercom / "broker.sock") as child:
        taken = ownership.take_over(str(intercom / "broker.sock"))
        assert taken.pid == child.pid and "systemctl --user" in taken.next_command
        assert child.wait() == -signal.SIGTERM
    os.kill(other, 0)


def test_take_over_tells_of_one_that_stays(short: Path) -> None:
    with process(short / "s", "stubborn") as child:
        with pytest.raises(OwnershipError) as caught:
            ownership.take_over(str(short / "s"), timeout=0.05)
        assert caught.value.code == "STILL_RUNNING" and str(child.pid) in str(caught.value)


def test_take_over_never_ends_a_manager(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signals: list[int] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda fd, number: signals.append(number))
    with process(short / "s"):
        monkeypatch.setattr(foreign, "is_manager", lambda pid: True)
        with pytest.raises(OwnershipError) as caught:
            ownership.take_over(str(short / "s"))
    assert (caught.value.code, signals) == ("NOT_A_BROKER", [])


def test_take_over_never_ends_itself(short: Path) -> None:
    with broker(short / "s"), pytest.raises(OwnershipError) as caught:
        ownership.take_over(str(short / "s"))
    assert caught.value.code == "NOT_A_BROKER"


def test_take_over_of_nothing(short: Path) -> None:
    with pytest.raises(OwnershipError) as caught:
        ownership.take_over(str(short / "s"))
    assert caught.value.code == "NOTHING_LISTENS"


def test_take_over_of_a_listener_whose_process_is_gone(short: Path) -> None:
    """A process listened, handed the socket to a child and ended: nobody is attested, so nobody is ended."""
    code = f"import os, socket; s = socket.socket(socket.AF_UNIX, fileno=0); s.bind({str(short / 's')!r}); s.listen()"
    with socket.socket(socket.AF_UNIX) as inherited:
        subprocess.run([sys.executable, "-c", code], stdin=inherited.fileno(), check=True)
        with pytest.raises(OwnershipError) as caught:
            ownership.take_over(str(short / "s"))
    assert caught.value.code == "UNKNOWN_PROCESS"


def test_what_a_manager_is(other: int) -> None:
    assert foreign.is_manager(1)
    assert not foreign.is_manager(other)
    assert not foreign.is_manager(None)
    assert not foreign.is_manager(ended_pid())
