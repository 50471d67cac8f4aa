# SPDX-License-Identifier: Apache-2.0
"""The event catalogue, and a sender that neither blocks nor kills.

What can be logged is an `Event`: a fixed text, a `MESSAGE_ID` that `journalctl -x` explains
(`units/agent-intercom.catalog`), and fields from a list. A field is a number, codes out of our own source, the id of a
worker, which is drawn at random, or an id of a peer's, which is turned into eight hexadecimal digits here; so a journal
can be published without a word of what peers said or a name that they chose.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple

JOURNAL_SOCKET: Final = "/run/systemd/journal/socket"
FIELD_PREFIX: Final = "INTERCOM_"

# Priorities of syslog(3).
ERROR: Final = 3
WARNING: Final = 4
NOTICE: Final = 5
INFO: Final = 6

_CODE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_CODES: Final = re.compile(rf"{_CODE.pattern}(?:,{_CODE.pattern}){{0,31}}")
_WORKER: Final = re.compile(r"[0-9a-f]{12}")
_STDERR: Final = 2


class FieldType(Enum):
    """What a field may hold.

    `INT` a number (or a truth value), `CODE` a word out of our source, `CODES` several of them with commas between,
    `ID` a peer's id, `WORKER` a worker's id or incarnation, as `orchestrate worker` shows it.
    """

    INT = "int"
    CODE = "code"
    CODES = "codes"
    ID = "id"
    WORKER = "worker"


INT, CODE, CODES, ID, WORKER = FieldType
_SHAPES: Final = {CODE: _CODE, CODES: _CODES, WORKER: _WORKER}


class Definition(NamedTuple):
    """One event: `message_id` (128 bits in hexadecimal, never reused), syslog `priority`, `text`, `fields`."""

    message_id: str
    priority: int
    text: str
    fields: Mapping[str, FieldType]


class Event(Enum):
    """Everything that is ever logged."""

    BROKER_STARTED = Definition(
        "b62a7ca3e7594b1587636db705437410",
        NOTICE,
        "Broker is ready",
        {"sessions": INT, "generation": INT, "took_ms": INT, "bound": CODE},
    )
    BROKER_STOPPING = Definition("cdf83e610b8045c8bb6e2124bf9fd83b", NOTICE, "Broker is stopping", {"reason": CODE})
    BROKER_RESTORED = Definition(
        "acee481b4db64ef5a6297890ebe1130d",
        NOTICE,
        "Broker continued the connections of its predecessor",
        {"kept": INT, "closed": INT, "records": INT},
    )
    SESSION_REGISTERED = Definition(
        "7e2d53cfe850468fa987d4e65c96490f", INFO, "Session registered", {"session": ID, "origin": CODE}
    )
    SESSION_REPLACED = Definition(
        "c14b47ca71f6434bb7a01c6bf0756eb5", INFO, "Session moved to a new connection", {"session": ID, "origin": CODE}
    )
    SESSION_LEFT = Definition("dba1dd40c2454bae939d9d9bd991660c", INFO, "Session left", {"session": ID, "reason": CODE})
    PEER_REFUSED = Definition(
        "472619083eb1486ebc2722beef10be36",
        WARNING,
        "Connection of another user refused",
        {"uid": INT, "listener": CODE, "code": CODE},
    )
    PROTOCOL_ERROR = Definition(
        "8c49a406efff4a71a50ff866aec2df12",
        WARNING,
        "Connection closed because its peer broke the protocol",
        {"connection": INT, "code": CODE},
    )
    FRAME_REFUSED = Definition(
        "7e6a84fbb0524e749a1ecc7593d74ab7", NOTICE, "Request refused", {"session": ID, "code": CODE}
    )
    RATE_LIMITED = Definition(
        "ec1cd50445534abcb959ac287841efb1", WARNING, "Session exceeded its rate limit", {"session": ID}
    )
    DELIVERY_FAILED = Definition(
        "e15bf9d086d24f5c9cbe2ed0642df409",
        NOTICE,
        "Message not delivered",
        {"session": ID, "code": CODE},
    )
    ASK_EXPIRED = Definition("d54167b402484e6d8735a4eb2536834b", INFO, "Ask expired without an answer", {"session": ID})
    LIST_SHORTENED = Definition(
        "bcfb76be7d2d45aaa25363b2509d6a51", WARNING, "List of sessions shortened to fit into a frame", {"session": ID}
    )
    SLOW_READER_DISCONNECTED = Definition(
        "d1559a32eec94295827fdbc0f4a6a9c2",
        WARNING,
        "Session disconnected because it does not read",
        {"session": ID},
    )
    SENDER_PAUSED = Definition(
        "10608904b1d748998115e33af0f3bb7d",
        NOTICE,
        "Session paused because what it sends is not being read",
        {"session": ID},
    )
    STORE_DEGRADED = Definition(
        "10fe7422a2ba4f928f3877ed49957a2b", ERROR, "Database cannot be used, working without it", {"code": CODE}
    )
    STORE_RECOVERED = Definition("313e80714a0947929aaa3d114786d479", NOTICE, "Database can be used again", {})
    OUT_OF_DESCRIPTORS = Definition(
        "76e1579dbde4422ea637f8ed568c1aab", ERROR, "No descriptor is left for a new connection", {"open": INT}
    )
    DESCRIPTOR_UNKNOWN = Definition(
        "9803df71af70422a865f25ff4d6ff070",
        WARNING,
        "Unknown descriptor removed from the descriptor store",
        {"count": INT},
    )
    MEMORY_FILE_REFUSED = Definition(
        "704c97ce36f64a018cb64428d2dc13e9",
        ERROR,
        "Memory file refused, starting without the predecessor's state",
        {"code": CODE},
    )
    FOREIGN_BROKER = Definition(
        "e38d4c64accc43daae042fb405d4573d", ERROR, "Another broker answers on this address, not taking it", {"pid": INT}
    )
    LOG_LINES_LOST = Definition(
        "09545624f2d8409284e0d17737e659a2",
        WARNING,
        "Log lines were lost because the journal did not take them",
        {"lost": INT},
    )
    STATE_SHED = Definition(
        "0c4e0b1f6f6a4d0c9a7e3b8d52f1a9c6",
        WARNING,
        "Memory file full, deduplication forgotten",
        {"code": CODE},
    )
    INTERNAL_ERROR = Definition(
        "5d0a3c1be5a94b6cbd5a2f7f9d1c40e7",
        ERROR,
        "Internal error",
        {"kind": CODE, "module": CODE, "line": INT},
    )
    RUN_EVENT = Definition(
        "3f6f0c1d6a1b4f0f8a5b7d0a9c2e4b61",
        INFO,
        "Run went on",
        {"sequence": INT, "run_event": CODE, "role": CODE, "round": INT, "status": CODE},
    )
    RUN_REFUSED = Definition(
        "a1f5c3e27d904c5e9b64d8f01e7a2c93",
        ERROR,
        "Run cannot be served, every request is refused",
        {"code": CODE},
    )
    RUN_STALLED = Definition(
        "91c5d2e7b03f4a6e8d1f7a24c6b9035e", ERROR, "Database cannot be used, the run stands still", {"code": CODE}
    )
    STARTUP_KEPT = Definition(
        "e4a7160d5c2b4f3998d0b6127fa3c85d", WARNING, "Startup file could not be deleted", {"code": CODE}
    )
    PEER_NOT_READING = Definition(
        "c7d40b8e52a1469c93f6e0b7a4d8125f",
        WARNING,
        "Peer disconnected because it does not read",
        {"connection": INT},
    )
    WORKER_REFUSED = Definition(
        "6bd21e0f9a3847c5b0e4f7a8d1c95e32",
        NOTICE,
        "Worker's request refused",
        {"role": CODE, "code": CODE},
    )
    WORKERS_STARTED = Definition(
        "34298e9768ef496cbff33c73508329dd",
        NOTICE,
        "Worker service is ready",
        {"live": INT, "attached": INT, "lost": INT, "took_ms": INT},
    )
    WORKERS_STOPPING = Definition(
        "3c47e37fc16f413abb3cd27834fbf4ee", NOTICE, "Worker service is stopping", {"reason": CODE, "live": INT}
    )
    WORKERS_REFUSED = Definition(
        "32c4e10394984dd19f45a0f8fbf288ee",
        ERROR,
        "Registry of workers cannot be used, every change is refused",
        {"code": CODE},
    )
    WORKERS_SET_ASIDE = Definition(
        "027a58669cec4394815a46e15c152173",
        ERROR,
        "Registry of workers was damaged and is set aside, what it knew of is not known any more",
        {"code": CODE},
    )
    MANAGER_LOST = Definition(
        "373b61a5246049f8b08819ec9c503543",
        ERROR,
        "User's service manager does not answer, no worker can be started",
        {"code": CODE},
    )
    WORKER_STARTED = Definition(
        "ae2033b3b1474ad987e91e8911570828",
        INFO,
        "Worker started",
        {"worker": WORKER, "harness": CODE, "generation": INT, "took_ms": INT, "enforced": CODES},
    )
    WORKER_START_FAILED = Definition(
        "609abc34d48049c1af7996b838923711", WARNING, "Worker did not start", {"worker": WORKER, "code": CODE}
    )
    WORKER_ENDED = Definition(
        "7445d26a1ab64ada9b0912b00304fdbb",
        INFO,
        "Worker ended",
        {"worker": WORKER, "outcome": CODE, "reason": CODE, "exit_code": INT, "exit_signal": INT, "code": CODE},
    )
    WORKER_LOST = Definition(
        "eb2668648fee4ed5b65e897eff7369d9",
        WARNING,
        "Worker is lost, how it ended cannot be told",
        {"worker": WORKER, "code": CODE},
    )
    WORKER_CHILDREN_REMAIN = Definition(
        "d2da24f148d94537b66d25c5d79b117a",
        NOTICE,
        "Worker's command ended and left processes behind",
        {"worker": WORKER},
    )
    WORKER_STOP_FAILED = Definition(
        "1e211f425f7e45ebb88e0d1673f4e1fd",
        ERROR,
        "Worker was stopped and processes of it are left",
        {"worker": WORKER, "code": CODE},
    )
    WORKER_FILES_LEFT = Definition(
        "1227b57b74c44aeda28236d23ae5c233",
        WARNING,
        "Files of a worker that has ended could not be removed",
        {"worker": WORKER, "code": CODE},
    )
    WORKER_REQUEST_REFUSED = Definition(
        "6f55e227fb1144308998e034d970c980",
        INFO,
        "Request to the worker service refused",
        {"action": CODE, "code": CODE, "inside": INT},
    )
    WORKER_REQUESTS_REFUSED = Definition(
        "7d1fb9a3c6e84f02a5b0d94e2c83f617",
        NOTICE,
        "More requests to the worker service refused than are told one by one",
        {"count": INT, "inside": INT},
    )
    CONFIG_INVALID = Definition(
        "f26b865e3556401f993ad4c60b88afd3", ERROR, "Setting refused, its default is used", {"key": CODE, "code": CODE}
    )


def short_id(text: str) -> str:
    """Eight hexadecimal digits for an id that a peer chose: the beginning of the SHA-256 of its UTF-8 form.

    The id itself may be any text, so not even a part of it can be shown.
    """
    # Not needed before the first session, and slow to import.
    from hashlib import sha256

    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


class Journal:
    """Sends events to journald, or to standard error when there is no journald and `stderr` is set.

    systemd-python is not used here, because its `sendv` waits for as long as journald is stalled (a full disk is
    enough), and a broker must not. This speaks the native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL) on a
    non-blocking socket: `KEY=value` lines in one datagram; no value of ours has a line break. What is not taken is
    counted in `lost`, and a `LOG_LINES_LOST` line says so as soon as one gets through.
    """

    def __init__(
        self, *, identifier: str = "intercom-broker", stderr: bool = False, path: str = JOURNAL_SOCKET
    ) -> None:
        self.lost = 0
        self._identifier = identifier
        self._stderr = stderr
        self._path = path
        self._socket: socket.socket | None = None

    def emit(self, event: Event, **fields: int | str | None) -> None:
        """Log `event`. Names of fields are the catalogue's, in lower case; a field that is None is left out.

        Raises ValueError for a field that the event does not have or a value of another type: errors of the
        programmer, never of the machine. What does not look like what it should be is logged as `unprintable`.
        """
        values = {name: _value(event, name, value) for name, value in fields.items() if value is not None}
        if self.lost and self._send(Event.LOG_LINES_LOST, {"lost": str(self.lost)}):
            self.lost = 0
        if not self._send(event, values):
            self.lost += 1

    def close(self) -> None:
        """Close the socket; a later `emit` opens it again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, event: Event, values: Mapping[str, str]) -> bool:
        message_id, priority, text, _ = event.value
        if values:
            text = f"{text} ({' '.join(f'{name}={value}' for name, value in values.items())})"
        lines = [
            f"MESSAGE={text}",
            f"MESSAGE_ID={message_id}",
            f"PRIORITY={priority}",
            f"SYSLOG_IDENTIFIER={self._identifier}",
            f"{FIELD_PREFIX}EVENT={event.name}",
            *(f"{FIELD_PREFIX}{name.upper()}={value}" for name, value in values.items()),
            "",
        ]
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            self._socket.sendto("\n".join(lines).encode(), self._path)
        except (FileNotFoundError, ConnectionRefusedError):
            return self._stderr and _to_stderr(f"{self._identifier}: {text}\n".encode())
        except OSError:
            return False
        return True


def _value(event: Event, name: str, value: int | str) -> str:
    kind = event.value.fields.get(name)
    if kind is INT and isinstance(value, int):
        return str(int(value))
    if kind is ID and isinstance(value, str):
        return short_id(value)
    if kind in _SHAPES and isinstance(value, str):
        return value if _SHAPES[kind].fullmatch(value) else "unprintable"
    raise ValueError(f"event {event.name} has no field {name} for a value of type {type(value).__name__}")


def _to_stderr(line: bytes) -> bool:
    """Write a line shorter than a pipe's atomic size if that needs no waiting."""
    ready = select.poll()
    ready.register(_STDERR, select.POLLOUT)
    with contextlib.suppress(OSError):
        if any(events & select.POLLOUT for _, events in ready.poll(0)):
            return os.write(_STDERR, line) == len(line)
    return False
