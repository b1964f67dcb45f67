"""The command that tests kernels on a GPU: what it counts, what it does when time is up."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from tools import check_on_gpu

XDIST = """created: 3/3 workers
3 workers [4 items]
[gw0] [ 25%] PASSED tests/kernels/test_moe.py::test_one[T1-a b]
[gw2] [ 50%] FAILED tests/kernels/test_moe.py::test_two
[gw1] [ 75%] PASSED tests/kernels/test_routing.py::test_three[x]
""".splitlines()
PLAIN = """collected 9 items / 7 deselected / 2 selected
tests/kernels/test_mla.py::test_four[1] PASSED                       [ 50%]
tests/kernels/test_mla.py::test_five SKIPPED (no)                    [100%]
""".splitlines()
TESTS = """
import pytest
@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 2])
def test_small_sizes(n): assert n == {right}
@pytest.mark.gpu
def test_a_captured_graph(): pass
def test_other(): pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(check_on_gpu, "KERNEL_TESTS", str(tmp_path))
    monkeypatch.setattr(check_on_gpu, "MEMCHECK", {"moe": "gpu and small_sizes"})
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # plugins take seconds to load
    (tmp_path / "test_moe.py").write_text(TESTS.format(right="n"), encoding="utf-8")
    return tmp_path


def sanitizer(folder: Path, monkeypatch: pytest.MonkeyPatch, *, errors: int = 0) -> None:
    """Put a compute-sanitizer on the PATH that runs its program and reports so many errors."""
    program = folder / "compute-sanitizer"
    program.write_text(
        '#!/bin/sh\nshift 4\necho "allocator off: $PYTORCH_NO_CUDA_MEMORY_CACHING"\n"$@"\nr=$?\n'
        f'echo "========= ERROR SUMMARY: {errors} errors"\nexit $r\n',
        encoding="utf-8",
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_outcomes_with_and_without_processes() -> None:
    files, selected = check_on_gpu.count_outcomes(XDIST)
    assert selected == 4
    assert files == {
        "tests/kernels/test_moe.py": {"passed": 1, "failed": 1},
        "tests/kernels/test_routing.py": {"passed": 1},
    }
    assert check_on_gpu.count_outcomes(PLAIN) == (
        {"tests/kernels/test_mla.py": {"passed": 1, "skipped": 1}},
        2,
    )


def test_marked_tests_are_run_and_counted(folder: Path) -> None:
    found = check_on_gpu.run_tests("gpu", 1, 60)
    assert (found["passed"], found["failed"], found["not_run"], found["ended"]) == (3, 0, 0, True)
    assert check_on_gpu.run_tests("not gpu", 1, 60)["passed"] == 1


def test_a_failure_is_named(folder: Path) -> None:
    (folder / "test_moe.py").write_text(TESTS.format(right="1"), encoding="utf-8")
    found = check_on_gpu.run_tests("gpu", 1, 60)
    assert (found["passed"], found["failed"]) == (2, 1)
    assert "test_small_sizes[2]" in found["failures"][0]


def test_what_time_cuts_off_was_not_run(folder: Path) -> None:
    slow = TESTS.format(right="n").replace("def test_other(): pass", "")
    slow += "@pytest.mark.gpu\ndef test_slow():\n    import time\n    time.sleep(60)\n"
    (folder / "test_moe.py").write_text(slow, encoding="utf-8")
    began = time.monotonic()
    found = check_on_gpu.run_tests("gpu", 1, 6)
    assert time.monotonic() - began < 30
    assert (found["passed"], found["not_run"], found["ended"]) == (3, 1, False)


def test_memcheck_makes_two_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The folder is named after this test, and pytest -k also looks at the names of folders.
    assert not any(word in str(folder) for word in check_on_gpu.GRAPH.split(" or "))
    sanitizer(folder, monkeypatch)
    small, graph = check_on_gpu.memcheck_all(["moe"], 2, 60)
    assert (small.caching_allocator, small.passed, small.is_clean) == (False, 2, True)
    assert (graph.caching_allocator, graph.passed, graph.is_clean) == (True, 1, True)


def test_an_error_of_memcheck_is_one_though_tests_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sanitizer(folder, monkeypatch, errors=3)
    small, _ = check_on_gpu.memcheck_all(["moe"], 2, 60)
    assert (small.passed, small.errors, small.is_clean) == (2, 3, False)


def test_children_end_with_their_command() -> None:
    mark = f"sleep {60 + os.getpid() / 1e6}"
    lines, code = check_on_gpu.run(["sh", "-c", f"echo said; {mark} & wait"], 1)
    assert (lines, code) == (["said\n"], None)
    time.sleep(0.2)
    running = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if _is_mine(p)]
    assert not any(mark.split()[1].encode() in words for words in running)


def _is_mine(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid() and bool(path.read_bytes())
    except OSError:
        return False


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_on_gpu.main([]) == 2
    assert "make python-tests" in capsys.readouterr().err


def test_the_whole_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sanitizer(folder, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    output = folder / "checks.json"
    assert check_on_gpu.main(["--workers", "1", "--output", str(output)]) == 0
    body = json.loads(output.read_text(encoding="utf-8"))
    assert [part["passed"] for part in body["tests"]] == [3, 1]
    assert [one["is_clean"] for one in body["memcheck"]] == [True, True]
    assert list(folder.glob("*.json")) == [output]
    monkeypatch.setenv("PATH", "/nowhere")
    assert check_on_gpu.main(["--workers", "1", "--only-gpu", "--output", str(output)]) == 0
    body = json.loads(output.read_text(encoding="utf-8"))
    assert body["memcheck"] is None
    assert "compute-sanitizer" in body["memcheck_left_out"]


def test_what_was_done_is_kept_if_it_is_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    output, before = folder / "checks.json", '{"the last": "result"}'
    output.write_text(before, encoding="utf-8")
    run_tests = check_on_gpu.run_tests

    def stopped(marked: str, workers: int, seconds: float) -> dict[str, object]:
        if marked != "gpu":
            raise KeyboardInterrupt
        return run_tests(marked, workers, seconds)

    monkeypatch.setattr(check_on_gpu, "run_tests", stopped)
    with pytest.raises(KeyboardInterrupt):
        check_on_gpu.main(["--workers", "1", "--output", str(output)])
    assert output.read_text(encoding="utf-8") == before
    body = json.loads((folder / "checks.partial.json").read_text(encoding="utf-8"))
    assert [part["passed"] for part in body["tests"]] == [3]
    assert body["memcheck"] is None and body["memcheck_left_out"] == "stopped before it"


def test_unknown_operators_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check_on_gpu.main(["--operators", "moe,nothing"])
    assert "nothing" in capsys.readouterr().err


def test_every_operator_with_gpu_tests_is_watched() -> None:
    tests = (check_on_gpu.ROOT / "tests" / "kernels").glob("test_*.py")
    marked = {
        path.stem.removeprefix("test_")
        for path in tests
        if "mark.gpu" in path.read_text(encoding="utf-8")
    }
    not_operators = {"async_steps", "rank_slice", "triton_backend", "moe_ladder", "kda_ladder"}
    assert marked - not_operators <= set(check_on_gpu.MEMCHECK)
