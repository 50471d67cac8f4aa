# SPDX-License-Identifier: Apache-2.0
"""Where everything lies.

Two families of places: the directory in which existing clients look (contract section 1.2, never influenced by XDG
variables) and the XDG directories that this broker prefers. A person who sets `PI_CODING_AGENT_DIR` lives on an island
of their own: only that directory counts then, for the sockets and for the state.

Everything takes the environment as a mapping, so that a test, the unit's environment and a shell's are handled alike.
Only `os` is imported: the socket unit runs this in front of every start.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from os import path

PRODUCT = "agent-intercom"
SOCKET_NAME = "intercom.sock"
GATEWAY_NAME = "gateway.sock"
COMPAT_SOCKET_NAME = "broker.sock"
COMPAT_GATEWAY_NAME = "remote-gateway.sock"
CONFIG_NAME = "intercom.toml"
SYSTEM_CONFIG = "/etc/agent-intercom/intercom.toml"


class DirectoryRefusedError(Exception):
    """A directory that must be private is somebody else's, or a link, or no directory.

    `code` is `STATE_FOREIGN`; the text names what is wrong, and no path.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = "STATE_FOREIGN"


def home(environ: Mapping[str, str]) -> str:
    """The home directory as Node's `os.homedir()` finds it: `HOME`, or the password database."""
    if value := environ.get("HOME", ""):
        return value
    import pwd  # only without HOME, which a user manager and a login shell always set

    return pwd.getpwuid(os.getuid()).pw_dir


def island(environ: Mapping[str, str], cwd: str | None = None) -> str | None:
    """The agent directory that `PI_CODING_AGENT_DIR` names, absolute, or None where it is unset or blank."""
    value = environ.get("PI_CODING_AGENT_DIR", "").strip()
    if not value:
        return None
    return path.normpath(path.join(cwd or os.getcwd(), value))


def agent_dir(environ: Mapping[str, str], home_dir: str | None = None, cwd: str | None = None) -> str:
    """The agent directory of contract section 1.2: the island, or `~/.pi/agent`."""
    return island(environ, cwd) or path.join(home_dir or home(environ), ".pi", "agent")


def intercom_dir(environ: Mapping[str, str], home_dir: str | None = None, cwd: str | None = None) -> str:
    """The directory in which existing clients and brokers keep their sockets and files."""
    return path.join(agent_dir(environ, home_dir, cwd), "intercom")


def compat_socket(environ: Mapping[str, str]) -> str:
    """The local socket where existing clients look."""
    return path.join(intercom_dir(environ), COMPAT_SOCKET_NAME)


def compat_gateway_socket(environ: Mapping[str, str]) -> str:
    """The remote gateway's socket where existing tools look."""
    return path.join(intercom_dir(environ), COMPAT_GATEWAY_NAME)


def runtime_dir(environ: Mapping[str, str]) -> str | None:
    """`$XDG_RUNTIME_DIR/agent-intercom`, which the units call `%t/agent-intercom`; None without a runtime directory."""
    base = _xdg(environ, "XDG_RUNTIME_DIR")
    return path.join(base, PRODUCT) if base else None


def client_sockets(environ: Mapping[str, str]) -> list[str]:
    """The addresses that a client tries, in order.

    On an island only the island's: a client there must not end up with people that it was kept apart from.
    """
    compat = compat_socket(environ)
    runtime = runtime_dir(environ)
    if runtime is None or island(environ):
        return [compat]
    return [path.join(runtime, SOCKET_NAME), compat]


def state_dir(environ: Mapping[str, str], *, self_bound: bool = False) -> str:
    """Where the database lies: `$XDG_STATE_HOME/agent-intercom`, default `~/.local/state/agent-intercom`.

    A broker that binds for itself on an island keeps its state there, or two brokers would want one database.
    """
    if self_bound and island(environ):
        return path.join(intercom_dir(environ), "state")
    base = _xdg(environ, "XDG_STATE_HOME") or path.join(home(environ), ".local", "state")
    return path.join(base, PRODUCT)


def config_files(environ: Mapping[str, str]) -> list[str]:
    """The places of the configuration file, the first that exists is read and no other."""
    base = _xdg(environ, "XDG_CONFIG_HOME") or path.join(home(environ), ".config")
    return [path.join(base, PRODUCT, CONFIG_NAME), SYSTEM_CONFIG]


def config_file(environ: Mapping[str, str]) -> str | None:
    """The configuration file that counts, or None. What cannot be looked at counts too: reading it tells why."""
    for candidate in config_files(environ):
        try:
            os.stat(candidate)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            pass
        return candidate
    return None


def ensure_private(directory: str) -> None:
    """Make `directory` and its missing parents (0700), or check that it is a directory of ours and close it to others.

    Raises DirectoryRefusedError where the directory is a link, is no directory or has another owner; OSError where the
    file system refuses. Parents are taken as they are: a home may well be behind a link.
    """
    missing = []
    parent = directory
    while not path.lexists(parent):
        missing.append(parent)
        parent = path.dirname(parent)
    for step in reversed(missing):
        try:
            os.mkdir(step, 0o700)
        except FileExistsError:
            continue
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode):
        raise DirectoryRefusedError("not a directory, or a link to one")
    if found.st_uid != os.geteuid():
        raise DirectoryRefusedError("the directory belongs to another user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        os.chmod(directory, 0o700)


def _xdg(environ: Mapping[str, str], name: str) -> str:
    """An XDG base directory; relative values are to be ignored (XDG Base Directory Specification)."""
    value = environ.get(name, "")
    return value if path.isabs(value) else ""
