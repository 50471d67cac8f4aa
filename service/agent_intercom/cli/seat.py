# SPDX-License-Identifier: Apache-2.0
"""A person's seat: an identity that outlives commands, and the messages that it received.

Everything lies below $XDG_RUNTIME_DIR, which is memory and gone after the last logout, in files of mode 0600 whose
names tell neither scope nor id. One process holds the seat at a time, by a lock on a file of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import suppress
from typing import IO, Any, Final, NamedTuple

from agent_intercom.cli.exits import OK, CommandError, JsonObject
from agent_intercom.cli.place import Place, chosen_session_id, passing, runtime_directory, seat_key

MAX_RECORDS: Final = 1_000
MAX_BYTES: Final = 8 * 1024 * 1024
ASK_LIFETIME_MS: Final = 600_000
"""How long a broker keeps an ask by default (contract section 2.7); one that is older may be gone."""


class Identity(NamedTuple):
    """What makes a later process the same session to the broker (contract section 4.4)."""

    session_id: str
    started_at: int
    runtime_instance_id: str


class Ask(NamedTuple):
    """An ask to this seat that nobody answered yet. Times are Unix milliseconds."""

    message_id: str
    sender_id: str
    sender_name: str
    text: str
    received_at: int
    deferred: bool

    def result(self, now: int) -> JsonObject:
        """What `pending --json` prints."""
        sender = {"id": self.sender_id, **({"name": self.sender_name} if self.sender_name else {})}
        age = max(now - self.received_at, 0)
        return {
            "id": self.message_id,
            "from": sender,
            "text": self.text,
            "receivedAt": self.received_at,
            "state": "deferred" if self.deferred else "waiting",
            "ageSeconds": age // 1000,
            "mayHaveExpired": age > ASK_LIFETIME_MS,
            "askerEnded": self.asker_ended,
        }

    @property
    def asker_ended(self) -> bool:
        """Whether a command asked and ended without taking its ask back: its session does not come back."""
        return self.deferred and passing(self.sender_id)


class Seat:
    """The seat of this user in this scope; nothing is opened yet."""

    def __init__(self, place: Place) -> None:
        self.chosen_id = chosen_session_id()
        key = seat_key(place, self.chosen_id)
        self.directory = directory = runtime_directory()
        self._identity_path = os.path.join(directory, f"seat-{key}.json")
        self._lock_path = os.path.join(directory, f"seat-{key}.lock")
        self.control_path = os.path.join(directory, f"seat-{key}.sock")
        self.inbox = Inbox(os.path.join(directory, f"inbox-{key}.jsonl"))
        self._lock: IO[bytes] | None = None

    def identity(self) -> Identity:
        """The stored identity, made on first use. A file that cannot be understood is replaced."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            with open(self._identity_path, encoding="utf-8") as file:
                stored = json.load(file)
            found = Identity(str(stored["sessionId"]), int(stored["startedAt"]), str(stored["runtimeInstanceId"]))
            if self.chosen_id in {None, found.session_id}:
                return found
        fresh = Identity(self.chosen_id or "human-" + os.urandom(6).hex(), _now(), os.urandom(16).hex())
        return self._store(fresh)

    def hold(self) -> bool:
        """Take the seat for this process; False while another one has it."""
        lock = open(self._lock_path, "ab", opener=_private)  # noqa: SIM115 - held until release
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return False
        self._lock = lock
        return True

    def release(self) -> None:
        """Give the seat up."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _store(self, identity: Identity) -> Identity:
        """Write the identity unless another process did so first; whichever is there counts."""
        stored = {
            "version": 1,
            "sessionId": identity.session_id,
            "pid": os.getpid(),
            "startedAt": identity.started_at,
            "runtimeInstanceId": identity.runtime_instance_id,
        }
        _replace(self._identity_path, json.dumps(stored).encode())
        return identity


class Inbox:
    """What the seat received: JSON lines, bounded. Written by the holder of the seat, read by anybody."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._size: tuple[int, int] | None = None

    def add(self, message: JsonObject) -> None:
        """Keep a message, given as `message_json` has it, without what its attachments hold. Raises OSError."""
        kept: JsonObject = {key: message[key] for key in ("id", "text", "expectsReply", "replyTo") if key in message}
        sender = message["from"]
        kept["from"] = {key: sender[key] for key in ("id", "name") if key in sender}
        self._append({"kind": "message", "receivedAt": _now(), **kept})

    def note(self, kind: str, sender_id: str, message_id: str) -> None:
        """Keep what became of an ask: `answered`, `cancelled` or `deferred`."""
        self._append({"kind": kind, "from": {"id": sender_id}, "id": message_id})

    def settle(self, sender_id: str, message_id: str, code: int, result: JsonObject) -> None:
        """Keep what the outcome of a reply, as `operations` has it, means for the ask.

        An asker that is not there keeps its ask: it may come back under its id (contract section 2.7), unless it was
        only a command.
        """
        error = result.get("error", {}).get("code")
        if code == OK:
            self.note("answered", sender_id, message_id)
        elif error == "INVALID_REPLY_TARGET" or (error == "SESSION_NOT_FOUND" and passing(sender_id)):
            self.note("cancelled", sender_id, message_id)

    def asks(self) -> list[Ask]:
        """Unanswered asks, oldest first."""
        found: dict[tuple[str, str], Ask] = {}
        for record in self._records():
            key = (record["from"]["id"], record["id"])
            match record["kind"]:
                case "message" if record.get("expectsReply"):
                    found[key] = _ask(record)
                case "deferred" if key in found:
                    found[key] = found[key]._replace(deferred=True)
                case "answered" | "cancelled":
                    found.pop(key, None)
        return list(found.values())

    def _append(self, record: JsonObject) -> None:
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        with open(self._path, "ab", opener=_private) as file:
            file.write(line)
        if self._size is None:
            records = self._records()
            self._size = (len(records), os.path.getsize(self._path))
        else:
            self._size = (self._size[0] + 1, self._size[1] + len(line))
        if self._size[0] > MAX_RECORDS or self._size[1] > MAX_BYTES:
            self._shrink()

    def _shrink(self) -> None:
        """Keep the newest half; open asks among the older ones go first into what room is left."""
        open_asks = {(ask.sender_id, ask.message_id) for ask in self.asks()}
        records = self._records()
        count, size, kept = 0, 0, set()
        by_age = list(range(len(records) - 1, -1, -1))
        lines = [json.dumps(record, separators=(",", ":")).encode() + b"\n" for record in records]
        for index in sorted(by_age, key=lambda i: (records[i]["from"]["id"], records[i]["id"]) not in open_asks):
            if count < MAX_RECORDS // 2 and size + len(lines[index]) <= MAX_BYTES // 2:
                kept.add(index)
                count += 1
                size += len(lines[index])
        _replace(self._path, b"".join(lines[index] for index in sorted(kept)))
        self._size = (count, size)

    def _records(self) -> list[dict[str, Any]]:
        found = []
        try:
            with open(self._path, "rb") as file:
                for line in file:
                    with suppress(ValueError):
                        record = json.loads(line)
                        if _usable(record):
                            found.append(record)
        except FileNotFoundError:
            pass
        return found


