"""What follows from the formula: capacity, splits, bounds on improvements, hidden reasoning, price, energy, agents."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, nan

from decodelab.arithmetic.catalog import ModelConfig, Workload
from decodelab.arithmetic.cost import Constants, kv_bytes, parameters, prefill_time, request_time, step_time, weight_bytes_per_step, weight_flops


class DoesNotFit(ValueError):
    """Weights, or weights and one sequence, exceed the memory; the message names both sizes."""


def _at_least_one(**values: float) -> None:
    """Raises ValueError naming the first of `values` that is below 1."""
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")


def sequences_that_fit(config: ModelConfig, *, memory_bytes: float, context: int, weight_bytes_per_value: float = 2, kv_bytes_per_value: float = 2,
                       reserved_fraction: float = 0.1) -> int:  # fmt: skip
    """Sequences of `context` tokens whose KV fits beside the weights: floor((memory * (1 - reserved) - weights) / KV of one).

    `reserved_fraction` is left to activations and the engine. Raises: DoesNotFit where not even the weights fit.
    Taught in: lessons/05.
    """
    _at_least_one(context=context)
    if not 0 <= reserved_fraction < 1:
        raise ValueError(f"reserved_fraction is {reserved_fraction}; it must be from 0 to below 1")
    weights = parameters(config) * weight_bytes_per_value
    room = memory_bytes * (1 - reserved_fraction) - weights
    if room < 0:
        raise DoesNotFit(f"{config.name} needs {weights / 1e9:.1f} GB for weights and {memory_bytes * (1 - reserved_fraction) / 1e9:.1f} GB is there; "
                         "use fewer bytes per weight, or more devices")  # fmt: skip
    return int(room // kv_bytes(config, context=context, dtype_bytes=kv_bytes_per_value))


def tensor_split_step(config: ModelConfig, constants: Constants, *, devices: int, context: int, exchange_s: float, batch: int = 1,
                      weight_bytes_per_value: float = 2, kv_bytes_per_value: float = 2) -> float:  # fmt: skip
    """Seconds of a step with every matrix cut over `devices`: 1/devices of the weight bytes each, two exchanges per layer.

        overhead + weights / devices + KV / min(devices, KV heads) + 2 * n_layers * exchange_s

    KV is cut by whole heads, so beyond n_kv_heads devices (with MLA's one latent: beyond one) it is held twice. Buys latency, until the exchanges eat it. Raises: ValueError for fewer than 1 device. Taught in: lessons/05.
    """
    _at_least_one(devices=devices)
    kv_parts = min(devices, 1 if config.attention == "MLA" else config.n_kv_heads)
    wide = replace(constants, weight_bytes_per_s=constants.weight_bytes_per_s * devices, kv_bytes_per_s=constants.kv_bytes_per_s * kv_parts,
                   flops_per_s=constants.flops_per_s * devices)  # fmt: skip
    step = step_time(config, wide, context=context, batch=batch, weight_bytes_per_value=weight_bytes_per_value, kv_bytes_per_value=kv_bytes_per_value)
    return step + (2 * config.n_layers * exchange_s if devices > 1 else 0.0)


def layer_split_step(config: ModelConfig, constants: Constants, *, devices: int, context: int, hop_s: float, batch: int = 1,
                     weight_bytes_per_value: float = 2, kv_bytes_per_value: float = 2) -> float:  # fmt: skip
    """Seconds of a step with the layers dealt out over `devices`: one works while the others wait, so the step is no shorter.

        step of one device + (devices - 1) * hop_s

    Buys memory, and throughput if `devices` batches are in flight. Taught in: lessons/05.
    """
    _at_least_one(devices=devices)
    formats = {"weight_bytes_per_value": weight_bytes_per_value, "kv_bytes_per_value": kv_bytes_per_value}
    return step_time(config, constants, context=context, batch=batch, **formats) + (devices - 1) * hop_s


def amdahl(share: float, *, speedup: float = inf) -> float:
    """How many times faster the whole gets when the part that is `share` of it becomes `speedup` times faster.

        1 / (1 - share + share / speedup)

    Raises: ValueError outside 0 <= share <= 1 or for a speed-up that is not positive. Taught in: lessons/03.

    >>> amdahl(0.5, speedup=2), amdahl(0.0001)
    (1.3333333333333333, 1.000100010001)
    """
    if not 0 <= share <= 1 or speedup <= 0:
        raise ValueError(f"share is {share} and speedup {speedup}; share must be from 0 to 1 and speedup above 0")
    left = 1 - share + share / speedup
    return 1 / left if left else inf


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A request whose output is reasoning, then the answer. Hidden tokens cost the same steps as visible ones."""

    ttft_s: float  # to the first token of any kind
    first_answer_s: float  # to the first token that the user sees when reasoning is hidden
    total_s: float
    dollars: float
    joules: float
    reasoning_share: float  # of total_s


def answer_cost(config: ModelConfig, constants: Constants, *, prompt: int, reasoning: int, answer: int, batch: int = 1, dollars_per_hour: float,
                watts: float, devices: int = 1, weight_bytes_per_value: float = 2, kv_bytes_per_value: float = 2) -> Answer:  # fmt: skip
    """Time, price and energy of one answer: `reasoning` + `answer` tokens out, one of `batch` that share the device.

    dollars = total_s * devices * dollars_per_hour / 3600 / batch, joules = total_s * devices * watts / batch: the device
    is paid by time and drawn at `watts` throughout. Taught in: lessons/03.
    """
    _at_least_one(answer=answer, devices=devices)
    work = Workload(prompt_tokens=prompt, output_tokens=reasoning + answer, batch=batch, weight_bytes_per_value=weight_bytes_per_value,
                    kv_bytes_per_value=kv_bytes_per_value)  # fmt: skip
    whole = request_time(config, constants, work)
    first = request_time(config, constants, replace(work, output_tokens=reasoning + 1)).total_s
    share = (first - whole.ttft_s) / whole.total_s
    return Answer(ttft_s=whole.ttft_s, first_answer_s=first, total_s=whole.total_s, dollars=whole.total_s * devices * dollars_per_hour / 3600 / batch,
                  joules=whole.total_s * devices * watts / batch, reasoning_share=share)  # fmt: skip


def token_price(*, prompt: int, output: int, dollars_per_million_in: float, dollars_per_million_out: float) -> tuple[float, float]:
    """(dollars, share of it that is output) at a provider's list price; hidden reasoning counts as output.

    >>> token_price(prompt=100, output=10_000, dollars_per_million_in=1, dollars_per_million_out=4)
    (0.0401, 0.9975062344139651)
    """
    read, written = prompt * dollars_per_million_in, output * dollars_per_million_out
    return (read + written) / 1e6, written / (read + written)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of an agent: tokens that prefill computed, tokens written, and the seconds of each."""

    prefill_tokens: int
    output_tokens: int
    context: int  # at the turn's end
    prefill_s: float
    decode_s: float


def agent_turns(config: ModelConfig, constants: Constants, *, turns: int, first_prompt: int, tool_tokens: int, output: int, reuse_prefix: bool,
                weight_bytes_per_value: float = 2, kv_bytes_per_value: float = 2) -> list[Turn]:  # fmt: skip
    """`turns` calls in a row; each one's output and `tool_tokens` of results come back as prompt for the next.

    With `reuse_prefix` the cache is kept and only new tokens are read; without it the whole history is read again.
    Taught in: lessons/03.
    """
    _at_least_one(turns=turns)
    done, history = [], 0
    for turn in range(turns):
        new = first_prompt if turn == 0 else tool_tokens + 1  # the last written token was never read back
        cached = history if reuse_prefix else 0
        read = new if reuse_prefix else history + new
        work = Workload(
            prompt_tokens=read, output_tokens=output, weight_bytes_per_value=weight_bytes_per_value, kv_bytes_per_value=kv_bytes_per_value
        )
        whole = replace(work, prompt_tokens=history + new)
        done.append(Turn(prefill_tokens=read, output_tokens=output, context=history + new + output - 1,
                         prefill_s=prefill_time(config, constants, work, cached=cached), decode_s=request_time(config, constants, whole).decode_s))  # fmt: skip
        history += new + output - 1
    return done


def decode_share(turns: Sequence[Turn]) -> float:
    """Decode's part of the time of all turns together."""
    decode = sum(turn.decode_s for turn in turns)
    return decode / (decode + sum(turn.prefill_s for turn in turns))


def ridge_batch(config: ModelConfig, constants: Constants, *, weight_bytes_per_value: float = 2) -> float:
    """The batch at which a dense step's weight FLOPs take as long as reading its weights; KV left out.

        (weight_bytes / BW_w) / (weight_flops of one row / peak)

    Taught in: lessons/05.

    >>> from decodelab.arithmetic import catalog, cost
    >>> round(ridge_batch(catalog.model("llama-3.1-8b"), cost.floor_constants(catalog.hardware("h200-sxm"))))
    206
    """
    streaming = weight_bytes_per_step(config, dtype_bytes=weight_bytes_per_value) / constants.weight_bytes_per_s
    return streaming * constants.flops_per_s / weight_flops(config, tokens=1, logit_rows=1)


def balance_output(config: ModelConfig, constants: Constants, *, prompt: int, **formats: float) -> int:
    """Fewest output tokens whose decode takes at least as long as the prefill of `prompt` tokens; the position limit is not looked at.

    `formats` are Workload's batch and bytes per value. Taught in: lessons/04.
    """
    ttft_s = prefill_time(config, constants, Workload(prompt_tokens=prompt, output_tokens=1, **formats))
    enough = ceil(ttft_s / step_time(config, constants, context=prompt, **formats)) + 1

    def decode_leads(output: int) -> bool:
        return request_time(config, constants, Workload(prompt_tokens=prompt, output_tokens=output, **formats)).decode_share >= 0.5

    return bisect_left(range(1, enough + 1), True, key=decode_leads) + 1


def decode_shares(
    config: ModelConfig, constants: Constants, *, prompts: Sequence[int], outputs: Sequence[int], **formats: float
) -> list[list[float]]:
    """Decode share of a request for each output (rows) and prompt (columns); nan where the model has too few positions."""
    works = [[Workload(prompt_tokens=prompt, output_tokens=output, **formats) for prompt in prompts] for output in outputs]
    return [[request_time(config, constants, work).decode_share if work.slots <= config.max_context else nan for work in row] for row in works]
