# SPDX-License-Identifier: Apache-2.0
"""Screens for a terminal: what a run looks like while it goes on."""
