# SPDX-License-Identifier: Apache-2.0
"""`worker run`: this process is the worker of a role in a run."""

from __future__ import annotations

import argparse
import os
from typing import Final

from agent_intercom.cli.orchestrate.worker import calling

ROLE_ENVIRONMENT: Final = "PI_TMUX_ORCHESTRATOR_ROLE"
"""Which role it is, of what a run gives to the worker of one."""


def run(options: argparse.Namespace) -> int:
    """Hand over to the bridge; its exit code. Raises CommandFailure where no run has started this."""
    if not options.arguments:
        raise calling.refuse("nothing is to run", f"`{options.program} worker run -- COMMAND…` says what.")
    if ROLE_ENVIRONMENT not in os.environ:
        hint = (
            f"`{options.program} start --harness ROLE=command --worker-command ROLE='COMMAND…'` starts a run that does;"
            f" `{options.program} worker start -- COMMAND…` starts a worker outside runs."
        )
        raise calling.refuse("a run starts this itself, for its roles with the harness `command`", hint)
    from agent_intercom.workers.bridge.main import main

    return main(["--", *options.arguments])
