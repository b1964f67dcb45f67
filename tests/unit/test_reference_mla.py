"""MLA: both forms against a loop, the cached prefix, the 64 unrotated values, the gate."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kimik3_lab.config import K3Config
from kimik3_lab.reference import mla
from kimik3_lab.reference.mla import MultiHeadLatentAttention
from kimik3_lab.reference.state import SequenceMixer, SequenceState

torch.set_num_threads(1)
F64 = torch.float64
HEADS, NOPE, ROPE, VALUE, RANK = 3, 5, 2, 4, 6


def inputs(count: int, length: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=F64)

    q = normal(count, HEADS, NOPE + ROPE)
    return q, normal(length, RANK + ROPE), normal(HEADS * (NOPE + VALUE), RANK)


def loop(q, latent, kv_b):
    """One query, one head, one key at a time."""
    count, length = len(q), len(latent)
    out = torch.zeros(count, HEADS, VALUE, dtype=F64)
    for h in range(HEADS):
        up = kv_b[h * (NOPE + VALUE) : (h + 1) * (NOPE + VALUE)]
        for n in range(count):
            scores, values = [], []
            for row in latent[: length - count + n + 1]:
                key = torch.cat((up[:NOPE] @ row[:RANK], row[RANK:]))
                scores.append((key @ q[n, h]) / (NOPE + ROPE) ** 0.5)
                values.append(up[NOPE:] @ row[:RANK])
            out[n, h] = torch.stack(scores).softmax(0) @ torch.stack(values)
    return out


@pytest.mark.parametrize("form", [mla.expanded, mla.absorbed])
@pytest.mark.parametrize(("count", "length"), [(1, 1), (1, 7), (6, 6), (4, 9)])
def test_form_against_a_loop(form, count: int, length: int) -> None:
    args = inputs(count, length, seed=count + length)
    torch.testing.assert_close(form(*args), loop(*args), rtol=1e-12, atol=1e-12)


def test_forms_agree_at_released_head_shape() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(5, 2, 192, generator=generator, dtype=F64)
    latent = torch.randn(40, 576, generator=generator, dtype=F64)
    kv_b = torch.randn(2 * 256, 512, generator=generator, dtype=F64) * 512**-0.5
    one, other = mla.expanded(q, latent, kv_b), mla.absorbed(q, latent, kv_b)
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", [mla.expanded, mla.absorbed])
def test_scale_and_causality_can_be_changed(form) -> None:
    q, latent, kv_b = inputs(4, 6)
    torch.testing.assert_close(
        form(q, latent, kv_b, scale=0.25), loop(q * 0.25 * (NOPE + ROPE) ** 0.5, latent, kv_b)
    )
    alone = torch.cat([loop(row.unsqueeze(0), latent, kv_b) for row in q])  # each sees all rows
    torch.testing.assert_close(form(q, latent, kv_b, causal=False), alone)


def test_later_rows_do_not_matter() -> None:
    q, latent, kv_b = inputs(5, 5)
    changed = latent.clone()
    changed[3:] = 1e6
    for form in (mla.expanded, mla.absorbed):
        assert torch.equal(form(q, latent, kv_b)[:3], form(q, changed, kv_b)[:3])


def test_bfloat16_scores_are_float32() -> None:
    q, latent, kv_b = (x.bfloat16() for x in inputs(4, 30))
    exact = loop(q.double(), latent.double(), kv_b.double())
    for form in (mla.expanded, mla.absorbed):
        got = form(q, latent, kv_b)
        assert got.dtype is torch.bfloat16
        torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-5)


def test_refusals() -> None:
    q, latent, kv_b = inputs(4, 3)
    with pytest.raises(ValueError, match="4 queries need at least as many cached rows, got 3"):
        mla.expanded(q, latent, kv_b)
    with pytest.raises(ValueError, match="do not fit"):
        mla.absorbed(q[:1], latent, kv_b[:-1])
    with pytest.raises(ValueError, match="do not fit"):
        mla.absorbed(q[:1], latent[:, :5], kv_b)


class Recorder(SequenceMixer):
    def mla(self, layer_id, q, latent, kv_b, config):
        self.seen = (layer_id, q, latent)
        self.o = super().mla(layer_id, q, latent, kv_b, config)
        return self.o


def layer_and_input(**changes):
    config = dataclasses.replace(K3Config.micro(), **changes)
    torch.manual_seed(0)
    layer = MultiHeadLatentAttention(config, 3, dtype=F64)
    layer.kv_a_layernorm.weight.data.uniform_(0.5, 2.0)
    layer.q_a_layernorm.weight.data.uniform_(0.5, 2.0)
    return layer, torch.randn(5, config.hidden_size, dtype=F64), config


def test_layer_projects_norms_and_gates() -> None:
    layer, x, config = layer_and_input(mla_norm_eps=0.3)
    recorder = Recorder(SequenceState.empty(config, dtype=F64))
    with torch.no_grad():
        y = layer(x, recorder)
        layer_id, q, latent = recorder.seen

        def norm(rows, weight):
            return rows / (rows.square().mean(-1, keepdim=True) + 0.3).sqrt() * weight

        row = x @ layer.kv_a_proj_with_mqa.weight.T
        rank = config.kv_lora_rank
        normed = norm(row[:, :rank], layer.kv_a_layernorm.weight)
        torch.testing.assert_close(latent, torch.cat((normed, row[:, rank:]), -1))
        want_q = norm(x @ layer.q_a_proj.weight.T, layer.q_a_layernorm.weight)
        want_q = want_q @ layer.q_b_proj.weight.T
        torch.testing.assert_close(q.flatten(-2), want_q)
        gate = (x @ layer.g_proj.weight.T).sigmoid()
        torch.testing.assert_close(y, (recorder.o.flatten(-2) * gate) @ layer.o_proj.weight.T)
    assert layer_id == 3
    assert recorder.state.latent[3].shape == (5, config.mla_cache_dim)


def test_eps_of_the_latent_norms_is_its_own_knob() -> None:
    outputs = []
    for eps in (1e-5, 1e-1):
        layer, x, config = layer_and_input(mla_norm_eps=eps)
        with torch.no_grad():
            outputs.append(layer(x, SequenceMixer(SequenceState.empty(config, dtype=F64))))
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3
