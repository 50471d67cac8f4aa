# SPDX-License-Identifier: Apache-2.0
"""Where a command stands: scope, addresses, and under which identity it acts. Captured once, before connecting."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Final, NamedTuple

from agent_intercom.cli.exits import CommandError
from agent_intercom.host.scopeid import SCOPE_ENVIRONMENT
from agent_intercom.intercom import paths
from agent_intercom.intercom.client_errors import ClientError
from agent_intercom.intercom.contract import parse_scope

SESSION_ID_ENVIRONMENT: Final = "AGENT_INTERCOM_SESSION_ID"
SESSION_NAME_ENVIRONMENT: Final = "AGENT_INTERCOM_SESSION_NAME"
MODEL: Final = "human"
EPHEMERAL_PREFIX: Final = "cli-"
COMMAND_SUFFIX: Final = " (command)"
MEMORY_FILE_SYSTEMS: Final = {"tmpfs", "ramfs"}

_NAME_LENGTH: Final = 120
"""Characters that fit a session's name with the suffix, whatever they are (contract section 2.1)."""

_SET_RUNTIME_DIRECTORY: Final = (
    "Log in through systemd-logind, which sets it to /run/user/UID, or set it to a private directory in memory."
)

_SESSION_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}", re.ASCII)


class Place(NamedTuple):
    """`scope` None is unscoped. It is never printed."""

    scope: str | None
    addresses: list[str]
    name: str
    cwd: str


def here(environ: Mapping[str, str] | None = None) -> Place:
    """Read the environment. Raises CommandError `SCOPE_INVALID`, without the value."""
    environ = os.environ if environ is None else environ
    return Place(
        scope=_scope(environ),
        addresses=paths.client_sockets(environ),
        name=_name(environ),
        cwd=_cwd(),
    )


def told(error: ClientError, addresses: list[str]) -> str:
    """The text of a client's error for a person, with the addresses where that is what they ask next."""
    if error.code != "BROKER_UNREACHABLE":
        return str(error)
    cause = error.__cause__
    why = ""
    if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError | ConnectionRefusedError):
        why = f" ({os.strerror(cause.errno or 0)})"
    return f"no broker listens at {' or '.join(addresses)}{why}"


def ephemeral_id() -> str:
    """The id of a session that lives as long as one command.

    Never AGENT_INTERCOM_SESSION_ID: the agent in whose shell the command runs may hold that one.
    """
    return EPHEMERAL_PREFIX + os.urandom(6).hex()


def ephemeral_name(place: Place) -> str:
    """The name of such a session. Not the person's own, which would become ambiguous the moment the command runs."""
    return place.name[:_NAME_LENGTH] + COMMAND_SUFFIX


def passing(session_id: str) -> bool:
    """Whether this looks like the id of a session that lives as long as one command."""
    return session_id.startswith(EPHEMERAL_PREFIX)


def chosen_session_id(environ: Mapping[str, str] | None = None) -> str | None:
    """The id that AGENT_INTERCOM_SESSION_ID asks for (contract section 9.1), or None. Raises CommandError."""
    environ = os.environ if environ is None else environ
    value = environ.get(SESSION_ID_ENVIRONMENT, "").strip()
    if not value:
        return None
    if not _SESSION_ID.fullmatch(value):
        text = f"Invalid {SESSION_ID_ENVIRONMENT}: must match ^[A-Za-z0-9_-]{{1,128}}$"
        raise CommandError("INVALID_SESSION", text)
    return value


def seat_key(place: Place, session_id: str | None) -> str:
    """The name of a person's seat in file names: one per scope, address and chosen id, and it tells none of them."""
    parts = (place.scope or "", place.addresses[0], session_id or "")
    return sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def runtime_directory(environ: Mapping[str, str] | None = None) -> str:
    """The private, memory-backed directory for seats. Raises CommandError `NO_RUNTIME_DIRECTORY`."""
    environ = os.environ if environ is None else environ
    directory = paths.runtime_dir(environ)
    if directory is None:
        given = environ.get("XDG_RUNTIME_DIR")
        text = (
            f"XDG_RUNTIME_DIR is {'not an absolute path' if given else 'not set'}, and messages are kept nowhere else"
        )
        raise CommandError("NO_RUNTIME_DIRECTORY", text, exit_code=2, hint=_SET_RUNTIME_DIRECTORY)
    if not os.path.isdir(os.path.dirname(directory)):
        text = "XDG_RUNTIME_DIR names no directory, and messages are kept nowhere else"
        raise CommandError("NO_RUNTIME_DIRECTORY", text, exit_code=2, hint=_SET_RUNTIME_DIRECTORY)
    try:
        paths.ensure_private(directory)
    except (paths.DirectoryRefusedError, OSError) as error:
        raise CommandError(
            "NO_RUNTIME_DIRECTORY",
            f"{directory} cannot be used: {os.strerror(error.errno or 0) if isinstance(error, OSError) else error}",
            exit_code=2,
            hint=_SET_RUNTIME_DIRECTORY,
        ) from error
    return directory


def file_system(path: str) -> str | None:
    """The type of the file system that `path` is on (proc_pid_mountinfo(5)), or None."""
    try:
        device = os.stat(path).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                fields = line.split()
                if fields[2] == wanted:
                    return fields[fields.index("-") + 1]
    except (OSError, ValueError, IndexError):
        pass
    return None


def _scope(environ: Mapping[str, str]) -> str | None:
    try:
        return parse_scope(environ.get(SCOPE_ENVIRONMENT))
    except ValueError:
        text = f"{SCOPE_ENVIRONMENT} is invalid: 16 to 128 characters of A-Z a-z 0-9 _ -"
        raise CommandError("SCOPE_INVALID", text) from None


def _name(environ: Mapping[str, str]) -> str:
    if name := environ.get(SESSION_NAME_ENVIRONMENT, "").strip():
        return name
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid-{os.getuid()}"


def _cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"
