# SPDX-License-Identifier: Apache-2.0
"""What a launcher is told, through its gate and never otherwise (managed-workers spec, sections 4.4 and 9.3).

A `Launch` goes through the gate as fields with a NUL between them, which none of them can have, and in the bytes that
execve(2) takes: the launcher reads it with nothing imported, because the start of every worker waits for that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Confinement(NamedTuple):
    """What a worker may not do, for the kernel to see to.

    Everything is readable, and of files only `writable`, the scratch directory and devices such as /dev/null may be
    changed; `network` is whether it may have sockets that lead out of the machine, or to itself by TCP or UDP.
    `required`: do not begin where the kernel cannot enforce that no file is changed, and that no such socket is made.
    """

    writable: Sequence[str]
    network: bool = True
    required: bool = True


class Launch(NamedTuple):
    """A command, and all that it is given.

    `environment` is the whole environment. `exit_file` is where it is written how the command ended. `output` is the
    directory of the private ring of what it prints; None: nobody keeps it. `stdin`: an endless, silent input instead of
    none, for agents that take the end of their input for their own.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    exit_file: str
    scratch: str
    confinement: Confinement | None = None
    output: str | None = None
    stdin: bool = False

    def __repr__(self) -> str:
        return "Launch()"

    def encode(self) -> bytes:
        """Groups of fields, each with its length before it: what is told, the arguments, the variables, confinement.

        Raises ValueError, without any value, for what no path, argument or variable can be.
        """
        if any(not name or "=" in name for name in self.environment):
            raise ValueError("a variable has a name that none can have")
        confinement = self.confinement
        groups: tuple[Sequence[str], ...] = (
            (self.directory, self.exit_file, self.scratch, self.output or "", "1" if self.stdin else ""),
            self.arguments,
            [f"{name}={value}" for name, value in self.environment.items()],
            ()
            if confinement is None
            else ("1" if confinement.network else "", "1" if confinement.required else "", *confinement.writable),
        )
        fields = [field for group in groups for field in (str(len(group)), *group)]
        if any("\0" in field for field in fields):
            raise ValueError("a path, an argument or a variable has a NUL in it")
        try:
            return b"\0".join(map(os.fsencode, fields))
        except UnicodeEncodeError:
            # Not chained: it has the value.
            raise ValueError("a path, an argument or a variable has a character that cannot be encoded") from None
