# SPDX-License-Identifier: Apache-2.0
"""The real Pi in the hands of a user of the testbed, found on the PATH and answered by the stand-in for the model."""

from __future__ import annotations

import json

import pytest

from tests.mockmodel import Model
from tests.system import realpi
from tests.system.conftest import Bed

QUESTION = json.dumps({"type": "prompt", "message": "Is anybody there?"})


@pytest.mark.parametrize("checkout", ["reachable", "private"])
def test_alice_talks_to_pi(bed: Bed, checkout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if checkout == "private":
        monkeypatch.setattr(realpi, "_reachable", lambda *_: False)
    programs = realpi.programs(bed.root)
    home = bed.root / "home/alice"
    with Model() as model:
        realpi.executable(home / ".local/bin", programs)
        realpi.prepare(home / ".pi", model.url)
        variables = ["PATH=/home/alice/.local/bin:/usr/bin:/bin", "PI_CODING_AGENT_DIR=/home/alice/.pi", "PI_OFFLINE=1"]
        pi = bed.popen("alice", ["env", *variables, "pi", "--mode", "rpc", "--no-session"])
        assert pi.stdin is not None
        assert pi.stdout is not None
        pi.stdin.write(QUESTION + "\n")
        pi.stdin.flush()
        answers = (json.loads(line) for line in pi.stdout)
        assert any(answer["type"] == "agent_end" for answer in answers)
        assert [request.roles for request in model.requests] == [("user",)]
    # A checkout that happens to lie where the testbed cannot see it is copied too.
    assert programs.pi.is_relative_to(realpi.COPIES) or checkout == "reachable"
    bed.run(["rm", "-rf", str(realpi.COPIES)])
