"""Our ``/metrics`` against vLLM's: every name that we use is one of its, with its buckets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import vllm.v1.metrics.loggers as loggers
import vllm.v1.spec_decode.metrics as spec_decode
from prometheus_client.parser import text_string_to_metric_families
from vllm.v1.metrics.buckets import histogram_buckets

from kimik3_lab.serving.server.metrics import ServerMetrics


def _names(module: object) -> set[str]:
    text = Path(module.__file__).read_text(encoding="utf-8")
    return set(re.findall(r'"(vllm:\w+)"', text))


@pytest.fixture(scope="module")
def families() -> list[object]:
    return list(text_string_to_metric_families(ServerMetrics("tiny", 1024).text()))


def test_names(families: list[object]) -> None:
    known = _names(loggers) | _names(spec_decode)
    ours = {f.name for f in families if f.name.startswith("vllm:")}
    ours = {name for name in ours if not name.endswith("_created")}
    # A counter's family has lost its suffix, and one name of vLLM's ends in it by itself.
    assert {name for name in ours if name not in known and name + "_total" not in known} == set()
    assert len(ours) > 20


def test_labels(families: list[object]) -> None:
    for family in families:
        if family.name.startswith("vllm:") and "admission" not in family.name:
            for sample in family.samples:
                assert {"model_name", "engine"} <= sample.labels.keys()


#: Which of vLLM's lists a histogram has, by the end of its name.
BUCKETS = {
    "request_tokens": ("request_prompt_tokens", "request_generation_tokens",
                       "request_params_max_tokens"),
    "request_params_n": ("request_params_n",),
    "iteration_tokens": ("iteration_tokens_total",),
    "time_to_first_token": ("time_to_first_token_seconds",),
    "inter_token_latency": ("inter_token_latency_seconds",
                            "request_time_per_output_token_seconds"),
    "request_latency": ("e2e_request_latency_seconds", "request_queue_time_seconds",
                        "request_inference_time_seconds", "request_prefill_time_seconds",
                        "request_decode_time_seconds"),
}  # fmt: skip


def test_buckets(families: list[object]) -> None:
    ours = {
        family.name.removeprefix("vllm:"): [
            float(s.labels["le"])
            for s in family.samples
            if s.name.endswith("_bucket") and s.labels["le"] != "+Inf"
        ]
        for family in families
        if family.type == "histogram"
    }
    theirs = {
        name: [float(bound) for bound in histogram_buckets(kind, max_model_len=1024)]
        for kind, names in BUCKETS.items()
        for name in names
    }
    assert ours == theirs
