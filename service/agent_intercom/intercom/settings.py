# SPDX-License-Identifier: Apache-2.0
"""The broker's settings: defaults of the contract, `intercom.toml`, environment.

This is the reader of the broker, which a connecting client waits for: TOML and the schema are looked at only where
there is something to read. `settings_model` says the same with pydantic-settings for what people call; one test holds
the two equal. Nothing here is fatal: a value that cannot be used is a problem that names its key, and the default
counts.

Precedence: `AGENT_INTERCOM_<KEY>` in the environment, `PI_INTERCOM_ASK_TIMEOUT_MS` (for `ask_expiry_ms`), the first
configuration file that exists (paths.config_files), the default. Empty variables count as unset.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, get_type_hints

import msgspec
from msgspec import Meta

from agent_intercom.intercom import paths
from agent_intercom.intercom.contract import DEFAULT_LIMITS, MAX_FRAME, Limits

if TYPE_CHECKING:
    from agent_intercom.wire.connection import ReactorLimits

PREFIX: Final = "AGENT_INTERCOM_"
LEGACY_ASK_TIMEOUT: Final = "PI_INTERCOM_ASK_TIMEOUT_MS"
FILE_KEY: Final = "file"
"""The key of a problem that concerns the whole file."""

MAX_FILE_BYTES: Final = 262_144
MAX_SAFE: Final = 2**53 - 1
DAY_MS: Final = 86_400_000
MIB: Final = 1_048_576


class Settings(msgspec.Struct, frozen=True):
    """Every setting: bytes, milliseconds (`_ms`), counts, or lengths in UTF-16 units (`_length`).

    `max_sessions` and `max_unregistered` together, and one more for the memory file, stay within what the unit lets the
    service manager store (`FileDescriptorStoreMax=512`). The ranges of the four queue sizes do not overlap, so that no
    combination of them is out of order.
    """

    max_sessions: Annotated[int, Meta(ge=1, le=448, description="sessions at once")] = DEFAULT_LIMITS.sessions
    max_unregistered: Annotated[int, Meta(ge=1, le=63, description="connections that have not registered")] = (
        DEFAULT_LIMITS.unregistered
    )
    registration_timeout_ms: Annotated[int, Meta(ge=100, le=60_000, description="time to register")] = (
        DEFAULT_LIMITS.registration_ms
    )
    idle_exit_ms: Annotated[
        int, Meta(ge=100, le=DAY_MS, description="time without sessions before the broker ends")
    ] = DEFAULT_LIMITS.idle_exit_ms
    presence_interval_ms: Annotated[int, Meta(ge=1, le=60_000, description="least time between equal presences")] = (
        DEFAULT_LIMITS.presence_ms
    )
    ack_timeout_ms: Annotated[int, Meta(ge=100, le=3_600_000, description="time for a recipient to acknowledge")] = (
        DEFAULT_LIMITS.ack_ms
    )
    ask_expiry_ms: Annotated[int, Meta(ge=1, le=MAX_SAFE, description="life of an ask without an answer")] = (
        DEFAULT_LIMITS.ask_expiry_ms
    )
    recent_delivery_ms: Annotated[
        int, Meta(ge=1_000, le=DAY_MS, description="time that repetitions are recognised")
    ] = DEFAULT_LIMITS.recent_ms
    max_recent_deliveries: Annotated[int, Meta(ge=64, le=1_048_576, description="deliveries remembered for that")] = (
        DEFAULT_LIMITS.recent_entries
    )
    max_pending_deliveries: Annotated[int, Meta(ge=1, le=65_536, description="deliveries waiting, altogether")] = (
        DEFAULT_LIMITS.pending_total
    )
    max_pending_per_sender: Annotated[int, Meta(ge=1, le=65_536, description="deliveries waiting, of one sender")] = (
        DEFAULT_LIMITS.pending_per_sender
    )
    max_asks_per_sender: Annotated[int, Meta(ge=1, le=65_536, description="open asks of one sender")] = (
        DEFAULT_LIMITS.asks_per_sender
    )
    rate_capacity: Annotated[int, Meta(ge=1, le=1_000_000, description="tokens of a session's bucket")] = (
        DEFAULT_LIMITS.rate_capacity
    )
    rate_refill_per_second: Annotated[int, Meta(ge=1, le=1_000_000, description="tokens it regains a second")] = (
        DEFAULT_LIMITS.rate_per_second
    )
    remote_rate_capacity: Annotated[int, Meta(ge=1, le=1_000_000, description="the same at the gateway")] = (
        DEFAULT_LIMITS.remote_rate_capacity
    )
    remote_rate_refill_per_second: Annotated[int, Meta(ge=1, le=1_000_000, description="the same at the gateway")] = (
        DEFAULT_LIMITS.remote_rate_per_second
    )
    bytes_per_token: Annotated[int, Meta(ge=1, le=MAX_FRAME, description="bytes of a frame that cost one token")] = (
        DEFAULT_LIMITS.bytes_per_token
    )
    stall_timeout_ms: Annotated[
        int, Meta(ge=1, le=60_000, description="time that a sender is paused for one reader")
    ] = DEFAULT_LIMITS.stall_ms
    queue_low_water_bytes: Annotated[int, Meta(ge=65_536, le=MIB, description="paused senders go on below this")] = (
        524_288
    )
    queue_high_water_bytes: Annotated[int, Meta(ge=MIB, le=8 * MIB, description="senders are paused above this")] = (
        2 * MIB
    )
    queue_limit_bytes: Annotated[
        int, Meta(ge=8 * MIB, le=64 * MIB, description="a peer that does not read is left")
    ] = 16 * MIB
    total_queue_bytes: Annotated[int, Meta(ge=64 * MIB, le=256 * MIB, description="the same for all peers")] = 64 * MIB
    write_timeout_ms: Annotated[
        int, Meta(ge=1_000, le=DAY_MS, description="time for a peer to read anything at all")
    ] = 30_000
    linger_timeout_ms: Annotated[int, Meta(ge=1, le=60_000, description="time to flush a connection that ends")] = 1_000
    max_text_bytes: Annotated[int, Meta(ge=1, le=MAX_FRAME, description="text of a message")] = (
        DEFAULT_LIMITS.text_bytes
    )
    max_attachments: Annotated[int, Meta(ge=0, le=1_024, description="attachments of a message")] = (
        DEFAULT_LIMITS.attachments
    )
    max_attachment_bytes: Annotated[int, Meta(ge=1, le=MAX_FRAME, description="content of an attachment")] = (
        DEFAULT_LIMITS.attachment_bytes
    )
    max_attachment_name_length: Annotated[int, Meta(ge=1, le=65_536, description="name of an attachment")] = (
        DEFAULT_LIMITS.attachment_name
    )
    max_control_bytes: Annotated[int, Meta(ge=1, le=MAX_FRAME, description="data of a control")] = (
        DEFAULT_LIMITS.control_bytes
    )
    max_control_type_length: Annotated[int, Meta(ge=1, le=65_536, description="type of a control")] = (
        DEFAULT_LIMITS.control_type
    )
    max_message_id_length: Annotated[int, Meta(ge=36, le=65_536, description="message ids and reply targets")] = (
        DEFAULT_LIMITS.message_id
    )
    max_request_id_length: Annotated[int, Meta(ge=36, le=65_536, description="request ids of asks and access")] = (
        DEFAULT_LIMITS.request_id
    )
    max_target_length: Annotated[int, Meta(ge=36, le=65_536, description="whom a message is for")] = (
        DEFAULT_LIMITS.target
    )
    max_reject_reason_length: Annotated[int, Meta(ge=1, le=65_536, description="why a recipient refused")] = (
        DEFAULT_LIMITS.reject_reason
    )
    max_name_length: Annotated[int, Meta(ge=1, le=65_536, description="name of a session")] = DEFAULT_LIMITS.name
    max_cwd_length: Annotated[int, Meta(ge=1, le=65_536, description="its directory")] = DEFAULT_LIMITS.cwd
    max_model_length: Annotated[int, Meta(ge=1, le=65_536, description="its model")] = DEFAULT_LIMITS.model
    max_status_length: Annotated[int, Meta(ge=1, le=65_536, description="its status")] = DEFAULT_LIMITS.status
    max_runtime_instance_id_length: Annotated[int, Meta(ge=36, le=65_536, description="its instance")] = (
        DEFAULT_LIMITS.runtime_instance_id
    )

    def limits(self) -> Limits:
        """The router's numbers."""
        return Limits(**{field: getattr(self, key) for key, field in LIMITS.items()})

    def reactor_limits(self) -> ReactorLimits:
        """The socket server's numbers."""
        from agent_intercom.wire.connection import ReactorLimits

        return ReactorLimits(**{field: getattr(self, key) for key, field in REACTOR_LIMITS.items()})


