"""The catalogue of mistakes: 28 ways in which Kimi K3 was implemented wrongly, and what sees each.

An entry is ``number symptom``, then the cause after ``<-``, then how it is seen: ``mutated`` means
that ``k3_mistakes.py`` makes the mistake on purpose and a check must fail; ``seen by`` names a test
elsewhere that does so already; ``out of scope`` says why this project has no such part.

 1 KDA drifts into garbage
   <- the bounded gate done as a softplus that is clamped at -5, another function
   seen by tests/oracle/test_golden_kda.py::test_fixture_catches_a_wrong_gate
     [softplus form clamped at the bound]
   https://github.com/lightseekorg/tokenspeed/pull/847
 2 KDA is wrong although all shapes load
   <- A_log has 128 values, as a head has channels, and is read per channel; it is per head, padded
   mutated
   https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5130
 3 the first choice of some tokens flips
   <- the final mixture is missing, or its buffer is the running sum and is cleared first
   mutated
   https://github.com/sqliteai/waste
 4 corruption after layer 84 only
   <- the slot of the last block is used as scratch while it is still read
   mutated
   https://github.com/local-inference-lab/vllm/issues/467
 5 small drift, greedy texts part ways
   <- mixture keys normalised and multiplied in bfloat16
   mutated
   https://github.com/vllm-project/vllm-ascend/issues/13315
 6 acceptance of drafts drops and nothing raises
   <- the drafter reads the mixture where it was trained on the running sum, or the reverse
   mutated
   https://github.com/vllm-project/vllm/issues/50487
 7 one token in twenty is routed differently
   <- router logits in bfloat16
   mutated
   https://github.com/sgl-project/sglang/issues/33764
 8 experts at the margin of the top k change
   <- the selection bias is made in bfloat16 and upcast after loading
   mutated
   https://github.com/vllm-project/vllm/issues/50761
 9 feed-forward wrong outside the routed experts
   <- SiTU in the routed experts only, SiLU in the shared and dense ones, or everywhere
   mutated
   https://github.com/tenstorrent/tt-metal/issues/53625
10 loads cleanly, quality is off
   <- the norm of the routed sum is dropped, or applied to the part of each rank
   mutated
   https://github.com/radixark/Megatron-LM/issues/94
11 accuracy falls to a fifth
   <- the chunk kernel reads the state key by value, the cache holds it value by key
   mutated
   https://github.com/vllm-project/vllm/issues/40956
12 KDA layers uncorrelated with the reference
   <- the triangular system inverted by repeated doubling, which cancels for alike keys
   mutated
   https://github.com/tenstorrent/tt-metal/issues/54813
13 an output depends on gates that come later
   <- the decay of a sub-chunk anchored at a later row, and rounded there
   mutated
   https://github.com/fla-org/flash-linear-attention/issues/1240
14 NaN for single tokens in mixed batches
   <- they are sent through a chunk kernel with a race between its pipeline stages
   out of scope: a race inside a compiled GPU kernel; the chunked form of one token is compared with
     the recurrence in tests/unit/test_reference_kda.py
   https://github.com/vllm-project/vllm/issues/50649
15 a prefix-cache hit gives garbage
   <- KDA state or convolution window not kept at the boundary of the prefix
   mutated
   https://github.com/sgl-project/sglang/issues/31474
16 MLA differs in the fifth digit
   <- the two latent norms use another epsilon than the implementation compared with
   seen by tests/oracle/test_golden_layers.py::test_fixture_catches_the_other_epsilon
   seen by tests/oracle/test_golden_model.py::test_fixture_catches_the_other_mla_epsilon
   https://github.com/PaddlePaddle/PaddleFleet/pull/1651
17 attention is wrong in a model that rotates nothing
   <- the unrotated 64 values are left out, or counted wrongly in the scale, or rotated after all;
     the reverse in the drafter, which does rotate
   mutated
   seen by tests/oracle/test_golden_layers.py::test_fixture_catches_wrong_attention[k_pe left out]
   seen by tests/oracle/test_golden_layers.py::test_fixture_catches_wrong_attention
     [scale of the nope part]
   https://github.com/lablup/mlxcel/issues/1334
18 outputs of both attentions are off
   <- both gates are called g_proj: KDA norms each head before its gate, MLA does not
   mutated
   https://github.com/chrishayuk/larql/pull/439
19 no layer gets a weight, or the layer count is refused
   <- names without language_model. or a configuration read at the top level, not in text_config
   mutated
   seen by tests/unit/test_reference_checkpoint.py
     ::test_flat_name_in_a_nested_checkpoint_is_an_error
   https://github.com/sgl-project/sglang/issues/35314
20 estimates of 5.45 T parameters, or of 3.9 times the cache
   <- experts taken to be as wide as the model; cache rows counted on all 93 layers, not on 24
   mutated
   https://github.com/inference-sim/inference-sim/pull/1644
21 a small relative of the model is off by more than 0.1
   <- the bound of -5 forced on a checkpoint whose configuration has none
   seen by tests/oracle/test_golden_layers.py::test_fixture_catches_the_other_gate
   seen by tests/unit/test_config.py::test_absent_gate_bound_means_the_older_gate
   https://github.com/MoonshotAI/FlashKDA/pull/7
22 slow channels never forget
   <- decay or beta in bfloat16, where everything above 0.998 is 1
   seen by tests/oracle/test_golden_kda.py::test_fixture_catches_a_wrong_recurrence
     [decay rounded to bfloat16]
   https://github.com/osaurus-ai/vmlx-swift/pull/433
23 crash or no memory on 16 ranks and more
   <- expert widths padded to a floor per rank that the shards do not have
   out of scope: nothing here is sharded over ranks
   https://github.com/vllm-project/vllm/issues/51124
24 shapes do not fit while a graph is captured
   <- f_b applied by the layer and again by the kernel that should have been left to do it
   out of scope: no graph is captured and no projection deferred; the reference applies f_b once,
     and a second time would not fit its shape
   https://github.com/sgl-project/sglang/issues/39066
25 no draft is ever accepted, logs look healthy
   <- names that the loader of the drafter does not know are skipped
   mutated
   https://github.com/vllm-project/vllm-ascend/issues/14875
26 the same token over and over
   <- NaN in the recurrent state from a boundary on, and argmax of NaN is one fixed id
   mutated
   https://github.com/sgl-project/sglang/issues/32968
27 images are misread
   <- pixels scaled with the mean and deviation of CLIP, not 0.5 and 0.5
   out of scope: text only
   https://github.com/sqliteai/waste
28 greedy speculation is called lossy
   <- steps of 1 and of N + 1 tokens round differently even without drafts; equality is no test
   mutated
   https://github.com/lightseekorg/tokenspeed/issues/879
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from k3_mistakes import MUTATIONS, Mutation

from kimik3_lab.config import K3Config
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.state import SequenceMixer

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]
#: Entries that a test in this file stands for.
HERE = {28}


class Entry(NamedTuple):
    """A row of the table above."""

    number: int
    symptom: str
    cause: str
    mutated: bool
    seen_by: list[str]
    out_of_scope: str
    source: str


def catalogue() -> dict[int, Entry]:
    entries = {}
    for block in re.split(r"\n(?=[ \d]\d )", __doc__)[1:]:
        # A line that is indented further continues the one before it.
        first, *lines = re.sub(r"\n {5}", " ", block.rstrip()).splitlines()
        lines = [line.strip() for line in lines]

        def starting(what: str, lines=lines) -> list[str]:
            return [x.removeprefix(what).strip() for x in lines if x.startswith(what)]

        number, symptom = first.split(maxsplit=1)
        (cause,), (source,) = starting("<- "), starting("https://github.com/")
        scope = starting("out of scope: ")
        entry = Entry(
            int(number), symptom, cause, "mutated" in lines, starting("seen by "),
            scope[0] if scope else "", source,
        )  # fmt: skip
        assert entry.number not in entries, f"entry {number} is there twice"
        starts = ("<- ", "mutated", "seen by ", "out of scope: ", "https://github.com/")
        assert all(line.startswith(starts) for line in lines), entry
        entries[entry.number] = entry
    return entries


CATALOGUE = catalogue()


def label(mistake: Mutation) -> str:
    entry = CATALOGUE[mistake.number]
    return f"{entry.number:02}: {entry.symptom} <- {mistake.name}"


@pytest.mark.parametrize("mistake", MUTATIONS, ids=label)
def test_mistake_is_seen(mistake: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.apply(monkeypatch)
    with pytest.raises(AssertionError):
        mistake.check()  # errors of other kinds would be a broken variant, not a seen one
    if mistake.symptom is not None:
        mistake.symptom()


CHECKS = {mistake.check: mistake.name for mistake in MUTATIONS}


@pytest.mark.parametrize("check", CHECKS, ids=CHECKS.values())
def test_check_passes_without_the_mistake(check) -> None:
    check()


@torch.inference_mode()
def test_28_steps_of_another_length_round_differently_without_any_draft() -> None:
    tokens = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(0))
    worst = {}
    for dtype in (torch.float32, torch.float64):
        model = random_model(K3Config.micro(), 0, dtype=dtype)
        logits = []
        for steps in (1, 8):
            mixer = SequenceMixer(model.new_state())
            logits.append(torch.cat([model(step, mixer) for step in tokens.split(8 // steps)]))
        worst[dtype] = (logits[0] - logits[1]).abs().max().item()
    assert 0 < worst[torch.float32] < 1e-2  # not equal, and no mistake
    assert worst[torch.float64] < 1e-10  # what a check for a mistake compares


def test_all_28_are_accounted_for() -> None:
    assert sorted(CATALOGUE) == list(range(1, 29))
    made = {mistake.number for mistake in MUTATIONS} | HERE
    assert made == {entry.number for entry in CATALOGUE.values() if entry.mutated}
    for entry in CATALOGUE.values():
        handled = bool(entry.mutated or entry.seen_by)
        assert handled != bool(entry.out_of_scope), entry
        assert re.fullmatch(r"[\w.-]+/[\w.-]+(/(pull|issues)/\d+)?", entry.source), entry
    out = [entry.number for entry in CATALOGUE.values() if entry.out_of_scope]
    assert out == [14, 23, 24, 27]


SEEN_ELSEWHERE = [test for entry in CATALOGUE.values() for test in entry.seen_by]


@pytest.mark.parametrize("test", SEEN_ELSEWHERE)
def test_tests_that_are_named_exist(test: str) -> None:
    path, name, case = re.fullmatch(r"(\S+?) ?::(\w+) ?(?:\[(.+)\])?", test).groups()
    text = (ROOT / path).read_text(encoding="utf-8")
    functions = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    assert name in functions
    assert case is None or f'"{case}"' in text


def test_names_are_told_apart() -> None:
    labels = [label(mistake) for mistake in MUTATIONS]
    assert len(labels) == len(set(labels)) >= 24
