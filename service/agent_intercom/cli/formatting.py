# SPDX-License-Identifier: Apache-2.0
"""How `--help` of both commands is laid out."""

from __future__ import annotations

import argparse
import os


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Knows the width without `shutil`, which would be a sixth of the time that the parser takes."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_columns())


def _columns() -> int:
    try:
        wanted = int(os.environ.get("COLUMNS", "")) or os.get_terminal_size(1).columns
    except (ValueError, OSError):
        wanted = 100
    return max(min(wanted, 100) - 2, 40)
