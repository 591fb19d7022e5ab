"""THE formula: parameters, bytes, FLOPs, step time and request time of a decoder, from its shape alone.

    step_s = c0 + c1*batch + max(weight_bytes/BW_w, weight_flops/peak) + max(kv_bytes/BW_kv, attention_flops/peak)

While memory-bound a decode step is a line in the context length: t(n) = a + b*n. Every widget, exercise, test, hook
and command of the course calls the functions below. A multiply-add is 2 FLOP; causal attention counts visible pairs.
"""

from dataclasses import dataclass
from math import inf

from decodelab.arithmetic.catalog import Hardware, ModelConfig, Workload

ATTENTION_CONVENTION = "attention FLOPs count the visible (query, key) pairs of a causal mask, 4 * n_heads * head_dim each"


# --- parameters ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LayerParameters:
    """Values one layer stores: `matrices` take part in a matmul for every token, `vectors` are norms, biases, sinks."""

    matrices: int
    vectors: int
    expert_matrices: int = 0  # one routed expert
    expert_vectors: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        return self.matrices + self.vectors + self.experts * (self.expert_matrices + self.expert_vectors)


def _attention_parameters(config: ModelConfig) -> tuple[int, int]:
    """(matrix values, vector values) of one layer's attention."""
    c, hidden = config, config.hidden
    if c.attention == "MLA":
        query_width = c.n_heads * (c.qk_nope_dim + c.qk_rope_dim)
        query = hidden * c.q_lora_rank + c.q_lora_rank * query_width if c.q_lora_rank else hidden * query_width
        latent = hidden * (c.kv_lora_rank + c.qk_rope_dim) + c.kv_lora_rank * c.n_heads * (c.qk_nope_dim + c.v_head_dim)
        return query + latent + c.n_heads * c.v_head_dim * hidden, c.q_lora_rank + c.kv_lora_rank
    qkv = c.query_width + 2 * c.kv_width
    vectors = qkv * (c.is_gpt2 or c.qkv_bias) + hidden * (c.is_gpt2 or c.attention_out_bias) + 2 * c.head_dim * c.qk_norm
    sinks = c.n_heads if c.family == "gpt-oss" else 0
    return hidden * qkv + c.query_width * hidden, vectors + sinks


def layer_parameters(config: ModelConfig, *, layer: int = 0) -> LayerParameters:
    """Parameters of layer number `layer`: attention, norms and a dense or routed feed-forward part."""
    c, hidden = config, config.hidden
    matrices, vectors = _attention_parameters(c)
    vectors += c.norms_per_layer * hidden * (2 if c.is_gpt2 else 1)
    if c.moe_experts_total and layer >= c.dense_layers:
        oss = c.family == "gpt-oss"  # biases on experts and router
        deepseek = c.attention == "MLA"  # one score-correction value per expert
        matrices += hidden * c.moe_experts_total + c.moe_shared_experts * 3 * hidden * c.moe_intermediate
        vectors += c.moe_experts_total * (oss or deepseek)
        return LayerParameters(matrices=matrices, vectors=vectors, experts=c.moe_experts_total,
                               expert_matrices=3 * hidden * c.moe_intermediate,
                               expert_vectors=(2 * c.moe_intermediate + hidden) * oss)  # fmt: skip
    matrices += (3 if c.gated_mlp else 2) * hidden * c.intermediate
    return LayerParameters(matrices=matrices, vectors=vectors + (c.intermediate + hidden) * c.is_gpt2)


def _layer_kinds(config: ModelConfig) -> list[tuple[int, LayerParameters]]:
    """(how many layers, their parameters) for the leading dense layers and the rest."""
    dense = min(config.dense_layers, config.n_layers) if config.moe_experts_total else 0
    kinds = [(dense, layer_parameters(config, layer=0)), (config.n_layers - dense, layer_parameters(config, layer=dense))]
    return [(count, kind) for count, kind in kinds if count]


