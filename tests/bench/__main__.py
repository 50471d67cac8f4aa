# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.bench`: the same as `python tests/bench/run.py`."""

from __future__ import annotations

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parent / "run.py"), run_name="__main__")
