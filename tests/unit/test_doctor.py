from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from kimik3_lab import K3Config
from kimik3_lab.cli import app
from kimik3_lab.teaching import doctor
from kimik3_lab.teaching.doctor import Check
from kimik3_lab.tensors import checkpoint_tensors

run = CliRunner().invoke


def test_python() -> None:
    assert doctor.check_python((3, 11, 0)).status == "OK"
    old = doctor.check_python((3, 10, 9))
    assert old.status == "FAIL"
    assert "3.11" in old.mend


def test_packages_of_this_environment_are_as_the_project_says() -> None:
    found = doctor.check_packages()
    assert {check.status for check in found} <= {"OK", "WARN"}
    assert {"torch", "jupyterlab", "plotly", "fastapi", "other packages"} <= {c.name for c in found}


def test_packages_missing_old_and_for_other_systems() -> None:
    found = {
        check.name: check
        for check in doctor.check_packages(
            [
                "no-such-package>=1",
                "pytest>=999",
                "numpy>=1",
                "triton>=3; sys_platform == 'nowhere'",
                "vllm; extra == 'gpu'",
            ]
        )
    }
    assert {name: check.status for name, check in found.items()} == {
        "no-such-package": "FAIL",
        "pytest": "FAIL",
        "triton": "WARN",
        "other packages": "OK",
    }
    assert "recorded results" in found["triton"].detail
    assert ">=999" in found["pytest"].detail


def test_labextensions(tmp_path: Path) -> None:
    assert doctor.check_labextensions().status == "OK"
    extension = tmp_path / "jupyterlab-plotly"
    extension.mkdir()
    (extension / "package.json").write_text("{}")
    found = doctor.check_labextensions([tmp_path])
    assert found.status == "FAIL"
    assert "ipywidgets" in found.detail
    assert "plotly" not in found.detail


def test_labextensions_are_looked_for_where_the_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    (tmp_path / "share" / "jupyter").mkdir(parents=True)
    server = [str(tmp_path / "bin" / "python"), "-m", "jupyterlab"]

    class Server:
        def __init__(self, pid: int) -> None:
            assert pid == 42

        def cmdline(self) -> list[str]:
            return server

    monkeypatch.setattr(psutil, "Process", Server)
    monkeypatch.setenv("JPY_PARENT_PID", "42")
    monkeypatch.setattr("jupyter_core.paths.jupyter_path", lambda *_: [])
    assert doctor.check_labextensions().status == "FAIL"
    server[:] = ["/usr/bin/python", "-m", "pytest"]  # no Jupyter: this environment counts
    assert doctor.check_labextensions().status == "OK"


@pytest.mark.parametrize(
    ("check", "statuses"),
    [
        (doctor.check_cpu, {1: "WARN", 2: "OK"}),
        (doctor.check_memory, {2**30: "FAIL", 3 * 2**30: "WARN", 4 * 2**30: "OK"}),
        (doctor.check_disk, {2**20: "FAIL", 2**29: "WARN", 2**30: "OK"}),
    ],
)
def test_machine(check: object, statuses: dict[int, str]) -> None:
    for value, status in statuses.items():
        found = check(value)  # type: ignore[operator]
        assert found.status == status
        assert bool(found.mend) == (status != "OK")


def test_no_gpu_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert doctor.check_gpu() == Check(
        "gpu", "OK", "no CUDA device: lessons run on CPU, kernels in the interpreter"
    )


def test_gpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (0, 139 * 2**30))
    monkeypatch.setenv("CC", "gcc")
    assert doctor.check_gpu() == Check("gpu", "OK", "NVIDIA H200, 139 GiB")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert doctor.check_gpu().status == "WARN"


