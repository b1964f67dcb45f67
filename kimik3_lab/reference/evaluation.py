"""How well a model predicts text: bits per byte, and how much of a draft it accepts.

Needs torch. Lesson 01 compares the tiny K3 with gzip by it, lesson 02 before and after balancing,
lesson 09 counts accepted drafts with it.

Bits per token depend on the tokenizer: longer tokens are fewer and harder. Bits per *byte* of the
text do not, so models of different vocabularies, n-gram models and compressors can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kimik3_lab.reference.batch import BatchMixer
from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.reference.speculative import verify_greedy
from kimik3_lab.reference.state import SequenceMixer, SequenceState

__all__ = ["Speculation", "bits_per_byte", "document_bits", "generate_with_drafts"]


# -- bits per byte ---------------------------------------------------------------------------------


@torch.inference_mode()
def document_bits(
    model: K3ForCausalLM,
    documents: Sequence[Sequence[int]],
    *,
    window: int = 512,
    batch_tokens: int = 4096,
) -> list[float]:
    """Bits that the model needs for each document.

    A document costs ``-log2 p(token | beginning of sequence, tokens before it)``, summed over all
    of its tokens, the first included. The beginning-of-sequence token is given and costs nothing;
    no end-of-sequence token is counted. Where a document is longer than ``window``, it is read in
    windows that begin at every half window, each opened by the beginning-of-sequence token; a
    window is charged for what the one before it has not read yet. So every token past the first
    half window is predicted from at least half a window of text.

    Parameters
    ----------
    model
        On any device, of any type; probabilities are taken in float32 or wider.
    documents
        Token ids of each document, without special tokens.
    window
        Most text tokens read together; even, and best what the model was trained on.
    batch_tokens
        Most tokens in one forward pass: raise it on a GPU.

    Returns
    -------
    list of float
        Bits, a value per document; 0 for an empty one.

    Raises
    ------
    ValueError
        If ``window`` is odd, not positive, or longer than the model's context.

    Examples
    --------
    A model whose output head is zero finds all 64 tokens equally likely, 6 bits each:

    >>> from kimik3_lab.config import K3Config
    >>> from kimik3_lab.reference.initialization import random_model
    >>> model = random_model(K3Config.micro(), seed=0).requires_grad_(False)
    >>> _ = model.lm_head.weight.zero_()
    >>> [round(bits, 3) for bits in document_bits(model, [[5, 9, 11], [7], []], window=2)]
    [18.0, 6.0, 0.0]
    """
    longest = model.config.max_position_embeddings - 1
    if window < 2 or window % 2 or window > longest:
        raise ValueError(f"window must be an even number from 2 to {longest}, got {window}")
    bits = [0.0] * len(documents)
    pieces = [
        _Window(number, document[start : start + window], window // 2 if start else 0)
        for number, document in enumerate(documents)
        for start in range(0, max(len(document) - window // 2, 1), window // 2)
        if document
    ]
    # Windows of like length share a batch, so little of it is padding.
    pieces.sort(key=lambda piece: len(piece.token_ids))
    rows = max(batch_tokens // window, 1)
    for first in range(0, len(pieces), rows):
        batch = pieces[first : first + rows]
        for piece, value in zip(batch, _batch_bits(model, batch), strict=True):
            bits[piece.document] += value
    return bits


def bits_per_byte(
    model: K3ForCausalLM,
    documents: Sequence[Sequence[int]],
    num_bytes: Sequence[int],
    *,
    window: int = 512,
    batch_tokens: int = 4096,
) -> float:
    """Bits of all documents over the bytes of all documents.

    Parameters
    ----------
    model, documents, window, batch_tokens
        As for :func:`document_bits`.
    num_bytes
        Length in UTF-8 of the text that each document was encoded from.

    Raises
    ------
    ValueError
        If there is not one length per document, or there are no bytes at all.

    Examples
    --------
    >>> from kimik3_lab.config import K3Config
    >>> from kimik3_lab.reference.initialization import random_model
    >>> model = random_model(K3Config.micro(), seed=0).requires_grad_(False)
    >>> _ = model.lm_head.weight.zero_()
    >>> round(bits_per_byte(model, [[5, 9, 11], [7]], [7, 5], window=64), 3)  # 24 bits, 12 bytes
    2.0
    """
    if len(num_bytes) != len(documents) or sum(num_bytes) <= 0:
        raise ValueError(
            f"expected the number of bytes of each of {len(documents)} documents, together above "
            f"0, got {len(num_bytes)} numbers with sum {sum(num_bytes)}"
        )
    bits = document_bits(model, documents, window=window, batch_tokens=batch_tokens)
    return math.fsum(bits) / sum(num_bytes)


class _Window(NamedTuple):
    document: int
    token_ids: Sequence[int]
    #: Tokens at the front that an earlier window was charged for.
    known: int


def _batch_bits(model: K3ForCausalLM, windows: Sequence[_Window]) -> list[float]:
    """Bits of each window's own tokens; all windows run side by side, padded at the end."""
    bos, device = model.config.bos_token_id, model.device
    length = max(len(window.token_ids) for window in windows)
    targets = torch.full((len(windows), length), bos)
    charged = torch.zeros(len(windows), length, dtype=torch.bool)
    for row, window in enumerate(windows):
        targets[row, : len(window.token_ids)] = torch.tensor(window.token_ids)
        charged[row, window.known : len(window.token_ids)] = True
    targets, charged = targets.to(device), charged.to(device)
    # What is read at a position is the token before it; padding follows all that is charged for.
    inputs = torch.cat((targets.new_full((len(windows), 1), bos), targets[:, :-1]), 1)
    logits = model(inputs.flatten(), BatchMixer(model.new_state(), len(windows)))
    loss = F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)
    nats = torch.where(charged, loss, 0.0).sum(1, dtype=torch.float64)
    return (nats / math.log(2)).tolist()


