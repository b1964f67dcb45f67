"""A public bug of deferred finalization: the switch is on, the output right, and nothing deferred.

vLLM's first version asked for the kernel in ``__init__``, where it is still None before weights are
loaded, so the saving never came (https://github.com/vllm-project/vllm/pull/53327). No comparison of
outputs can see that. So here the path itself is watched, for every number of tokens up to the 128
that vLLM defers for.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="running kernels needs Triton")

from kimik3_lab.config import K3Config
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.moe import LatentMoE
from kimik3_lab.serving import CacheConfig
from kimik3_lab.serving.executors import triton_moe
from kimik3_lab.serving.executors.execution import ExecutionConfig
from kimik3_lab.serving.executors.step_counters import StepCounters
from kimik3_lab.serving.executors.torch_executor import TorchExecutor
from kimik3_lab.serving.executors.triton_linear import Skinny
from kimik3_lab.serving.executors.triton_moe import TritonMoE
from kimik3_lab.serving.presets import MAIN_2026_09_13, V0_27_1

MOST_DEFERRED = 128


class Spy:
    """Who normalises the sum over a token's experts: the kernel that takes it, or one more."""

    def __init__(self) -> None:
        self.by_finalize: list[bool] = []
        self.afterwards = 0


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spy]:
    """Watch the finalize kernel, which still runs."""
    watched, module = Spy(), importlib.import_module("k3_kernels.moe")
    original = module.finalize

    def finalize(*arguments, norm_weight=None, **options):
        watched.by_finalize.append(norm_weight is not None)
        return original(*arguments, norm_weight=norm_weight, **options)

    monkeypatch.setattr(module, "finalize", finalize)
    norm = triton_moe.row_norm

    def row_norm(*arguments, **options):
        watched.afterwards += 1
        return norm(*arguments, **options)

    monkeypatch.setattr(triton_moe, "row_norm", row_norm)
    return watched


def layer(device: str) -> LatentMoE:
    model = random_model(K3Config.micro(), seed=3).requires_grad_(False).to(device)
    return model.model.layers[1].block_sparse_moe


def products() -> Skinny:
    return Skinny(enabled=False, counters=StepCounters())


class AskedTooEarly(TritonMoE):
    """The bug: whether to defer is decided before there are experts to ask."""

    def __init__(self, moe, config, *, deferred_finalize, skinny) -> None:
        self.experts = None
        early = deferred_finalize and self.experts is not None
        super().__init__(moe, config, deferred_finalize=early, skinny=skinny)


@pytest.mark.parametrize("num_tokens", [1, 2, 9])
@pytest.mark.parametrize("deferred", [False, True])
def test_known_bug_53327_the_kernel_takes_the_norm_along(
    num_tokens: int, deferred: bool, spy: Spy, device: str
) -> None:
    moe = layer(device)
    hidden = torch.randn(num_tokens, 64, device=device)
    expected = moe(hidden)
    ours = TritonMoE(moe, moe.gate.config, deferred_finalize=deferred, skinny=products())
    torch.testing.assert_close(ours(hidden), expected, rtol=1e-4, atol=1e-4)
    assert (spy.by_finalize, spy.afterwards) == ([deferred], not deferred)


def test_known_bug_53327_is_seen_although_the_output_is_right(spy: Spy, device: str) -> None:
    moe = layer(device)
    hidden = torch.randn(2, 64, device=device)
    expected = moe(hidden)
    wrong = AskedTooEarly(moe, moe.gate.config, deferred_finalize=True, skinny=products())
    torch.testing.assert_close(wrong(hidden), expected, rtol=1e-4, atol=1e-4)
    assert spy.by_finalize == [False]


@pytest.mark.parametrize(("preset", "deferred"), [(V0_27_1, False), (MAIN_2026_09_13, True)])
def test_known_bug_53327_every_number_of_tokens_is_deferred(
    preset, deferred: bool, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """From the preset through the executor to each layer; the kernels themselves are replaced."""
    model = random_model(K3Config.micro(), seed=3).requires_grad_(False).to(device)
    execution = ExecutionConfig.from_preset(preset)
    executor = TorchExecutor(
        model, CacheConfig(num_blocks=9), 2, backend="triton", execution=execution
    )
    layers = list(executor.compute.moe_layers)
    assert len(layers) == 3
    calls: list[bool] = []

    def experts(x, *_, norm_weight=None, **__):
        calls.append(norm_weight is not None)
        return x

    monkeypatch.setattr(triton_moe, "moe_experts", experts)
    norms: list[bool] = []
    monkeypatch.setattr(triton_moe, "route", lambda logits, *_, **__: (logits, logits))
    monkeypatch.setattr(triton_moe, "situ_and_mul", lambda *_, **__: None)
    monkeypatch.setattr(triton_moe, "row_norm", lambda *_, **__: norms.append(True))
    for num_tokens in range(1, MOST_DEFERRED + 1):
        for moe in layers:
            moe(torch.zeros(num_tokens, 64, device=device))
    assert calls == [deferred] * (3 * MOST_DEFERRED)
    assert len(norms) == (0 if deferred else 3 * MOST_DEFERRED)
