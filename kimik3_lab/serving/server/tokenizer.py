"""Text to token ids and back: whole texts, one token at a time, and chats.

Needs ``tokenizers``, and ``jinja2`` for chats. Used by the server and by lessons 00, 10 and 12.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

if TYPE_CHECKING:
    import jinja2

__all__ = ["Detokenizer", "Tokenizer", "TokenizerError"]

#: What a decoder writes for bytes that are no valid UTF-8, or not yet.
_REPLACEMENT = "\ufffd"


class TokenizerError(ValueError):
    """A tokenizer that cannot be read, or a text or chat that it cannot take."""


class Tokenizer:
    """The tokenizer of a model folder.

    Parameters
    ----------
    backend
        The Hugging Face ``tokenizers`` object that does the work.
    config
        Content of ``tokenizer_config.json``: special tokens and the chat template.

    Examples
    --------
    >>> from tokenizers import models
    >>> tokenizer = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"hi": 0, "?": 1}, "?")))
    >>> tokenizer.encode("hi"), tokenizer.decode([0])
    ([0], 'hi')
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, config: Mapping[str, Any] | None = None
    ) -> None:
        self._backend = backend
        self._config = dict(config or {})
        #: Most characters that one token stands for; a text longer than n times this has over n.
        self.longest_token = max(map(len, backend.get_vocab()), default=1)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read the tokenizer of a model folder.

        That is ``tokenizer.json`` and, when there are any, ``tokenizer_config.json`` and
        ``chat_template.jinja``.

        Raises
        ------
        TokenizerError
            If ``tokenizer.json`` is missing, or one of the files cannot be read.
        """
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(
                f"no tokenizer at {file}: a model folder holds the tokenizer.json that it was "
                "trained with"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise TokenizerError(f"{file} is not a tokenizer: {error}") from error
        config: dict[str, Any] = {}
        config_file = folder / "tokenizer_config.json"
        if config_file.is_file():
            try:
                config = json.loads(config_file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise TokenizerError(f"{config_file} is not valid JSON: {error}") from error
            if not isinstance(config, dict):
                raise TokenizerError(f"{config_file} must hold a JSON object")
        template_file = folder / "chat_template.jinja"
        if template_file.is_file():
            config["chat_template"] = template_file.read_text(encoding="utf-8")
        return cls(backend, config)

    # -- facts -------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return int(self._backend.get_vocab_size())

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text; None when the tokenizer has none."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text; None when the tokenizer has none."""
        return self._special_id("eos_token")

    @property
    def chat_template(self) -> str | None:
        """Jinja source that writes a chat as one text; None when the tokenizer has none."""
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several named templates: the one for plain chats
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default")
        return template

    # -- text --------------------------------------------------------------------------------

    def encode(
        self, text: str, *, add_special_tokens: bool = True, release_gil: bool = False
    ) -> list[int]:
        """Turn a text into token ids.

        Parameters
        ----------
        add_special_tokens
            Let the tokenizer add what it puts around every text (often a begin token). A chat
            template writes these itself.
        release_gil
            Let other threads run meanwhile. The library does that for a batch only, and starts
            threads of its own for it.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"text has half of a surrogate pair at character {error.start}, so it is not "
                "valid Unicode"
            ) from error
        if release_gil:
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        else:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Turn token ids into text; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        r"""Return the bytes that one token stands for, which may be a part of a character.

        Examples
        --------
        >>> from tokenizers import Tokenizer as Backend, decoders, models
        >>> backend = Backend(models.BPE({"Ã": 0, "©": 1}, []))  # the two bytes of é
        >>> backend.decoder = decoders.ByteLevel()
        >>> Tokenizer(backend).token_bytes(1)
        b'\xa9'
        """
        if self._byte_of is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        token = self._backend.id_to_token(token_id) or ""
        try:
            return bytes(self._byte_of[letter] for letter in token)
        except KeyError:  # a special token, which is written as it is
            return token.encode()

    @cached_property
    def _byte_of(self) -> dict[str, int] | None:
        """The byte that each letter stands for; None if the tokens are not made of bytes.

        The letters of byte-level BPE are GPT-2's: a printable byte is itself, the others follow
        from U+0100 on (``bytes_to_unicode`` in openai/gpt-2, ``src/encoder.py``).
        """
        decoder = json.loads(self._backend.to_str()).get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            return None
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in set(printable)]
        letters = {chr(byte): byte for byte in printable}
        return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}

    # -- chats -------------------------------------------------------------------------------

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Write a chat as the one text that the model was trained on.

        Parameters
        ----------
        messages
            Each a mapping with ``role`` and ``content`` (a string).
        add_generation_prompt
            End with the words that open the assistant's next turn.

        Raises
        ------
        TokenizerError
            If the tokenizer has no template, or the template refuses these messages.
        """
        import jinja2

        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **{name: self._special(name) or "" for name in ("bos_token", "eos_token")},
            )
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template refuses these messages: {error}") from error

    @cached_property
    def _template(self) -> jinja2.Template:
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if self.chat_template is None:
            raise TokenizerError(
                "this tokenizer has no chat template: send a plain prompt to /v1/completions, or "
                "add chat_template to tokenizer_config.json"
            )

        def raise_exception(message: str) -> None:  # templates call it, as in transformers
            raise TemplateError(message)

        # A template comes with the model, so it may do no more than write text. The two blank
        # settings are those that published templates are written for.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = raise_exception
        try:
            return environment.from_string(self.chat_template)
        except TemplateError as error:
            raise TokenizerError(f"the chat template is not valid Jinja: {error}") from error

    def _special(self, name: str) -> str | None:
        token = self._config.get(name)
        return token.get("content") if isinstance(token, dict) else token

    def _special_id(self, name: str) -> int | None:
        token = self._special(name)
        return None if token is None else self._backend.token_to_id(token)


