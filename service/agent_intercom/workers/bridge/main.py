# SPDX-License-Identifier: Apache-2.0
"""`orchestrate-bridge -- COMMAND ARG…`, which is also `orchestrate worker run -- COMMAND ARG…`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

from agent_intercom.workers.errors import WorkerError

USAGE: Final = """\
usage: orchestrate-bridge -- COMMAND [ARG ...]

Be the worker of a role in a run, and run COMMAND once for each assignment. It finds the assignment in the file
$AGENT_INTERCOM_ASSIGNMENT_FILE and answers with `orchestrate report`. `orchestrate start` starts this for roles with
the harness `command`, and gives it all that it needs in its environment.

example: orchestrate-bridge -- my-agent --print

exit codes:
  0    the run has ended
  1    a fault; the line on standard error says which
  2    wrong usage, or an environment that is not a worker's
  3    another worker has taken over the role
  143  ended by SIGTERM
"""

_REFUSED: Final = 2
_BY_A_RUN: Final = "a run starts this itself, for its roles with the harness `command`"


def main(argv: Sequence[str] | None = None) -> int:
    """Be a bridge; the exit status. `argv` is without the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    command = arguments[1:] if arguments[:1] == ["--"] else arguments
    if not command or (command is arguments and arguments[0].startswith("-")):
        return _give_up("a command is needed; see --help", _REFUSED)
    from agent_intercom.workers.bridge import core, settings, shell

    try:
        told = settings.read(os.environ, command, os.getcwd())
    except WorkerError as error:
        return _give_up(f"{_BY_A_RUN}; {error.text}", _REFUSED)
    except OSError as error:
        return _give_up(f"the directory cannot be told: {os.strerror(error.errno or 0)}", core.FAILED)
    bridge = shell.Shell(told)
    try:
        return bridge.run()
    except WorkerError as error:
        return _give_up(error.text, core.FAILED)
    finally:
        bridge.close()


def _give_up(why: str, status: int) -> int:
    sys.stderr.write(f"orchestrate-bridge: {why}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
