# SPDX-License-Identifier: Apache-2.0
"""How `--help` of both commands is laid out and printed."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Knows the width without `shutil`, which would be a sixth of the time that the parser takes."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_columns())


class HelpfulParser(argparse.ArgumentParser):
    """Does not keep to itself that help could not be printed."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if message:
            (sys.stderr if file is None else file).write(message)


def _columns() -> int:
    try:
        wanted = int(os.environ.get("COLUMNS", "")) or os.get_terminal_size(1).columns
    except (ValueError, OSError):
        wanted = 100
    return max(min(wanted, 100) - 2, 40)
