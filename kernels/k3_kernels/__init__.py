"""Triton kernels for serving Kimi K3, usable without the rest of the lab.

Needs PyTorch. Triton is imported when an operator runs for the first time, so importing this
package works on a machine without it, and ``TRITON_INTERPRET=1`` may be set up to that moment as
long as nothing else has imported Triton. Lessons 04 and 06 use the package.

An operator is one public function. Its module ``<operator>.py`` says what it computes and checks
the arguments; it chooses the configuration, or ``<operator>_config.py`` does. Modules named
``..._kernel.py`` are the Triton code and nothing else.
"""

from __future__ import annotations

from k3_kernels.attn_res import attn_res
from k3_kernels.dispatch import Dispatch, dispatch
from k3_kernels.few_rows import few_rows_linear
from k3_kernels.finalize import finalize
from k3_kernels.gating import sigmoid_mul, silu_and_mul, situ_and_mul
from k3_kernels.kda_conv import kda_conv
from k3_kernels.kda_decode import kda_decode
from k3_kernels.kda_prefill import kda_prefill
from k3_kernels.kda_records import KDARecords
from k3_kernels.kda_recover import kda_recover
from k3_kernels.mla_decode import mla_decode
from k3_kernels.moe import moe_experts
from k3_kernels.moe_weights import BF16Experts, MXFP4Experts, pack_mxfp4
from k3_kernels.rotary import rotate_pairs
from k3_kernels.routing import Routing, route
from k3_kernels.row_norms import gated_norm, row_norm
from k3_kernels.seat_tables import Seats, fill_in_seats, settle_seats

__all__ = [
    "BF16Experts",
    "Dispatch",
    "KDARecords",
    "MXFP4Experts",
    "Routing",
    "Seats",
    "attn_res",
    "dispatch",
    "few_rows_linear",
    "fill_in_seats",
    "finalize",
    "gated_norm",
    "kda_conv",
    "kda_decode",
    "kda_prefill",
    "kda_recover",
    "mla_decode",
    "moe_experts",
    "pack_mxfp4",
    "rotate_pairs",
    "route",
    "row_norm",
    "settle_seats",
    "sigmoid_mul",
    "silu_and_mul",
    "situ_and_mul",
]
