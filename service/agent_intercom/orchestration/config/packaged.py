# SPDX-License-Identifier: Apache-2.0
"""What holds where nobody says anything (orchestration spec, section 10.2), and the closed lists of values."""

from __future__ import annotations

from typing import Final

from agent_intercom.orchestration import harness
from agent_intercom.orchestration.contract import DJANGO, IMPLEMENTER, PLAYWRIGHT, PROBE, REVIEWER, Flow

MODELS: Final = {
    IMPLEMENTER: ("openai-codex", "gpt-5.6-sol"),
    REVIEWER: ("openai-codex", "gpt-5.4"),
    PROBE: ("openai-codex", "gpt-5.4-mini"),
    PLAYWRIGHT: ("openai-codex", "gpt-5.4"),
    DJANGO: ("openai-codex", "gpt-5.4"),
}
"""Role to provider and model."""

PROFILES: Final = {
    "thorough": {IMPLEMENTER: "xhigh", REVIEWER: "high", PROBE: "high", PLAYWRIGHT: "high", DJANGO: "high"},
    "balanced": {IMPLEMENTER: "high", REVIEWER: "high", PROBE: "medium", PLAYWRIGHT: "medium", DJANGO: "medium"},
    "economy": {IMPLEMENTER: "medium", REVIEWER: "medium", PROBE: "low", PLAYWRIGHT: "medium", DJANGO: "medium"},
}
"""Profile to role to thinking."""

DEFAULT_PROFILE: Final = "thorough"
FLOW: Final = Flow.SINGLE
FLOWS: Final = (Flow.SINGLE, Flow.PHASED)

HARNESS: Final = harness.PI

CONFINE: Final = True
"""Whether a role that may not write is kept from it by the kernel; nobody else is unless somebody says so."""

TASKS_MAX: Final = 512
"""Processes and threads of one worker (managed-workers spec, section 9.3)."""

PI_COMMAND: Final = "pi"
KEEP_DAYS: Final = 30
KEEP_RUNS: Final = 200
