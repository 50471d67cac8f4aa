# SPDX-License-Identifier: Apache-2.0
"""`setup`: drop-ins that move the compatibility sockets to where PI_CODING_AGENT_DIR points.

Existing clients look below that directory only; a user unit does not see the shell's variable, so the path has to be
written into the units (contract section 1.2, systemd.unit(5) on drop-ins).
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from agent_intercom.cli import output
from agent_intercom.cli.exits import OK, CommandError
from agent_intercom.intercom import paths
from agent_intercom.intercom.foreign import is_manager, probe

DROP_IN: Final = "agent-dir.conf"
MOUNTS: Final = "intercom.service.d/50-mounts.conf"
_SOCKETS: Final = "intercom.socket intercom-gateway.socket"
RELOAD: Final = (
    f"systemctl --user stop {_SOCKETS} && systemctl --user daemon-reload && systemctl --user start {_SOCKETS}"
)
"""Stopping comes first: what the sockets leave behind is taken away where the unit says, not where it will say."""

_HEAD: Final = "# Written by `intercom setup`; `intercom setup --undo` removes it.\n"


def setup(options: argparse.Namespace) -> int:
    """`intercom setup`."""
    left: list[str] = []
    changed = _undo(left) if options.undo else _write()
    following = _reload(left) if changed else None
    result = {"ok": True, "changed": changed, "next": following}
    verb = "removed" if options.undo else "wrote"
    lines = [f"{verb} {output.printable(name)}" for name in changed] or ["nothing to change"]
    output.finish(options.json, result, [*lines, *([f"now run: {following}"] if following else [])])
    return OK


def _reload(left: list[str]) -> str:
    """`RELOAD`, which also removes the socket files `left` by units that listen there no more."""
    if not left:
        return RELOAD
    stop, then, start = RELOAD.partition(" && ")
    return f"{stop} && rm -f {shlex.join(left)}{then}{start}"


def drop_ins(directory: str, *, mounts: bool = False) -> dict[str, str]:
    """File names below the user's unit directory, and contents, for sockets in the intercom directory `directory`.

    `mounts` tells that the service sees the home read-only, and so has to be given the directory.
    """
    setting = _quoted(f"AGENT_INTERCOM_COMPAT_DIR={directory}")
    found = {}
    for unit, canonical, name in (
        ("intercom.socket", paths.SOCKET_NAME, paths.COMPAT_SOCKET_NAME),
        ("intercom-gateway.socket", paths.GATEWAY_NAME, paths.COMPAT_GATEWAY_NAME),
    ):
        found[f"{unit}.d/{DROP_IN}"] = (
            f"{_HEAD}[Socket]\n"
            "ListenStream=\n"
            f"ListenStream=%t/{paths.PRODUCT}/{canonical}\n"
            f"ListenStream={_literal(os.path.join(directory, name))}\n"
            f"Environment={setting}\n"
        )
    writable = f"ReadWritePaths={_quoted('-' + directory)}\n" if mounts else ""
    found[f"intercom.service.d/{DROP_IN}"] = (
        f"{_HEAD}[Service]\nEnvironment={_quoted(f'PI_CODING_AGENT_DIR={os.path.dirname(directory)}')}\n{writable}"
    )
    return found


def is_set_up() -> bool:
    """Whether the drop-ins are there that make the sockets listen where PI_CODING_AGENT_DIR points."""
    directory = paths.intercom_dir(os.environ)
    wanted = drop_ins(directory)[f"intercom.socket.d/{DROP_IN}"]
    return _read(os.path.join(unit_directory(), f"intercom.socket.d/{DROP_IN}")) == wanted


def has_mount_hardening() -> bool:
    """Whether the drop-in is installed that makes the service see the home read-only."""
    places = (unit_directory(), *(os.path.join(base, "systemd/user") for base in _data_directories()))
    return any(os.path.exists(os.path.join(place, MOUNTS)) for place in places)


def _data_directories() -> list[str]:
    home = paths.home(os.environ)
    return [os.path.join(home, ".local/share"), "/etc", "/usr/local/lib", "/usr/lib"]


def unit_directory() -> str:
    """Where a user's own units and drop-ins lie (systemd.unit(5))."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(paths.home(os.environ), ".config")
    return os.path.join(base, "systemd", "user")


def _write() -> list[str]:
    if paths.island(os.environ) is None:
        raise CommandError("USAGE", "PI_CODING_AGENT_DIR is not set, so the sockets are where clients look already")
    directory = paths.intercom_dir(os.environ)
    if not directory.isprintable():
        raise CommandError("USAGE", "PI_CODING_AGENT_DIR has characters that a unit file cannot hold")
    if len(os.fsencode(os.path.join(directory, paths.COMPAT_GATEWAY_NAME))) > 107:
        raise CommandError("USAGE", "PI_CODING_AGENT_DIR is too long: a socket's path has to fit 107 bytes")
    if problem := _impossible(directory):
        raise CommandError("USAGE", f"{directory} cannot be used: {problem}", hint="Correct PI_CODING_AGENT_DIR.")
    changed = []
    for name, content in drop_ins(directory, mounts=has_mount_hardening()).items():
        path = os.path.join(unit_directory(), name)
        if _read(path) != content:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(content)
            changed.append(path)
    return changed


def _impossible(directory: str) -> str:
    """Why the manager could not listen in `directory`, or an empty string. Nothing is made."""
    place = directory
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        return f"{place} is not a directory"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} is not writable"
    if place == directory and (os.path.islink(place) or os.lstat(place).st_uid != os.geteuid()):
        return "it is a link, or belongs to another user"
    return ""


def _undo(left: list[str]) -> list[str]:
    """Remove the drop-ins. `left` is told the socket files that the units made there and nobody else listens at."""
    changed = []
    for name in drop_ins("/"):
        path = os.path.join(unit_directory(), name)
        content = _read(path)
        if content is None:
            continue
        if not content.startswith(_HEAD):
            raise CommandError("USAGE", "a drop-in of this name was not written by `intercom setup`; it is left alone")
        os.unlink(path)
        changed.append(path)
        left += filter(_abandoned, _own_sockets(content))
        with suppress(OSError):
            os.rmdir(os.path.dirname(path))
    return changed


def _own_sockets(drop_in: str) -> Iterator[str]:
    """The addresses in the agents' directory that a drop-in of `drop_ins` has its unit listen at."""
    for line in drop_in.splitlines():
        key, _, value = line.partition("=")
        if key == "ListenStream" and value.startswith("/"):
            yield value.replace("%%", "%")


def _abandoned(address: str) -> bool:
    """Whether a socket file is there at which nobody listens but the service manager."""
    if not os.path.lexists(address):
        return False
    found = probe(address, 0.2)
    return found.state == "absent" or is_manager(found.pid)


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _literal(text: str) -> str:
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    escaped = _literal(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