def parameters(config: ModelConfig) -> int:
    """Parameters stored, a shared embedding and output matrix counted once.

    Source: config shapes; checked against loaded tensors. Taught in: lessons/01.

    >>> from decodelab.arithmetic.catalog import model
    >>> parameters(model("gpt2"))
    124439808
    """
    embedding = config.vocab_size * config.hidden
    positions = config.max_context * config.hidden if config.is_gpt2 else 0
    final_norm = config.hidden * (2 if config.is_gpt2 else 1)
    layers = sum(count * kind.total for count, kind in _layer_kinds(config))
    return embedding * (1 if config.tied_embeddings else 2) + positions + final_norm + layers


def expected_experts(config: ModelConfig, *, tokens: int) -> float:
    """Distinct routed experts one layer touches for `tokens` tokens with independent, even routing: E(1-(1-k/E)^tokens).

    Source: good to about 15 % on chat traffic (data/README.md). Taught in: lessons/05.
    """
    total, active = config.moe_experts_total, config.moe_experts_active
    return total * (1 - (1 - active / total) ** tokens) if total else 0.0


def active_matrix_parameters(config: ModelConfig) -> int:
    """Matrix values that multiply one token inside the layers: shared parts plus the active experts, no output matrix."""
    return sum(count * (kind.matrices + config.moe_experts_active * kind.expert_matrices) for count, kind in _layer_kinds(config))


# --- bytes --------------------------------------------------------------------------------------------------------


def weight_bytes_per_step(config: ModelConfig, *, dtype_bytes: float = 2, batch: int = 1) -> int:
    """Weight bytes one forward pass over `batch` tokens must read.

        (layers + final norm + output matrix, once each) + batch embedding rows, all * dtype_bytes

    The output matrix counts once, also when tied; the embedding only as the rows looked up. Of routed experts, the
    distinct ones expected at that batch. Source: design of gpt-fast's bandwidth count. Taught in: lessons/01.

    >>> from decodelab.arithmetic.catalog import model
    >>> weight_bytes_per_step(model("llama-3.1-8b"))
    15009857536
    """
    experts = expected_experts(config, tokens=batch)
    layers = sum(count * (kind.matrices + kind.vectors + experts * (kind.expert_matrices + kind.expert_vectors))
                 for count, kind in _layer_kinds(config))  # fmt: skip
    norm = config.hidden * (2 if config.is_gpt2 else 1)
    rows = batch * config.hidden * (2 if config.is_gpt2 else 1)
    return round((layers + norm + config.vocab_size * config.hidden + rows) * dtype_bytes)


def kv_values_per_layer(config: ModelConfig) -> int:
    """Values one token leaves in one layer's cache: K and V for each KV head, or for MLA one latent and one rotary key."""
    return config.kv_lora_rank + config.qk_rope_dim if config.attention == "MLA" else 2 * config.kv_width


def kv_bytes_per_token(config: ModelConfig, *, dtype_bytes: float = 2) -> int:
    """Bytes of K and V stored per token, all layers, one sequence.

        2 (K and V) * n_layers * n_kv_heads * head_dim * dtype_bytes

    Source: Pope et al. 2022, section 2. Taught in: lessons/02, labs/00.

    >>> from decodelab.arithmetic.catalog import model
    >>> kv_bytes_per_token(model("llama-3.1-8b"))  # 128 KiB
    131072
    """
    return round(config.n_layers * kv_values_per_layer(config) * dtype_bytes)


def visible_tokens(config: ModelConfig, *, context: int) -> int:
    """Cached tokens one query reads, summed over layers; a windowed layer reads at most its window."""
    full = config.n_layers - config.windowed_layers
    return full * context + config.windowed_layers * min(context, config.window)


def kv_bytes(config: ModelConfig, *, context: int, dtype_bytes: float = 2) -> int:
    """Bytes of K and V that one sequence of `context` tokens holds and that its next step reads.

    >>> from decodelab.arithmetic.catalog import model
    >>> kv_bytes(model("gpt2"), context=1024) / 2**20
    36.0
    """
    return round(visible_tokens(config, context=context) * kv_values_per_layer(config) * dtype_bytes)


# --- FLOPs --------------------------------------------------------------------------------------------------------


