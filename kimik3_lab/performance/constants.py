"""What kernels and the host reach of the hardware: every fitted number of the cost model.

Needs the standard library only. Lesson 11 introduces them one at a time. A constant has a physical
meaning, a range that the evidence leaves open, and the rows that set it: by their ``id`` in
``data/published/kimi_k3_measurements.csv`` (``*`` stands for anything) or, as
``blog-<version>-c1``, in the table of the published result. What public figures cannot settle at
all is no constant but a choice in :mod:`kimik3_lab.performance.scenarios`.

Shares are of a GPU's published peak. So one value serves all GPUs, which is an assumption: they
were set on one B300 except where a row says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CONSTANTS", "Constant", "constants_with"]


@dataclass(frozen=True, slots=True)
class Constant:
    """One number that was set on measurements.

    Attributes
    ----------
    value, low, high
        As used, and the range that the evidence allows.
    unit
        ``"s"``, ``"B/s"``, ``"FLOP/s"``, ``"s/token"``, ``"s/B"``, or ``"1"`` for a share.
    meaning, evidence
        What it stands for, and how it was set.
    set_on
        Rows that it was set on; empty if it is an assumption.
    source
        Where those rows were published.
    """

    name: str
    value: float
    low: float
    high: float
    unit: str
    meaning: str
    evidence: str
    set_on: tuple[str, ...]
    source: str


_TABLES = "https://github.com/ai-dynamo/aiconfigurator, release 0.12.0, systems/data/b300_sxm"
_LEDGER = (
    "https://github.com/ai-dynamo/aiconfigurator, "
    "docs/perf_database/kimi-k3-blackwell-bringup-ledger.md"
)
_BLOG = "https://vllm.ai/blog/2026-09-13-kimi-k3-performance-optimization"
_DAY0 = "https://vllm.ai/blog/2026-07-27-k3"
_H200 = "https://github.com/mnmehta/kimi-k3"
_NONE = ""

_MATMULS = (
    Constant(
        "gemm_latency", 1.1e-6, 0.8e-6, 3e-6, "s",
        "start of a matrix product in a captured graph",
        "line through the products of few rows: time against bytes of weights",
        ("gemm-*-1", "gemm-*-128"), _TABLES,
    ),
    Constant(
        "gemm_bandwidth", 0.65, 0.55, 0.8, "1",
        "share of the memory's peak at which a product of few rows reads its weights",
        "slope of the same line: 5.2 of 8 TB/s",
        ("gemm-*-1", "gemm-*-128"), _TABLES,
    ),
    Constant(
        "gemm_flops", 0.81, 0.7, 0.85, "1",
        "share of the BF16 peak that a product of many rows reaches",
        "qkvg and o of 8,192 rows: 1.83 and 1.73 of 2.25 PFLOP/s",
        ("gemm-*-8192",), _TABLES,
    ),
    Constant(
        "skinny_gemm_gain", 0.25, 0.08, 0.5, "1",
        "share of its time that a product of up to 16 rows saves on a kernel of its own",
        "8 to 100 % faster kernels, about 10 % of a small batch's step",
        (), _DAY0,
    ),
)  # fmt: skip
_EXPERTS = (
    Constant(
        "moe_latency", 24.7e-6, 18e-6, 30e-6, "s",
        "routing, sorting and finalizing around the experts of a layer, TensorRT-LLM kernels",
        "least squares with the next four and with the skew of each table, 8 % rms",
        ("moe-trtllm-*", "moe-flashinfer-*"), _TABLES,
    ),
    Constant(
        "expert_bandwidth_sliced", 0.546, 0.45, 0.65, "1",
        "share of the memory's peak at which slices of experts are read (TP8)",
        "as moe_latency", ("moe-trtllm-*", "moe-flashinfer-*"), _TABLES,
    ),
    Constant(
        "expert_bandwidth_whole", 0.86, 0.7, 0.95, "1",
        "the same for whole experts, on the busiest rank (EP8)",
        "as moe_latency", ("moe-trtllm-ep8-*",), _TABLES,
    ),
    Constant(
        "expert_flops_sliced", 0.30, 0.25, 0.4, "1",
        "share of the FP8 peak that slices of experts reach",
        "as moe_latency", ("moe-trtllm-*",), _TABLES,
    ),
    Constant(
        "expert_flops_whole", 0.424, 0.35, 0.55, "1",
        "share of the FP8 peak that whole experts reach",
        "as moe_latency", ("moe-trtllm-ep8-*",), _TABLES,
    ),
    Constant(
        "marlin_latency", 58e-6, 45e-6, 65e-6, "s",
        "what moe_latency is for Marlin",
        "least squares with the next two", ("moe-marlin-*",), _TABLES,
    ),
    Constant(
        "marlin_bandwidth", 3.25e12, 2.8e12, 4e12, "B/s",
        "bytes of experts that Marlin reads in a second, whatever the memory could give",
        "as marlin_latency", ("moe-marlin-*",), _TABLES,
    ),
    Constant(
        "marlin_share", 0.50, 0.45, 0.65, "1",
        "share of the memory's peak that it stays below where memory is slower",
        "growth from 1 to 8 requests on H200",
        ("h200-tp16-tpot-c8",), _H200,
    ),
    Constant(
        "marlin_flops", 0.19e15, 0.17e15, 0.22e15, "FLOP/s",
        "operations a second that Marlin reaches, on B300 as on H200",
        "as marlin_latency; a prompt of 1,000 tokens on H200 agrees", ("moe-marlin-*",), _TABLES,
    ),
    Constant(
        "finalize_gain", 8e-6, 4e-6, 12e-6, "s",
        "what a MoE layer saves if its weighted sum moves into the next kernel",
        "about 5 % of latency; 92 x 8 us are 5 % of a step of 15 ms",
        ("pr53152-latency",), _BLOG,
    ),
)  # fmt: skip
_ATTENTION = (
    Constant(
        "kda_latency", 4e-6, 3e-6, 7e-6, "s",
        "start of the fused KDA decode step of a layer",
        "line through 16 to 1,024 sequences", ("kda-decode-*",), _TABLES,
    ),
    Constant(
        "kda_bandwidth", 0.67, 0.6, 0.75, "1",
        "share of the memory's peak at which states are read and written",
        "slope of the same line; verification writes a state for each row and fits too",
        ("kda-decode-*", "kda-verify-vllm-*"), _TABLES,
    ),
    Constant(
        "kda_convolution_verify", 4.5e-6, 3e-6, 6e-6, "s",
        "convolution of a layer when drafts are verified",
        "its own row in the same table", (), _TABLES,
    ),
    Constant(
        "kda_scan_latency", 17e-6, 10e-6, 30e-6, "s",
        "start of the chunked scan of a layer",
        "line through 1,024 and 8,192 tokens", ("kda-scan-*",), _TABLES,
    ),
    Constant(
        "kda_scan_head_token", 5.05e-9, 4e-9, 6e-9, "s",
        "chunked scan of one head and token",
        "slope of the same line, 12 heads", ("kda-scan-*",), _TABLES,
    ),
    Constant(
        "kda_convolution_gathered", 0.5e-3, 0.45e-3, 0.56e-3, "s",
        "convolution of prompts in a layer, with states gathered before and copied after",
        "constant over lengths", ("kda-conv-prefill-vllm",), _TABLES,
    ),
    Constant(
        "kda_convolution_in_place", 40e-6, 15e-6, 60e-6, "s",
        "the same where output and states are written where they belong",
        "SGLang's; vLLM's own later figure is not public", ("kda-conv-prefill-sglang",), _TABLES,
    ),
    Constant(
        "mla_latency", 8e-6, 5e-6, 15e-6, "s",
        "decode attention of a layer with its two absorbed products",
        "assumed: four small kernels", (), _NONE,
    ),
    Constant(
        "mla_bandwidth", 0.5, 0.3, 0.75, "1",
        "share of the memory's peak at which all requests together read MLA rows",
        "assumed: between a product's and half of it", (), _NONE,
    ),
    Constant(
        "mla_sequence_bandwidth", 0.92e12, 0.7e12, 1.3e12, "B/s",
        "rate at which the rows of one request are read, however few requests there are",
        "TP8 against DCP8 at 120,000 tokens, one and two requests",
        ("pr50484-tpot-*",), _BLOG,
    ),
    Constant(
        "mla_prefill_flops", 0.45, 0.3, 0.6, "1",
        "share of the BF16 peak that attention of prompts reaches",
        "assumed; 2 % of a prompt of 8,000 tokens", (), _NONE,
    ),
)  # fmt: skip
_REST = (
    Constant(
        "elementwise_latency", 5e-6, 3e-6, 8e-6, "s",
        "norms, gates and residual mixtures of a layer in a captured graph",
        "KDA module 34.5 us, less its products and its kernel", ("kda-module-graph-*",), _LEDGER,
    ),
    Constant(
        "elementwise_bandwidth", 0.7, 0.5, 0.8, "1",
        "share of the memory's peak that they reach with many rows",
        "assumed: a copy's", (), _NONE,
    ),
    Constant(
        "sampling_row", 1e-6, 0.5e-6, 2e-6, "s",
        "choosing a token from one row of logits",
        "assumed: some passes over 655 kB", (), _NONE,
    ),
    Constant(
        "markov_draft", 0.25e-3, 0.02e-3, 0.4e-3, "s",
        "one draft token of the sequential part of DSpark, besides reading its table: "
        "exchange logits, sample by temperature and top-p",
        "with the acceptance length, on latencies at 1, 4 and 16 requests; a step with drafts took "
        "13 to 15 ms on GB300 and 18.9 ms in SGLang's first version",
        ("blog-main-2026-09-13-*",), _BLOG,
    ),
    Constant(
        "step_host", 0.5e-3, 0.2e-3, 1e-3, "s",
        "host time between steps that nothing hides",
        "assumed; the row checks the sum", (), _NONE,
    ),
    Constant(
        "bulk_all_reduce", 365e9, 190e9, 480e9, "B/s",
        "bytes of a large all-reduce a second, on eight GPUs with NVLink 5, fused parts hidden",
        "first token after 8,000 tokens; the table of vLLM's own kernel alone has 190",
        ("blog-main-2026-09-13-c1",), _BLOG,
    ),
    Constant(
        "node_crossing", 52e-6, 30e-6, 70e-6, "s",
        "what an all-reduce takes longer if it spans two NVLink domains",
        "one request on two nodes of 8 H200",
        ("h200-tp16-tpot-c1",), _H200,
    ),
    Constant(
        "node_crossing_byte", 140e-12, 60e-12, 180e-12, "s/B",
        "for each byte of a small message beyond that",
        "23 requests against one on two nodes of 8 H200",
        ("h200-tp16-tpot-c64",), _H200,
    ),
    Constant(
        "node_crossing_bulk", 60e-6, 20e-6, 80e-6, "s",
        "most that the bytes of a message cost beyond what the network needs for them",
        "a prompt of 1,000 tokens on two nodes of 8 H200",
        ("h200-tp16-ttft-c1",), _H200,
    ),
    Constant(
        "node_crossing_middle", 320e-6, 0.0, 340e-6, "s",
        "more of it for messages of 192 to 256 KiB, cause not public",
        "16 requests are slower than 23 in both layouts",
        ("h200-tp16-tpot-c16",), _H200,
    ),
    Constant(
        "eager_layer_0_27_1", 3.0e-3, 2.9e-3, 3.05e-3, "s",
        "host time to launch a layer of a step too large for a captured graph, vLLM 0.27.1",
        "2,262.9 ms are 8 steps of 1,024 tokens, each 93 layers",
        ("blog-0.27.1-c1",), _BLOG,
    ),
    Constant(
        "eager_layer", 1.1e-3, 0.75e-3, 2.0e-3, "s",
        "the same on 2026-09-13",
        "KDA module 742 us when launched one by one; a layer has a feed-forward besides",
        ("kda-prefill-module-eager",), _LEDGER,
    ),
    Constant(
        "decode_step_residual", 14e-3, 5e-3, 20e-3, "s",
        "what a decode step of vLLM 0.27.1 takes beyond all of the above",
        "latency of one request", ("blog-0.27.1-c1",), _BLOG,
    ),
    Constant(
        "mixed_batch_token", 28e-6, 0.0, 40e-6, "s/token",
        "on 2026-09-13, for each prompt token of a step that also decodes, up to 8,192 tokens",
        "first token at four requests, if the table shows medians; cause not public, and nothing "
        "is known of larger steps",
        ("blog-main-2026-09-13-c4",), _BLOG,
    ),
    Constant(
        "mixed_batch_copies_token", 14e-6, 8e-6, 20e-6, "s/token",
        "gathers and copies of such a step before zero-copy batches",
        "5.2 to 7.7 % of throughput at 4 and 16 requests", ("pr56159-throughput",), _BLOG,
    ),
)  # fmt: skip

#: By name.
CONSTANTS: Mapping[str, Constant] = {c.name: c for c in (*_MATMULS, *_EXPERTS, *_ATTENTION, *_REST)}


def constants_with(overrides: Mapping[str, float] | None = None) -> dict[str, float]:
    """Values of all constants, some of them replaced.

    Raises
    ------
    KeyError
        If there is no constant of such a name; the message lists those there are.
    ValueError
        If a value is negative or no number.

    Examples
    --------
    >>> constants_with({"step_host": 0.0})["step_host"]
    0.0
    """
    values = {name: c.value for name, c in CONSTANTS.items()}
    for name, value in (overrides or {}).items():
        if name not in values:
            raise KeyError(f"no constant {name!r}; expected one of {', '.join(values)}")
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
        values[name] = float(value)
    return values
