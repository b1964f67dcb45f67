"""Bits per byte and decoding with drafts, by hand and end to end at micro size."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from drafter_support import random_drafter, teach_bigrams

from kimik3_lab.config import K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.reference import checkpoint, drafter_checkpoint
from kimik3_lab.reference.batch import BatchMixer
from kimik3_lab.reference.evaluation import bits_per_byte, document_bits, generate_with_drafts
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.state import SequenceMixer
from tools.train_tiny_k3 import drafter_command, evaluate_command
from tools.train_tiny_k3.acceptance import choose_prompts, measure
from tools.train_tiny_k3.corpus import Document
from tools.train_tiny_k3.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

torch.set_num_threads(1)
CONFIG = K3Config.micro()


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG, seed=1).double().requires_grad_(False).eval()


def _log2(model, before: list[int], token: int) -> float:
    """Definition: one forward over everything before a token."""
    logits = model(torch.tensor(before), SequenceMixer(model.new_state()))[-1]
    return float(logits.log_softmax(-1)[token]) / math.log(2)


def _ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, CONFIG.vocab_size, (length,), generator=generator).tolist()


# -- a batch ---------------------------------------------------------------------------------------


def test_side_by_side_is_one_after_the_other(model) -> None:
    token_ids = torch.tensor([_ids(75, seed) for seed in range(3)])
    mixer = BatchMixer(model.new_state(), 3)
    parts = [model(part.flatten(), mixer).view(3, part.shape[1], -1)
             for part in token_ids.split([70, 1, 1, 3], 1)]  # fmt: skip
    for row, got in zip(token_ids, torch.cat(parts, 1), strict=True):
        want = model(row, SequenceMixer(model.new_state()))
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert mixer.num_tokens == 75


def test_a_batch_wants_equal_shares_and_an_empty_state(model) -> None:
    with pytest.raises(ValueError, match="no equal share of 2"):
        model(torch.tensor([0, 1, 2]), BatchMixer(model.new_state(), 2))
    state = model.new_state()
    model(torch.tensor([0]), SequenceMixer(state))
    with pytest.raises(ValueError, match="with 1 tokens"):
        BatchMixer(state, 2)
    with pytest.raises(ValueError, match="at least one sequence"):
        BatchMixer(model.new_state(), 0)


# -- bits ------------------------------------------------------------------------------------------


def test_every_token_is_charged_once_with_the_context_that_is_promised(model) -> None:
    documents, window, bos = [_ids(23, 0), [], _ids(8, 1), _ids(9, 2), _ids(1, 3)], 8, 0
    found = document_bits(model, documents, window=window, batch_tokens=24)
    for document, bits in zip(documents, found, strict=True):
        want = 0.0
        for at, token in enumerate(document):
            # Windows begin every 4 tokens; the one that charges a token ends soonest after it.
            start = 0 if at < window else (at - window) // 4 * 4 + 4
            assert at - start < window and (start == 0 or at - start >= window // 2)
            want -= _log2(model, [bos, *document[start:at]], token)
        assert bits == pytest.approx(want, rel=1e-9)


def test_bits_per_byte_weighs_bytes_not_files(model) -> None:
    documents = [_ids(5, 0), _ids(30, 1)]
    bits = document_bits(model, documents, window=16)
    assert bits_per_byte(model, documents, [10, 50], window=16) == pytest.approx(sum(bits) / 60)
    with pytest.raises(ValueError, match="each of 2 documents"):
        bits_per_byte(model, documents, [10], window=16)
    for window in (0, 7, 256):
        with pytest.raises(ValueError, match="window must be an even number from 2 to 255"):
            document_bits(model, documents, window=window)


# -- drafts ----------------------------------------------------------------------------------------


def test_drafts_change_the_number_of_forwards_and_nothing_else(model) -> None:
    config = dataclasses.replace(DSparkConfig.for_target(CONFIG, markov_rank=64), block_size=4)
    drafter, prompt = random_drafter(config, seed=2), [0, *_ids(6, 9)]
    plain = model.generate(prompt, 40, stop_token_ids=())
    teach_bigrams(drafter, plain)
    made = generate_with_drafts(model, drafter, prompt, 40, stop_token_ids=())
    assert made.token_ids == plain
    assert max(made.accepted) >= 1, "a drafter that knows the text gets some of it right"
    assert 1 + sum(made.yielded) == 40
    assert made.tokens_per_verify == sum(made.yielded) / len(made.yielded)
    assert all(y == a + 1 for a, y in zip(made.accepted[:-1], made.yielded[:-1], strict=True))
    assert 1 <= made.yielded[-1] <= made.accepted[-1] + 1


def test_a_stop_token_ends_the_text_inside_a_block(model) -> None:
    config = dataclasses.replace(DSparkConfig.for_target(CONFIG, markov_rank=64), block_size=4)
    drafter, prompt = random_drafter(config, seed=2), [0, *_ids(6, 9)]
    plain = model.generate(prompt, 40, stop_token_ids=())
    teach_bigrams(drafter, plain)
    for stop in list(dict.fromkeys(plain))[:3]:
        want = model.generate(prompt, 40, stop_token_ids={stop})
        made = generate_with_drafts(model, drafter, prompt, 40, stop_token_ids={stop})
        assert made.token_ids == want
        assert 1 + sum(made.yielded) == len(want)


def test_a_block_needs_room(model) -> None:
    drafter = random_drafter(DSparkConfig.for_target(CONFIG))
    with pytest.raises(ValueError, match="max_tokens from 1 to 239"):
        generate_with_drafts(model, drafter, [0] * 10, 240)
    with pytest.raises(ValueError, match="a prompt"):
        generate_with_drafts(model, drafter, [], 4)


# -- end to end ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A corpus of three files, its manifest, and a random target with a tokenizer of 300."""
    folder = tmp_path_factory.mktemp("work")
    line = "def spam{0}(eggs):\n    return eggs + {0}\n\n\n"
    texts = {
        "one.py": "".join(line.format(i) for i in range(150)),
        "two.py": "".join(line.format(i * 7) for i in range(150)),
        "seen/never.py": "".join(line.format(i * 3) for i in range(60)),
    }
    files = []
    for path, text in texts.items():
        for root in ("Lib", "held_out"):
            (folder / root / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / root / path).write_text(text, encoding="utf-8")
        digest = hashlib.sha256(text.encode()).hexdigest()
        split = "held_out" if "never" in path else "train"
        files.append({"path": path, "bytes": len(text), "sha256": digest, "split": split})
    (folder / "corpus.json").write_text(json.dumps({"files": files}), encoding="utf-8")
    config = dataclasses.replace(CONFIG, vocab_size=300)
    documents = [Document(path, text) for path, text in texts.items() if "never" not in path]
    save_tokenizer(train_tokenizer(config, documents), config, folder / "target")
    model = random_model(config, seed=0)
    checkpoint.save(model, folder / "target")
    return folder


