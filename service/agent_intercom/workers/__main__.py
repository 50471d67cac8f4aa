# SPDX-License-Identifier: Apache-2.0
"""`python3 -m agent_intercom.workers`: the worker service."""

import sys

from agent_intercom.workers.serve import main

sys.exit(main(sys.argv[1:]))
