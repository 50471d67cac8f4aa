# SPDX-License-Identifier: Apache-2.0
"""The parts of the bench: `servers` starts what is measured, `measure` measures, `report` judges and prints."""
