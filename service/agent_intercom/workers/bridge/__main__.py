# SPDX-License-Identifier: Apache-2.0
"""`python -m agent_intercom.workers.bridge`."""

import sys

from agent_intercom.workers.bridge.main import main

sys.exit(main())
