"""What pip makes of the source: a wheel with the extension, one without where no compiler works, and light imports."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "venv"  # where `make build` compiles, so that a second wheel costs no second compilation

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("scikit_build_core") is None, reason="the build tools are not installed: run `make setup`"
)


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=600, env=inherited | environment
    )


def build_wheel(folder: Path, build_folder: Path, **environment: str) -> Path:
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder)
    built = run(*pip, "--config-settings", f"build-dir={build_folder}", ROOT, **environment)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def make_environment(folder: Path, wheel: Path) -> Path:
    """An environment with only this sakiyomi, today's other packages, and no torch; returns its scripts' folder."""
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    hide_torch = "import sys; sys.modules['torch'] = None"
    Path(paths["purelib"], "packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n{hide_torch}\n")
    python = Path(paths["scripts"], "python")
    installed = run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    return python.parent


@pytest.fixture(scope="module")
def pure_scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of an environment whose sakiyomi was built without a working compiler."""
    folder = tmp_path_factory.mktemp("pure")
    wheel = build_wheel(folder, folder / "build", CXX="/bin/false", CMAKE_ARGS="-DCMAKE_CXX_COMPILER=/bin/false")
    assert wheel.name.endswith("-py3-none-any.whl")
    return make_environment(folder / "venv", wheel)


def test_without_a_compiler_the_package_imports(pure_scripts: Path) -> None:
    script = "import sakiyomi; print(sakiyomi.__file__, sakiyomi.SamplingParams(), sakiyomi.LLM)"
    shown = run(pure_scripts / "python", "-I", "-c", script)
    assert shown.returncode == 0, shown.stderr
    assert str(pure_scripts.parent) in shown.stdout


def test_without_a_compiler_the_command_line_says_what_to_do(pure_scripts: Path, tmp_path: Path) -> None:
    assert run(pure_scripts / "sakiyomi", "--version").returncode == 0
    shown = run(pure_scripts / "sakiyomi", "generate", "x", SAKIYOMI_CACHE=str(tmp_path))
    assert (shown.returncode, shown.stdout) == (1, "")
    assert shown.stderr.startswith("error: ")
    assert shown.stderr.count("\n") == 1
    assert "compiler" in shown.stderr
    assert not list(tmp_path.iterdir()), "a model was fetched that cannot run"


def test_with_a_compiler_the_wheel_holds_the_extension(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, BUILD)
    assert "none-any" not in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.startswith("sakiyomi/_native.")]
    assert "sakiyomi/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "csrc"))]
    scripts = make_environment(tmp_path / "venv", wheel)
    shown = run(scripts / "python", "-I", "-c", "import sakiyomi._native; print(sakiyomi._native.__file__)")
    assert shown.returncode == 0, shown.stderr
    assert str(tmp_path) in shown.stdout


def test_the_source_archive_is_enough_to_build(tmp_path: Path) -> None:
    script = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    built = run(sys.executable, "-c", f"import os; os.chdir({str(ROOT)!r}); {script}", tmp_path)
    assert built.returncode == 0, built.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    needed = {"CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", "src/sakiyomi/__init__.py"}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert needed | sources <= names
    unwanted = ("tests/", "benchmarks/", "build/", ".ci/", ".venv/", "src/sakiyomi/_native")
    assert not [name for name in names if name.startswith(unwanted)]


@pytest.mark.parametrize(
    "script",
    [
        "import sakiyomi, sakiyomi.cli.app",
        "import sakiyomi; sakiyomi.LLM",
        "from sakiyomi.cli.app import run; run(['--help'])",
    ],
)
def test_nothing_imports_torch_unasked(script: str) -> None:
    check = "import sys; heavy = {'torch', 'transformers', 'scipy'} & set(sys.modules); assert not heavy, heavy"
    shown = run(sys.executable, "-c", f"{script}\n{check}", PYTHONPATH=str(ROOT / "src"))
    assert shown.returncode == 0, shown.stderr


def test_without_torch_its_parts_say_what_to_install(pure_scripts: Path) -> None:
    for module in ("sakiyomi.hf", "sakiyomi.models.hf"):
        shown = run(pure_scripts / "python", "-I", "-c", f"import {module}")
        assert shown.returncode == 1
        assert "MissingExtraError" in shown.stderr.splitlines()[-1]
        assert 'pip install "sakiyomi[torch]"' in shown.stderr.splitlines()[-1]
