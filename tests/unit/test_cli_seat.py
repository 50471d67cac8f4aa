# SPDX-License-Identifier: Apache-2.0
"""The seat's files: identity, lock, inbox; and the socket by which other commands use it."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agent_intercom.cli import control, seat
from agent_intercom.cli.control import ask_seat
from agent_intercom.cli.exits import CommandError, JsonObject
from agent_intercom.cli.place import here
from agent_intercom.cli.seat import Ask, Inbox, Seat, select


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("AGENT_INTERCOM_SCOPE_ID", "AGENT_INTERCOM_SESSION_ID", "PI_CODING_AGENT_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "agent-intercom"


def received(sender: str, message_id: str, text: str = "?", *, ask: bool = True) -> JsonObject:
    return {"id": message_id, "from": {"id": sender, "name": "n", "cwd": "/"}, "text": text, "expectsReply": ask}


def an_ask(message_id: str) -> Ask:
    return Ask(message_id, "a", "", "?", 0, False)


def test_the_identity_is_made_once_and_kept(runtime: Path) -> None:
    first = Seat(here()).identity()
    assert Seat(here()).identity() == first
    (file,) = runtime.glob("seat-*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    stored = json.loads(file.read_text())
    assert set(stored) == {"version", "sessionId", "pid", "startedAt", "runtimeInstanceId"}


def test_a_damaged_identity_is_replaced(runtime: Path) -> None:
    first = Seat(here()).identity()
    (file,) = runtime.glob("seat-*.json")
    file.write_text("{")
    second = Seat(here()).identity()
    assert second != first
    assert Seat(here()).identity() == second


def test_the_chosen_id_has_a_seat_of_its_own(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Seat(here()).identity()
    monkeypatch.setenv("AGENT_INTERCOM_SESSION_ID", "me")
    chosen = Seat(here()).identity()
    assert chosen.session_id == "me"
    assert chosen.runtime_instance_id != plain.runtime_instance_id


def test_one_process_holds_a_seat(runtime: Path) -> None:
    first, second = Seat(here()), Seat(here())
    assert first.hold()
    assert not second.hold()
    first.release()
    assert second.hold()
    second.release()


def test_asks_are_open_until_answered_or_cancelled(runtime: Path) -> None:
    inbox = Seat(here()).inbox
    assert inbox.asks() == []
    inbox.add(received("a", "1"))
    inbox.add(received("a", "2"))
    inbox.add(received("b", "1"))
    inbox.add(received("b", "note", ask=False))
    inbox.note("answered", "a", "1")
    inbox.note("deferred", "b", "1")
    inbox.note("deferred", "a", "unknown")
    found = Seat(here()).inbox.asks()
    assert [(ask.sender_id, ask.message_id, ask.deferred) for ask in found] == [("a", "2", False), ("b", "1", True)]
    inbox.note("cancelled", "a", "2")
    inbox.note("cancelled", "b", "1")
    assert inbox.asks() == []
    (file,) = runtime.glob("inbox-*.jsonl")
    assert file.stat().st_mode & 0o777 == 0o600


def test_attachments_and_claims_are_not_kept(runtime: Path) -> None:
    inbox = Seat(here()).inbox
    inbox.add({**received("a", "1"), "attachments": [{"content": "canary"}]})
    (file,) = runtime.glob("inbox-*.jsonl")
    assert "canary" not in file.read_text()
    assert "cwd" not in file.read_text()


def test_the_inbox_is_bounded_and_keeps_open_asks_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat, "MAX_RECORDS", 20)
    inbox = Inbox(str(tmp_path / "inbox"))
    inbox.add(received("a", "open"))
    for n in range(100):
        inbox.add(received("a", str(n), ask=False))
    assert len((tmp_path / "inbox").read_text().splitlines()) <= 20
    assert [ask.message_id for ask in inbox.asks()] == ["open"]


def test_the_inbox_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat, "MAX_BYTES", 10_000)
    inbox = Inbox(str(tmp_path / "inbox"))
    for n in range(50):
        inbox.add(received("a", str(n), "x" * 1_000))
    assert (tmp_path / "inbox").stat().st_size <= 11_500
    assert inbox.asks()[-1].message_id == "49"


def test_a_torn_line_costs_that_line_only(tmp_path: Path) -> None:
    inbox = Inbox(str(tmp_path / "inbox"))
    inbox.add(received("a", "1"))
    with (tmp_path / "inbox").open("a") as file:
        file.write('{"kind":"message"\n[]\n{"kind":1}\n{"kind":"message","id":"x","from":"a"}\n')
    inbox.add(received("a", "2"))
    assert [ask.message_id for ask in inbox.asks()] == ["1", "2"]


def test_pending_tells_age() -> None:
    found = an_ask("q").result(601_000)
    assert (found["ageSeconds"], found["mayHaveExpired"], found["state"]) == (601, True, "waiting")
    assert an_ask("q").result(599_000)["mayHaveExpired"] is False


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [("latest", "abd"), ("oldest", "abc"), ("abd", "abd"), ("abc", "abc"), ("x", "xyz"), ("xyz", "xyz")],
)
def test_selecting_an_ask(selector: str, chosen: str) -> None:
    assert select([an_ask("abc"), an_ask("xyz"), an_ask("abd")], selector).message_id == chosen


@pytest.mark.parametrize(
    ("ids", "selector", "code"),
    [
        ([], None, "NO_PENDING_ASK"),
        ([], "latest", "NO_PENDING_ASK"),
        (["a"], "b", "NO_PENDING_ASK"),
        (["a", "b"], None, "AMBIGUOUS_ASK"),
        (["ab", "ac"], "a", "AMBIGUOUS_ASK"),
        (["a", "a"], "a", "AMBIGUOUS_ASK"),
    ],
)
def test_no_ask_is_guessed(ids: list[str], selector: str | None, code: str) -> None:
    with pytest.raises(CommandError) as caught:
        select([an_ask(name) for name in ids], selector)
    assert caught.value.code == code


def test_the_only_ask_needs_no_selector() -> None:
    assert select([an_ask("a")], None).message_id == "a"


# The seat's socket.


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    path = str(tmp_path / "s")
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as sock:
        sock.bind(path)
        sock.listen()
        yield path, sock


def answering(sock: socket.socket, answer: bytes) -> threading.Thread:
    def serve() -> None:
        connection, _ = sock.accept()
        with connection:
            while not connection.recv(65_536).endswith(b"\n"):
                pass
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_nobody_holds_the_seat(tmp_path: Path) -> None:
    assert ask_seat(str(tmp_path / "none"), {}) is None
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as sock:
        sock.bind(str(tmp_path / "dead"))
    assert ask_seat(str(tmp_path / "dead"), {}) is None


def test_the_answer_is_handed_on(listener: tuple[str, socket.socket]) -> None:
    path, sock = listener
    thread = answering(sock, b'{"exit":4,"result":{"ok":false}}\n')
    assert ask_seat(path, {"op": "x"}) == (4, {"ok": False})
    thread.join()


@pytest.mark.parametrize("answer", [b"", b"{", b"[]", b'{"exit":"0","result":{}}', b'{"exit":0,"result":[]}'])
def test_no_usable_answer_is_never_success(listener: tuple[str, socket.socket], answer: bytes) -> None:
    path, sock = listener
    thread = answering(sock, answer)
    with pytest.raises(CommandError) as caught:
        ask_seat(path, {"op": "x"})
    assert caught.value.code == "CONNECTION_LOST"
    thread.join()


def test_another_users_seat_is_not_asked(listener: tuple[str, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "same_user", lambda sock: False)
    with pytest.raises(CommandError) as caught:
        ask_seat(listener[0], {"op": "x"})
    assert caught.value.code == "PEER_FOREIGN"


def test_same_user_is_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = socket.socketpair()
    with left, right:
        assert control.same_user(left)
        monkeypatch.setattr(os, "geteuid", lambda: 12_345)
        assert not control.same_user(left)