def weight_flops(config: ModelConfig, *, tokens: int, logit_rows: int) -> int:
    """FLOPs of every product with a weight matrix: 2 per value and token; the output matrix for `logit_rows` rows only.

    >>> from decodelab.arithmetic.catalog import model
    >>> weight_flops(model("gpt2"), tokens=1, logit_rows=1)  # about 2 per parameter, not 6
    247064064
    """
    return 2 * active_matrix_parameters(config) * tokens + 2 * config.hidden * config.vocab_size * logit_rows


def visible_pairs(*, new_tokens: int, context: int, window: int = 0) -> int:
    """(query, key) pairs a causal mask leaves visible when the last `new_tokens` of `context` tokens are the queries.

    >>> visible_pairs(new_tokens=1024, context=1024), visible_pairs(new_tokens=9, context=16)
    (524800, 108)
    """
    first = context - new_tokens + 1
    if not window or context <= window:
        return (first + context) * new_tokens // 2
    if first >= window:
        return new_tokens * window
    return visible_pairs(new_tokens=window - first + 1, context=window) + (context - window) * window


def _layer_pairs(config: ModelConfig, *, new_tokens: int, context: int) -> int:
    """Visible pairs summed over the layers of one sequence."""
    full = (config.n_layers - config.windowed_layers) * visible_pairs(new_tokens=new_tokens, context=context)
    if not config.windowed_layers:
        return full
    return full + config.windowed_layers * visible_pairs(new_tokens=new_tokens, context=context, window=config.window)


def _flops_per_pair(config: ModelConfig, *, decode: bool = True) -> int:
    """QK and AV of one visible pair in one layer, over all query heads.

    MLA decodes against the latent itself (scores over latent + rotary part, values over the latent); in prefill its K
    and V are expanded, which is fewer FLOPs per pair.
    """
    c = config
    if c.attention == "MLA":
        return 2 * c.n_heads * (2 * c.kv_lora_rank + c.qk_rope_dim if decode else c.qk_nope_dim + c.qk_rope_dim + c.v_head_dim)
    return 4 * c.query_width


def attention_flops(config: ModelConfig, *, new_tokens: int, context: int) -> int:
    """FLOPs of attention over all layers, one sequence, when the last `new_tokens` of `context` tokens are the queries.

    Counts visible pairs: in prefill half of the square, in decode every cached token. Taught in: lessons/01.

    >>> from decodelab.arithmetic.catalog import model
    >>> attention_flops(model("gpt2"), new_tokens=1, context=1024)
    37748736
    """
    return _layer_pairs(config, new_tokens=new_tokens, context=context) * _flops_per_pair(config, decode=new_tokens == 1)


@dataclass(frozen=True, kw_only=True)
class PassWork:
    """What one forward pass must compute and read."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes


def pass_work(config: ModelConfig, *, new_tokens: int, context: int, batch: int = 1, weight_bytes_per_value: float = 2,
              kv_bytes_per_value: float = 2) -> PassWork:  # fmt: skip
    """FLOPs and bytes of one pass: `new_tokens` queries per sequence against `context` tokens, theirs included, `batch` sequences.

        flops = weight_flops + batch * attention_flops, bytes = weight_bytes_per_step + batch * kv_bytes

    The output matrix runs on each last row only. Prefill has new_tokens = context, a decode step new_tokens = 1.
    Taught in: lessons/01.

    >>> from decodelab.arithmetic.catalog import model
    >>> pass_work(model("llama-3.1-8b"), new_tokens=1, context=1024)
    PassWork(flops=15546187776, bytes=15144075264)
    """
    flops = weight_flops(config, tokens=batch * new_tokens, logit_rows=batch)
    flops += batch * attention_flops(config, new_tokens=new_tokens, context=context)
    moved = weight_bytes_per_step(config, dtype_bytes=weight_bytes_per_value, batch=batch * new_tokens)
    return PassWork(flops=flops, bytes=moved + batch * kv_bytes(config, context=context, dtype_bytes=kv_bytes_per_value))


def intensity(config: ModelConfig, *, new_tokens: int, context: int, batch: int = 1, dtype_bytes: float = 2) -> float:
    """FLOPs per byte of one pass: `new_tokens` queries per sequence against `context` cached tokens, `batch` sequences.

    Taught in: lessons/01.
    """
    formats = {"weight_bytes_per_value": dtype_bytes, "kv_bytes_per_value": dtype_bytes}
    return pass_work(config, new_tokens=new_tokens, context=context, batch=batch, **formats).intensity


# --- seconds ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What a machine and an engine bring to the formula.

    c0 = step_overhead_s + n_layers * layer_overhead_s: an eager engine pays per layer, so one c0 would not carry over
    from a 4-layer probe to a 30-layer model. c1 = per_row_s.
    """

    weight_bytes_per_s: float  # BW_w
    kv_bytes_per_s: float  # BW_kv
    flops_per_s: float = inf  # peak; inf where no source gives one
    step_overhead_s: float = 0.0
    layer_overhead_s: float = 0.0
    per_row_s: float = 0.0
    weight_rows_bytes_per_s: float | None = None  # BW_w of a pass over several tokens, where it is another one
    layer_overhead_rows_s: float | None = None  # and its overhead per layer

    def overhead_s(self, config: ModelConfig, *, batch: int = 1) -> float:
        """c0 + c1 * batch in seconds for this model."""
        layer_s = self.layer_overhead_rows_s if batch > 1 and self.layer_overhead_rows_s is not None else self.layer_overhead_s
        return self.step_overhead_s + config.n_layers * layer_s + batch * self.per_row_s


