"""Trains the tiny reasoner, or its draft, from nothing, on a CPU: `python labs/reasoner/train.py [--draft]`.

Two cores take under half an hour for the target. Everything is drawn from one seed. Two stages: short windows taken anywhere
in the texts teach the rule of each step; long ones teach that what lies 1,000 tokens back does not matter.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import mean

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from decodelab.arithmetic.catalog import ModelConfig
from decodelab.decoder import weights
from decodelab.decoder.model import Decoder, Pass
from decodelab.teaching import tasks

IDS = {token: number for number, token in enumerate(tasks.VOCABULARY)}
SHAPE = {"hidden": 128, "intermediate": 320, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "vocab_size": len(IDS), "max_context": 2048,
         "tied_embeddings": True}  # fmt: skip
LAYERS = {"reasoner": 10, "reasoner-draft": 1}
STAGES = ((256, 16, 3200), (1280, 4, 560))  # tokens per row, rows, steps
SHARE = {"collatz": 0.2, "multiplication": 0.4, "search": 0.4}  # of texts; Collatz traces are ten times as long as the others
CUT, IGNORED = 0.25, -100  # share of texts that answer early; a label that no loss sees
RATE, WARM_UP, SEED = 2e-3, 80, 11


def example(rng: Random) -> tuple[list[int], list[int]]:
    """One text as ids and labels. Of an early cut, which nothing announces, ANSWER itself is not learned."""
    task = tasks.TASKS[rng.choices(list(SHARE), list(SHARE.values()))[0]]
    while (problem := task.draw(rng)).held_out:
        pass
    cut = rng.randrange(len(problem.trace)) if problem.trace and rng.random() < CUT else None
    ids = [IDS[token] for token in problem.text(cut=cut)]
    labels = [*ids[1:], IGNORED]
    if cut is not None:
        labels[len(problem.prompt) + cut] = IGNORED
    return ids, labels


def row(rng: Random, length: int) -> tuple[list[int], list[int]]:
    """`length` tokens of one text after another; half the rows begin anywhere within a long text."""
    ids, labels = [], []
    while len(ids) < length:
        new, learned = example(rng)
        start = rng.randrange(len(new) - length + 1) if not ids and len(new) > length and rng.random() < 0.5 else 0
        ids, labels = ids + new[start:], labels + learned[start:]
    return ids[:length], labels[:length]


def batches(rng: Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and labels of every step, (rows, tokens) each."""
    for length, rows, steps in STAGES:
        for _ in range(steps):
            yield tuple(torch.tensor(part) for part in zip(*(row(rng, length) for _ in range(rows)), strict=True))


def fresh(layers: int, generator: torch.Generator) -> Decoder:
    """The course's own decoder with weights to train: variance 1 / inputs, what is added to the stream less with depth."""
    model = weights.random(ModelConfig(name="reasoner", n_layers=layers, **SHAPE), dtype="float32", path="eager")
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            depth = 2 * layers if name.endswith(("out.weight", "down.weight")) else 1
            parameter.normal_(0, (parameter.shape[1] * depth) ** -0.5, generator=generator)
        parameter.requires_grad_(True)
    return model


class NoCache:
    """Training reads each text once: keys and values go no further."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v


@torch.compile(dynamic=False)
def block(part: torch.nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return part(x, cache=NoCache(), layer=0, shared=Pass(cos, sin, None, True))  # (B, T, D)


def loss(model: Decoder, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the labels; products in bfloat16."""
    angles = torch.arange(ids.shape[1])[:, None] * model.inverse_wavelengths
    angles = torch.cat((angles, angles), dim=-1)  # (T, H)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        x = model.embed(ids)  # (B, T, D)
        for part in model.blocks:
            x = block(part, x, cos, sin)
        logits = model.head(model.norm(x))  # (B, T, V)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def optimisers(model: Decoder) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for embedding and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("blocks")]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or not name.startswith("blocks")]
    return [torch.optim.Muon(matrices, lr=5 * RATE, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True)]  # fmt: skip


