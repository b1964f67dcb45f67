"""The layer that is measured on GPUs, here in Triton's interpreter: real kernels, toy sizes."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="running kernels needs Triton")

from kimik3_lab.config import K3Config
from kimik3_lab.parallel.gpu_experts import (
    check_experts,
    draw_mxfp4,
    draw_routing,
    split_mxfp4,
)
from kimik3_lab.parallel.gpu_layer import KDA_PARTS, PARTS, GpuLayer
from kimik3_lab.parallel.groups import Ranks
from kimik3_lab.parallel.launch import run_ranks
from kimik3_lab.parallel.layer_shape import LayerShape
from kimik3_lab.reference.moe import routed_sum, situ
from kimik3_lab.reference.mxfp4 import dequantize

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="tensors on the CPU want the interpreter"
)
CPU = torch.device("cpu")
TOY = dataclasses.replace(K3Config.micro(), moe_intermediate_size=64)


@dataclasses.dataclass(frozen=True)
class Recorder(Ranks):
    """A rank whose partner is missing: what it would add up is kept."""

    parts: list[Tensor] = dataclasses.field(default_factory=list, compare=False)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.parts.append(x.clone())
        return x


def test_slices_and_whole_experts_add_up_to_the_same() -> None:
    parts = []
    for rank in range(2):
        ranks = Recorder(rank, 2)
        errors = check_experts(TOY, ranks, 2, CPU, torch.float32)
        assert min(errors.values()) > 0.05  # a part is not the sum
        parts.append(ranks.parts)
    (sliced, whole), (other_sliced, other_whole) = parts
    torch.testing.assert_close(sliced + other_sliced, whole + other_whole, rtol=1e-4, atol=1e-4)


def test_one_rank_has_nothing_to_exchange_and_two_have_three_sums() -> None:
    shape = LayerShape.of(TOY, "tp", Ranks(0, 2))
    layer = GpuLayer(shape, 1, device=CPU, dtype=torch.float32)
    routing = draw_routing(1, TOY, "uniform", torch.Generator().manual_seed(0))
    for name in PARTS:
        layer.part(name, routing)
    with pytest.raises(ValueError, match="no part 'head'"):
        layer.part("head", routing)
    two = Recorder(0, 2)
    out = layer.whole(two, routing)
    assert out.shape == (1, TOY.hidden_size)
    assert bool(out.isfinite().all())
    # Attention, the latent sum, and the shared experts.
    widths = [part.shape[-1] for part in two.parts]
    assert widths == [TOY.hidden_size, TOY.routed_expert_hidden_size, TOY.hidden_size]


class Prompt(GpuLayer):
    """Few tokens that are a prompt all the same."""

    prefill_from = 1


def test_the_parts_of_kda_are_parts_of_it() -> None:
    shape = LayerShape.of(TOY, "tp", Ranks(0, 2))
    routing = draw_routing(2, TOY, "uniform", torch.Generator().manual_seed(0))
    layer = Prompt(shape, 2, device=CPU, dtype=torch.float32)
    products, mixed = (layer.part(name, routing) for name in KDA_PARTS)
    assert isinstance(products, Tensor)
    assert isinstance(mixed, Tensor)
    assert products.shape == (2, TOY.hidden_size)
    assert mixed.shape == (2, 3 * layer.width)
    torch.testing.assert_close(
        mixed, layer._convolve(layer._project(layer.hidden)[0][:, : 3 * layer.width])
    )
    step = GpuLayer(shape, 2, device=CPU, dtype=torch.float32, weights=layer)
    torch.testing.assert_close(step.part("kda_products", routing), products)
    with pytest.raises(ValueError, match="no part 'kda_convolution'"):
        step.part("kda_convolution", routing)  # a step that decodes has none of its own


def _layers(ranks: Ranks) -> list[dict[str, float]]:
    """On a rank: a step of one request, then a prompt of two tokens."""
    import triton.runtime.interpreter  # noqa: F401 - so that the next line finds it

    _quick_interpreter()
    from kimik3_lab.parallel.check_layer import check_layer

    return [
        check_layer(TOY, ranks, 1, CPU, torch.float32),
        check_layer(TOY, ranks, 2, CPU, torch.float32, prompt=True),
    ]


def _quick_interpreter() -> None:
    """What the settings of all tests do before a test; a rank does not read them."""
    path = Path(__file__).parents[2] / "conftest.py"
    spec = importlib.util.spec_from_file_location("settings_of_all_tests", path)
    assert spec is not None
    assert spec.loader is not None
    settings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(settings)
    settings.pytest_runtest_setup()


def test_a_layer_of_two_ranks_is_the_layer_of_one() -> None:
    """Both layouts, both forms of KDA, and the shared experts beside an exchange."""
    names = {f"{kind} {what}" for kind in ("tp", "ep") for what in ("moe", "moe overlap", "whole")}
    for result in run_ranks(_layers, 2):
        for errors in result:
            assert set(errors) == names
            assert max(errors.values()) < 1e-5, errors
            for kind in ("tp", "ep"):  # the same kernels in another order
                assert errors[f"{kind} moe overlap"] == errors[f"{kind} moe"]


class Stream(torch.cpu.Stream):
    """A stream that notes what waits for it, and what runs on it."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def wait_stream(self, stream: Stream) -> None:
        self.events.append(f"{self.name} waits for {stream.name}")