def floor_constants(hardware: Hardware, *, dtype: str = "bfloat16") -> Constants:
    """The datasheet as constants: every byte at full bandwidth, every FLOP at the dense peak, no overhead."""
    peak = hardware.flops_per_s(dtype)
    return Constants(weight_bytes_per_s=hardware.bandwidth_bytes_per_s, kv_bytes_per_s=hardware.bandwidth_bytes_per_s, flops_per_s=peak or inf)


def weights_time(config: ModelConfig, constants: Constants, *, tokens: int, logit_rows: int, dtype_bytes: float) -> float:
    """Seconds of the weight products of one pass: streaming or arithmetic, whichever is longer."""
    rate = constants.weight_rows_bytes_per_s if tokens > 1 and constants.weight_rows_bytes_per_s else constants.weight_bytes_per_s
    streaming = weight_bytes_per_step(config, dtype_bytes=dtype_bytes, batch=tokens) / rate
    return max(streaming, weight_flops(config, tokens=tokens, logit_rows=logit_rows) / constants.flops_per_s)


def step_time(config: ModelConfig, constants: Constants, *, context: int, batch: int = 1,
              weight_bytes_per_value: float = 2, kv_bytes_per_value: float = 2) -> float:  # fmt: skip
    """Seconds of one decode step for `batch` sequences of `context` tokens each, the new token included.

        c0 + c1*batch + max(weight_bytes/BW_w, weight_flops/peak) + max(kv_bytes/BW_kv, attention_flops/peak)

    Raises: ValueError for a batch below 1 or a negative context. Taught in: lessons/03, labs/00.
    """
    if batch < 1 or context < 0:
        raise ValueError(f"batch is {batch} and context {context}; batch must be at least 1 and context at least 0")
    weights = weights_time(config, constants, tokens=batch, logit_rows=batch, dtype_bytes=weight_bytes_per_value)
    reads = batch * kv_bytes(config, context=context, dtype_bytes=kv_bytes_per_value) / constants.kv_bytes_per_s
    scores = batch * attention_flops(config, new_tokens=1, context=context) / constants.flops_per_s
    return constants.overhead_s(config, batch=batch) + weights + max(reads, scores)


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The line t(n) = a + b*n: seconds of a step at an empty cache, and seconds each cached token adds to it."""

    a_s: float
    b_s_per_token: float

    def __call__(self, context: float) -> float:
        """Seconds of a step with `context` tokens in the cache."""
        return self.a_s + self.b_s_per_token * context


def growth(config: ModelConfig, constants: Constants, *, batch: int = 1, weight_bytes_per_value: float = 2, kv_bytes_per_value: float = 2) -> Growth:
    """a and b of t(n) for this model on these constants; with windowed layers, b holds below the window.

    Taught in: lessons/03.
    """
    formats = {"batch": batch, "weight_bytes_per_value": weight_bytes_per_value, "kv_bytes_per_value": kv_bytes_per_value}
    a_s = step_time(config, constants, context=0, **formats)
    return Growth(a_s=a_s, b_s_per_token=step_time(config, constants, context=1, **formats) - a_s)


def crossover_tokens(config: ModelConfig, *, batch: int = 1, weight_bytes_per_value: float = 2, kv_bytes_per_value: float = 2) -> float:
    """n*: the context at which a step reads as many KV bytes as weight bytes, W / (batch * k); inf if it never does.

    Taught in: lessons/03.
    """
    weights = weight_bytes_per_step(config, dtype_bytes=weight_bytes_per_value, batch=batch)
    layer_tokens = weights / (batch * kv_values_per_layer(config) * kv_bytes_per_value)
    if layer_tokens <= config.n_layers * config.window or not config.windowed_layers:
        return layer_tokens / config.n_layers
    full = config.n_layers - config.windowed_layers
    return (layer_tokens - config.windowed_layers * config.window) / full if full else inf


def prefill_time(config: ModelConfig, constants: Constants, workload: Workload, *, cached: int = 0) -> float:
    """Seconds to read the prompts of one batch in one pass; the output matrix runs on each last row only.

    `cached` tokens of every sequence are in the cache already and are read by attention, not computed again.
    Taught in: lessons/01.
    """
    prompt, batch, context = workload.prompt_tokens, workload.batch, workload.prompt_tokens + cached
    weights = weights_time(config, constants, tokens=batch * prompt, logit_rows=batch, dtype_bytes=workload.weight_bytes_per_value)
    moved = batch * kv_bytes(config, context=context, dtype_bytes=workload.kv_bytes_per_value) / constants.kv_bytes_per_s
    scores = batch * attention_flops(config, new_tokens=prompt, context=context) / constants.flops_per_s
    return constants.overhead_s(config, batch=batch) + weights + max(moved, scores)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A request in seconds. The first token comes from prefill; the other output - 1 are decode steps."""

    ttft_s: float
    itl_first_s: float | None  # None where the prefill's token is the only one
    itl_last_s: float | None
    decode_s: float
    total_s: float
    decode_share: float
    crossover_tokens: float
    free_prefill_saves_fraction: float


