"""KDA against flash-linear-attention's naive code and vLLM's decode kernel.

Both recorded in float32. The reference runs in float64, so what remains is the recording's own
rounding.
"""

import functools

import pytest
import torch
from golden_cases import Golden, error, load, names

from kimik3_lab.reference import kda

SEQUENCE = ("q", "k", "v", "g", "beta")
FLA = [name for name in names("fla_kda") if not name.startswith("gate")]
CHUNKED_BY_FLA = [name for name in FLA if load("fla_kda")[name].params["chunk_size"]]
DECODE = names("vllm_triton", "decode")
#: measured: 4e-7 in float64, 7e-7 when the reference runs in float32 too
ROUNDING = 2e-6


def fla_inputs(case: Golden, dtype=torch.float64):
    """Arguments of our functions; FLA scales q itself, ours are handed a scaled q."""
    q, *rest = case.given(*SEQUENCE, dtype=dtype)
    state = case.inputs.get("state")
    return [q * q.shape[-1] ** -0.5, *rest], None if state is None else state.to(dtype)


# -- flash-linear-attention ------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLA)
def test_recurrence_matches_fla(name):
    case = load("fla_kda")[name]
    inputs, state = fla_inputs(case)
    o, after = kda.recurrent(*inputs, state)
    assert error(o, case.outputs["o"]) < ROUNDING
    assert error(after, case.outputs["state"]) < ROUNDING


@pytest.mark.parametrize("chunk_size", [16, 24, 64])
@pytest.mark.parametrize("name", FLA)
def test_chunked_form_matches_fla_recurrence(name, chunk_size):
    case = load("fla_kda")[name]
    inputs, state = fla_inputs(case)
    o, after, _ = kda.chunked(*inputs, state, chunk_size)
    assert error(o, case.outputs["o"]) < ROUNDING
    assert error(after, case.outputs["state"]) < ROUNDING


@pytest.mark.parametrize("name", CHUNKED_BY_FLA)
def test_chunked_form_matches_fla_chunked_form(name):
    case = load("fla_kda")[name]
    inputs, state = fla_inputs(case)
    o, after, _ = kda.chunked(*inputs, state, case.params["chunk_size"])
    assert error(o, case.outputs["o_chunk"]) < ROUNDING
    assert error(after, case.outputs["state_chunk"]) < ROUNDING


@pytest.mark.parametrize("form", [kda.recurrent, kda.chunked])
@pytest.mark.parametrize("name", FLA)
def test_float32_is_as_good_as_the_recording(name, form):
    case = load("fla_kda")[name]
    inputs, state = fla_inputs(case, torch.float32)
    o, after, *_ = form(*inputs, state)
    assert error(o, case.outputs["o"]) < ROUNDING
    assert error(after, case.outputs["state"]) < ROUNDING


RECURRENCE_MISTAKES = {
    "q not scaled by 1/sqrt(K)": lambda q, k, v, g, beta: (q * k.shape[-1] ** 0.5, k, v, g, beta),
    "one decay for all channels": lambda q, k, v, g, beta: (
        (q, k, v, g.mean(-1, keepdim=True).expand_as(g), beta)
    ),
    "no decay": lambda q, k, v, g, beta: (q, k, v, torch.zeros_like(g), beta),
    "decay of the token before": lambda q, k, v, g, beta: (q, k, v, g.roll(1, 1), beta),
    "everything is written": lambda q, k, v, g, beta: (q, k, v, g, torch.ones_like(beta)),
    "decay rounded to bfloat16": lambda q, k, v, g, beta: (
        (q, k, v, g.exp().bfloat16().double().log(), beta)
    ),
}


@pytest.mark.parametrize("mistake", RECURRENCE_MISTAKES)
def test_fixture_catches_a_wrong_recurrence(mistake):
    case = load("fla_kda")["mixed_gate"]
    inputs, state = fla_inputs(case)
    o, _ = kda.recurrent(*RECURRENCE_MISTAKES[mistake](*inputs), state)
    assert error(o, case.outputs["o"]) > 100 * ROUNDING


@pytest.mark.parametrize("wrong", ["forgotten", "transposed"])
def test_fixture_catches_a_wrong_initial_state(wrong):
    case = load("fla_kda")["initial_state"]
    inputs, state = fla_inputs(case)
    o, _ = kda.recurrent(*inputs, None if wrong == "forgotten" else state.mT.contiguous())
    assert error(o, case.outputs["o"]) > 100 * ROUNDING


# -- the gate --------------------------------------------------------------------------------------


def run_gate(case: Golden, lower_bound):
    return kda.gate(*case.given("raw", "A_log", "dt_bias"), lower_bound)


@pytest.mark.parametrize("name", names("fla_kda", "gate"))
@pytest.mark.parametrize(("form", "lower_bound"), [("bounded", -5.0), ("softplus", None)])
def test_gate_matches_fla(name, form, lower_bound):
    case = load("fla_kda")[name]
    assert error(run_gate(case, lower_bound), case.outputs[form]) < 1e-6


@pytest.mark.parametrize("name", names("fla_kda", "gate"))
def test_gate_reads_one_rate_per_head_and_ignores_the_padding(name):
    case = load("fla_kda")[name]
    raw, rates, bias = case.given("raw", "A_log", "dt_bias")
    padded = torch.cat((rates, rates.new_zeros(13)))
    assert error(kda.gate(raw, padded, bias), case.outputs["bounded"]) < 1e-6


