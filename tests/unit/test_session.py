from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import plotly.io as pio
import pytest
import torch

from kimik3_lab.teaching import session as lab


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3LAB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "1"))
    monkeypatch.setenv(lab.DEVICE_ENV, "cpu")


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the process look as if no kernel had been imported."""
    for name in [name for name in sys.modules if name.startswith("k3_kernels")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delenv("TRITON_INTERPRET")


def test_start_says_what_runs_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "notebooks").mkdir()
    cells = [{"cell_type": "markdown", "source": ["# 07 — A hybrid cache\n", "45 min"]}]
    (tmp_path / "notebooks" / "07_hybrid.ipynb").write_text(json.dumps({"cells": cells}))
    monkeypatch.setattr("kimik3_lab.paths.repository_dir", lambda: tmp_path)
    ctx = lab.start("07", seed=3)
    out = capsys.readouterr().out
    assert out.startswith("Lesson 07: A hybrid cache\n")
    for word in (f"torch {torch.__version__}", "triton", "lab 0.", "CPU", "seed 3", "interpreter"):
        assert word in out
    assert (ctx.device, ctx.live, ctx.seed) == ("cpu", True, 3)


def test_recipe_begins_under_its_title(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "notebooks" / "recipes").mkdir(parents=True)
    cells = [{"cell_type": "markdown", "source": ["# Size a deployment\n", "| | |"]}]
    path = tmp_path / "notebooks" / "recipes" / "size_it.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    monkeypatch.setattr("kimik3_lab.paths.repository_dir", lambda: tmp_path)
    ctx = lab.recipe("size_it", seed=5)
    first = random.random()
    lab.seed(5)
    assert random.random() == first
    assert (ctx.lesson, ctx.title, ctx.device) == ("size_it", "Size a deployment", "cpu")
    out = capsys.readouterr().out
    assert out.startswith("Recipe: Size a deployment\n")
    assert f"torch {torch.__version__}" in out


def test_start_without_triton_says_recorded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = lab.importlib.util.find_spec
    monkeypatch.setattr(
        lab.importlib.util, "find_spec", lambda name: None if name == "triton" else find(name)
    )
    monkeypatch.delenv("TRITON_INTERPRET")
    ctx = lab.start("00")
    assert "Triton not available: recorded results" in capsys.readouterr().out
    assert not ctx.live
    assert "TRITON_INTERPRET" not in os.environ


def test_start_sets_seeds_and_plot_style() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    lab.start("00", seed=5)
    first = draw()
    lab.seed(5)
    assert draw() == first
    lab.seed(6)
    assert draw() != first
    assert (pio.templates.default, pio.renderers.default) == ("k3lab", "plotly_mimetype")


@pytest.mark.usefixtures("no_kernels")
def test_start_turns_the_interpreter_on_without_a_gpu() -> None:
    lab.start("00")
    assert os.environ["TRITON_INTERPRET"] == "1"


@pytest.mark.usefixtures("no_kernels")
def test_kernels_imported_too_early_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    early = "k3_kernels.routing_kernel"
    monkeypatch.setitem(sys.modules, early, types.ModuleType(early))
    with pytest.raises(RuntimeError, match=r"k3_kernels\.routing_kernel was imported before start"):
        lab.start("00")


def test_a_device_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv(lab.DEVICE_ENV, "cuda")
    with pytest.raises(RuntimeError, match="sees no CUDA device"):
        lab.start("00")
    monkeypatch.setenv(lab.DEVICE_ENV, "tpu")
    with pytest.raises(RuntimeError, match="expected 'cpu' or 'cuda'"):
        lab.start("00")
    monkeypatch.delenv(lab.DEVICE_ENV)
    assert lab.start("00").device == "cpu"


def test_predict_and_reveal(capsys: pytest.CaptureFixture[str]) -> None:
    ctx = lab.start("00")
    capsys.readouterr()
    ctx.predict("tps", 50, "tokens/s", question="How fast?")
    assert capsys.readouterr().out == "tps: you predict 50 tokens/s\n"
    ctx.reveal("tps", np.float32(100), "the batch shares the weights")
    assert capsys.readouterr().out == (
        "tps\n"
        "  predicted  50 tokens/s\n"
        "  actual     100 tokens/s\n"
        "  apart      2x too low, -50 %\n"
        "  verdict    right size, wrong detail (70 of 100 points)\n"
        "  because    the batch shares the weights\n"
    )
    ctx.predict("tps", 100, "tokens/s")
    assert "attempt 2, after you saw the answer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("predicted", "actual", "told"),
    [
        (7, 7, "nothing: exact"),
        (200, 100, "2x too high, +100 %"),
        (-3, 3, "too low, -200 %"),
        (3, 0, "too high; the actual value is zero"),
    ],
)
def test_reveal_says_how_far_apart(
    capsys: pytest.CaptureFixture[str], predicted: float, actual: float, told: str
) -> None:
    ctx = lab.start("00")
    ctx.predict("n", predicted)
    ctx.reveal("n", actual)
    assert f"  apart      {told}\n" in capsys.readouterr().out


def test_open_questions_do_not_stop_the_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    ctx = lab.start("00")
    ctx.predict("tps", ...)
    ctx.predict("ttft", None)
    ctx.reveal("tps", 100)
    out = capsys.readouterr().out
    assert out.count("no prediction yet") == 2
    assert "nothing was predicted" in out
    assert ctx.scores().empty


def test_scores_are_those_of_the_lesson() -> None:
    lab.start("01").predict("other", 1)
    ctx = lab.start("00")
    ctx.predict("tps", 50, "tokens/s")
    ctx.predict("open", 1)
    ctx.reveal("tps", 100)
    scores = ctx.scores()
    assert list(scores.index) == ["tps", "open"]
    assert scores.loc["tps", "points"] == 70
    assert scores.loc["open", "verdict"] == "not revealed yet"


@pytest.mark.parametrize(("chosen", "threads"), [(None, 1), ("2", 2)])
def test_a_lesson_takes_one_thread_unless_the_reader_chose(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, threads: int
) -> None:

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    try:
        lab.start("00")
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_figures_are_made_ready_without_parsers_of_addresses() -> None:
    """They take longer to build than all else that a lesson imports for its figures."""
    code = (
        "import sys; from kimik3_lab.teaching import session; session._import_nbformat();"
        "print([name in sys.modules for name in ('nbformat', 'jsonschema', 'rfc3987_syntax')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[True, True, False]"
