# SPDX-License-Identifier: Apache-2.0
"""The part that no rule can make cheaper: one commit to the disk, by SQLite alone and by the file system alone.

Run as `commit.py DIRECTORY SAMPLES`. It prints one JSON object with medians in microseconds: `commit` of a transaction
in the broker's mode (a journal that is deleted, synchronous=FULL) that changes one row in each of `PAGES` pages, and
`fsync` of a file of one page after it was overwritten.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median

import apsw

PAGES = 12
"""What the acceptance of a report writes to the database of a run in its second round, as strace(1) shows it."""

PAGE = 4096


def timed(samples: int, step: Callable[[], object]) -> float:
    """The median time of `step` in microseconds."""
    taken = []
    for _ in range(samples):
        since = time.perf_counter()
        step()
        taken.append((time.perf_counter() - since) * 1e6)
    return median(taken)


def main(directory: str, samples: int) -> dict[str, float]:
    """Both figures of `directory`."""
    db = apsw.Connection(os.path.join(directory, "commit.sqlite3"))
    db.execute("PRAGMA synchronous = FULL")
    db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, n INTEGER, filler BLOB)")
    # Each row fills most of a page, so that it has the page to itself.
    db.executemany("INSERT INTO t VALUES (?, 0, zeroblob(3000))", [(number,) for number in range(PAGES)])

    def commit() -> None:
        db.execute("BEGIN IMMEDIATE")
        for number in range(PAGES):
            db.execute("UPDATE t SET n = n + 1 WHERE id = ?", (number,))
        db.execute("COMMIT")

    file = os.open(os.path.join(directory, "fsync"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def sync() -> None:
        os.pwrite(file, bytes(PAGE), 0)
        os.fsync(file)

    sync()
    result = {"commit": timed(samples, commit), "fsync": timed(samples, sync)}
    os.close(file)
    db.close()
    return result


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