LIMITS: Final = {
    "max_sessions": "sessions",
    "max_unregistered": "unregistered",
    "registration_timeout_ms": "registration_ms",
    "idle_exit_ms": "idle_exit_ms",
    "presence_interval_ms": "presence_ms",
    "ack_timeout_ms": "ack_ms",
    "ask_expiry_ms": "ask_expiry_ms",
    "recent_delivery_ms": "recent_ms",
    "max_recent_deliveries": "recent_entries",
    "max_pending_deliveries": "pending_total",
    "max_pending_per_sender": "pending_per_sender",
    "max_asks_per_sender": "asks_per_sender",
    "rate_capacity": "rate_capacity",
    "rate_refill_per_second": "rate_per_second",
    "remote_rate_capacity": "remote_rate_capacity",
    "remote_rate_refill_per_second": "remote_rate_per_second",
    "bytes_per_token": "bytes_per_token",
    "stall_timeout_ms": "stall_ms",
    "max_text_bytes": "text_bytes",
    "max_attachments": "attachments",
    "max_attachment_bytes": "attachment_bytes",
    "max_attachment_name_length": "attachment_name",
    "max_control_bytes": "control_bytes",
    "max_control_type_length": "control_type",
    "max_message_id_length": "message_id",
    "max_request_id_length": "request_id",
    "max_target_length": "target",
    "max_reject_reason_length": "reject_reason",
    "max_name_length": "name",
    "max_cwd_length": "cwd",
    "max_model_length": "model",
    "max_status_length": "status",
    "max_runtime_instance_id_length": "runtime_instance_id",
}
"""Setting to field of `contract.Limits`."""

