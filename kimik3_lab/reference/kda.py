"""Kimi Delta Attention: a state of fixed size that forgets per channel and corrects itself.

Needs torch. Lesson 05 builds these functions up; lesson 06 compares kernels with them.

Each head keeps a matrix ``S [K, V]``, a memory that maps keys to values. A token first lets every
key channel decay, then looks up its own key, and writes only the part of its value that the memory
got wrong::

    S' = diag(exp(g)) S        decay, one factor per key channel
    r  = v - S'^T k            what the memory does not know yet
    S  = S' + k (beta r)^T     write it
    o  = S^T q                 read

:func:`recurrent` is that, token by token. :func:`chunked` is the same map with matrix products over
64 tokens at a time. Both take ``q`` and ``k`` already L2-normalised and ``q`` already scaled by
``K ** -0.5``, as :class:`KimiDeltaAttention` hands them over.

Sources: vLLM 0.33.0 ``vllm/models/kimi_k3/nvidia/kda.py``; flash-linear-attention
``fla/ops/kda/{naive,gate}.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kimik3_lab.config import K3Config
from kimik3_lab.reference.kda_chunked import SUB_CHUNK, chunked, initial_state
from kimik3_lab.reference.mixer import Mixer
from kimik3_lab.reference.norms import RMSNorm, compute_dtype, rms_norm

__all__ = [
    "SUB_CHUNK",
    "KimiDeltaAttention",
    "chunked",
    "from_cache_layout",
    "gate",
    "gated_norm",
    "l2norm",
    "recurrent",
    "short_conv",
    "to_cache_layout",
]

# -- what happens to a token before and after the recurrence ---------------------------------------


def gate(raw: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None = -5.0) -> Tensor:
    """Log-decay of each key channel.

    Parameters
    ----------
    raw
        ``[..., H, K]``: output of ``f_b_proj(f_a_proj(x))``.
    A_log
        ``[>= H]``: log of a rate per *head*. The release pads 96 rates to 128 values; only the
        first H are read.
    dt_bias
        ``[H * K]`` or ``[H, K]``.
    lower_bound
        K3 keeps the log-decay in ``(lower_bound, 0)`` with a sigmoid. ``None`` selects the older
        unbounded form of Kimi Linear, with a softplus; the two are different functions.

    Returns
    -------
    Tensor
        ``[..., H, K]``, negative, float32 or wider: in bfloat16 a decay above 0.998 becomes 1 and
        its channel never forgets.

    Raises
    ------
    ValueError
        If ``A_log`` has fewer values than there are heads.

    Examples
    --------
    >>> gate(torch.zeros(1, 2), torch.zeros(1), torch.zeros(2))
    tensor([[-2.5000, -2.5000]])
    """
    heads, channels = raw.shape[-2:]
    if A_log.numel() < heads:
        raise ValueError(f"A_log needs a value per head: got {A_log.numel()} for {heads} heads")
    dtype = compute_dtype(raw.dtype)
    rate = A_log[:heads].to(dtype).exp().unsqueeze(-1)
    x = raw.to(dtype) + dt_bias.to(dtype).reshape(heads, channels)
    if lower_bound is None:
        # From 40 on softplus(x) is x to the last bit of a float64.
        return -rate * F.softplus(x, threshold=40.0)
    return lower_bound * torch.sigmoid(rate * x)


def short_conv(u: Tensor, weight: Tensor, window: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution over time, then SiLU.

    Parameters
    ----------
    u
        ``[..., T, C]``: the projections, before any activation.
    weight
        ``[C, kernel]`` or ``[C, 1, kernel]``; the last tap multiplies the current token.
    window
        ``[..., C, kernel - 1]``: the inputs just before ``u``, oldest first; ``None`` at the start
        of a sequence, which is the same as zeros.

    Returns
    -------
    y, window
        ``[..., T, C]`` in the type of ``u``, and the window to hand to the next call. Any split
        of a sequence over calls gives the same rows.

    Examples
    --------
    >>> u, taps = torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0, 1.0]])
    >>> y, window = short_conv(u, taps)
    >>> torch.equal(y, F.silu(torch.tensor([[1.0], [12.0]]))), window
    (True, tensor([[2.]]))
    """
    weight = weight.reshape(weight.shape[0], -1)
    length, history = u.shape[-2], weight.shape[-1] - 1
    if window is None:
        before = u.new_zeros(*u.shape[:-2], history, u.shape[-1])
    else:
        before = window.transpose(-1, -2).to(u.dtype)
    inputs = torch.cat((before, u), -2)
    dtype = compute_dtype(u.dtype)
    taps = weight.to(dtype)
    y = sum(inputs[..., j : j + length, :].to(dtype) * taps[:, j] for j in range(history + 1))
    return F.silu(y).to(u.dtype), inputs[..., length:, :].transpose(-1, -2).contiguous()


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Scale each head vector ``[..., K]`` to length 1; float32 or wider.

    It is the sum of squares that is taken here, not the mean, and ``eps`` is inside the root.

    Examples
    --------
    >>> l2norm(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    x = x.to(compute_dtype(x.dtype))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Normalise each head of the output, *then* gate it with a sigmoid.

    Parameters
    ----------
    o
        ``[..., H, V]``.
    gate
        ``[..., H, V]`` or ``[..., H * V]``: output of ``g_proj(x)``.
    weight
        ``[V]``, shared by all heads.

    Returns
    -------
    Tensor
        ``[..., H, V]`` in the type of ``gate``.

    Examples
    --------
    >>> gated_norm(torch.ones(1, 2), torch.zeros(1, 2), torch.ones(2), eps=0.0)
    tensor([[0.5000, 0.5000]])
    """
    dtype = compute_dtype(o.dtype)
    opening = torch.sigmoid(gate.to(dtype).reshape(o.shape))
    return (rms_norm(o.to(dtype), weight, eps) * opening).to(gate.dtype)


# -- the recurrence --------------------------------------------------------------------------------


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the delta rule token by token: the definition, and the form for decoding.

    Parameters
    ----------
    q, k
        ``[B, T, H, K]``, L2-normalised, ``q`` scaled.
    v
        ``[B, T, H, V]``.
    g
        ``[B, T, H, K]``: log-decay, at most 0.
    beta
        ``[B, T, H]``: how much of the error to write, in (0, 1).
    state
        ``[B, H, K, V]``; ``None`` is the empty memory. Never changed in place.

    Returns
    -------
    o, state
        ``[B, T, H, V]`` in the type of ``v``, and the state after the last token, float32 or wider.

    Examples
    --------
    Written with ``beta=1``, a value comes back when its key is asked for:

    >>> key = torch.tensor([[[[0.6, 0.8]]]])
    >>> value = torch.tensor([[[[5.0, -1.0]]]])
    >>> o, state = recurrent(key, key, value, torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1))
    >>> o.flatten().tolist()
    [5.0, -1.0]
    """
    state = initial_state(k, v, state)
    o = torch.empty_like(v)
    q, k, v, g, beta = (x.to(state.dtype) for x in (q, k, v, g, beta))
    for t in range(q.shape[1]):
        decayed = g[:, t].exp().unsqueeze(-1) * state
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", decayed, k[:, t])
        write = beta[:, t].unsqueeze(-1) * error
        state = decayed + k[:, t].unsqueeze(-1) * write.unsqueeze(-2)
        o[:, t] = torch.einsum("bhkv,bhk->bhv", state, q[:, t])
    return o, state


# -- layouts ---------------------------------------------------------------------------------------


def to_cache_layout(state: Tensor) -> Tensor:
    """``[..., H, K, V]`` of this file to ``[..., H, V, K]`` of caches and kernels, contiguous.

    Examples
    --------
    >>> to_cache_layout(torch.zeros(1, 2, 8, 4)).shape
    torch.Size([1, 2, 4, 8])
    """
    return state.transpose(-1, -2).contiguous()


def from_cache_layout(state: Tensor) -> Tensor:
    """``[..., H, V, K]`` of caches and kernels to ``[..., H, K, V]`` of this file, contiguous.

    Examples
    --------
    >>> state = torch.randn(1, 2, 8, 4)
    >>> torch.equal(from_cache_layout(to_cache_layout(state)), state)
    True
    """
    return state.transpose(-1, -2).contiguous()


# -- the layer -------------------------------------------------------------------------------------


class KimiDeltaAttention(nn.Module):
    """A KDA layer; convolution and recurrence go through the mixer, which owns their state.

    Parameters
    ----------
    config
        Shape of the model.
    layer_id
        0-based, handed to the mixer.
    dtype
        Of the matrices; the small vectors that are float32 on disk stay float32 or wider.
    """

    def __init__(
        self,
        config: K3Config,
        layer_id: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        kda, hidden = config.linear_attn_config, config.hidden_size
        self.layer_id, self.lower_bound = layer_id, kda.gate_lower_bound
        self.num_heads, self.head_dim = kda.num_heads, kda.head_dim
        width, wide = kda.projection_size, compute_dtype(dtype)

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=device)

        def conv() -> nn.Conv1d:
            kernel = kda.short_conv_kernel_size
            return nn.Conv1d(
                width, width, kernel, groups=width, bias=False, dtype=wide, device=device
            )

        self.q_proj, self.k_proj, self.v_proj = (linear(hidden, width) for _ in "qkv")
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (conv() for _ in "qkv")
        self.f_a_proj, self.f_b_proj = linear(hidden, self.head_dim), linear(self.head_dim, width)
        self.b_proj = linear(hidden, self.num_heads)
        padded = max(self.num_heads, self.head_dim)
        self.A_log = nn.Parameter(torch.zeros(padded, dtype=wide, device=device))
        self.dt_bias = nn.Parameter(torch.zeros(width, dtype=wide, device=device))
        self.g_proj = linear(hidden, width)
        self.o_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=wide, device=device)
        self.o_proj = linear(width, hidden)

    def forward(self, x: Tensor, mixer: Mixer) -> Tensor:
        """Map normed inputs ``x [N, hidden]`` to outputs ``[N, hidden]``."""
        heads = (self.num_heads, self.head_dim)
        u = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), -1)
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        taps = torch.cat([conv.weight for conv in convs]).squeeze(1)
        q, k, v = mixer.conv(self.layer_id, u, taps).unflatten(-1, (3, *heads)).unbind(-3)
        q, k = l2norm(q) * self.head_dim**-0.5, l2norm(k)
        raw = self.f_b_proj(self.f_a_proj(x)).unflatten(-1, heads)
        g = gate(raw, self.A_log, self.dt_bias, self.lower_bound)
        beta = torch.sigmoid(self.b_proj(x).to(g.dtype))
        o = mixer.kda(self.layer_id, q, k, v, g, beta)
        o = gated_norm(o, self.g_proj(x), self.o_norm.weight, self.o_norm.eps)
        return self.o_proj(o.flatten(-2))
