# SPDX-License-Identifier: Apache-2.0
"""The bridge: the worker side of coordination protocol 1, with the harness `command` (docs/workers.md)."""
