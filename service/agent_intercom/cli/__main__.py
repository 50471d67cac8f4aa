# SPDX-License-Identifier: Apache-2.0
"""`python -m agent_intercom.cli`."""

from __future__ import annotations

import sys

from agent_intercom.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
