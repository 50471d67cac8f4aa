# SPDX-License-Identifier: Apache-2.0
"""Objects that own one descriptor."""

from __future__ import annotations

import os
from typing import Self


class Descriptor:
    """Owns one descriptor, once its constructor has put it into `_fd`; a context manager that gives it back."""

    def __init__(self) -> None:
        self._fd = -1

    def close(self) -> None:
        """Give the descriptor back; a second time is of no effect."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
