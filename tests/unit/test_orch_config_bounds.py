# SPDX-License-Identifier: Apache-2.0
"""How much `config check` tells of a file that is wrong from end to end."""

from __future__ import annotations

from tests.unit.orchcli import Home


def test_faults_are_told_up_to_a_number(home: Home) -> None:
    home.config("".join(f"x{number} = 1\n" for number in range(3_000)))
    said = home.json("config", "check")
    envelope = said.envelope
    assert envelope["error"]["message"].startswith("3000 faults")
    assert len(envelope["data"]["problems"]) == 100 and envelope["data"]["problems_total"] == 3_000
    assert len(said.out) < 65_536
    assert "and 2900 more" in home.call("config", "check").out
