"""KDA: gate, convolution, the recurrence against scalars, the chunked form against it."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from kimik3_lab.config import K3Config
from kimik3_lab.reference import kda
from kimik3_lab.reference.kda import KimiDeltaAttention
from kimik3_lab.reference.state import SequenceMixer, SequenceState

torch.set_num_threads(1)
F64 = torch.float64


def f64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def kda_inputs(length: int, *, batch=2, heads=2, keys=8, values=5, seed=0, gates="mixed"):
    """Inputs of the recurrence; ``gates`` names the regime of the log-decay."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=F64)

    q = kda.l2norm(normal(batch, length, heads, keys)) * keys**-0.5
    k = kda.l2norm(normal(batch, length, heads, keys))
    v = normal(batch, length, heads, values)
    logits = normal(batch, length, heads, keys) * 4
    g = {
        "mixed": -5 * torch.sigmoid(logits),
        "saturated": torch.full_like(logits, -5.0),
        "half": torch.full_like(logits, -2.5),
        "open": torch.full_like(logits, -1e-4),
        "none": torch.zeros_like(logits),
    }[gates]
    beta = torch.sigmoid(normal(batch, length, heads))
    return q, k, v, g, beta, normal(batch, heads, keys, values)


# -- gate ------------------------------------------------------------------------------------------


def test_gate_formula_reads_one_rate_per_head_and_ignores_padding() -> None:
    heads, keys = 2, 3
    raw = f64([[0.4, -1.0, 30.0], [-30.0, 0.0, 2.0]])
    bias = f64([0.1, 0.2, 0.3, -0.1, -0.2, -0.3])
    a_log = f64([0.5, 1.5, 99.0, -99.0])  # two heads, the rest is padding that must not be read
    for lower in (-5.0, -3.0):
        got = kda.gate(raw, a_log, bias, lower)
        for h in range(heads):
            for d in range(keys):
                x = math.exp(a_log[h]) * (raw[h, d] + bias[h * keys + d]).item()
                want = lower / (1 + math.exp(-x))
                assert got[h, d].item() == pytest.approx(want, rel=1e-13)


def test_gate_covers_its_range_and_is_no_clamped_softplus() -> None:
    raw = f64([[-40.0, 0.0, 40.0]])
    g = kda.gate(raw, torch.zeros(1), torch.zeros(3))
    torch.testing.assert_close(g, f64([[0.0, -2.5, -5.0]]), rtol=0, atol=1e-12)
    clamped = (-F.softplus(raw)).clamp(min=-5)
    assert (g - clamped).abs().max() > 1.5


def test_gate_without_bound_is_the_softplus_form() -> None:
    raw, rate = [[-50.0, -0.3, 3.0, 25.0]], 0.7
    got = kda.gate(f64(raw), f64([math.log(rate)]), f64([0.0, 0.1, 0.0, 0.0]), None)
    for d, x in enumerate([-50.0, -0.2, 3.0, 25.0]):
        assert got[0, d].item() == pytest.approx(-rate * math.log1p(math.exp(x)), rel=1e-13)


def test_gate_of_bfloat16_is_float32_and_takes_any_leading_dimensions() -> None:
    raw = torch.randn(2, 7, 3, 4).bfloat16()
    bias = torch.randn(3, 4)
    g = kda.gate(raw, torch.zeros(3), bias)
    assert g.dtype is torch.float32 and g.shape == raw.shape
    assert torch.equal(g, kda.gate(raw, torch.zeros(3), bias.flatten()))
    torch.testing.assert_close(g, -5 * torch.sigmoid(raw.float() + bias))


def test_gate_refuses_too_few_rates() -> None:
    with pytest.raises(ValueError, match="got 2 for 3 heads"):
        kda.gate(torch.zeros(3, 4), torch.zeros(2), torch.zeros(12))


# -- convolution, norms, layouts -------------------------------------------------------------------


