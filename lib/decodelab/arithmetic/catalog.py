"""The catalogue: model shapes, hardware and workloads, read from data/*.csv. One slug rule for every name."""

import csv
import difflib
import re
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "fp8": 1.0, "q8_0": 8.5 / 8, "q5_0": 5.5 / 8,
               "q4_0": 4.5 / 8, "q4_1": 5.0 / 8, "mxfp4": 4.25 / 8}  # fmt: skip
"""Bytes per value of each format, block formats with their scales: Q4_0 stores 32 values in 18 bytes."""


class UnknownName(LookupError):
    """A model, hardware or format name that the catalogue does not hold; the message names the near ones."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """The `llama3` rule that stretches rotary wavelengths longer than the original context.

    Source: huggingface/transformers modeling_rope_utils.py.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_context: int

    def __post_init__(self) -> None:
        numbers = all(type(value) in (int, float) and 0 < value < 1e30 for value in vars(self).values())
        if not numbers or self.factor < 1 or self.low_freq_factor >= self.high_freq_factor or self.original_max_context < 1:
            raise ValueError(f"{str(vars(self))[:200]}: it needs numbers, factor >= 1, 0 < low < high, original context >= 1")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer: what the cost model counts and the decoder builds.

    `head_dim` is a field, never hidden / n_heads. `intermediate` is the width of a dense FFN.
    """

    name: str
    n_layers: int
    hidden: int
    intermediate: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    family: str = "llama"
    tied_embeddings: bool = False
    gated_mlp: bool = True
    norm_eps: float = 1e-5
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    attention: str = "GQA"  # "MHA", "GQA", "MQA" or "MLA"
    qkv_bias: bool = False
    attention_out_bias: bool = False
    qk_norm: bool = False
    norms_per_layer: int = 2
    window: int = 0  # tokens a windowed layer keeps; 0: none
    windowed_layers: int = 0
    moe_experts_total: int = 0
    moe_experts_active: int = 0
    moe_intermediate: int = 0
    moe_shared_experts: int = 0
    dense_layers: int = 0  # leading layers with a dense FFN in a mixture-of-experts model
    kv_lora_rank: int = 0  # MLA: width of the latent that the cache stores
    qk_rope_dim: int = 0
    q_lora_rank: int = 0
    qk_nope_dim: int = 0
    v_head_dim: int = 0

    def __post_init__(self) -> None:
        sizes = (self.n_layers, self.hidden, self.n_heads, self.n_kv_heads, self.vocab_size, self.max_context)
        if min(sizes) < 1 or (self.attention != "MLA" and self.head_dim < 1):
            raise ValueError(f"{self.name}: every size must be at least 1; got {sizes}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"{self.name}: {self.n_heads} query heads cannot share {self.n_kv_heads} KV heads evenly; "
                             "make n_heads a multiple of n_kv_heads")  # fmt: skip
        if self.windowed_layers > self.n_layers or (self.windowed_layers and not self.window):
            raise ValueError(f"{self.name}: {self.windowed_layers} windowed layers of {self.n_layers}, window {self.window}")
        if self.moe_experts_active > self.moe_experts_total:
            raise ValueError(f"{self.name}: {self.moe_experts_active} active experts of {self.moe_experts_total}")

    @property
    def is_gpt2(self) -> bool:
        """Learned positions, LayerNorm and biases everywhere, as in GPT-2."""
        return self.family.lower() in ("gpt2", "gpt-2")

    @property
    def query_width(self) -> int:
        """Values of Q per token in one layer: n_heads * head_dim."""
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Values of K (or of V) per token in one layer: n_kv_heads * head_dim."""
        return self.n_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One accelerator or CPU by its datasheet: memory in GB, bandwidth in bytes/s, dense peaks in FLOP/s by format."""

    name: str
    vendor: str
    kind: str
    memory_gb: float | None
    bandwidth_bytes_per_s: float
    fp32_flops_per_s: float | None = None
    bf16_fp16_flops_per_s: float | None = None
    fp8_flops_per_s: float | None = None
    tdp_w: float | None = None
    source: str = ""

    def flops_per_s(self, dtype: str) -> float | None:
        """Dense peak for arithmetic in `dtype`; weight-only formats compute in 16 bits. None where no source gives it."""
        if dtype == "float32":
            return self.fp32_flops_per_s
        return self.fp8_flops_per_s if dtype == "fp8" and self.fp8_flops_per_s else self.bf16_fp16_flops_per_s


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A request and the formats it runs in: token counts, sequences per step, bytes per value of weights and of KV."""

    prompt_tokens: int
    output_tokens: int
    batch: int = 1
    weight_bytes_per_value: float = 2.0
    kv_bytes_per_value: float = 2.0

    def __post_init__(self) -> None:
        for name, value, least in (("prompt_tokens", self.prompt_tokens, 1), ("output_tokens", self.output_tokens, 1), ("batch", self.batch, 1)):
            if value < least or value != int(value):
                raise ValueError(f"{name} is {value}; it must be at least {least}, and whole")
        if min(self.weight_bytes_per_value, self.kv_bytes_per_value) <= 0:
            raise ValueError(f"bytes per value are {self.weight_bytes_per_value} and {self.kv_bytes_per_value}; they must be above 0")

    @property
    def slots(self) -> int:
        """Cache slots one sequence needs: prompt + output - 1, since the last token is never read back.

        >>> Workload(prompt_tokens=32, output_tokens=16).slots
        47
        """
        return slots_needed(prompt_tokens=self.prompt_tokens, max_tokens=self.output_tokens)


def slots_needed(*, prompt_tokens: int, max_tokens: int) -> int:
    """Cache slots of a whole request: the last token written is never read, so prompt + max_tokens - 1. Taught in: labs/08.

    >>> slots_needed(prompt_tokens=12, max_tokens=4)
    15
    """
    return prompt_tokens + max(max_tokens, 1) - 1


