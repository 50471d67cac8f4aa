# SPDX-License-Identifier: Apache-2.0
"""What people configure about runs: `orchestrate.toml`, the original's two JSON files, and what follows for one run."""
