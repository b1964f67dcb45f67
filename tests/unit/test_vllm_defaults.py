"""What vLLM's releases do when a setting is left out: the recording, and how it was made."""

from __future__ import annotations

import json

import pytest

from kimik3_lab.deploy.flags import load_release, releases
from kimik3_lab.paths import data_dir
from tools import record_vllm_defaults as recorder

RECORDED = json.loads((data_dir() / "deploy" / "vllm_defaults.json").read_text())["releases"]


def test_every_release_with_options_has_defaults_too() -> None:
    assert tuple(RECORDED) == releases()
    for version, body in RECORDED.items():
        # Some variables have no default, or a computed one.
        known = load_release(version).environment
        assert set(body["environment"]) <= known
        assert len(body["environment"]) > 0.8 * len(known)


def test_the_three_that_moved() -> None:
    """Sources: vLLM pull requests 51726 and 50991, and vllm/envs.py."""
    tokens = [RECORDED[v]["api_server"]["B300"]["max_num_batched_tokens"] for v in RECORDED]
    assert tokens == [8192] + 6 * [16384]
    assert {RECORDED[v]["api_server"]["H200"]["max_num_batched_tokens"] for v in RECORDED} == {8192}
    assert [RECORDED[v]["hybrid_prefix_caching"] for v in RECORDED] == [False] + 6 * [True]
    flashinfer = [RECORDED[v]["environment"]["VLLM_ALLREDUCE_USE_FLASHINFER"] for v in RECORDED]
    assert flashinfer == 2 * ["'0'"] + 5 * ["'1'"]


ARGUMENTS = """
class EngineArgs:
    @classmethod
    def get_batch_defaults(cls, world_size: int) -> Elsewhere[int]:
        from vllm.usage.usage_lib import UsageContext
        tokens: SomeDict = {}
        try:
            memory = current_platform.get_device_total_memory()
            EXTRA
        except Exception:
            memory = 0
        tokens = 4096 if memory >= 160 * GiB_bytes else 1
        return {UsageContext.OPENAI_API_SERVER: tokens}, {UsageContext.OPENAI_API_SERVER: 8}

    def other(self):
        default_prefix_caching = model_config.is_prefix_caching_supported RULE
"""


def test_batch_defaults_are_those_of_the_function() -> None:
    source = ARGUMENTS.replace("EXTRA", "pass").replace("RULE", "")
    for gpu, tokens in (("B300", 4096), ("H200", 1)):
        got = recorder.batch_defaults(source, recorder.Platform(*recorder.GPUS[gpu]))
        assert got == {"max_num_batched_tokens": tokens, "max_num_seqs": 8}


def test_a_new_question_to_the_platform_is_not_swallowed() -> None:
    source = ARGUMENTS.replace("EXTRA", "current_platform.is_new()").replace("RULE", "")
    with pytest.raises(recorder.RecordError, match="asks for something new: is_new"):
        recorder.batch_defaults(source, recorder.Platform(*recorder.GPUS["B300"]))


def test_prefix_caching_rule() -> None:
    for rule, wanted in (("", True), ("and not model_config.is_hybrid", False)):
        assert recorder.hybrid_prefix_caching(ARGUMENTS.replace("RULE", rule)) is wanted
    with pytest.raises(recorder.RecordError, match="assigned 0 times"):
        recorder.hybrid_prefix_caching("x = 1")


def test_environment_defaults() -> None:
    source = """
environment_variables: dict = {
    "A": lambda: bool(int(os.getenv("A", "0"))),
    "B": lambda: os.environ.get("B"),
    "C": lambda: os.getenv("OTHER", "1") or os.environ.get("C", "x" + "y"),
}
"""
    assert recorder.environment_defaults(source) == {"A": "'0'", "C": "'x' + 'y'"}
    with pytest.raises(recorder.RecordError, match="no dictionary"):
        recorder.environment_defaults("x = {}")