def slug(name: str) -> str:
    """The one form in which names are compared: lower case, runs of anything but letters, digits and '.' become '-'.

    >>> slug("NVIDIA H200 SXM"), slug("Llama-3.1-8B")
    ('nvidia-h200-sxm', 'llama-3.1-8b')
    """
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def course_file(name: str) -> Path:
    """A file of the course: beside the code in a wheel, below the top of the repository in an editable install.

    Raises: FileNotFoundError.
    """
    package = Path(__file__).resolve().parents[1]
    found = next((place / name for place in (package, package.parents[1]) if (place / name).is_file()), None)
    if found is None:
        raise FileNotFoundError(f"no {name} beside {package.name}: install with `pip install -e ./lib[lab]` from the clone")
    return found


def data_dir() -> Path:
    """Where the reference tables are."""
    return course_file("data/models.csv").parent


@lru_cache(maxsize=16)
def read_table(file: str) -> tuple[dict[str, str], ...]:
    """The rows of data/`file` as dictionaries of text."""
    with (data_dir() / file).open(encoding="utf-8", newline="") as lines:
        return tuple(csv.DictReader(lines))


def _number(text: str | None, scale: float = 1.0) -> float | None:
    return float(text) * scale if text else None


def _model(row: dict[str, str]) -> ModelConfig:
    """A models.csv row; a blank cell is the field's default."""
    renamed = {"n_layers": "layers", "vocab_size": "vocab"}
    values = {}
    for field in fields(ModelConfig):
        text = row.get(renamed.get(field.name, field.name), "")
        if text:
            values[field.name] = text == "true" if field.type is bool else field.type(text) if field.type in (int, float, str) else text
    return ModelConfig(**{"intermediate": 0, "head_dim": 0, **values})


def _hardware(row: dict[str, str]) -> Hardware:
    """A hardware.csv row, in base units."""
    return Hardware(name=row["name"], vendor=row["vendor"], kind=row["kind"], memory_gb=_number(row["memory_gb"]),
                    bandwidth_bytes_per_s=float(row["bandwidth_gb_s"]) * 1e9, tdp_w=_number(row["tdp_w"]), source=row["source"],
                    **{f"{peak}_flops_per_s": _number(row[column], 1e12) for peak, column in
                       (("fp32", "fp32_tflops"), ("bf16_fp16", "bf16_fp16_tflops"), ("fp8", "fp8_tflops"))})  # fmt: skip


@lru_cache(maxsize=1)
def models() -> dict[str, ModelConfig]:
    """Every model shape of the catalogue by slug."""
    return {slug(row["name"]): _model(row) for row in read_table("models.csv")}


@lru_cache(maxsize=1)
def hardware_by_slug() -> dict[str, Hardware]:
    """Every accelerator and CPU of the catalogue by slug, with the vendor's name in it."""
    return {slug(row["name"]): _hardware(row) for row in read_table("hardware.csv")}


@lru_cache(maxsize=2)
def _names(kind: str) -> dict[str, str]:
    """Every accepted slug of a kind ("model" or "hardware") -> the slug of its row: rows, without vendor, aliases."""
    rows = models() if kind == "model" else hardware_by_slug()
    names = {key: key for key in rows}
    if kind == "hardware":
        names |= {key.removeprefix(f"{slug(row.vendor)}-"): key for key, row in rows.items()}
    aliases = {slug(row["alias"]): slug(row["name"]) for row in read_table("aliases.csv") if row["kind"] == kind}
    vendors = {f"{slug(rows[key].vendor)}-{alias}": key for alias, key in aliases.items()} if kind == "hardware" else {}
    return vendors | names | aliases


def _resolve(kind: str, name: str) -> str:
    names = _names(kind)
    if (key := slug(name)) in names:
        return names[key]
    near = difflib.get_close_matches(key, names, n=4, cutoff=0.4) or sorted(names)[:6]
    raise UnknownName(
        f"unknown {kind} {name!r}; near names: {', '.join(dict.fromkeys(near))}. All are in data/{'models' if kind == 'model' else 'hardware'}.csv"
    )


def model(name: str) -> ModelConfig:
    """The shape called `name` in data/models.csv, under any spelling that the slug rule or an alias maps to it.

    Raises: UnknownName, naming the near ones.

    >>> model("Llama 3.1 8B").n_kv_heads
    8
    """
    return models()[_resolve("model", name)]


def hardware(name: str) -> Hardware:
    """The accelerator or CPU called `name` in data/hardware.csv; the vendor may be left out.

    Raises: UnknownName, naming the near ones.

    >>> hardware("h200-sxm").bandwidth_bytes_per_s
    4800000000000.0
    """
    return hardware_by_slug()[_resolve("hardware", name)]


def dtype_bytes(name: str) -> float:
    """Bytes per value of the format `name`, scales of a block format included.

    Raises: UnknownName.

    >>> dtype_bytes("bf16"), dtype_bytes("q4_0")
    (2.0, 0.5625)
    """
    return DTYPE_BYTES[dtype_name(name)]


def dtype_name(name: str) -> str:
    """The full name of a format: "bf16" is "bfloat16".

    Raises: UnknownName.
    """
    short = {"f32": "float32", "fp32": "float32", "bf16": "bfloat16", "f16": "float16", "fp16": "float16", "float8": "fp8"}
    full = short.get(name.lower().replace("-", "_"), name.lower().replace("-", "_"))
    if full not in DTYPE_BYTES:
        raise UnknownName(f"unknown format {name!r}; known: {', '.join(DTYPE_BYTES)}")
    return full