def request_time(config: ModelConfig, constants: Constants, workload: Workload) -> Estimate:
    """The whole request: prefill, then output - 1 steps at contexts prompt + 1 ... prompt + output - 1.

        decode_s = sum of t(n); decode_share = decode_s / total_s; free_prefill_saves_fraction = ttft_s / total_s

    KV bytes and attention FLOPs both count visible tokens, so the sum is exact. Taught in: lessons/03.
    """
    w, steps = workload, workload.output_tokens - 1
    formats = {"batch": w.batch, "weight_bytes_per_value": w.weight_bytes_per_value, "kv_bytes_per_value": w.kv_bytes_per_value}
    ttft_s, last = prefill_time(config, constants, w), w.prompt_tokens + steps
    per_pair_s = max(kv_values_per_layer(config) * w.kv_bytes_per_value / constants.kv_bytes_per_s, _flops_per_pair(config) / constants.flops_per_s)
    pairs = _layer_pairs(config, new_tokens=steps, context=last) if steps else 0
    decode_s = steps * step_time(config, constants, context=0, **formats) + w.batch * pairs * per_pair_s
    itl = [step_time(config, constants, context=n, **formats) if steps else None for n in (w.prompt_tokens + 1, last)]
    return Estimate(ttft_s=ttft_s, itl_first_s=itl[0], itl_last_s=itl[1], decode_s=decode_s, total_s=ttft_s + decode_s,
                    decode_share=decode_s / (ttft_s + decode_s), free_prefill_saves_fraction=ttft_s / (ttft_s + decode_s),
                    crossover_tokens=crossover_tokens(config, **formats))  # fmt: skip