GATE_MISTAKES = {
    "softplus form clamped at the bound": lambda case: run_gate(case, None).clamp(min=-5.0),
    "softplus form": lambda case: run_gate(case, None),
    "bias forgotten": lambda case: kda.gate(
        *case.given("raw", "A_log"), torch.zeros_like(case.inputs["dt_bias"]).double()
    ),
    "rate not exponentiated": lambda case: kda.gate(
        case.given("raw")[0], case.given("A_log")[0].log(), case.given("dt_bias")[0]
    ),
    "rates of the heads reversed": lambda case: kda.gate(
        case.given("raw")[0], case.given("A_log")[0].flip(0), case.given("dt_bias")[0]
    ),
    "another bound": lambda case: run_gate(case, -4.0),
}


@pytest.mark.parametrize("name", names("fla_kda", "gate"))
@pytest.mark.parametrize("mistake", GATE_MISTAKES)
def test_fixture_catches_a_wrong_gate(mistake, name):
    case = load("fla_kda")[name]
    assert error(GATE_MISTAKES[mistake](case), case.outputs["bounded"]) > 0.01


# -- vLLM's decode kernel: raw projections in, the state after every token out ---------------------


def decode(case: Golden, form=kda.recurrent, *, norm=kda.l2norm, convert=kda.from_cache_layout):
    """Each sequence on its own: outputs of all tokens, and the state after each, V-major."""
    q, k, v, raw, raw_beta = case.given("q", "k", "v", "raw_g", "raw_beta")
    q, k = norm(q) * q.shape[-1] ** -0.5, norm(k)
    g = kda.gate(raw, *case.given("A_log", "dt_bias"), case.params["lower_bound"])
    beta = raw_beta.sigmoid()
    outputs, states, start = [], [], 0
    for n, length in enumerate(case.params["lengths"]):
        state = convert(case.given("state")[0][n : n + 1])
        rows = [x[:, start : start + length] for x in (q, k, v, g, beta)]
        if form is kda.recurrent:
            for t in range(length):
                o, state = kda.recurrent(*(x[:, t : t + 1] for x in rows), state)
                outputs.append(o)
                states.append(kda.to_cache_layout(state))
        else:
            o, _, at = kda.chunked(*rows, state, checkpoint_at=range(1, length + 1))
            outputs.append(o)
            states += [kda.to_cache_layout(at[t]) for t in range(1, length + 1)]
        start += length
    return torch.cat(outputs, 1), torch.cat(states)


@pytest.mark.parametrize("form", [kda.recurrent, kda.chunked])
@pytest.mark.parametrize("name", DECODE)
def test_every_state_matches_the_vllm_kernel(name, form):
    case = load("vllm_triton")[name]
    o, states = decode(case, form)
    assert error(o, case.outputs["o"]) < ROUNDING
    assert error(states, case.outputs["states"]) < ROUNDING


DECODE_MISTAKES = {
    "q and k not normalised": functools.partial(decode, norm=lambda x: x),
    "mean of squares in place of the sum": functools.partial(
        decode, norm=lambda x: kda.l2norm(x) * x.shape[-1] ** 0.5
    ),
    "state taken as key-major": functools.partial(decode, convert=lambda state: state),
}


@pytest.mark.parametrize("mistake", DECODE_MISTAKES)
def test_fixture_catches_a_wrong_decode_step(mistake):
    case = load("vllm_triton")["decode"]
    o, _ = DECODE_MISTAKES[mistake](case)
    assert error(o, case.outputs["o"]) > 100 * ROUNDING


# -- the norm after it -----------------------------------------------------------------------------


def norm_inputs(case: Golden):
    dtype = case.inputs["x"].dtype
    wide = torch.float64 if dtype == torch.float32 else dtype
    return *case.given("x", "gate", dtype=wide), case.inputs["weight"], case.params["eps"]


@pytest.mark.parametrize("name", names("vllm_native", "norm"))
def test_gated_norm_matches_vllm(name):
    case = load("vllm_native")[name]
    y = kda.gated_norm(*norm_inputs(case))
    assert error(y, case.outputs["y"]) < (2**-8 if y.dtype == torch.bfloat16 else 1e-6)


NORM_MISTAKES = {
    "SiLU gate": lambda x, gate, weight, eps: kda.gated_norm(x, gate, weight, eps) * gate,
    "gate before the norm": lambda x, gate, weight, eps: kda.rms_norm(
        x * gate.sigmoid(), weight, eps
    ),
    "eps 1e-6": lambda x, gate, weight, _: kda.gated_norm(x, gate, weight, 1e-6),
    "no weight": lambda x, gate, weight, eps: kda.gated_norm(x, gate, torch.ones_like(weight), eps),
}


@pytest.mark.parametrize("mistake", NORM_MISTAKES)
def test_fixture_catches_a_wrong_gated_norm(mistake):
    case = load("vllm_native")["norm_tiny_values"]
    assert error(NORM_MISTAKES[mistake](*norm_inputs(case)), case.outputs["y"]) > 0.01