def train(layers: int) -> tuple[Decoder, float]:
    """A trained model and the mean loss of its last hundred steps; prints it as it goes."""
    torch.manual_seed(SEED)
    model = fresh(layers, torch.Generator().manual_seed(SEED))
    both, steps, losses, started = optimisers(model), sum(stage[-1] for stage in STAGES), [], time.perf_counter()
    rates = [each.param_groups[0]["lr"] for each in both]
    for step, (ids, labels) in enumerate(batches(Random(SEED)), start=1):
        for each, rate in zip(both, rates, strict=True):
            each.param_groups[0]["lr"] = rate * min(1, step / WARM_UP) * (0.51 + 0.49 * math.cos(math.pi * step / steps))
        value = loss(model, ids, labels)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in both:
            each.step()
            each.zero_grad()
        losses.append(value.item())
        if not math.isfinite(losses[-1]):
            raise SystemExit(f"the loss of step {step:,} is {losses[-1]}: nothing was saved; a lower RATE (now {RATE}) may help")
        if step % 100 == 0:
            print(f"step {step:,} of {steps:,}: loss {mean(losses[-100:]):.4f} after {time.perf_counter() - started:,.0f} s", flush=True)
    return model, mean(losses[-100:])


def save(model: Decoder, folder: Path) -> None:
    """A Hugging Face folder: weights in bfloat16, config and tokenizer. transformers reads it too."""
    names = {"embed": "model.embed_tokens", "norm": "model.norm", "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
             **{f"attention.{part}": f"self_attn.{part[0]}_proj" for part in ("q", "k", "v", "out")},
             **{f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}}  # fmt: skip
    tensors = {}
    for name, parameter in model.named_parameters():
        part, layer = name.removesuffix(".weight"), ""
        if part.startswith("blocks."):
            _, index, part = part.split(".", 2)
            layer = f"model.layers.{index}."
        tensors[f"{layer}{names[part]}.weight"] = parameter.detach().bfloat16().clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    documents = {
        "config": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": config.hidden, "num_hidden_layers": config.n_layers,
                   "intermediate_size": config.intermediate, "num_attention_heads": config.n_heads, "num_key_value_heads": config.n_kv_heads,
                   "head_dim": config.head_dim, "vocab_size": config.vocab_size, "max_position_embeddings": config.max_context,
                   "rms_norm_eps": config.norm_eps, "rope_theta": config.rope_base, "hidden_act": "silu", "tie_word_embeddings": True,
                   "bos_token_id": IDS[tasks.START], "eos_token_id": IDS[tasks.END], "torch_dtype": "bfloat16"},
        "tokenizer_config": {"bos_token": tasks.START, "eos_token": tasks.END, "add_bos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"},
        "tokenizer": {"version": "1.0", "added_tokens": [{"id": IDS[token], "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                                                          "normalized": False, "special": True} for token in (tasks.START, tasks.END, tasks.ANSWER)],
                      "normalizer": None, "post_processor": None, "decoder": {"type": "Fuse"},
                      "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(?m:.)"}, "behavior": "Isolated", "invert": False},
                      "model": {"type": "WordLevel", "vocab": IDS, "unk_token": "<unk>"}},  # which is no entry: other characters are refused
    }  # fmt: skip
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draft", action="store_true", help="train the draft of one layer, not the target of ten layers")
    parser.add_argument("--to", type=Path, default=Path(__file__).parents[2] / "data" / "models", help="folder that gets reasoner/ or reasoner-draft/")
    args = parser.parse_args()
    name = "reasoner-draft" if args.draft else "reasoner"
    started = time.perf_counter()
    model, last = train(LAYERS[name])
    record = {"parameters": sum(p.numel() for p in model.parameters()), "layers": LAYERS[name], "seed": SEED, "stages": STAGES,
              "tokens": sum(length * rows * steps for length, rows, steps in STAGES), "last_loss": round(last, 4),
              "minutes": round((time.perf_counter() - started) / 60, 1), "torch": torch.__version__, "threads": torch.get_num_threads()}  # fmt: skip
    save(model, args.to / name)
    (args.to / name / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{args.to / name}: {record['parameters']:,} parameters, trained in {record['minutes']} minutes")


if __name__ == "__main__":
    main()
