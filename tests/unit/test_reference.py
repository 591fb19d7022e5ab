"""Our logits and greedy text against transformers, an independent implementation, in float32."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from decodelab.decoder import weights
from decodelab.decoder.generate import generate
from decodelab.decoder.tokenizer import load_tokenizer

TOLERANCE = 1e-4  # of a logit, float32
NEAR_TIE = 1e-3  # a top-2 gap below which two correct implementations may choose differently
PROMPT = "Explain in three sentences why the sky is blue."
LLAMA = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 131, "max_position_embeddings": 512, "initializer_range": 0.2}  # fmt: skip
LLAMA3_RULE = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip

# Golden data: made once with these weights (sha256 of the file in course.py), float32. Ids chosen over the whole range.
GOLDEN_LOGITS = {0: 10.9088, 2: 13.5606, 11: 8.6912, 253: 15.3728, 504: 28.0544, 1000: 12.5024, 28: 12.7674, 49151: 6.8323}
GOLDEN_TOKENS = [504, 6376, 314, 4461, 975, 282, 253, 980, 1217, 13739, 43464, 24484, 28, 837, 1420, 13242, 5383, 6756, 282, 1512, 284, 314,
                 753, 6475, 411, 1507, 6756, 28, 1285, 913, 6756, 30, 669, 7613, 4149, 975, 282, 260, 6019, 282, 1420, 351, 6756, 28, 527, 314,
                 253, 4959, 2325, 282, 260, 1782, 905, 30, 2, 198, 2, 1, 9690, 198, 2, 198, 1, 4093]  # fmt: skip


def every_logit(model, ids):
    return model(ids, cache=model.new_cache(max_len=ids.shape[1], batch=len(ids)), every_row=True)


def reference_logits(reference, ids):
    with torch.no_grad():
        return reference(ids).logits


def assert_equal_up_to_a_near_tie(tokens, logits):
    """`tokens` are the argmax of `logits`, row by row, up to the first row whose two best are nearly equal."""
    best = logits.topk(2, dim=-1)
    gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
    for step, (token, gap) in enumerate(zip(tokens, gaps, strict=True)):
        if gap < NEAR_TIE:
            print(f"near tie at step {step}: top-2 gap {gap:.2g}; {step} tokens compared")
            return
        assert token == best.indices[step, 0], f"step {step}: {token} against {int(best.indices[step, 0])}, top-2 gap {gap:.3g}"
    print(f"all {len(tokens)} tokens equal; smallest top-2 gap {min(gaps):.3g}")


@pytest.fixture(scope="module")
def smollm():
    return weights.load("smollm2-135m")


@pytest.fixture(scope="module")
def smollm_reference():
    path = weights.find("smollm2-135m")
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompt():
    return load_tokenizer("smollm2-135m").chat([{"role": "user", "content": PROMPT}])


def greedy(model, prompt):
    return [step.token for step in generate(model, prompt, max_tokens=64)]


def test_smollm2_logits(smollm, smollm_reference, prompt):
    ids = torch.tensor([prompt, prompt[::-1]])
    assert (every_logit(smollm, ids) - reference_logits(smollm_reference, ids)).abs().max() < TOLERANCE


def test_smollm2_greedy_text(smollm, smollm_reference, prompt):
    """64 greedy tokens with our cache; the reference scores the whole text in one pass, so each row is its own greedy choice."""
    tokens = greedy(smollm, prompt)
    ids = torch.tensor([prompt + tokens[:-1]])
    assert_equal_up_to_a_near_tie(tokens, reference_logits(smollm_reference, ids)[0, len(prompt) - 1 :])


@pytest.mark.parametrize("threads", [1, 2])
def test_b107_golden(smollm, prompt, threads):
    """Golden logits with a tolerance; golden tokens up to the first near tie, on 1 and 2 threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        first = smollm(torch.tensor([prompt]), cache=smollm.new_cache(max_len=len(prompt)))[0]
        for token, value in GOLDEN_LOGITS.items():
            assert first[token].item() == pytest.approx(value, abs=2e-3), token
        ids = torch.tensor([prompt + GOLDEN_TOKENS[:-1]])
        assert_equal_up_to_a_near_tie(GOLDEN_TOKENS, every_logit(smollm, ids)[0, len(prompt) - 1 :])
    finally:
        torch.set_num_threads(before)


def test_a_changed_token_fails_the_comparison():
    """The comparison can fail: it does at the first token that is not the best one, and not after a near tie."""
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 1.0, 1.0005], [9.0, 0.0, 0.0]])
    assert_equal_up_to_a_near_tie([1, 1, 2], logits)
    with pytest.raises(AssertionError, match="step 0: 2 against 1, top-2 gap 2"):
        assert_equal_up_to_a_near_tie([2, 2, 0], logits)
    with pytest.raises(AssertionError, match="step 2: 1 against 0, top-2 gap 9"):
        assert_equal_up_to_a_near_tie([1, 2, 1], logits * torch.tensor([[1.0], [9.0], [1.0]]))


@pytest.fixture
def saved(tmp_path):
    """Saves a randomly initialised reference model; returns its folder and the model in eval mode."""

    def save(model):
        model.eval().save_pretrained(tmp_path / "model")
        return tmp_path / "model", model

    torch.manual_seed(7)
    return save


def shake(reference):
    """Moves biases and norms: transformers starts them at zero and at one, and real ones are not."""
    for name, parameter in reference.named_parameters():
        if name.endswith("bias") or "norm" in name or "ln_" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return reference