def _run(command, work: Path, *words: str) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    shared = ["--target", f"{work}/target", "--manifest", f"{work}/corpus.json", "--device", "cpu"]
    command.run(parser.parse_args([*shared, *map(str, words)]))


def test_train_a_drafter_and_evaluate_both(work: Path, capsys) -> None:
    _run(
        drafter_command, work, "--corpus", work / "Lib", "--out", work / "drafter", "--layers", 2,
        "--steps", 6, "--batch", 4, "--anchors", 4, "--sequences", 8, "--rounds", 2,
        "--prompt-lengths", 12, 9, "--new-tokens", 20, "--watched", 4, "--warmup", 2,
        "--checkpoint", work / "drafter.pt",
    )  # fmt: skip
    record = json.loads((work / "drafter" / "training.json").read_text(encoding="utf-8"))
    assert record["curve"][-1]["step"] == 6 and record["settings"]["prompt_lengths"] == [12, 9]
    assert drafter_checkpoint.load(work / "drafter").config.num_hidden_layers == 2

    out = work / "evaluation.json"
    _run(
        evaluate_command, work, "--held-out", work / "held_out", "--drafter", work / "drafter",
        "--unpacked", work / "target", "--corpus", work / "Lib", "--out", out, "--window", 64,
        "--prompts", 2, "--prompt-tokens", 24, "--new-tokens", 12, "--float64-prompts", 1,
    )  # fmt: skip
    found = json.loads(out.read_text(encoding="utf-8"))
    text = (work / "held_out" / "seen" / "never.py").read_text(encoding="utf-8")
    assert found["bits"]["bytes"] == len(text.encode())
    assert found["bits"]["packing"]["costs"] == 0.0  # the same folder twice
    ids = load_tokenizer(work / "target").encode(text, add_special_tokens=False).ids
    model = checkpoint.load(work / "target")
    want = bits_per_byte(model, [ids], [len(text.encode())], window=64)
    assert found["bits"]["bits_per_byte"]["packed"] == pytest.approx(want, abs=1e-4)
    assert found["baselines"]["bits_per_byte"]["kneser_ney_5"] < 1.5
    acceptance = found["acceptance"]
    assert acceptance["prompts"] == acceptance["prompts_same_as_without_drafts"] == 2
    assert acceptance["float64"]["prompts"] == 1
    assert sum(acceptance["accepted_lengths"]) == acceptance["verifications"]
    assert "tokens per verify" in capsys.readouterr().out
    drafter = drafter_checkpoint.load(work / "drafter")
    document = Document("seen/never.py", text)
    prompts = choose_prompts([document], load_tokenizer(work / "target"), 0, 2, 24)
    again = measure(model, drafter, prompts[0].token_ids, 12)
    assert "".join(map(str, again.accepted)) == acceptance["accepted_of_prompt"][0]["accepted"]


def test_prompts_start_at_lines_and_are_spread(work: Path) -> None:
    tokenizer = load_tokenizer(work / "target")
    texts = [(work / "Lib" / name).read_text(encoding="utf-8") for name in ("one.py", "two.py")]
    documents = [Document("one.py", texts[0]), Document("two.py", texts[1])]
    prompts = choose_prompts(documents, tokenizer, 0, 10, 24)
    assert [prompt.path for prompt in prompts] == ["one.py"] * 5 + ["two.py"] * 5
    for prompt in prompts:
        text = texts[prompt.path == "two.py"].split("\n", prompt.line - 1)[-1]
        assert text and text.startswith(tokenizer.decode(prompt.token_ids[1:]))
        assert len(prompt.token_ids) == 24 and prompt.token_ids[0] == 0
    assert len({(prompt.path, prompt.line) for prompt in prompts}) == 10
    with pytest.raises(ValueError, match="shorter than a prompt"):
        choose_prompts([Document("tiny.py", "x = 1\n")], tokenizer, 0, 1, 24)
