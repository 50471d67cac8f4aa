# SPDX-License-Identifier: Apache-2.0
"""`python3 -m agent_intercom.intercom`: the intercom broker."""

import sys

from agent_intercom.intercom.launch import main

sys.exit(main(sys.argv[1:]))
