# SPDX-License-Identifier: Apache-2.0
"""The event catalogue against its catalog file, and the sender against a journal that the test holds."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_intercom.host.journal import CODE, CODES, ID, INT, WORKER, Event, Journal, short_id

ROOT = Path(__file__).resolve().parents[2]
CATALOG = ROOT / "units" / "agent-intercom.catalog"


def parse_catalog() -> dict[str, tuple[dict[str, str], str]]:
    """Entries by id: headers and text (systemd.io/CATALOG)."""
    entries: dict[str, tuple[dict[str, str], str]] = {}
    text = "\n".join(line for line in CATALOG.read_text("utf-8").splitlines() if not line.startswith("#"))
    for entry in re.split(r"^-- ", text, flags=re.MULTILINE)[1:]:
        head, _, body = entry.partition("\n\n")
        message_id, *headers = head.splitlines()
        assert re.fullmatch("[0-9a-f]{32}", message_id)
        assert message_id not in entries
        fields = dict(header.split(": ", 1) for header in headers)
        entries[message_id] = (fields, body.strip())
    return entries


def test_catalog_has_exactly_the_events() -> None:
    entries = parse_catalog()
    assert set(entries) == {event.value.message_id for event in Event}
    for event in Event:
        headers, body = entries[event.value.message_id]
        assert set(headers) == {"Subject", "Defined-By"}
        used = set(re.findall("@([A-Z_]+)@", body))
        assert used == {f"INTERCOM_{name.upper()}" for name in event.value.fields}, event
        assert len(body.split("\n\n")) >= 2, f"{event} must say what happened and what to do"


def test_ids_were_drawn_at_random() -> None:
    ids = [event.value.message_id for event in Event]
    assert len(set(ids)) == len(ids)
    # Version and variant of a random UUID, which systemd-id128 new and uuidgen both make.
    assert all(re.fullmatch("[0-9a-f]{12}4[0-9a-f]{3}[89ab][0-9a-f]{15}", message_id) for message_id in ids)


@pytest.mark.skipif(shutil.which("journalctl") is None, reason="journalctl is not installed")
def test_systemd_takes_the_catalog(tmp_path: Path) -> None:
    source = tmp_path / "usr/lib/systemd/catalog"
    source.mkdir(parents=True)
    (tmp_path / "var/lib/systemd/catalog").mkdir(parents=True)
    shutil.copy(CATALOG, source)
    updated = subprocess.run(["journalctl", f"--root={tmp_path}", "--update-catalog"], capture_output=True, check=True)
    assert updated.stderr == b""
    listed = subprocess.run(
        ["journalctl", f"--root={tmp_path}", "--list-catalog"], capture_output=True, check=True, text=True
    )
    assert {line.split()[0] for line in listed.stdout.splitlines()} == {event.value.message_id for event in Event}


class Journald:
    """The other end of the journal's socket."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(path)
        self.socket.setblocking(False)

    def read(self) -> list[dict[str, str]]:
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                lines = self.socket.recv(65536).decode().split("\n")
                assert lines.pop() == ""
                found.append(dict(line.split("=", 1) for line in lines))
        return found


@pytest.fixture
def journald() -> Iterator[Journald]:
    with tempfile.TemporaryDirectory(prefix="ai-", dir="/tmp") as directory:
        made = Journald(f"{directory}/j")
        yield made
        made.socket.close()


@pytest.fixture
def journal(journald: Journald) -> Iterator[Journal]:
    made = Journal(path=journald.socket.getsockname())
    yield made
    made.close()


def test_a_line(journald: Journald, journal: Journal) -> None:
    journal.emit(Event.DELIVERY_FAILED, session="agent-one", code="RECIPIENT_DISCONNECTED")
    short = short_id("agent-one")
    assert journald.read() == [
        {
            "MESSAGE": f"Message not delivered (session={short} code=RECIPIENT_DISCONNECTED)",
            "MESSAGE_ID": Event.DELIVERY_FAILED.value.message_id,
            "PRIORITY": "5",
            "SYSLOG_IDENTIFIER": "intercom-broker",
            "INTERCOM_EVENT": "DELIVERY_FAILED",
            "INTERCOM_SESSION": short,
            "INTERCOM_CODE": "RECIPIENT_DISCONNECTED",
        }
    ]


def test_every_event_with_every_field(journald: Journald, journal: Journal) -> None:
    samples: dict[Any, int | str] = {INT: 42, CODE: "SOME_CODE", ID: "canary\nMESSAGE=forged"}
    samples |= {CODES: "files-read-only,network-off", WORKER: "0123456789ab"}
    for event in Event:
        journal.emit(event, **{name: samples[kind] for name, kind in event.value.fields.items()})
        (line,) = journald.read()
        assert line["INTERCOM_EVENT"] == event.name
        assert {name for name in line if name.startswith("INTERCOM_")} == {
            "INTERCOM_EVENT",
            *(f"INTERCOM_{name.upper()}" for name in event.value.fields),
        }
        assert not any("canary" in value or "forged" in value for value in line.values())
        assert "(" not in event.value.text


def test_a_field_without_a_value_is_left_out(journald: Journald, journal: Journal) -> None:
    journal.emit(Event.FRAME_REFUSED, session=None, code="INVALID_REQUEST")
    (line,) = journald.read()
    assert line["MESSAGE"] == "Request refused (code=INVALID_REQUEST)"
    assert "INTERCOM_SESSION" not in line