def test_conv_against_scalars() -> None:
    torch.manual_seed(0)
    u, weight = torch.randn(6, 3, dtype=F64), torch.randn(3, 4, dtype=F64)
    y, window = kda.short_conv(u, weight)
    for t in range(6):
        for c in range(3):
            x = sum(weight[c, j] * u[t - 3 + j, c] for j in range(4) if t - 3 + j >= 0).item()
            assert y[t, c].item() == pytest.approx(x / (1 + math.exp(-x)), rel=1e-13)
    assert torch.equal(window, u[3:].T)
    assert window.is_contiguous()


@pytest.mark.parametrize("cut", range(8))
def test_conv_streams_across_any_cut(cut: int) -> None:
    torch.manual_seed(1)
    u, weight = torch.randn(2, 7, 3, dtype=F64), torch.randn(3, 1, 4, dtype=F64)
    whole, last = kda.short_conv(u, weight)
    first, window = kda.short_conv(u[:, :cut], weight)
    second, window = kda.short_conv(u[:, cut:], weight, window)
    torch.testing.assert_close(torch.cat((first, second), 1), whole, rtol=1e-15, atol=1e-15)
    assert torch.equal(window, last)
    assert torch.equal(whole, kda.short_conv(u, weight[:, 0])[0])


def test_conv_window_holds_raw_inputs_token_by_token() -> None:
    u, weight = torch.arange(1.0, 6.0).unsqueeze(-1), torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
    window = torch.tensor([[7.0, 8.0, 9.0]])
    for t in range(5):
        y, window = kda.short_conv(u[t : t + 1], weight, window)
        past = [7.0, 8.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0][t : t + 4]
        x = sum(w * p for w, p in zip([1, 10, 100, 1000], past, strict=True))
        assert y.item() == pytest.approx(x)  # SiLU of a large number is the number
        assert window.tolist() == [past[1:]]


