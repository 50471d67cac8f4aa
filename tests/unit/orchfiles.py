# SPDX-License-Identifier: Apache-2.0
"""A store of runs that is killed at every step of its work.

`python -m tests.unit.orchfiles TEMPLATE DIRECTORY` copies the database TEMPLATE to DIRECTORY/0, /1, ..., and a child
opens copy n, applies two batches and is killed at step n; the last child gets through. An empty TEMPLATE is created as
a new run first. The output is the number of steps.
"""

from __future__ import annotations

import os
import shutil
import sys

from agent_intercom.orchestration.store import Store
from tests.unit.orchrows import FIRST, SECOND, make
from tests.unit.stepping import kill_at_each, killing


def main(template: str, directory: str) -> None:
    def work(number: int) -> None:
        path = str(shutil.copy(template, os.path.join(directory, str(number))))
        vfs = killing("killing", number)
        if os.path.getsize(path) == 0:
            make(path, vfs="killing")
        opened = Store.open(path, vfs="killing")
        opened.apply(FIRST)
        opened.apply(SECOND)
        opened.close()
        vfs.unregister()

    print(kill_at_each(work, 2000))


if __name__ == "__main__":
    main(*sys.argv[1:])