# -- drafts ----------------------------------------------------------------------------------------


class Speculation(NamedTuple):
    """What :func:`generate_with_drafts` made.

    Attributes
    ----------
    token_ids
        The new tokens.
    accepted
        Drafted tokens kept, a value per verification.
    yielded
        Tokens that each verification added to the text: the accepted ones and the bonus, except
        that the last one may be cut by the end of the text.
    """

    token_ids: list[int]
    accepted: list[int]
    yielded: list[int]

    @property
    def tokens_per_verify(self) -> float:
        """Mean tokens per verification; NaN if the prompt's forward was already the last."""
        return sum(self.yielded) / len(self.yielded) if self.yielded else math.nan


@torch.inference_mode()
def generate_with_drafts(
    target: K3ForCausalLM,
    drafter: DSparkDrafter,
    prompt_ids: Sequence[int],
    max_tokens: int = 16,
    *,
    num_drafts: int | None = None,
    stop_token_ids: Collection[int] | None = None,
) -> Speculation:
    """Continue a prompt greedily with drafts: the tokens of ``target.generate``, in fewer forwards.

    The prompt's forward gives the first token. Then, until the text is complete: the drafter
    guesses a block, one forward of the target scores the last token and the whole block, the
    guesses are kept as long as each is the target's own first choice, and the target's choice
    after them is added. The target's state is put back to the last token kept.

    Parameters
    ----------
    target, drafter
        On the same device; drafts come from the target's embedding and output head.
    prompt_ids
        At least one token id.
    max_tokens
        Most new tokens.
    num_drafts
        Length of a block, ``drafter.config.block_size`` by default.
    stop_token_ids
        As for ``target.generate``.

    Raises
    ------
    ValueError
        If the prompt is empty, or prompt, text and the last block exceed the context length.

    Examples
    --------
    >>> from kimik3_lab.config import K3Config
    >>> from kimik3_lab.drafter_config import DSparkConfig
    >>> from kimik3_lab.reference.initialization import random_model
    >>> target = random_model(K3Config.micro(), seed=0)
    >>> drafter = DSparkDrafter(DSparkConfig.for_target(target.config)).eval()
    >>> made = generate_with_drafts(target, drafter, [0, 5, 9], 12)
    >>> made.token_ids == target.generate([0, 5, 9], 12), 1 + sum(made.yielded)
    (True, 12)
    """
    config = target.config
    count = drafter.config.block_size if num_drafts is None else num_drafts
    room = config.max_position_embeddings - len(prompt_ids) - count
    if not len(prompt_ids) or not 1 <= max_tokens <= room:
        raise ValueError(
            f"expected a prompt and max_tokens from 1 to {room} (a context of "
            f"{config.max_position_embeddings} less {len(prompt_ids)} of the prompt and {count} of "
            f"the last block), got max_tokens={max_tokens}"
        )
    stops = {config.eos_token_id} if stop_token_ids is None else set(stop_token_ids)
    state, context = target.new_state(), drafter.new_state()

    def score(step: Tensor, state: SequenceState) -> tuple[Tensor, dict[int, Tensor | None]]:
        taps = drafter.new_taps()
        return target(step, SequenceMixer(state), taps=taps), taps

    logits, taps = score(torch.tensor(list(prompt_ids), device=target.device), state)
    drafter.write_context(taps, context)
    text = [int(logits[-1].argmax())]
    accepted: list[int] = []
    yielded: list[int] = []
    while len(text) < max_tokens and text[-1] not in stops:
        draft = drafter.draft(text[-1], context, target, num_tokens=count)
        before = state.clone()
        step = torch.cat((draft.token_ids.new_tensor(text[-1:]), draft.token_ids))
        logits, taps = score(step, state)
        new = verify_greedy(draft.token_ids, logits)
        # Verified are the token that the block hangs on and the accepted drafts; the bonus is not.
        drafter.write_context(taps, context, len(new))
        if len(new) < len(step):
            # A recurrent state cannot forget its last tokens: take the copy, read the kept again.
            state = before
            score(step[: len(new)], state)
        accepted.append(len(new) - 1)
        stop = next((i + 1 for i, token in enumerate(new) if token in stops), len(new))
        kept = new[: min(stop, max_tokens - len(text))]
        yielded.append(len(kept))
        text += kept
    return Speculation(text, accepted, yielded)
