# SPDX-License-Identifier: Apache-2.0
"""`python3 -m agent_intercom.orchestration`: the broker of one run."""

import sys

from agent_intercom.orchestration.launch import main

sys.exit(main(sys.argv[1:]))
