# SPDX-License-Identifier: Apache-2.0
"""The scope id: who may see whom, as every protocol has it (intercom contract; managed-workers spec, section 4)."""

from __future__ import annotations

import re
from typing import Final

SCOPE_ENVIRONMENT: Final = "AGENT_INTERCOM_SCOPE_ID"
SCOPE_PATTERN: Final = re.compile(r"[A-Za-z0-9_-]{16,128}", re.ASCII)