def select(asks: list[Ask], selector: str | None) -> Ask:
    """The ask that a person means: `latest`, `oldest`, a message id or its unique start; None is the only one.

    Raises CommandError `NO_PENDING_ASK` or `AMBIGUOUS_ASK`.
    """
    if not asks:
        raise CommandError("NO_PENDING_ASK", "no ask is waiting for an answer of this seat")
    if selector == "latest":
        return asks[-1]
    if selector == "oldest":
        return asks[0]
    if selector is None:
        matching = asks
    else:
        exact = [ask for ask in asks if ask.message_id == selector]
        matching = exact or [ask for ask in asks if ask.message_id.startswith(selector)]
    if not matching:
        raise CommandError("NO_PENDING_ASK", "no pending ask has this id; `intercom pending` lists them")
    if len(matching) > 1:
        text = f"{len(matching)} asks are waiting; name one by its id, or say latest or oldest (see `intercom pending`)"
        raise CommandError("AMBIGUOUS_ASK", text)
    return matching[0]


def _ask(record: JsonObject) -> Ask:
    sender = record["from"]
    return Ask(
        record["id"],
        sender["id"],
        str(sender.get("name", "")),
        str(record.get("text", "")),
        int(record.get("receivedAt", 0)),
        deferred=False,
    )


def _usable(record: object) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str) or not isinstance(record.get("id"), str):
        return False
    sender = record.get("from")
    return isinstance(sender, dict) and isinstance(sender.get("id"), str)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _replace(path: str, content: bytes) -> None:
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "wb", opener=_private) as file:
        file.write(content)
    os.rename(temporary, path)


def _now() -> int:
    return time.time_ns() // 1_000_000
