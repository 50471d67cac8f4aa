#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""worker.py SESSION ROLE COMMAND…: an `external` worker that runs COMMAND once for each assignment.
COMMAND gets its baseline, run state, messages and the assignment on standard input, and prints a report as JSON, or
only its summary as text. Where it fails or prints nothing, the worker waits for a message, and runs it again.
"""

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

PLAN = ("relevant_paths", "relevant_symbols", "intended_changes", "required_checks", "risks", "open_questions")


class Worker:
    """What outlives a connection: the memory, in a file of the run's directory, and the command that runs."""

    def __init__(self, session: str, role: str, *command: str) -> None:
        self.session, self.role, self.command = session, role, command
        self.memory = {"texts": {}, "seen": [], "work": None, "report": None}
        self.file = self.child = None

    def find(self) -> None:
        """Where the broker is, and which generation it takes; each generation begins without a memory."""
        status = subprocess.run(["orchestrate", "--json", "status", self.session], stdout=subprocess.PIPE, check=False)
        data = json.loads(status.stdout)["data"]
        rows = data["broker"]["roles"] if data and data["live"] else []
        self.generation = next((row["generation"] for row in rows if row["role"] == self.role), None)
        if self.generation is None:
            sys.exit(f"worker.py: no run of the session {self.session} lives and has a role {self.role}")
        directory, self.address = Path(data["paths"]["coordination"]), data["paths"]["observer_socket"]
        self.token = (directory / f"{self.role}.token").read_text().strip()
        before, self.file = self.file, directory / "sessions" / self.role / f"worker-g{self.generation}.json"
        if before not in (None, self.file):
            sys.exit("worker.py: another worker takes over")
        self.memory = json.loads(self.file.read_text()) if self.file.exists() else self.memory

    def remember(self, **changes: object) -> None:
        self.memory |= changes
        (new := self.file.with_suffix(".new")).write_text(json.dumps(self.memory))
        new.replace(self.file)

    def serve(self) -> None:
        """One connection, which ends with an exception."""
        with socket.socket(socket.AF_UNIX) as self.line:
            self.line.connect(self.address)
            self.inbox, told = [], ""
            self.ask("hello", generation=self.generation)
            while True:
                if report := self.memory["report"]:  # Said again if there was no answer, and not if it was refused.
                    taken = self.ask("report", assignment_id=self.memory["work"]["assignment_id"], report=report)
                    self.remember(report=None, work=None if taken else self.memory["work"])
                if told != (state := "active" if self.child else "waiting" if self.memory["work"] else "idle"):
                    self.ask("lifecycle", state=(told := state), usage=None)
                if self.inbox:
                    self.take(self.inbox.pop(0))
                elif self.line in select.select([self.line, *([self.child.stdout] if self.child else [])], [], [])[0]:
                    self.inbox.append(self.read())
                elif printed := os.read(self.child.stdout.fileno(), 65_536):
                    self.output += printed
                else:
                    self.finish()

    def ask(self, kind: str, **keys: object) -> bool:
        """Send a request and wait for its answer; what comes in between is kept. After a refusal the broker closes."""
        request = {"version": 1, "type": kind, "role": self.role, "token": self.token, "id": os.urandom(16).hex()}
        payload = json.dumps(request | keys).encode()
        self.line.sendall(len(payload).to_bytes(4, "big") + payload)
        while (frame := self.read())["type"] != "response":
            self.inbox.append(frame)
        if not frame["success"]:
            print(f"worker.py: {kind} refused, {frame['status']}: {frame['error']}", file=sys.stderr)
        return frame["success"]

    def read(self) -> dict:
        size = int.from_bytes(self.line.recv(4, socket.MSG_WAITALL), "big")
        return json.loads(self.line.recv(size, socket.MSG_WAITALL))

    def take(self, frame: dict) -> None:
        """Keep the newest baseline, run state and assignment, and all messages; begin; and only then acknowledge."""
        kind, memory, known = frame["type"], self.memory, frame.get("id") in self.memory["seen"]
        if kind == "abort" and self.child:
            self.child.terminate()
        elif kind in ("context", "assignment") and not known:
            key = kind if kind == "assignment" else frame["id" if frame["kind"] == "operator_message" else "kind"]
            memory["texts"].pop(key, None)
            memory["texts"][key] = frame["content"]
            self.remember(seen=[*memory["seen"], frame["id"]], work=frame if kind == "assignment" else memory["work"])
            if frame["trigger"] and memory["work"] and not self.child:
                (text := self.file.with_suffix(".txt")).write_text("\n\n".join(memory["texts"].values()))
                with text.open() as stdin:
                    self.child, self.output = subprocess.Popen(self.command, stdin=stdin, stdout=subprocess.PIPE), b""
                atexit.register(self.child.terminate)
        if kind in ("context", "assignment", "abort"):
            self.ask("ack", delivery_id=frame["id"], status="duplicate" if known else "accepted")

    def finish(self) -> None:
        with self.child as child:
            self.child = None
        try:
            body = json.loads(self.output[:40_000])  # More is no report.
        except ValueError:
            body = {"summary": self.output.decode(errors="replace").strip()[:1_000]}
        if child.returncode == 0 and self.output.strip() and isinstance(body, dict):
            kind = self.memory["work"]["kind"]  # All lists of a plan are to be there, if only empty.
            self.remember(report={"kind": kind, **({name: [] for name in PLAN} if kind == "plan" else {}), **body})


if __name__ == "__main__":
    worker = Worker(*sys.argv[1:]) if len(sys.argv) > 3 else sys.exit(__doc__)
    while True:
        try:
            worker.find()
            worker.serve()
        except (OSError, ValueError, TypeError) as error:  # TypeError: the database is busy.
            print(f"worker.py: connecting again after: {error}", file=sys.stderr)
            time.sleep(1)
