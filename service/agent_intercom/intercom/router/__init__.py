# SPDX-License-Identifier: Apache-2.0
"""The rules of the intercom, pure: no socket, file, clock, random source or log.

`core.Router` is fed connections, frames and time; it changes `state` and appends `effects`. Whatever it does depends on
its inputs alone, in their order, so that feeding the same inputs again gives the same state and the same effects.
"""

from agent_intercom.intercom.router.core import Router

__all__ = ["Router"]