def test_conv_of_bfloat16_sums_in_float32() -> None:
    u = torch.tensor([[256.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)
    y, window = kda.short_conv(u, torch.ones(1, 4))
    assert y[-1].item() == 260.0  # 256 + 1 is 256 in bfloat16; 259 rounds to 260
    assert y.dtype is window.dtype is torch.bfloat16


def test_l2norm_takes_the_sum_with_eps_inside_the_root() -> None:
    x = [2e-3, -1e-3]
    want = [value / math.sqrt(5e-6 + 1e-6) for value in x]
    torch.testing.assert_close(kda.l2norm(f64(x)), f64(want), rtol=1e-14, atol=0)
    assert kda.l2norm(torch.ones(2).bfloat16()).dtype is torch.float32


@pytest.mark.parametrize("flat", [True, False])
def test_gated_norm_is_norm_then_sigmoid(flat: bool) -> None:
    o, gate, weight = (
        f64([[3.0, -1.0], [0.1, 0.2]]),
        f64([[0.5, -2.0], [1.0, 9.0]]),
        f64([2.0, 7.0]),
    )
    got = kda.gated_norm(o, gate.flatten() if flat else gate, weight, eps=0.5)
    for h in range(2):
        root = math.sqrt((o[h] ** 2).mean().item() + 0.5)
        for d in range(2):
            want = weight[d] * o[h, d] / root / (1 + math.exp(-gate[h, d]))
            assert got[h, d].item() == pytest.approx(want.item(), rel=1e-13)


def test_layouts_are_each_others_inverse() -> None:
    state = torch.randn(2, 3, 8, 5)
    cached = kda.to_cache_layout(state)
    assert cached.shape == (2, 3, 5, 8) and cached.is_contiguous()
    assert cached[1, 2, 4, 7] == state[1, 2, 7, 4]
    back = kda.from_cache_layout(cached)
    assert torch.equal(back, state) and back.is_contiguous()


# -- recurrence ------------------------------------------------------------------------------------


def test_recurrence_against_scalars() -> None:
    q, k, v, g, beta, state = kda_inputs(4, keys=3, values=2)
    before = state.clone()
    o, after = kda.recurrent(q, k, v, g, beta, state)
    assert torch.equal(state, before), "the given state was changed in place"
    for b in range(2):
        for h in range(2):
            s = before[b, h].tolist()
            for t in range(4):
                s = [[math.exp(g[b, t, h, i]) * x for x in row] for i, row in enumerate(s)]
                for j in range(2):
                    error = v[b, t, h, j].item() - sum(
                        s[i][j] * k[b, t, h, i].item() for i in range(3)
                    )
                    for i in range(3):
                        s[i][j] += k[b, t, h, i].item() * beta[b, t, h].item() * error
                    want = sum(s[i][j] * q[b, t, h, i].item() for i in range(3))
                    assert o[b, t, h, j].item() == pytest.approx(want, rel=1e-12, abs=1e-14)
            torch.testing.assert_close(after[b, h], f64(s), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("form", [kda.recurrent, kda.chunked])
def test_no_state_is_the_zero_state_and_no_token_changes_nothing(form) -> None:
    q, k, v, g, beta, state = kda_inputs(5)
    zero = torch.zeros_like(state)
    for got, want in zip(form(q, k, v, g, beta)[:2], form(q, k, v, g, beta, zero)[:2], strict=True):
        assert torch.equal(got, want)
    o, after = form(*(x[:, :0] for x in (q, k, v, g, beta)), state)[:2]
    assert o.shape == (2, 0, 2, 5) and torch.equal(after, state)


@pytest.mark.parametrize("form", [kda.recurrent, kda.chunked])
def test_state_is_float32_and_outputs_keep_the_type_of_v(form) -> None:
    q, k, v, g, beta, state = kda_inputs(3)
    o, after = form(q.bfloat16(), k.bfloat16(), v.bfloat16(), g.float(), beta.float())[:2]
    assert (o.dtype, after.dtype) == (torch.bfloat16, torch.float32)
    # A float32 state must not be rounded to the type of the activations on the way in.
    kept = form(*(x[:, :0].bfloat16() for x in (q, k, v, g, beta)), state.float())[1]
    assert torch.equal(kept, state.float())


@pytest.mark.parametrize("form", [kda.recurrent, kda.chunked])
def test_state_in_cache_layout_is_refused(form) -> None:
    q, k, v, g, beta, state = kda_inputs(3)
    with pytest.raises(ValueError, match="from_cache_layout"):
        form(q, k, v, g, beta, kda.to_cache_layout(state))


# -- chunked ---------------------------------------------------------------------------------------


def assert_same(got, want, tolerance: float) -> None:
    for name, x, y in zip(("o", "state"), got, want, strict=True):
        error = (x.double() - y.double()).abs().max() / y.abs().max()
        assert error < tolerance, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 63, 64, 65, 128, 150])
@pytest.mark.parametrize("gates", ["mixed", "saturated", "half", "open", "none"])
def test_chunked_equals_recurrent(length: int, gates: str) -> None:
    args = kda_inputs(length, seed=length, gates=gates)
    assert_same(kda.chunked(*args)[:2], kda.recurrent(*args), 1e-12)


@pytest.mark.parametrize("chunk_size", [1, 2, 15, 16, 24, 40, 200])
def test_chunk_size_changes_nothing(chunk_size: int) -> None:
    args = kda_inputs(70, batch=1, seed=chunk_size)
    assert_same(kda.chunked(*args, chunk_size)[:2], kda.recurrent(*args), 1e-12)


@pytest.mark.parametrize("cut", [1, 16, 37, 64, 99])
def test_hand_over_between_forms(cut: int) -> None:
    q, k, v, g, beta, state = kda_inputs(100, seed=cut)
    whole = kda.recurrent(q, k, v, g, beta, state)
    first = [x[:, :cut] for x in (q, k, v, g, beta)]
    rest = [x[:, cut:] for x in (q, k, v, g, beta)]
    for one, other in ((kda.chunked, kda.recurrent), (kda.recurrent, kda.chunked)):
        o1, middle = one(*first, state)[:2]
        o2, last = other(*rest, middle)[:2]
        assert_same((torch.cat((o1, o2), 1), last), whole, 1e-12)


def test_checkpoints_are_the_states_at_their_positions() -> None:
    q, k, v, g, beta, state = kda_inputs(100)
    wanted = [64, 0, 1, 37, 100, 16, 65, 63]
    before = state.clone()
    o, after, checkpoints = kda.chunked(q, k, v, g, beta, state, checkpoint_at=wanted)
    assert sorted(checkpoints) == sorted(wanted)
    for position, got in checkpoints.items():
        parts = [x[:, :position] for x in (q, k, v, g, beta)]
        torch.testing.assert_close(
            got, kda.recurrent(*parts, before)[1], rtol=1e-12, atol=1e-13, msg=str(position)
        )
    plain = kda.chunked(q, k, v, g, beta, before)
    assert torch.equal(o, plain[0]) and torch.equal(after, plain[1]) and not plain[2]


def test_refusals() -> None:
    args = kda_inputs(5)
    for position in (-1, 6):
        with pytest.raises(ValueError, match=f"after {position} of 5 tokens"):
            kda.chunked(*args, checkpoint_at=[position])
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        kda.chunked(*args, 0)


def correlated(length: int, gates: str) -> list[torch.Tensor]:
    """Float32 inputs as a real model makes them: keys that look alike, gates at their ends."""
    generator = torch.Generator().manual_seed(7)
    shape = (1, length, 2, 32)
    shared = torch.randn(1, 1, 2, 32, generator=generator)
    k = kda.l2norm(shared + 0.1 * torch.randn(shape, generator=generator))
    q = kda.l2norm(shared + torch.randn(shape, generator=generator)) * 32**-0.5
    v = torch.randn(shape, generator=generator)
    beta = torch.rand(1, length, 2, generator=generator) * 0.1 + 0.9
    g = torch.full(shape, -1e-4)
    if gates == "saturated":
        g.fill_(-5.0)
    elif gates == "late":  # saturated for most of a chunk, then open: a long sum, then no decay
        g[:, torch.arange(length) % 64 < 48] = -5.0
    elif gates == "split":  # half of the channels saturated, half open
        g[..., ::2] = -5.0
    return [q, k, v, g, beta]


@pytest.mark.parametrize("gates", ["saturated", "open", "late", "split"])
def test_float32_is_stable_for_correlated_keys(gates: str) -> None:
    args = correlated(200, gates)
    exact = kda.recurrent(*(x.double() for x in args))
    assert_same(kda.chunked(*args)[:2], exact, 1e-5)
    assert_same(kda.recurrent(*args), exact, 1e-5)


def test_float32_keeps_a_slow_decay_after_saturated_gates() -> None:
    # After 48 gates of -5 the running sum is -240, where float32 has steps of 1.5e-5: too coarse
    # for the 15 gates of -0.0131 that follow, by which the one value written must decay.
    g = torch.full((1, 64, 1, 1), -0.0131)
    g[:, :48] = -5.0
    beta = torch.zeros(1, 64, 1)
    beta[:, 48] = 1.0
    one = torch.ones(1, 64, 1, 1)
    o, state, checkpoints = kda.chunked(one, one, one, g, beta, checkpoint_at=[56])
    want = math.exp(15 * -0.0131)
    assert state.item() == pytest.approx(want, rel=1e-6)
    assert o[0, -1].item() == pytest.approx(want, rel=1e-6)
    assert checkpoints[56].item() == pytest.approx(math.exp(7 * -0.0131), rel=1e-6)


def test_both_forms_have_the_same_finite_gradients() -> None:
    args = list(kda_inputs(20, batch=1, seed=3))
    args[3] = args[3] * 20  # the softplus gate has no bound: exponents of 1000 and more
    gradients = []
    for form in (kda.recurrent, kda.chunked):
        leaves = [x.clone().requires_grad_() for x in args]
        o, state = form(*leaves)[:2]
        (o.square().sum() + state.square().sum()).backward()
        gradients.append([leaf.grad for leaf in leaves])
    for want, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_a_later_gate_does_not_reach_an_earlier_output() -> None:
    q, k, v, g, beta, state = kda_inputs(40)
    changed = g.clone()
    changed[:, 20:] = -5.0
    same = kda.chunked(q, k, v, g, beta, state)[0][:, :20]
    assert torch.equal(kda.chunked(q, k, v, changed, beta, state)[0][:, :20], same)


# -- layer -----------------------------------------------------------------------------------------


class Recorder(SequenceMixer):
    def conv(self, layer_id, u, weight):
        self.u, self.weight = u, weight
        self.y = super().conv(layer_id, u, weight)
        return self.y

    def kda(self, layer_id, q, k, v, g, beta):
        self.seen = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        self.o = super().kda(layer_id, q, k, v, g, beta)
        return self.o


def test_layer_hands_the_mixer_what_the_contract_says() -> None:
    config = K3Config.micro()
    torch.manual_seed(0)
    layer = KimiDeltaAttention(config, 1, dtype=F64)
    for parameter in (layer.A_log, layer.dt_bias, layer.o_norm.weight):
        parameter.data.normal_()
    recorder = Recorder(SequenceState.empty(config, dtype=F64))
    x = torch.randn(5, config.hidden_size, dtype=F64)
    with torch.no_grad():
        y = layer(x, recorder)
    heads, width = 2, 16
    projections = [getattr(layer, f"{name}_proj").weight for name in "qkv"]
    torch.testing.assert_close(recorder.u, x @ torch.cat(projections).T)
    taps = [getattr(layer, f"{name}_conv1d").weight[:, 0] for name in "qkv"]
    assert torch.equal(recorder.weight, torch.cat(taps))
    q, k, v = recorder.y.view(5, 3, heads, width).unbind(1)
    seen = recorder.seen
    torch.testing.assert_close(seen["q"], kda.l2norm(q) / 4)
    torch.testing.assert_close(seen["k"], kda.l2norm(k))
    assert torch.equal(seen["v"], v)
    raw = (x @ layer.f_a_proj.weight.T @ layer.f_b_proj.weight.T).view(5, heads, width)
    torch.testing.assert_close(seen["g"], kda.gate(raw, layer.A_log, layer.dt_bias))
    torch.testing.assert_close(seen["beta"], (x @ layer.b_proj.weight.T).sigmoid())
    gate = x @ layer.g_proj.weight.T
    normed = kda.gated_norm(recorder.o, gate, layer.o_norm.weight, config.rms_norm_eps)
    torch.testing.assert_close(y, normed.flatten(1) @ layer.o_proj.weight.T)


def test_layer_in_bfloat16_keeps_decay_and_small_vectors_in_float32() -> None:
    config = K3Config.micro()
    layer = KimiDeltaAttention(config, 0, dtype=torch.bfloat16)
    wide = {name for name, p in layer.named_parameters() if p.dtype is torch.float32}
    assert wide == {
        "A_log", "dt_bias", "o_norm.weight",
        "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight",
    }  # fmt: skip
    recorder = Recorder(SequenceState.empty(config, dtype=torch.bfloat16))
    with torch.no_grad():
        y = layer(torch.randn(3, config.hidden_size).bfloat16(), recorder)
    assert y.dtype is torch.bfloat16
    assert recorder.seen["g"].dtype is recorder.seen["beta"].dtype is torch.float32
    assert recorder.state.recurrent[0].dtype is torch.float32
    assert recorder.state.conv[0].dtype is torch.bfloat16
