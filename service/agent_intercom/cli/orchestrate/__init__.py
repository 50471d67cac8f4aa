# SPDX-License-Identifier: Apache-2.0
"""The `orchestrate` command: one module per group of subcommands."""
