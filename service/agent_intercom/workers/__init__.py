# SPDX-License-Identifier: Apache-2.0
"""Managed workers: scope units, private environment, confinement, what runs in them and the worker bridge."""
