# SPDX-License-Identifier: Apache-2.0
"""The systemd-native control plane for coding agents on one Linux machine."""

__version__ = "0.1.0"
