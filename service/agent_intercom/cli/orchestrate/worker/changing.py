# SPDX-License-Identifier: Apache-2.0
"""What is done with workers that are there: `stop`, `restart`, `rename`, `adopt`, `release`, `renew`, `pause`, …"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Final

from agent_intercom.cli.orchestrate import texts
from agent_intercom.cli.orchestrate.answer import Answer
from agent_intercom.cli.orchestrate.worker import calling, telling
from agent_intercom.cli.orchestrate.worker.looking import now
from agent_intercom.workers.contract import Code

STOP_TIMEOUT: Final = 180.0
"""Seconds: a cascade ends many, each within seconds."""

_NOT_ADOPTED: Final = "Its owner restarts or forgets it; a person may with --override."


def stop(options: argparse.Namespace) -> Answer:
    """`worker stop`: end it and whatever it has started."""
    texts.refuse_unless(options.yes, "stop ends the worker, and every worker that it has started")
    return _one(options, "stop", STOP_TIMEOUT)


def restart(options: argparse.Namespace) -> Answer:
    """`worker restart`: the next generation of a worker, started with what the one before was."""
    texts.refuse_unless(options.yes, "restart starts the worker again, and ends first what still runs of it")
    return _one(options, "restart", STOP_TIMEOUT, fresh=options.fresh)


def rename(options: argparse.Namespace) -> Answer:
    """`worker rename`: another name."""
    return _one(options, "rename", name=options.worker_name)


def adopt(options: argparse.Namespace) -> Answer:
    """`worker adopt`: the caller is its owner from now on."""
    return _one(options, "adopt", hints={Code.NOT_LIVE: _NOT_ADOPTED})


def release(options: argparse.Namespace) -> Answer:
    """`worker release`: nobody is its owner from now on."""
    return _one(options, "release")


def pause(options: argparse.Namespace) -> Answer:
    """`worker pause`: its processes stand still, and so do its times."""
    return _one(options, "pause")


def resume(options: argparse.Namespace) -> Answer:
    """`worker resume`: they go on."""
    return _one(options, "resume")


def renew(options: argparse.Namespace) -> Answer:
    """`worker renew`: counts as a sign of life of one, or of all that the caller owns."""
    with calling.asking(options) as service:
        result = service.request("renew", {} if options.worker is None else {"worker": options.worker})
    return Answer(result, telling.safe(telling.renewed(result, now())))


def notify(options: argparse.Namespace) -> Answer:
    """`worker notify`: what the worker that says this is at."""
    with calling.asking(options) as service:
        result = service.request("notify", {"state": options.state})
    return Answer(result, telling.safe(telling.changed("notify", result, now())))


def _one(
    options: argparse.Namespace,
    action: str,
    timeout: float | None = None,
    hints: Mapping[str, str] | None = None,
    **more: object,
) -> Answer:
    with calling.asking(options, hints=hints) as service:
        result = service.request(action, {"worker": options.worker, **more}, timeout)
    return Answer(result, telling.safe(telling.changed(action, result, now())))
