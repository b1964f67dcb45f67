"""Kimi K3 a second time, for tests: NumPy in float64, one token at a time, no shared code.

Written from the equations, in another order than the reference: tokens outside, layers inside, each
cached thing a Python list. It is the oracle for ``kimik3_lab.reference.model``.
"""

from __future__ import annotations

import numpy as np


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def rms(x, weight, eps):
    return weight * x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


class NumpyK3:
    """One sequence; ``weights`` maps checkpoint names to float64 arrays."""

    def __init__(self, config, weights):
        self.c, self.w = config, weights
        self.conv, self.memory, self.cache = {}, {}, {}

    def lin(self, name, x):
        return self.w[name + ".weight"] @ x

    def logits(self, token_ids):
        return np.stack([self.token(t) for t in token_ids])

    def token(self, token_id):
        c, blocks, p = self.c, [], self.w["model.embed_tokens.weight"][token_id]
        for i in range(c.num_hidden_layers):
            pre = f"model.layers.{i}."
            x = self.aggregate(pre + "self_attention_res", [*blocks, p])
            x = rms(x, self.w[pre + "input_layernorm.weight"], c.rms_norm_eps)
            attention = self.kda if i + 1 in c.linear_attn_config.kda_layers else self.mla
            a = attention(pre + "self_attn.", x)
            if i % c.attn_res_block_size == 0:
                blocks, p = [*blocks, p], a
            else:
                p = p + a
            x = self.aggregate(pre + "mlp_res", [*blocks, p])
            x = rms(x, self.w[pre + "post_attention_layernorm.weight"], c.rms_norm_eps)
            dense = i < c.first_k_dense_replace
            p = p + (self.mlp(pre + "mlp.", x) if dense else self.moe(pre + "block_sparse_moe.", x))
        x = self.aggregate("model.output_attn_res", [*blocks, p])
        return self.w["lm_head.weight"] @ rms(x, self.w["model.norm.weight"], c.rms_norm_eps)

    def aggregate(self, name, sources):
        if len(sources) == 1:
            return sources[0]
        gamma, query = self.w[name + "_norm.weight"], self.w[name + "_proj.weight"][0]
        scores = np.array([rms(s, gamma, self.c.rms_norm_eps) @ query for s in sources])
        return sum(share * s for share, s in zip(softmax(scores), sources, strict=True))

    def kda(self, pre, x):
        linear = self.c.linear_attn_config
        heads, d, taps = linear.num_heads, linear.head_dim, linear.short_conv_kernel_size
        mixed = []
        for letter in "qkv":
            u = self.lin(f"{pre}{letter}_proj", x)
            past = self.conv.setdefault(pre + letter, [np.zeros_like(u)] * (taps - 1))
            past.append(u)
            weight = self.w[f"{pre}{letter}_conv1d.weight"].reshape(heads * d, taps)
            y = sum(weight[:, j] * past[len(past) - taps + j] for j in range(taps))
            mixed.append((y * sigmoid(y)).reshape(heads, d))
        raw = self.lin(pre + "f_b_proj", self.lin(pre + "f_a_proj", x)) + self.w[pre + "dt_bias"]
        beta = sigmoid(self.lin(pre + "b_proj", x))
        gate = sigmoid(self.lin(pre + "g_proj", x)).reshape(heads, d)
        memory = self.memory.setdefault(pre, np.zeros((heads, d, d)))
        out = []
        for h in range(heads):
            q, k, v = (m[h] for m in mixed)
            q = q / np.sqrt((q * q).sum() + 1e-6) / np.sqrt(d)
            k = k / np.sqrt((k * k).sum() + 1e-6)
            rate = np.exp(self.w[pre + "A_log"][h])
            if linear.gate_lower_bound is None:
                decay = np.exp(-rate * np.log1p(np.exp(raw.reshape(heads, d)[h])))
            else:
                decay = np.exp(linear.gate_lower_bound * sigmoid(rate * raw.reshape(heads, d)[h]))
            s = decay[:, None] * memory[h]
            s = s + beta[h] * np.outer(k, v - k @ s)
            memory[h] = s
            out.append(rms(q @ s, self.w[pre + "o_norm.weight"], self.c.rms_norm_eps) * gate[h])
        return self.lin(pre + "o_proj", np.concatenate(out))

    def mla(self, pre, x):
        c = self.c
        heads, nope = c.num_attention_heads, c.qk_nope_head_dim
        q = rms(self.lin(pre + "q_a_proj", x), self.w[pre + "q_a_layernorm.weight"], c.mla_norm_eps)
        q = self.lin(pre + "q_b_proj", q).reshape(heads, nope + c.qk_rope_head_dim)
        row = self.lin(pre + "kv_a_proj_with_mqa", x)
        compressed, k_pe = row[: c.kv_lora_rank], row[c.kv_lora_rank :]
        compressed = rms(compressed, self.w[pre + "kv_a_layernorm.weight"], c.mla_norm_eps)
        kv = self.lin(pre + "kv_b_proj", compressed).reshape(heads, nope + c.v_head_dim)
        cache = self.cache.setdefault(pre, [])
        cache.append((kv, k_pe))
        out = []
        for h in range(heads):
            keys = np.stack([np.concatenate((kv[h, :nope], k_pe)) for kv, k_pe in cache])
            values = np.stack([kv[h, nope:] for kv, _ in cache])
            out.append(softmax(keys @ q[h] / np.sqrt(keys.shape[1])) @ values)
        return self.lin(pre + "o_proj", np.concatenate(out) * sigmoid(self.lin(pre + "g_proj", x)))

    def situ(self, a, b):
        beta, linear = self.c.activation_situ_beta, self.c.activation_situ_linear_beta
        return beta * np.tanh(a / beta) * sigmoid(a) * linear * np.tanh(b / linear)

    def mlp(self, pre, x, names=("gate_proj", "up_proj", "down_proj")):
        gate, up, down = (pre + name for name in names)
        return self.lin(down, self.situ(self.lin(gate, x), self.lin(up, x)))

    def moe(self, pre, x):
        scores = sigmoid(self.lin(pre + "gate", x))
        preferred = np.argsort(-(scores + self.w[pre + "gate.e_score_correction_bias"]))
        chosen = preferred[: self.c.num_experts_per_token]
        z = self.lin(pre + "routed_expert_down_proj", x)
        total = sum(
            scores[e] * self.mlp(f"{pre}experts.{e}.", z, ("w1", "w3", "w2")) for e in chosen
        )
        total = total / scores[chosen].sum() * self.c.routed_scaling_factor
        total = rms(total, self.w[pre + "routed_expert_norm.weight"], self.c.rms_norm_eps)
        routed = self.lin(pre + "routed_expert_up_proj", total)
        return routed + self.mlp(pre + "shared_experts.", x)
