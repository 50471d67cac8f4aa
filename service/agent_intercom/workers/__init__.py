# SPDX-License-Identifier: Apache-2.0
"""Managed workers: scope units, private environment, confinement, agent drivers and the worker bridge."""