REACTOR_LIMITS: Final = {
    "queue_low_water_bytes": "low_water",
    "queue_high_water_bytes": "high_water",
    "queue_limit_bytes": "hard_limit",
    "total_queue_bytes": "total_queue_limit",
    "write_timeout_ms": "write_deadline_ms",
    "linger_timeout_ms": "linger_ms",
}
"""Setting to field of `wire.connection.ReactorLimits`."""


class Problem(NamedTuple):
    """Something that was not used. `key` is a key of the schema, or `file`.

    `code`: `UNKNOWN_KEY` (`key` is the nearest valid one), `WRONG_TYPE`, `OUT_OF_RANGE`, `NOT_TOML`, `UNREADABLE`.
    `text`, and `written` and `value`, the key and the value as they were written, are for a person and may quote the
    file: they are not for the journal. `source` is `file` or the name of a variable.
    """

    key: str
    code: str
    text: str
    source: str = FILE_KEY
    written: str = ""
    value: str = ""


class Loaded(NamedTuple):
    """What was read. `sources` holds, for each setting that is not a default, `file` or the variable's name."""

    settings: Settings
    problems: list[Problem]
    file: str | None
    sources: dict[str, str]


class Bounds(NamedTuple):
    """What the schema says about one setting; both ends are allowed."""

    low: int
    high: int
    default: int
    text: str