def random_ids(vocabulary, rows, columns):
    return torch.randint(0, vocabulary, (rows, columns), generator=torch.Generator().manual_seed(8))


def test_gpt2_logits(saved):
    path, reference = saved(shake(GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=48, n_head=4, vocab_size=131, n_positions=64, initializer_range=0.2))))
    ids = random_ids(131, 3, 64)
    model = weights.load(path)
    assert model.config.is_gpt2 and model.config.tied_embeddings
    assert (every_logit(model, ids) - reference_logits(reference, ids)).abs().max() < TOLERANCE


@pytest.mark.parametrize("more", [
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": False},
    {"tie_word_embeddings": False, "head_dim": 24, "rms_norm_eps": 1e-3},
    {"tie_word_embeddings": False, "num_key_value_heads": 1},
    {"tie_word_embeddings": False, "num_key_value_heads": 4},
    {"tie_word_embeddings": False, "attention_bias": True},
], ids=["tied", "untied", "explicit head_dim", "one KV head", "as many KV heads", "biases"])  # fmt: skip
def test_llama_logits(saved, more):
    path, reference = saved(shake(LlamaForCausalLM(LlamaConfig(**{**LLAMA, **more}))))
    ids = random_ids(131, 2, 90)
    model = weights.load(path)
    assert model.config.tied_embeddings is more["tie_word_embeddings"]
    assert (every_logit(model, ids) - reference_logits(reference, ids)).abs().max() < TOLERANCE


QWEN = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 untied, other base": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2, windows off": ("Qwen2", {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "qwen3 untied, one KV head": ("Qwen3", {"head_dim": 40, "num_key_value_heads": 1}),
    "qwen3 with biases": ("Qwen3", {"head_dim": 24, "attention_bias": True}),
}


def qwen(kind, more):
    """A reference model of this architecture, its biases and norms shaken."""
    config = getattr(transformers, f"{kind}Config")(**{**LLAMA, **more})
    return shake(getattr(transformers, f"{kind}ForCausalLM")(config))


@pytest.mark.parametrize("kind", QWEN)
def test_qwen_logits_from_one_file_and_from_shards(saved, tmp_path, kind):
    """Equal to the reference in one pass, token by token and in chunks; the head size is never hidden / heads in Qwen3."""
    path, reference = saved(qwen(*QWEN[kind]))
    reference.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2 and (path / "model.safetensors").exists()
    ids = random_ids(131, 2, 90)
    expected = reference_logits(reference, ids)
    for folder in (path, tmp_path / "shards"):
        model = weights.load(folder)
        assert (every_logit(model, ids) - expected).abs().max() < TOLERANCE
    for sizes in ((1,) * 90, (1, 30, 7, 52), (64, 1, 1, 24)):
        cache = model.new_cache(max_len=90, batch=2)
        pieces = [model(piece, cache=cache, every_row=True) for piece in ids.split(sizes, dim=1)]
        assert (torch.cat(pieces, dim=1) - expected).abs().max() < TOLERANCE, sizes


def test_qwen3_without_a_head_size_has_128(saved):
    """transformers reads a config that leaves it out so."""
    path, reference = saved(qwen("Qwen3", {"head_dim": 128}))
    config = json.loads((path / "config.json").read_text())
    assert config.pop("head_dim") == 128
    (path / "config.json").write_text(json.dumps(config))
    ids = random_ids(131, 1, 20)
    assert (every_logit(weights.load(path), ids) - reference_logits(reference, ids)).abs().max() < TOLERANCE


@pytest.mark.parametrize("part", ["attention.q.bias", "attention.v.bias", "attention.q_norm.weight", "attention.k_norm.weight"])
def test_a_qwen_bias_or_norm_left_out_fails_the_comparison(saved, part):
    path, reference = saved(qwen(*QWEN["qwen2" if part.endswith("bias") else "qwen3"]))
    model, ids = weights.load(path), random_ids(131, 1, 20)
    dict(model.named_parameters())[f"blocks.1.{part}"].fill_(part.endswith("weight"))
    assert (every_logit(model, ids) - reference_logits(reference, ids)).abs().max() > 100 * TOLERANCE


def test_llama3_rope_scaling(saved):
    """At 300 positions, five times the original context, the scaling moves the logits by much more than the tolerance."""
    path, reference = saved(LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True, rope_parameters=LLAMA3_RULE)))
    ids = random_ids(131, 2, 300)
    model = weights.load(path)
    expected = reference_logits(reference, ids)
    assert (every_logit(model, ids) - expected).abs().max() < TOLERANCE
    plain = weights.Decoder(replace(model.config, rope_scaling=None))
    plain.load_state_dict(model.state_dict(), strict=False)
    assert (every_logit(plain, ids) - expected).abs().max() > 0.1


def test_llama3_rope_scaling_as_transformers_4_wrote_it(saved, tmp_path):
    path, reference = saved(LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True, rope_parameters=LLAMA3_RULE)))
    old = tmp_path / "old"
    shutil.copytree(path, old)
    config = json.loads((old / "config.json").read_text())
    rule = config.pop("rope_parameters")
    config |= {"rope_theta": rule.pop("rope_theta"), "rope_scaling": rule}
    (old / "config.json").write_text(json.dumps(config))
    ids = random_ids(131, 1, 200)
    assert (every_logit(weights.load(old), ids) - reference_logits(reference, ids)).abs().max() < TOLERANCE
