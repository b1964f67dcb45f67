"""MXFP4 against compressed-tensors, whose format the released checkpoint uses: bit for bit."""

import pytest
import torch
from golden_cases import load, names

from kimik3_lab.reference import mxfp4

FIXTURE = "compressed_tensors_fp4"
MATRICES = names(FIXTURE, "matrix")
TO_PACK = ["weights", "weights_large", "ties"]
ONE = 127  # the scale byte of 1.0


def same_bits(a, b):
    """Equal, and of equal sign where zero."""
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


def unit_scale(packed):
    """Scales of 1.0 for every group of ``packed``."""
    groups = -(-2 * packed.shape[1] // 32)
    return torch.full((len(packed), groups), ONE, dtype=torch.uint8)


def test_every_byte_decodes_to_the_recorded_pair():
    case = load(FIXTURE)["every_byte"]
    packed = case.inputs["packed"]
    assert packed.flatten().tolist() == list(range(256))
    assert same_bits(mxfp4.dequantize(packed, unit_scale(packed)), case.outputs["weight"])


@pytest.mark.parametrize("name", MATRICES)
def test_whole_groups_decode_to_the_recorded_values(name):
    case = load(FIXTURE)[name]
    weight = mxfp4.dequantize(case.inputs["packed"], case.inputs["scale"])
    assert same_bits(weight, case.outputs["weight"].float())


@pytest.mark.parametrize("name", TO_PACK)
def test_quantize_gives_the_recorded_bytes(name):
    case = load(FIXTURE)[name]
    packed, scale = mxfp4.quantize(case.inputs["weight"])
    assert torch.equal(scale, case.outputs["scale"])
    assert torch.equal(packed, case.outputs["packed"])


MISTAKES = {
    "high nibble first": lambda packed, scale: mxfp4.dequantize(
        (packed << 4) | (packed >> 4), scale
    ),
    "scale bias 126": lambda packed, scale: mxfp4.dequantize(packed, scale + 1),
    "scale as e4m3": lambda packed, scale: (
        mxfp4.dequantize(packed, torch.full_like(scale, ONE))
        * scale.view(torch.float8_e4m3fn).float().repeat_interleave(32, -1)
    ),
    "groups along the output dimension": lambda packed, scale: mxfp4.dequantize(
        packed, scale.flatten().view(scale.shape[1], -1).T.contiguous()
    ),
    "sign ignored": lambda packed, scale: mxfp4.dequantize(packed & 0x77, scale),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_fixture_catches_a_wrong_decoder(mistake):
    case = load(FIXTURE)["matrix"]
    wrong = MISTAKES[mistake](case.inputs["packed"], case.inputs["scale"])
    assert not torch.equal(wrong, case.outputs["weight"].float())


def test_fixture_catches_ties_rounded_away_from_zero():
    case = load(FIXTURE)["ties"]
    weight = case.inputs["weight"]
    packed, _ = mxfp4.quantize(weight + weight.sign() * 1e-6)
    assert not torch.equal(packed, case.outputs["packed"])
