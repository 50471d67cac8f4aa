# SPDX-License-Identifier: Apache-2.0
"""`worker run`: this process is the worker of a role in a run."""

from __future__ import annotations

import argparse

from agent_intercom.cli.orchestrate.worker import calling


def run(options: argparse.Namespace) -> int:
    """Hand over to the bridge; its exit code."""
    if not options.arguments:
        raise calling.refuse("nothing is to run", f"`{options.program} worker run -- COMMAND…` says what.")
    from agent_intercom.workers.bridge.main import main

    return main(["--", *options.arguments])
