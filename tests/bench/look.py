# SPDX-License-Identifier: Apache-2.0
"""The reference for looking at a run: what it costs to read one manifest and one database, and to do nothing with it.

Run as `look.py PATH DIRECTORY`: the path that modules are looked for on, and the directory of the run.
"""

from __future__ import annotations

import json
import sys

sys.path[:0] = sys.argv[1].split(":")

import apsw  # noqa: E402

TABLES = ("meta", "roles", "assignments", "reports", "assignment_guardrails", "specialist_activations")

with open(f"{sys.argv[2]}/manifest.json", "rb") as file:
    manifest = json.load(file)
db = apsw.Connection(f"{sys.argv[2]}/broker.sqlite3", flags=apsw.SQLITE_OPEN_READONLY)
db.execute("BEGIN")
rows = [list(db.execute(f"SELECT * FROM {table}")) for table in TABLES]
db.close()