class SettingError(ValueError):
    """A value that cannot be used. `code` as in Problem."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def schema() -> dict[str, Bounds]:
    """Every setting, in the order in which it is shown."""
    found = {}
    hints = get_type_hints(Settings, include_extras=True)
    for key, default in zip(Settings.__struct_fields__, Settings.__struct_defaults__, strict=True):
        (meta,) = hints[key].__metadata__
        found[key] = Bounds(meta.ge, meta.le, default, meta.description)
    return found


def load(environ: Mapping[str, str]) -> Loaded:
    """Read the settings. Never raises: what cannot be used is among the problems."""
    file = paths.config_file(environ)
    given: dict[str, tuple[str, Any]] = {}
    problems: list[Problem] = []
    if file is not None:
        try:
            given = {key: (FILE_KEY, value) for key, value in read_file(file).items()}
        except SettingError as error:
            problems.append(Problem(FILE_KEY, error.code, str(error)))
    given.update((key, (variable, value)) for key, variable, value in from_environment(environ))
    if not given:
        return Loaded(Settings(), problems, file, {})
    values: dict[str, int] = {}
    known = schema()
    for key, (source, value) in given.items():
        if key not in known:
            problems.append(unknown(key, known))
            continue
        try:
            values[key] = check(whole(value) if source != FILE_KEY else value, known[key])
        except SettingError as error:
            text = f"{key if source == FILE_KEY else source}: {error}"
            problems.append(Problem(key, error.code, text, source, value=str(value)))
    return Loaded(Settings(**values), problems, file, {key: given[key][0] for key in values})


def check(value: Any, bounds: Bounds) -> int:
    """A setting's value. Raises SettingError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingError("WRONG_TYPE", "must be a whole number")
    if not bounds.low <= value <= bounds.high:
        raise SettingError("OUT_OF_RANGE", f"must be from {bounds.low} to {bounds.high}")
    return value


def whole(text: str) -> int | str:
    """The number that `text` writes in decimal digits, or `text`."""
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 20 else text


def from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Key, variable and value of what the environment sets; a later one of the same key counts."""
    if value := environ.get(LEGACY_ASK_TIMEOUT):
        yield "ask_expiry_ms", LEGACY_ASK_TIMEOUT, value
    for key in Settings.__struct_fields__:
        name = PREFIX + key.upper()
        if value := environ.get(name):
            yield key, name, value


def read_file(name: str) -> dict[str, Any]:
    """The entries of a configuration file. Raises SettingError `UNREADABLE` or `NOT_TOML`."""
    import tomllib

    try:
        # A pipe in the place of the file must not keep the broker from starting.
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SettingError("UNREADABLE", "the configuration is not a regular file")
            content = os.pread(descriptor, MAX_FILE_BYTES + 1, 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        text = f"the configuration file cannot be read: {os.strerror(error.errno or 0)}"
        raise SettingError("UNREADABLE", text) from error
    if len(content) > MAX_FILE_BYTES:
        raise SettingError("UNREADABLE", f"the configuration file is longer than {MAX_FILE_BYTES} bytes")
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise SettingError("NOT_TOML", f"the configuration file is not TOML: {error}") from error


def unknown(key: str, known: Mapping[str, Bounds]) -> Problem:
    """The problem of a key that is not in the schema."""
    import difflib

    (nearest,) = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    near = difflib.get_close_matches(key.lower().replace("-", "_"), known, n=1)
    text = f"{key}: unknown setting; {f'did you mean {near[0]}?' if near else '`intercom config show` lists them'}"
    return Problem(near[0] if near else nearest, "UNKNOWN_KEY", text, written=key)
