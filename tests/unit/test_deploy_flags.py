"""Options of vLLM's releases: recorded whole, and held against commands."""

from __future__ import annotations

import json
import shlex

import pytest

from kimik3_lab.deploy.flags import check_command, load_release, releases
from kimik3_lab.paths import data_dir

MODEL = "moonshotai/Kimi-K3"
#: The command of the vLLM blog post of 2026-09-13, as it was printed.
PUBLISHED = shlex.split(
    f"{MODEL} --trust-remote-code --tensor-parallel-size 8 --load-format fastsafetensors "
    "--gpu-memory-utilization 0.9 --reasoning-parser kimi_k3 --enable-auto-tool-choice "
    "--tool-call-parser kimi_k3 --host 0.0.0.0 --port 30000 --max-model-len auto "
    "--no-enable-prefix-caching --speculative-config "
    '\'{"model":"RedHatAI/Kimi-K3-speculator.dspark","method":"dspark","num_speculative_tokens":8,'
    '"draft_sample_method":"probabilistic","rejection_sample_method":"standard"}\''
)


def problems(*arguments: str, version: str = "0.33.0", **environment: str) -> list[str]:
    return [str(problem) for problem in check_command(version, [MODEL, *arguments], environment)]


def test_every_release_between_the_two_ends_was_recorded() -> None:
    assert releases() == ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")


@pytest.mark.parametrize("version", releases())
def test_a_recording_is_whole(version: str) -> None:
    release = load_release(version)
    assert len(release.flags) > 280 and len(release.environment) > 280
    for name in ("--tensor-parallel-size", "-tp", "--scheduler-cls", "--speculative-config"):
        assert name in release
    assert "num_speculative_tokens" in release.json_fields["--speculative-config"]
    body = json.loads((data_dir() / "deploy" / "vllm_flags" / f"{version}.json").read_text())
    assert body["vllm"] == version and version in body["wheel"] and len(body["sha256"]) == 64


@pytest.mark.parametrize("version", releases())
def test_every_release_takes_the_published_command(version: str) -> None:
    assert check_command(version, PUBLISHED) == []


@pytest.mark.parametrize(
    ("flag", "first"),
    [
        ("--prefix-cache-retention-interval", "0.29.0"),
        ("--kda-decode-backend", "0.30.0"),
        ("--max-num-active-seqs", "0.31.0"),
    ],
)
def test_an_option_that_came_later_is_named_with_its_release(flag: str, first: str) -> None:
    known = releases()
    for version in known:
        said = problems(flag, "auto" if "backend" in flag else "1", version=version)
        if known.index(version) < known.index(first):
            assert said == [
                f"{flag}: vLLM {version} has no such option ({first} and later have it)"
            ]
        else:
            assert said == []


def test_a_variable_that_has_gone_is_named_with_its_last_release() -> None:
    variable = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"
    assert problems(version="0.29.0", **{variable: "0"}) == []
    (said,) = problems(version="0.33.0", **{variable: "0"})
    assert said.endswith("(0.29.0 was the last to have it)")


def test_variables_of_others_are_left_alone() -> None:
    assert problems(NCCL_DEBUG="INFO", CUDA_VISIBLE_DEVICES="0") == []


def test_a_misspelt_option_is_put_right() -> None:
    (said,) = problems("--tensor-paralel-size", "8")
    assert said.endswith("did you mean --tensor-parallel-size?")


def test_the_value_of_an_unknown_option_is_not_taken_for_a_model() -> None:
    assert len(problems("--no-such-thing-at-all", "--max-model-len", "4096")) == 1
    assert len(problems("--no-such-thing-at-all", "8", "--max-model-len", "4096")) == 1


def test_values_are_held_against_choices() -> None:
    assert problems("--mamba-ssm-cache-dtype", "float32") == []
    for words in (["--mamba-ssm-cache-dtype", "float31"], ["--mamba-ssm-cache-dtype=float31"]):
        (said,) = problems(*words)
        assert "must be one of" in said and "'float31'" in said


def test_other_spellings_are_known() -> None:
    """0.33.0 shows --disable-prefix-caching, and takes what older releases had."""
    for spelling in ("--disable-prefix-caching", "--no-enable-prefix-caching"):
        assert problems(spelling) == []
    assert problems("--max_num_seqs", "8") == []
    assert problems("--disable-prefix-caching", version="0.32.0") != []


def test_a_field_may_be_an_option_of_its_own() -> None:
    assert problems("--speculative-config.num_speculative_tokens", "8") == []
    (said,) = problems("--speculative-config.num_speculative_token", "8")
    assert "did you mean num_speculative_tokens?" in said


@pytest.mark.parametrize("words", [["--max-num-seqs"], ["--max-num-seqs", "--headless"]])
def test_a_missing_value_is_seen(words: list[str]) -> None:
    assert problems(*words) == ["--max-num-seqs: needs a value"]


def test_a_switch_takes_no_value() -> None:
    assert problems("--enable-expert-parallel", "--no-async-scheduling") == []
    assert problems("--enable-expert-parallel=true") == [
        "--enable-expert-parallel: takes no value, got 'true'"
    ]


def test_a_negative_number_is_a_value() -> None:
    assert problems("--max-logprobs", "-1") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"num_speculative_token": 8}', "did you mean num_speculative_tokens?"),
        ("{num_speculative_tokens: 8}", "is no JSON"),
        ("8", "must be a JSON object"),
    ],
)
@pytest.mark.parametrize("name", ["--speculative-config", "-sc"])
def test_json_is_looked_into(name: str, text: str, said: str) -> None:
    (problem,) = problems(name, text)
    assert said in problem


def test_a_deprecated_option_warns_and_does_not_refuse() -> None:
    (problem,) = check_command("0.33.0", [MODEL, "--mamba-cache-mode", "align"])
    assert not problem.fatal and "deprecated" in problem.what


def test_an_unknown_release_lists_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"'0\.26\.0'; known: 0\.27\.1, 0\.28\.0"):
        load_release("0.26.0")
