# SPDX-License-Identifier: Apache-2.0
"""A scripted stand-in for the model that real agents talk to, on loopback, in the shape of OpenAI's chat completions.

    with Model({("reviewer", "review", 1): [report(verdict="changes_requested")]}) as model:
        ...                                    # agents with the base URL model.url
        model.requests                         # what each of them sent, and how much

What a request wants is read off the request alone, so the server keeps no state of its own: the role from the kinds of
report that its tool admits, the round from the newest assignment, the step from how often the model has answered since.
A script maps (role, kind, round) to steps; `None` in place of the round fits every round. What no script covers is
answered with the default report of its kind. A script that has run out, or a message that is no assignment, gets a word
and the turn ends.

Somebody who is no worker, as a parent, has "" for role and kind, and the round of the newest message that names one.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self, TypeAlias

Json: TypeAlias = dict[str, Any]
Step: TypeAlias = Json
"""`{"call": tool, "arguments": {…}}`, `{"say": text}`, `{"status": code}`, or `{"hold": name}` before one of them."""
Key: TypeAlias = tuple[str, str, int | None]

UNDERSTOOD: Step = {"say": "Understood."}
REPORT_TOOL = "orchestrator_report"
ROLES = {"review": "reviewer", "probe": "probe", "playwright": "playwright", "django": "django"}
ROUND = re.compile(r"^Round: (\d+)\s*$", re.M)
WRITERS = {"edit", "write"}

DEFAULTS: Mapping[str, Json] = {
    "implementation": {"changed_paths": ["feature.py"], "checks": [{"name": "unit tests", "status": "passed"}]},
    "plan": {
        "relevant_paths": ["feature.py"],
        "relevant_symbols": ["feature"],
        "intended_changes": ["Add the feature."],
        "required_checks": ["unit tests"],
        "risks": [],
        "open_questions": [],
    },
    "review": {"verdict": "approved"},
    "playwright": {"verdict": "pass"},
    "django": {"verdict": "advisory_approved"},
}


def call(tool: str, **arguments: object) -> Step:
    """The model calls a tool."""
    return {"call": tool, "arguments": arguments}


def report(**members: object) -> Step:
    """The model reports: the default report of the assignment's kind, with `members` over it."""
    return {"call": REPORT_TOOL, "report": members}


@dataclass(frozen=True)
class Request:
    """What one request was about and how large it was, in characters of compact JSON."""

    role: str
    kind: str
    round: int
    step: int
    size: int
    messages_size: int
    """Of the conversation alone, without the system prompt and the tools."""
    roles: tuple[str, ...]
    """Who says what in the conversation: `user`, `assistant`, `tool`."""
    tools: tuple[str, ...]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or "" for part in content or () if isinstance(part, dict))


def _length(value: object) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def read(body: Json) -> Request:
    """Tell from a request's body what it is about; an empty role where it is no worker's."""
    messages = [message for message in body.get("messages", ()) if message["role"] not in {"system", "developer"}]
    functions = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or ()}
    admitted = functions.get(REPORT_TOOL, {}).get("parameters", {}).get("properties", {}).get("kind", {})
    kinds = admitted.get("enum") or [admitted.get("const")]
    role = "" if kinds == [None] else ROLES.get(kinds[0], "implementer")
    kind = kinds[0] or ""
    if role == "implementer":
        kind = "implementation" if WRITERS & functions.keys() else "plan"
    asked = [
        (place, int(found[1]))
        for place, message in enumerate(messages)
        if message["role"] == "user" and (found := ROUND.search(_text(message.get("content"))))
    ]
    place, round_ = asked[-1] if asked else (-1, 0)
    answers = sum(message["role"] == "assistant" for message in messages[place + 1 :])
    speakers = tuple(message["role"] for message in messages)
    return Request(role, kind, round_, answers, _length(body), _length(messages), speakers, tuple(functions))