def test_shared_experts_have_a_stream_that_waits_and_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU a wait left out is a race that mostly goes well: here it shows."""
    events: list[str] = []
    here = Stream("main", events)
    monkeypatch.setattr(torch.cpu, "current_stream", lambda: here)

    class Noting(Ranks):
        def all_reduce(self, x: Tensor) -> Tensor:
            events.append(f"sum of {x.shape[-1]}")
            return x

    layer = GpuLayer(LayerShape.of(TOY, "tp", Ranks(0, 2)), 1, device=CPU, dtype=torch.float32)
    layer.side = Stream("side", events)
    routing = draw_routing(1, TOY, "uniform", torch.Generator().manual_seed(0))
    shared = layer.shared

    def noting(hidden: Tensor) -> Tensor:
        events.append("shared")
        return shared(hidden)

    monkeypatch.setattr(layer, "shared", noting)
    plain = layer.moe(layer.hidden, Noting(0, 2), routing)
    latent, hidden = TOY.routed_expert_hidden_size, TOY.hidden_size
    assert events == [f"sum of {latent}", "shared", f"sum of {hidden}"]
    events.clear()
    beside = layer.moe(layer.hidden, Noting(0, 2), routing, overlap=True)
    assert torch.equal(beside, plain)
    assert events == [
        "side waits for main", "shared", f"sum of {latent}", "main waits for side",
        f"sum of {hidden}",
    ]  # fmt: skip


def test_the_parts_of_one_rank_are_the_references() -> None:
    """Kernels and wiring of a layer that is timed, against plain PyTorch with the same weights."""
    layer = GpuLayer(LayerShape.of(TOY, "tp", Ranks()), 3, device=CPU, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    raw = draw_mxfp4(TOY, CPU, generator)
    layer.experts = split_mxfp4(raw, "tp", Ranks())
    gate_up, down = dequantize(*raw[:2]), dequantize(*raw[2:])
    routing = draw_routing(3, TOY, "uniform", generator)
    experts = [
        lambda z, e=e: situ(*(z @ gate_up[e].mT).chunk(2, -1)) @ down[e].mT
        for e in range(TOY.num_experts)
    ]
    summed = routed_sum(layer.latent, routing, experts)
    torch.testing.assert_close(layer.part("experts", routing), summed, rtol=1e-4, atol=1e-4)
    x = layer.hidden
    shared = situ(*(x @ layer.shared_in.mT).chunk(2, -1)) @ layer.shared_out.mT
    torch.testing.assert_close(layer.part("shared", routing), shared, rtol=1e-4, atol=1e-4)
    total = routed_sum(x @ layer.down.mT, routing, experts)
    normed = total * (total.square().mean(-1, keepdim=True) + TOY.rms_norm_eps).rsqrt()
    torch.testing.assert_close(
        layer.moe(x, Ranks(), routing), normed @ layer.up.mT + shared, rtol=1e-4, atol=1e-4
    )


def test_a_load_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="'uniform' or 'skewed', got 'skew'"):
        draw_routing(1, TOY, "skew", torch.Generator())