class TestModel:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        config = K3Config.micro()
        config.save(tmp_path)
        types = {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8}
        self.write(
            tmp_path,
            {
                t.name: (t.dtype, np.zeros(t.shape, types[t.dtype]))
                for t in checkpoint_tensors(config, prefix="")
            },
        )
        (tmp_path / "tokenizer.json").write_text("{}")
        return tmp_path

    @staticmethod
    def write(folder: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
        """Write a safetensors file; numpy has no BF16, so its header is mended by hand."""
        path = folder / "model.safetensors"
        save_file({name: array for name, (_, array) in tensors.items()}, path)
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        for name, (dtype, _) in tensors.items():
            header[name]["dtype"] = dtype
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    def test_complete(self, folder: Path) -> None:
        found = doctor.check_model(folder)
        assert found.status == "OK", found.detail

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
    def test_missing_file(self, folder: Path, name: str) -> None:
        (folder / name).unlink()
        found = doctor.check_model(folder)
        assert found.status == "FAIL"
        assert name in found.detail

    def test_cut_off(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        assert doctor.check_model(folder).status == "FAIL"

    def test_not_safetensors(self, folder: Path) -> None:
        (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
        assert doctor.check_model(folder).status == "FAIL"

    def test_other_tensors_than_the_config_asks_for(self, folder: Path) -> None:
        self.write(folder, {"surprise": ("F32", np.zeros(2, np.float32))})
        found = doctor.check_model(folder)
        assert found.status == "FAIL"
        assert "tensors are not as config.json says" in found.detail

    def test_shards(self, folder: Path) -> None:
        """As released and as the tiny K3 lies there: several files, and their index."""
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        save_file(
            {"surprise": np.zeros(2, np.float32)}, folder / "model-00002-of-00002.safetensors"
        )
        index = folder / "model.safetensors.index.json"
        shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
        index.write_text(json.dumps({"weight_map": {"a": shards[0], "b": shards[1]}}))
        found = doctor.check_model(folder)
        assert found.status == "FAIL" and "first surprise" in found.detail
        index.write_text(json.dumps({"weight_map": {"a": shards[0]}}))
        assert doctor.check_model(folder).status == "OK"
        (folder / shards[0]).unlink()
        assert shards[0] in doctor.check_model(folder).detail
        index.write_text("{}")
        assert doctor.check_model(folder).status == "FAIL"

    def test_bad_config(self, folder: Path) -> None:
        (folder / "config.json").write_text("{")
        found = doctor.check_model(folder)
        assert found.status == "FAIL"
        assert "not valid JSON" in found.detail


def test_notebooks(tmp_path: Path) -> None:
    assert doctor.check_notebooks(tmp_path).status == "FAIL"
    (tmp_path / "00_start_here.ipynb").touch()
    assert doctor.check_notebooks(tmp_path).status == "OK"


def test_user_folder(tmp_path: Path) -> None:
    new = tmp_path / "not" / "yet"
    assert doctor.check_user_folder(new).status == "OK"
    assert not new.exists()
    file = tmp_path / "file"
    file.touch()
    found = doctor.check_user_folder(file / "home")
    assert (found.status, "K3LAB_HOME" in found.mend) == ("WARN", True)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_port(taken_port: int) -> None:
    found = doctor.check_port(taken_port)
    assert found.status == "WARN"
    assert str(taken_port + 1) in found.mend
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    assert doctor.check_port(free).status == "OK"


def test_a_check_that_breaks_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Check:
        raise ImportError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(doctor, "check_gpu", broken)
    found = next(check for check in doctor.run_checks() if check.name == "gpu")
    assert found.status == "FAIL"
    assert "libcudart" in found.detail


def test_table_shows_every_mend_whole() -> None:
    mend = "a long mend " * 20
    html = doctor.table([Check("a", "OK", "fine"), Check("b", "FAIL", "bad", mend)]).to_html()
    assert mend.strip() in html


@pytest.mark.parametrize(
    ("statuses", "code", "told"),
    [
        (["OK", "OK"], 0, "Ready."),
        (["OK", "WARN"], 0, "Ready with 1 warning."),
        (["FAIL", "WARN"], 1, "Not ready: 1 of 2 checks failed."),
    ],
)
def test_command(
    monkeypatch: pytest.MonkeyPatch, statuses: list[str], code: int, told: str
) -> None:
    checks = [Check(s, s, "found", "" if s == "OK" else "mend it") for s in statuses]  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "run_checks", lambda: checks)
    result = run(app, ["doctor"])
    assert (result.exit_code, told in result.output) == (code, True)
    assert ("-> mend it" in result.output) == (statuses != ["OK", "OK"])
    result = run(app, ["doctor", "--json"])
    body = json.loads(result.output)
    assert (result.exit_code, body["ready"], len(body["checks"])) == (code, code == 0, 2)


def test_command_names_itself_as_the_shell_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "run_checks", lambda: [Check("a", "OK", "fine")])
    monkeypatch.setattr(sys, "argv", [".venv/bin/k3lab", "doctor"])
    for found, told in ((None, ".venv/bin/k3lab lab"), ("/usr/bin/k3lab", ": k3lab lab")):
        monkeypatch.setattr(shutil, "which", lambda name, found=found: found)
        assert told in run(app, ["doctor"]).output
