# SPDX-License-Identifier: Apache-2.0
"""What a launcher is told, through its gate and never otherwise (managed-workers spec, sections 4.4 and 9.3).

Standard library only: the launcher of every worker imports this, and stays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

REFUSED: Final = 125
CANNOT_EXECUTE: Final = 126
NOT_FOUND: Final = 127
"""What a launcher exits with where the command did not begin (env(1) has the same)."""


class Confinement(NamedTuple):
    """What a worker may not do, for the kernel to see to.

    Everything is readable, and of files only `writable`, the scratch directory and devices such as /dev/null may be
    changed; `network` is whether it may connect to and listen on TCP ports. `required`: do not begin where the kernel
    cannot enforce that no file is changed.
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
        """The same as JSON in ASCII, because a variable may have bytes that are no UTF-8."""
        record = self._asdict()
        record["confinement"] = None if self.confinement is None else self.confinement._asdict()
        return json.dumps(record).encode()


def decode(content: bytes) -> Launch:
    """What `Launch.encode` made. Raises ValueError, KeyError or TypeError for anything else."""
    record: dict[str, Any] = json.loads(content)
    confinement = record.pop("confinement")
    return Launch(**record, confinement=None if confinement is None else Confinement(**confinement))