class Model:
    """The server, on a port of its own for as long as the context lasts."""

    def __init__(self, script: Mapping[Key, Sequence[Step]] | None = None) -> None:
        self.script: dict[Key, Sequence[Step]] = dict(script or {})
        self.requests: list[Request] = []
        self.aborted = 0
        """Answers that the agent did not wait for."""
        self._changed = threading.Condition()
        self._released: set[str] = set()
        self._holding: set[str] = set()
        model = self

        class Handler(_Handler):
            owner = model

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """What an agent takes for the provider's base URL."""
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of what is held and wait for every answer that is on its way."""
        with self._changed:
            self._released.add("*")
            self._changed.notify_all()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def release(self, name: str) -> None:
        """Let the answers that hold at `name` go on, those to come as well."""
        with self._changed:
            self._released.add(name)
            self._changed.notify_all()

    def held(self, name: str, timeout: float = 30.0) -> bool:
        """Wait until an answer holds at `name`; whether one does."""
        with self._changed:
            return self._changed.wait_for(lambda: name in self._holding, timeout)

    def steps(self, request: Request) -> Sequence[Step]:
        """The script of an assignment, or of one who is no worker."""
        for round_ in (request.round, None):
            steps = self.script.get((request.role, request.kind, round_))
            if steps is not None:
                return steps
        return [report()] if request.role else [UNDERSTOOD]

    def answer(self, request: Request) -> Step:
        """The step that a request is answered with; holds come before it and do not count."""
        if request.role and not request.round:
            return UNDERSTOOD
        holds: list[str] = []
        number = 0
        for step in self.steps(request):
            if "hold" in step:
                holds.append(step["hold"])
                continue
            if number == request.step:
                return {**step, "holds": holds}
            holds, number = [], number + 1
        return {"say": "Nothing is left to do.", "holds": holds}

    def take(self, request: Request) -> None:
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()

    def wait_released(self, name: str, timeout: float) -> bool:
        """Hold at `name`; whether it has been released."""
        with self._changed:
            self._holding.add(name)
            self._changed.notify_all()
            released = self._changed.wait_for(lambda: bool({name, "*"} & self._released), timeout)
            if released:
                self._holding.discard(name)
            return released

    def forget(self) -> None:
        with self._changed:
            self.aborted += 1
            self._changed.notify_all()


class _Handler(BaseHTTPRequestHandler):
    """One connection of an agent."""

    owner: Model
    timeout = 30

    def log_message(self, *_: object) -> None:
        """Nothing: what was asked is in the record."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)))
        request = read(body)
        self.owner.take(request)
        step = self.owner.answer(request)
        self.close_connection = True
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if "status" in step:
                self.send_error(step["status"])
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            self._stream(request, step)
            return
        self.owner.forget()

    def _stream(self, request: Request, step: Step) -> None:
        self._chunk({"role": "assistant", "content": ""})
        for name in step.get("holds", ()):
            while not self.owner.wait_released(name, 0.1):
                self._chunk({"content": "."})  # how it is noticed that the agent has gone
        if "say" in step:
            self._chunk({"content": step["say"]})
            finish = "stop"
        else:
            arguments = step.get("arguments")
            if arguments is None:
                summary = f"{request.kind} of round {request.round} is done."
                arguments = {
                    "kind": request.kind,
                    "summary": summary,
                    **DEFAULTS.get(request.kind, {}),
                    **step["report"],
                }
            function = {"name": step["call"], "arguments": json.dumps(arguments)}
            name = f"call-{request.round}-{request.step}"
            self._chunk({"tool_calls": [{"index": 0, "id": name, "type": "function", "function": function}]})
            finish = "tool_calls"
        self._chunk({}, finish)
        # What a provider would count, near enough to be told apart and to sum.
        usage = {"prompt_tokens": request.size // 4, "completion_tokens": 20}
        self._event({"choices": [], "usage": {**usage, "total_tokens": sum(usage.values())}})
        self._write(b"data: [DONE]\n\n")

    def _chunk(self, delta: Json, finish: str | None = None) -> None:
        self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    def _event(self, members: Json) -> None:
        head = {"id": "completion", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        self._write(b"data: " + json.dumps({**head, **members}).encode() + b"\n\n")

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()


def saved(requests: Sequence[Request], role: str, kind: str, later: int = 2) -> float:
    """How much of the conversation a role is spared when it begins a later round, between 0 and 1.

    Measured against what it was sent last in an earlier round, which is less than all that it would be sent had nothing
    been left out.
    """
    mine = [request for request in requests if request.role == role and request.kind == kind]
    before = [request.messages_size for request in mine if request.round < later]
    after = [request.messages_size for request in mine if request.round == later]
    if not before or not after:
        raise AssertionError(f"no two rounds of {role}: {[(each.round, each.step) for each in mine]}")
    return 1 - after[0] / before[-1]
