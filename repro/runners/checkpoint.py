"""Saving what an engine has learned after every sample, so that a run resumes with its pool.

Entries never change once made (see :class:`~kvcmas.engine.contract.State`), so each is written
once; the index that names them is replaced atomically and says how many samples it covers. What it
does not name is the rest of an interrupted write.
"""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from kvcmas.engine.contract import State
from kvcmas.errors import UserError

INDEX = "index.json"


class Checkpoint:
    """A directory of safetensors entries and ``index.json``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: dict[str, str] = {}

    def load(self) -> tuple[int, State | None]:
        """Samples covered and the state after them; ``(0, None)`` if nothing was saved.

        Raises:
            UserError: a file is missing or unreadable.
        """
        index = self._directory / INDEX
        if not index.exists():
            return 0, None
        try:
            content = json.loads(index.read_text())
            entries = {
                name: load_file(self._directory / file) for name, file in content["files"].items()
            }
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"checkpoint {self._directory} is damaged ({error}); delete it"
            ) from error
        self._written = dict(content["files"])
        return int(content["samples"]), State(content["meta"], entries)

    def save(self, samples: int, state: State) -> None:
        """Make ``state`` the one after ``samples`` samples.

        Raises:
            UserError: the directory cannot be written, or the disk is full.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            files = {name: self._entry(name, state) for name in state.entries}
            temporary = self._directory / f"{INDEX}.tmp"
            temporary.write_text(
                json.dumps({"samples": samples, "files": files, "meta": state.meta})
            )
            temporary.replace(self._directory / INDEX)
            for name in self._written.keys() - files.keys():
                (self._directory / self._written[name]).unlink(missing_ok=True)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "the disk is full" if full else error.strerror
            raise UserError(f"cannot write checkpoint {self._directory}: {reason}") from error
        self._written = files

    def _entry(self, name: str, state: State) -> str:
        if name in self._written:
            return self._written[name]
        file = hashlib.sha256(name.encode()).hexdigest()[:24] + ".safetensors"
        tensors = {key: tensor.contiguous() for key, tensor in state.entries[name].items()}
        save_file(tensors, self._directory / file)
        return file
