"""`python course.py bench`: performance as ratios taken in one run, and README's picture.

    python course.py bench                  ours against transformers, batch 1, same shape, threads and lengths
    python course.py bench --picture        measure t(n) and rewrite data/runs/growth.json and growth.png
    python course.py bench --json           one document on stdout

Rounds are interleaved and medians compared, so that a machine's drift falls on both. Run it with nothing else running.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median

import torch

from decodelab.arithmetic import catalog, cost
from decodelab.arithmetic.catalog import ModelConfig
from decodelab.arithmetic.units import format_bandwidth, format_seconds
from decodelab.decoder import weights
from decodelab.measuring import clock, experiments, machine

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "data" / "runs"


def transformers_step(config: ModelConfig, dtype: str, context: int):
    """One greedy decode step of transformers' Llama of the same shape, random weights, cropped back each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(vocab_size=config.vocab_size, hidden_size=config.hidden, intermediate_size=config.intermediate, head_dim=config.head_dim,
                        num_hidden_layers=config.n_layers, num_attention_heads=config.n_heads, num_key_value_heads=config.n_kv_heads,
                        max_position_embeddings=config.max_context, tie_word_embeddings=config.tied_embeddings)  # fmt: skip
    model = LlamaForCausalLM(shape).to(getattr(torch, dtype)).eval()
    with torch.inference_mode():
        past = model(torch.randint(0, 1000, (1, context - 1)), use_cache=True).past_key_values

    @torch.inference_mode()
    def step() -> None:
        model(torch.tensor([[1]]), past_key_values=past, use_cache=True).logits[:, -1].argmax(-1).tolist()
        past.crop(-1)

    return step


def against_transformers(dtype: str, *, context: int = 128, rounds: int = 30) -> dict:
    """Our tokens/s over theirs, and what both reach of the read roof measured in the same run."""
    card = machine.fresh_card(dtype)
    model = weights.load("smollm2-135m", dtype=dtype)
    experiments.warm_weights(model)
    ours = experiments.step_calls(model, model.new_cache(max_len=context), [context])[0]
    theirs = transformers_step(model.config, dtype, context)
    taken = [median(seconds) for seconds in clock.interleaved([ours, theirs], rounds=rounds, budget_s=60, warmup=3)]
    moved = cost.weight_bytes_per_step(model.config, dtype_bytes=model.dtype.itemsize) + model.new_cache(max_len=context).bytes_per_token * context
    return {"dtype": dtype, "context": context, "rounds": rounds, "ours_s": taken[0], "transformers_s": taken[1], "ratio": taken[1] / taken[0],
            "mbu": moved / taken[0] / card.read_bytes_per_s, "read_bytes_per_s": card.read_bytes_per_s, "machine": card.title()}  # fmt: skip


def picture() -> dict:
    """Measures t(n) of the GPT-2 shape and rewrites the record and the picture that README shows."""
    from decodelab.teaching import plots

    card = machine.card("float32", remeasure=True, say=lambda line: print(line, file=sys.stderr))
    result = experiments.growth(catalog.model("gpt2"), card, contexts=(128, 1024, 2048, 4096, 6144, 8192), rounds=20, budget_s=40)
    RUNS.mkdir(parents=True, exist_ok=True)
    (RUNS / "growth.json").write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    fig, ax = plots.axes()
    plots.growth(result, ax=ax, title="Each token costs more than the last: GPT-2 124M, float32, batch 1")
    fig.savefig(RUNS / "growth.png", dpi=110, metadata={"Software": None})
    return {"a_error": result.a_s.error, "b_error": result.b_s_per_token.error, "r2": result.r2}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true", help="one JSON document on stdout")
    arguments.add_argument("--picture", action="store_true", help="rewrite README's picture and its record instead")
    options = arguments.parse_args()
    if options.picture:
        print(json.dumps(picture(), indent=1))
        return
    dtypes = ["float32", "bfloat16"] if machine.has_bfloat16() else ["float32"]
    rows = [against_transformers(dtype) for dtype in dtypes]
    if options.json:
        print(
            json.dumps(
                {
                    "ratios": {f"{row['dtype']}_vs_transformers": row["ratio"] for row in rows},
                    "mbu": {row["dtype"]: row["mbu"] for row in rows},
                    "rows": rows,
                },
                indent=1,
            )
        )
        return
    for row in rows:
        print(f"{row['machine']}: ours {format_seconds(row['ours_s'])}, transformers {format_seconds(row['transformers_s'])}, ratio {row['ratio']:.2f}, "
              f"{row['mbu']:.2f} of the {format_bandwidth(row['read_bytes_per_s'])} read roof")  # fmt: skip


if __name__ == "__main__":
    main()
