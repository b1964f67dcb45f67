"""Prompts: exact lengths with a tokenizer, the same for the same seed, fresh for each cell."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from kimik3_lab.benchmark import Workload, WorkloadError


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer trained on the spot."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = [" ".join(["the cat sat on the mat and read the scheduler paper"] * 20),
            "prefill decode token batch budget request cache block page state kernel"]  # fmt: skip
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.enable_truncation(16)  # as some published files do; prompts must not care
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def letters_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that knows no words at all: bytes only."""
    folder = tmp_path_factory.mktemp("letters")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=256, show_progress=False,
                                initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )  # fmt: skip
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def count(folder: Path, text: str) -> int:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("length", [1, 2, 3, 17, 64, 1000])
def test_prompts_have_exactly_the_tokens(tokenizer_folder, length):
    workload = Workload.synthetic(length, 4, tokenizer_folder, seed=5)
    for request in islice(workload.requests(), 5):
        assert count(tokenizer_folder, request.prompt) == request.prompt_tokens == length
        assert request.output_tokens == 4


@pytest.mark.parametrize("length", [1, 3, 9])
def test_exact_even_without_whole_words(letters_folder, length):
    workload = Workload.synthetic(length, 4, letters_folder / "tokenizer.json", seed=5)
    assert count(letters_folder, next(workload.requests()).prompt) == length


def test_length_that_no_text_has_is_an_error(letters_folder, tmp_path):
    tokenizer = Tokenizer.from_file(str(letters_folder / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Replace(Regex("."), "")  # every text has no tokens
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(WorkloadError, match="no text of exactly 3 tokens"):
        next(Workload.synthetic(3, 4, tmp_path, seed=5).requests())


def test_tokenizer_without_english_is_an_error(tmp_path):
    Tokenizer(models.WordLevel({"kimi": 0})).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(WorkloadError, match=r"tokenizer\.json is not a tokenizer for English text"):
        next(Workload.synthetic(3, 4, tmp_path, seed=5).requests())


def test_same_seed_same_prompts_and_every_cell_its_own(tokenizer_folder):
    for folder in (None, tokenizer_folder):
        take = [
            list(islice(Workload.synthetic(20, 4, folder, seed=seed).requests(cell), 4))
            for seed, cell in ((1, 0), (1, 0), (1, 1), (2, 0))
        ]
        assert take[0] == take[1]
        prompts = [r.prompt for requests in take[1:] for r in requests]
        assert len(set(prompts)) == 12


def test_no_seed_is_a_fresh_seed():
    assert Workload.synthetic(4, 4).seed != Workload.synthetic(4, 4).seed


def test_without_tokenizer_prompts_are_words():
    request = next(Workload.synthetic(300, 7, seed=1).requests())
    assert len(request.prompt.split()) == request.prompt_tokens == 300


def test_spread_and_shared_prefix(tokenizer_folder):
    workload = Workload.synthetic(
        40, 20, tokenizer_folder, seed=1, prompt_spread=0.25, output_spread=0.5
    )
    requests = list(islice(workload.requests(), 200))
    assert {r.prompt_tokens for r in requests} == set(range(30, 51))
    assert min(r.output_tokens for r in requests) == 10
    assert max(r.output_tokens for r in requests) == 30
    assert all(count(tokenizer_folder, r.prompt) == r.prompt_tokens for r in requests[:20])

    shared = Workload.synthetic(40, 4, tokenizer_folder, seed=1, prefix_share=0.5)
    first, second = islice(shared.requests(), 2)
    assert count(tokenizer_folder, first.prompt) == count(tokenizer_folder, second.prompt) == 40
    common = next(i for i, (a, b) in enumerate(zip(first.prompt, second.prompt, strict=False))
                  if a != b)  # fmt: skip
    assert 18 <= count(tokenizer_folder, first.prompt[:common]) <= 26
    other_cell = next(shared.requests(1))
    assert other_cell.prompt[:common] != first.prompt[:common]


def test_published_workload_scales():
    assert (Workload.published().prompt_tokens, Workload.published().output_tokens) == (8000, 1000)
    small = Workload.published(31.25)
    assert (small.prompt_tokens, small.output_tokens, small.scale) == (256, 32, 31.25)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Workload.synthetic(0, 4), "prompt_tokens must be a whole number"),
        (lambda: Workload.synthetic(4, 2.5), "output_tokens must be a whole number"),
        (lambda: Workload.synthetic(4, 4, prompt_spread=1), r"prompt_spread must be in \[0, 1\)"),
        (lambda: Workload.synthetic(4, 4, prefix_share=-0.1), "prefix_share"),
        (lambda: Workload.published(0), "scale must be between 1 and 1000"),
        (lambda: Workload.published(1001), "scale must be between 1 and 1000"),
        (lambda: Workload.synthetic(4, 4, "/nowhere"), "no tokenizer at /nowhere"),
    ],
)
def test_bad_workloads_say_what_is_wrong(make, message):
    with pytest.raises(WorkloadError, match=message):
        make()
