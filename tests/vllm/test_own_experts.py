"""Our experts in vLLM through its hook for layers out of its tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from kimik3_lab.reference import checkpoint

FOLDER = Path(__file__).resolve().parents[2] / "data" / "tiny-k3"
PROMPTS = [[3 + (7 * i + length) % 500 for i in range(length)] for length in (9, 40)]
#: Run in a process of its own: vLLM expects one engine in each.
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

from kimik3_lab.vllm_cpu import own_experts

own_experts.register()
own_experts.register()
llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
          enable_prefix_caching=False, attention_backend="CPU_MLA", max_model_len=256,
          max_num_seqs=2, num_gpu_blocks_override=16)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
prompts = [{"prompt_token_ids": tokens} for tokens in json.loads(sys.argv[2])]
before = own_experts.calls
answers = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
(names,) = llm.apply_model(lambda model: {type(m).__name__ for m in model.modules()})
print("ANSWER" + json.dumps([answers, own_experts.calls - before, sorted(names)]))
"""


def test_vllm_computes_with_our_experts_and_the_tokens_stay() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(FOLDER), json.dumps(PROMPTS)],
        capture_output=True, text=True, check=False,
        env=os.environ | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    answers, calls, names = json.loads(line.removeprefix("ANSWER"))
    model = checkpoint.load(FOLDER)
    assert answers == [model.generate(prompt, 8, stop_token_ids=()) for prompt in PROMPTS]
    # Each expert layer, in each of at least eight steps.
    layers = model.config.num_hidden_layers - model.config.first_k_dense_replace
    assert calls >= 8 * layers
    assert "LabRoutedExperts" in names and "RoutedExperts" not in names