@pytest.mark.parametrize(
    "fields",
    [{"text": "hello"}, {"session": "x"}, {"generation": "three"}, {"bound": 3}, {"sessions": 1.5}],
)
def test_what_is_not_listed_is_an_error(journal: Journal, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="BROKER_STARTED has no field"):
        journal.emit(Event.BROKER_STARTED, **fields)


def test_a_worker_is_told_as_commands_show_it_and_all_that_confines_it(journald: Journald, journal: Journal) -> None:
    words = ",".join(f"word-{number:02}-that-is-enforced" for number in range(20))
    journal.emit(Event.WORKER_STARTED, worker="0123456789ab", enforced=words)
    (line,) = journald.read()
    assert (line["INTERCOM_WORKER"], line["INTERCOM_ENFORCED"]) == ("0123456789ab", words)
    journal.emit(Event.WORKER_STARTED, worker="my-secret-name", enforced="one,,two")
    (line,) = journald.read()
    assert (line["INTERCOM_WORKER"], line["INTERCOM_ENFORCED"]) == ("unprintable", "unprintable")


@given(st.text())
def test_no_text_passes_as_a_code_or_an_id(text: str) -> None:
    with tempfile.TemporaryDirectory(prefix="ai-", dir="/tmp") as directory:
        journald = Journald(f"{directory}/j")
        journal = Journal(path=f"{directory}/j")
        try:
            journal.emit(Event.FRAME_REFUSED, code=text, session=text)
            (line,) = journald.read()
        finally:
            journal.close()
            journald.socket.close()
    assert re.fullmatch("[A-Za-z][A-Za-z0-9_.-]{0,63}", line["INTERCOM_CODE"])
    assert re.fullmatch("[0-9a-f]{8}", line["INTERCOM_SESSION"])


def logged(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """Event and fields of each `journal.emit(Event.NAME, …)` and, for the pure parts, `book.note("NAME", …)`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="emit"),
                args=[ast.Attribute(value=ast.Name(id="Event"), attr=name)],
                keywords=keywords,
            ):
                yield name, {keyword.arg or "**" for keyword in keywords}
            case ast.Call(func=ast.Attribute(attr="note"), args=[ast.Constant(value=str(name))], keywords=keywords):
                yield name, {keyword.arg or "**" for keyword in keywords}


def test_every_call_fits_the_catalogue() -> None:
    """A call that does not would end a broker on the day that it is reached."""
    problems = []
    for path in sorted((ROOT / "service").rglob("*.py")):
        for name, fields in logged(ast.parse(path.read_text("utf-8"))):
            if name not in Event.__members__ or not fields <= set(Event[name].value.fields):
                problems.append(f"{path.name}: {name} {sorted(fields)}")
    assert problems == []


def test_short_id() -> None:
    assert short_id("abc") == "ba7816bf"
    assert short_id("") == "e3b0c442"
    assert re.fullmatch("[0-9a-f]{8}", short_id("\ud800"))


def test_a_stalled_journal_costs_lines_and_nothing_else(journald: Journald, journal: Journal) -> None:
    sent = 0
    while not journal.lost:
        journal.emit(Event.STORE_RECOVERED)
        sent += 1
    journal.emit(Event.STORE_RECOVERED)
    assert journal.lost == 2
    assert len(journald.read()) == sent - 1
    journal.emit(Event.ASK_EXPIRED, session="x")
    lost, line = journald.read()
    assert (lost["INTERCOM_EVENT"], lost["INTERCOM_LOST"]) == ("LOG_LINES_LOST", "2")
    assert line["INTERCOM_EVENT"] == "ASK_EXPIRED"
    assert journal.lost == 0


def test_without_a_journal_lines_are_counted(capfd: pytest.CaptureFixture[str]) -> None:
    journal = Journal(path="/nonexistent/journal")
    journal.emit(Event.STORE_RECOVERED)
    journal.emit(Event.STORE_RECOVERED)
    assert journal.lost == 2
    assert capfd.readouterr().err == ""
    journal.close()


def test_without_a_journal_standard_error_serves(capfd: pytest.CaptureFixture[str]) -> None:
    journal = Journal(path="/nonexistent/journal", stderr=True, identifier="intercom")
    journal.emit(Event.BROKER_STOPPING, reason="idle")
    assert journal.lost == 0
    assert capfd.readouterr().err == "intercom: Broker is stopping (reason=idle)\n"
    journal.close()


def test_a_blocked_standard_error_loses_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe2(os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, bytes(65536))
    os.set_blocking(write, True)
    monkeypatch.setattr("agent_intercom.host.journal._STDERR", write)
    journal = Journal(path="/nonexistent/journal", stderr=True)
    journal.emit(Event.BROKER_STOPPING, reason="idle")
    assert journal.lost == 1
    os.close(read)
    journal.emit(Event.BROKER_STOPPING, reason="idle")
    assert journal.lost == 2
    os.close(write)
    journal.close()


def test_no_descriptor_for_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    journal = Journal()
    monkeypatch.setattr("agent_intercom.host.journal.socket.socket", refuse)
    journal.emit(Event.OUT_OF_DESCRIPTORS, open=1024)
    assert journal.lost == 1