class Detokenizer:
    """Turn a growing list of tokens into text, one token at a time.

    A token may end inside a character: byte-level tokenizers split many of them. Such bytes are
    held back until the character is whole, so all pieces joined, with :meth:`flush` at the end,
    equal :meth:`Tokenizer.decode` of all tokens.

    Examples
    --------
    >>> from tokenizers import Tokenizer as Backend, decoders, models
    >>> letters = {"Ã": 0, "©": 1, "!": 2}  # the two bytes of é as byte-level BPE writes them
    >>> backend = Backend(models.BPE(letters, []))
    >>> backend.decoder = decoders.ByteLevel()
    >>> detokenizer = Detokenizer(Tokenizer(backend))
    >>> [detokenizer.step(token_id) for token_id in (0, 1, 2)]
    ['', 'é', '!']
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        # Only the tail of the list is decoded again for each token. It starts at `_start`, always
        # a place between two characters, and `_sent` characters of its text are out already. The
        # tail keeps the piece before the newest, as some tokenizers write the first word of a
        # text differently (without its space).
        self._start = 0
        self._whole_until = 0
        self._sent = 0

    def step(self, token_id: int) -> str:
        """Add a token and return the text that it completes, often one word, perhaps nothing."""
        self._ids.append(token_id)
        text = self._tail()
        # Of several U+FFFD at the end only the last can still become a character: an unfinished
        # sequence is at most three bytes long and decodes to a single one.
        ready = len(text) - text.endswith(_REPLACEMENT)
        piece = text[self._sent : ready]
        self._sent = max(self._sent, ready)
        if piece and ready == len(text):
            self._start, self._whole_until = self._whole_until, len(self._ids)
            self._sent = len(self._tail())
        return piece

    def flush(self) -> str:
        """Return what is still held back: U+FFFD for bytes that never became a character."""
        piece = self._tail()[self._sent :]
        self._sent += len(piece)
        return piece

    def _tail(self) -> str:
        return self._tokenizer.decode(
            self._ids[self._start :], skip_special_tokens=self._skip_special_tokens
        )
