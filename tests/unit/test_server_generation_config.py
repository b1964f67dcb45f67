from __future__ import annotations

import json
from typing import Any

import pytest

from kimik3_lab.serving.server.generation_config import GenerationConfig


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, GenerationConfig((4,), 0.0, 1.0)),
        ({"eos_token_id": 7, "pad_token_id": 2}, GenerationConfig((7,), 0.0, 1.0)),
        ({"eos_token_id": [7, 9], "temperature": 1}, GenerationConfig((7, 9), 1.0, 1.0)),
        ({"temperature": 0.6, "top_p": 0.95}, GenerationConfig((4,), 0.6, 0.95)),
        ({"temperature": None, "top_p": None}, GenerationConfig((4,), 0.0, 1.0)),
        # Published files keep a temperature beside do_sample=false, which then has no meaning.
        ({"do_sample": False, "temperature": 0.6}, GenerationConfig((4,), 0.0, 1.0)),
    ],
)
def test_what_a_file_says_counts_before_the_defaults(
    tmp_path, body: dict[str, Any], expected: GenerationConfig
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(body))
    assert GenerationConfig.load(tmp_path, eos_token_id=4) == expected


def test_a_folder_without_the_file(tmp_path) -> None:
    assert GenerationConfig.load(tmp_path, eos_token_id=4) == GenerationConfig((4,), 0.0, 1.0)
    assert GenerationConfig.load(tmp_path) == GenerationConfig((), 0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting"),
        ("[]", "JSON object"),
        ('{"eos_token_id": "end"}', "eos_token_id must be a token id"),
        ('{"eos_token_id": [1, -1]}', "eos_token_id must be a token id"),
        ('{"temperature": -1}', "temperature must be at least 0, got -1"),
        ('{"temperature": true}', "temperature must be a number, got True"),
        ('{"temperature": NaN}', "temperature must be a number, got nan"),
        ('{"top_p": 0}', r"top_p must lie in \(0, 1\], got 0"),
    ],
)
def test_a_broken_file_is_named(tmp_path, text: str, words: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=words) as raised:
        GenerationConfig.load(tmp_path)
    assert "generation_config.json" in str(raised.value)
