# SPDX-License-Identifier: Apache-2.0
"""How a command of either program ends: what its output, its reader or a signal makes of its exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from agent_intercom.cli import output
from agent_intercom.cli.exits import BROKEN_PIPE, INTERRUPTED, SIGNALLED
from agent_intercom.cli.signals import Ended, raising


def status_of(program: str, command: Callable[[], int], unwritable: int) -> int:
    """Run `command`; its exit status, once everything that it printed has left.

    `unwritable` is the status where standard output takes nothing; that a command was carried out is said then.
    """
    try:
        with raising():
            try:
                code = command()
            except SystemExit as ended:
                # The parser has printed help, or the version.
                code = int(ended.code or 0)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        output.silence()
        return BROKEN_PIPE
    except OSError as error:
        output.silence()
        done = "; the command was carried out all the same" if isinstance(error, output.Untold) else ""
        text = f"standard output cannot be written: {os.strerror(error.errno or 0)}{done}"
        output.complain(text, program=program)
        return unwritable
    except Ended as error:
        return SIGNALLED + error.number
    except KeyboardInterrupt:
        return INTERRUPTED
