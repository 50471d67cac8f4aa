# SPDX-License-Identifier: Apache-2.0
"""The record of one installation, `lib/agent-intercom/manifest.json`, and how files come and go by it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import NoReturn


def die(text: str) -> NoReturn:
    print(f"install: {text}", file=sys.stderr)
    raise SystemExit(1)


def say(text: str) -> None:
    print(text, file=sys.stderr)


class Manifest:
    """The record of one installation. Paths in it are as they will be seen, without the staging directory."""

    def __init__(self, destdir: Path, path: Path) -> None:
        self.destdir, self.path = destdir, path
        self.files: dict[str, str] = {}
        self.directories: list[str] = []
        try:
            record = json.loads(self.staged(path).read_text())
            self.before: dict[str, str] = record["files"]
            self.directories = record["directories"]
        except FileNotFoundError:
            self.before = {}
        except (ValueError, KeyError) as error:
            die(f"{path} is damaged: {error}")

    def staged(self, path: Path | str) -> Path:
        return Path(f"{self.destdir}{path}") if str(self.destdir) != "/" else Path(path)

    def directory(self, path: Path) -> None:
        """Make `path` and its parents, and remember those that were not there."""
        missing = [p for p in (path, *path.parents) if not self.staged(p).exists()]
        for new in reversed(missing):
            self.staged(new).mkdir()
            self.directories.append(str(new))

    def write(self, path: Path, content: bytes, mode: int = 0o644) -> None:
        """Write one file by renaming, so that a broker which is being started never reads half of it."""
        self.directory(path.parent)
        target = self.staged(path)
        descriptor, temporary = tempfile.mkstemp(prefix=".install-", dir=target.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, mode)
        os.rename(temporary, target)
        self.files[str(path)] = hashlib.sha256(content).hexdigest()

    def foreign(self, path: Path) -> bool:
        """Whether a file is in the way that an installation did not make, or that was changed since."""
        staged = self.staged(path)
        if not staged.exists() and not staged.is_symlink():
            return False
        return digest(staged) != self.before.get(str(path))

    def save(self) -> None:
        for path in self.before.keys() - self.files.keys() - {str(self.path)}:
            self.take_back(path, self.before[path])
        record = {"files": self.files, "directories": sorted(set(self.directories))}
        content = json.dumps(record, indent=1, sort_keys=True).encode()
        self.staged(self.path).write_bytes(content + b"\n")

    def take_back(self, path: str, expected: str) -> None:
        staged = self.staged(path)
        if not staged.exists() and not staged.is_symlink():
            return
        if digest(staged) != expected:
            say(f"kept, because it was changed: {path}")
            return
        staged.unlink()

    def remove(self) -> None:
        if not self.staged(self.path).exists():
            say(f"nothing is installed: there is no {self.path}")
            return
        for path, expected in self.before.items():
            self.take_back(path, expected)
        self.staged(self.path).unlink()
        for directory in sorted(self.directories, key=lambda d: -len(Path(d).parts)):
            staged = self.staged(directory)
            if not staged.is_dir():
                continue
            try:
                staged.rmdir()
            except OSError:
                say(f"kept, because something else is in it: {directory}")


def digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return f"unreadable: {error.errno}"
