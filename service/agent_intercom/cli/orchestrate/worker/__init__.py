# SPDX-License-Identifier: Apache-2.0
"""`orchestrate worker`: workers that people and agents start for themselves, and what they do with them."""
