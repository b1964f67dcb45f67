"""The layer that is measured on GPUs, here in Triton's interpreter: real kernels, toy sizes."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="running kernels needs Triton")

from kimik3_lab.config import K3Config
from kimik3_lab.parallel.gpu_experts import check_experts, draw_routing
from kimik3_lab.parallel.gpu_layer import KDA_PARTS, PARTS, GpuLayer, LayerShape
from kimik3_lab.parallel.groups import Ranks

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
