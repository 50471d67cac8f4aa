# SPDX-License-Identifier: Apache-2.0
"""The rules of a run: `(state, event, now) → effects`. Pure: no socket, file, clock or random source."""

from agent_intercom.orchestration.workflow.core import Workflow

__all__ = ["Workflow"]
