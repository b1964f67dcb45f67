"""Fields that would change the answer in a way that this server cannot: refused, not ignored.

Needs pydantic. Part of :mod:`kimik3_lab.serving.server.protocol`.

A client that asks for JSON, or for a penalty, and gets an answer without would never learn of it.
Clients also send such fields with values that ask for nothing (``vllm bench serve`` always sends
``repetition_penalty=1.0``), and these are taken.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, WithJsonSchema

__all__ = ["UnsupportedFields", "only"]


def only(*allowed: Any) -> BeforeValidator:
    """Refuse a field that asks for what this server cannot give."""

    def check(value: object) -> object:
        if type(value) not in {type(a) for a in allowed} or value not in allowed:
            shown = dict.fromkeys(json.dumps(a) for a in allowed)
            raise ValueError(f"this server supports only {' or '.join(shown)}")
        return value

    return BeforeValidator(check)


def _schema(*allowed: Any) -> WithJsonSchema:
    return WithJsonSchema({"enum": list(allowed)})


_Zero = Annotated[Any, only(0, 0.0, None), _schema(0, None)]
_One = Annotated[Any, only(1, 1.0, None), _schema(1, None)]
_NoList = Annotated[Any, only([], None), _schema([], None)]
_NoObject = Annotated[Any, only({}, None), _schema({}, None)]
_NoText = Annotated[Any, only("", None), _schema("", None)]
_Null = Annotated[Any, only(None), _schema(None)]
_PLAIN_TEXT = {"type": "text"}
_PlainText = Annotated[Any, only(_PLAIN_TEXT, None), _schema(_PLAIN_TEXT, None)]
_FreeChoice = Annotated[Any, only("auto", "none", None), _schema("auto", "none", None)]


class UnsupportedFields(BaseModel):
    """OpenAI's fields, and below them vLLM's, each with the values that ask for nothing."""

    logit_bias: _NoObject = None
    presence_penalty: _Zero = None
    frequency_penalty: _Zero = None
    suffix: _NoText = None
    response_format: _PlainText = None
    tool_choice: _FreeChoice = None

    repetition_penalty: _One = None
    min_tokens: _Zero = None
    stop_token_ids: _NoList = None
    bad_words: _NoList = None
    allowed_token_ids: _Null = None
    structured_outputs: _Null = None
