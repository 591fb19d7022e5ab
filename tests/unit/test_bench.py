"""`course.py bench`: the protocol, the arithmetic and the document, with peers of a few lines; no real peer is started here."""

import json
import sys
from dataclasses import replace

import pytest
import torch

import course
import model_files
import run
import tiny
from decodelab.decoder import weights

PEER = """
import json, sys
for line in sys.stdin:
    asked, answer = json.loads(line), {"ok": True}
    if asked["command"] == "hello":
        answer |= {"version": "1.5", "settings": {"threads": 2}, "reads": "folder", "formats": FORMATS}
    if asked["command"] == "prepare":
        case, names = asked["case"], list(TIMES)
        answer |= {"first_call_s": dict.fromkeys(names, 1.0), "tokens": {name: [TOKEN] for name in names}, "weight_bytes": 4, "kv_bytes": 4}
    if asked["command"] == "step":
        answer["seconds"] = TIMES[asked["variant"]]
    EXTRA
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """A folder of scripted peers in place of the real ones, and a machine of 100 GB/s and 1 TFLOP/s that is measured at once."""
    monkeypatch.setattr(run, "PEERS", tmp_path)
    monkeypatch.setattr(run, "PAUSE_S", 0)
    monkeypatch.setattr(run.Files, "path", lambda self, case, reads: "")
    roofs = iter([60e9, 100e9, 80e9] * 3)
    monkeypatch.setattr(run.machine, "read_bandwidth", lambda **_: next(roofs))
    monkeypatch.setattr(run.machine, "gemm_rate", lambda *_, **__: 1e12)

    def write(name, times, *, formats=("f32", "bf16", "int8"), token=7, extra="pass"):
        script = PEER.replace("TIMES", repr(times if isinstance(times, dict) else {"": times})).replace("FORMATS", repr(list(formats)))
        (tmp_path / f"{name}.py").write_text(script.replace("TOKEN", repr(token)).replace("EXTRA", extra))

    write("ours", [0.02, 0.02, 9.0])
    return write


def bench(tmp_path, *names, cases="^f32$"):
    chosen = [case for case in run.all_cases() if run.re.search(cases, case.name)]
    return run.bench(chosen, dict.fromkeys(names, sys.executable), scratch=tmp_path, rounds=2, seconds=0.1)


def test_a_ratio_is_their_median_over_ours_and_the_better_variant_counts(peers, tmp_path):
    peers("llama_cpp", {"on": [0.03, 0.03, 0.5], "off": [0.05]})
    document = bench(tmp_path, "llama_cpp")
    assert document["ratios"] == {"f32_vs_llama_cpp": pytest.approx(1.5)}
    rows = {(row["worker"], row["variant"]): row for row in document["rows"]}
    assert rows["ours", ""]["n"] == 6 and rows["ours", ""]["tokens_per_s"] == pytest.approx(50)
    assert rows["llama_cpp", "off"]["median_s"] == 0.05 and rows["llama_cpp", "on"]["first_call_s"] == 1.0


def test_mbu_is_the_bytes_of_a_step_over_the_best_roof_of_the_run(peers, tmp_path):
    """538.06 MB of weights and 128 tokens of 46,080 B in 20 ms are 27.2 GB/s, of 100."""
    document = bench(tmp_path, cases="^f32$|^gpt2_f32$")
    assert document["read_bytes_per_s"] == [60e9, 100e9, 80e9]
    assert document["mbu"]["f32"] == pytest.approx((538.06e6 + 128 * 46_080) / 0.02 / 100e9, rel=1e-4)
    assert document["rows"][0]["mbu"] == document["mbu"]["f32"]


def test_prefill_batch_and_growth_have_their_own_figures(peers, tmp_path):
    """mfu, the batch-8 step over its floor, and KV bytes over the time they add; a step that is slower by nothing but KV reads it at the roof."""
    at_roof = 0.02 + (8000 - 128) * 46_080 / 100e9
    peers("ours", [0.02], extra=f"answer |= {{'seconds': [{at_roof}]}} if asked['command'] == 'step' and case['context'] == 8000 else {{}}")
    document = bench(tmp_path, cases="^f32$|^f32_8k$|^prefill_f32$|^batch8_f32$")
    assert document["kv_read_fraction"] == {"f32": pytest.approx(1)}
    assert document["batch8_over_floor"] == {"f32": pytest.approx(0.02 / (538.06e6 / 100e9), rel=1e-3)}
    tokens, pairs = 512, 512 * 513 / 2
    flops = 2 * 106.17e6 * tokens + 2 * 576 * 49_152 + 30 * 4 * 576 * pairs
    assert document["mfu"] == {"prefill_f32": pytest.approx(flops / 0.02 / 1e12, rel=1e-3)}
    rows = {row["case"]: row for row in document["rows"]}
    assert rows["prefill_f32"]["tokens_per_s"] == pytest.approx(512 / 0.02) and rows["batch8_f32"]["tokens_per_s"] == pytest.approx(8 / 0.02)
    assert set(document["mbu"]) == {"f32", "f32_8k", "batch8_f32"}


def test_the_keys_that_the_readers_of_a_record_look_for(peers, tmp_path):
    """Ratios of every peer by the names of the contract; a format that a peer lacks has no key."""
    for name, formats in (("llama_cpp", ("f32", "bf16", "int8")), ("transformers", ("f32", "bf16")), ("vllm", ("bf16",))):
        peers(name, [0.04], formats=formats)
    document = bench(tmp_path, "llama_cpp", "transformers", "vllm", cases="")
    assert {"f32_vs_llama_cpp", "bf16_vs_llama_cpp", "int8_vs_llama_cpp_q8_0", "f32_8k_vs_llama_cpp", "bf16_8k_vs_llama_cpp", "bf16_vs_vllm",
            "bf16_vs_transformers", "f32_vs_transformers", "prefill_f32_vs_llama_cpp", "gpt2_f32_vs_llama_cpp",
            "batch8_f32_vs_llama_cpp", "f32_4k_vs_transformers", "gpt2_bf16_vs_vllm"} <= set(document["ratios"])  # fmt: skip
    assert not {"f32_vs_vllm", "int8_vs_transformers", "int8_vs_llama_cpp"} & set(document["ratios"])
    assert {"f32", "bf16", "int8"} <= set(document["mbu"])
    names = [case.name for case in run.all_cases()]
    assert len(names) == len(set(names))


def test_an_absent_peer_is_reported_absent(peers, tmp_path):
    document = bench(tmp_path)
    assert document["peers"]["ours"] == {"version": "1.5", "settings": {"threads": 2}}
    assert document["peers"]["vllm"] == {"absent": "give --peers vllm=PYTHON"}
    assert document["ratios"] == {}


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("sys.exit('no such instruction')", "ended at hello: no such instruction"),
        ("print('loading the model'); continue", "printed 'loading the model' instead of an answer"),
        ("print('[]'); continue", "printed '[]' instead of an answer"),
        ("if asked['command'] == 'step': raise MemoryError('32 GB')", "ended at step: MemoryError: 32 GB"),
    ],
)
def test_a_peer_that_breaks_is_reported_in_one_line_and_the_rest_goes_on(peers, tmp_path, extra, reason):
    peers("llama_cpp", [0.03], extra=extra)
    peers("vllm", [0.04])
    document = bench(tmp_path, "llama_cpp", "vllm", cases="^bf16$|^f32$|^batch2_f32")
    assert document["peers"]["llama_cpp"] == {"failed": reason}
    assert document["ratios"] == {f"{case}_vs_vllm": pytest.approx(2) for case in ("f32", "batch2_f32", "bf16")}


def test_a_case_that_is_refused_leaves_a_note_and_the_next_one_runs(peers, tmp_path):
    refuse = (
        "answer = {'ok': False, 'note': 'ValueError: /srv/models/x.gguf: no 8 bits'} if asked.get('case', {}).get('format') == 'int8' else answer"
    )
    peers("llama_cpp", [0.03], extra=refuse)
    document = bench(tmp_path, "llama_cpp", cases="^(int8|gpt2_f32)$")
    assert [row["note"] for row in document["rows"] if row["worker"] == "llama_cpp"] == ["ValueError: x.gguf: no 8 bits", ""]
    assert set(document["ratios"]) == {"gpt2_f32_vs_llama_cpp"}


def test_a_peer_that_cannot_start_or_keeps_silent_has_failed(tmp_path):
    gone = run.Worker("vllm", [tmp_path / "python"], threads=1)
    assert gone.failed.startswith("does not start") and str(tmp_path) not in gone.failed
    silent = run.Worker("vllm", [sys.executable, "-c", "print('{\"ok\": true}', flush=True); input(); input(); input()"], threads=1)
    with pytest.raises(run.PeerError, match="no answer to prepare within 0.2 s"):
        silent.ask("prepare", limit_s=0.2)
    assert silent.process.poll() is not None


def test_another_greedy_token_for_the_same_prompt_is_noted(peers, tmp_path):
    peers("llama_cpp", [0.03], token=8)
    peers("vllm", [0.03])
    document = bench(tmp_path, "llama_cpp", "vllm", cases="^prefill_f32$")
    assert [row["note"] for row in document["rows"]] == ["", "its greedy token differs from ours", ""]
    assert "prefill_f32_vs_llama_cpp" in document["ratios"]


def test_a_worker_keeps_its_answers_apart_from_prints_and_its_warm_up_out_of_the_times(tmp_path):
    """The real worker.py around a peer that prints to stdout and counts its calls."""
    script = tmp_path / "peer.py"
    script.write_text(f"""
import os, sys
sys.path.insert(0, {str(course.ROOT / "tests/benchmarks/peers")!r})
from worker import Prepared, Timed, prompts, serve
calls = []
def prepare(case):
    if case["format"] == "int8":
        raise ValueError("no\\n8 bits")
    print("loading"); os.system("echo noise")
    return Prepared({{"a": Timed(lambda: calls.append("step") or prompts(case), lambda: calls.append("begin"))}}, weight_bytes=4, kv_bytes=len(calls))
serve(version="1", settings={{}}, reads="gguf", formats=["f32"], prepare=prepare)
""")
    worker = run.Worker("peer", [sys.executable, script], threads=3)
    case = {"format": "f32", "vocab": 50, "batch": 2, "context": 4}
    assert worker.about["reads"] == "gguf", worker.failed
    first = worker.ask("prepare", case=case)["tokens"]["a"]
    assert [len(row) for row in first] == [4, 4] and first[0] != first[1]
    assert len(worker.ask("step", variant="a", seconds=0, warmup=2)["seconds"]) == 1
    with pytest.raises(run.PeerError, match="ValueError: no 8 bits"):
        worker.ask("prepare", case=case | {"format": "int8"})
    again = worker.ask("prepare", case=case)
    assert again["tokens"]["a"] == first
    assert again["kv_bytes"] == 2 + 4, "begin and a first step, then begin, two of warm-up and the one that was timed"
    worker.close()


@pytest.mark.parametrize("shape", [tiny.GPT2, replace(tiny.LLAMA, tied_embeddings=True, n_heads=8, intermediate=64)], ids=["gpt2", "llama"])
def test_every_form_of_the_weights_holds_the_same_values(tmp_path, shape):
    """Read back by our own loader: the folder and the GGUF in f32 are equal, 16 and 8 bits within their rounding."""
    model = weights.random(shape, path="eager")
    forms = {0: model_files.write_folder(model, tmp_path / "folder"), **{step: model_files.write_gguf(model, tmp_path / f"{name}.gguf", format=name)
             for name, step in (("f32", 1e-9), ("bf16", 2**-8), ("int8", 1 / 127))}}  # fmt: skip
    for step, form in forms.items():
        back = dict(weights.load(form, dtype="float32", path="eager").named_parameters())
        for name, value in model.named_parameters():
            assert (back[name] - value).abs().max() <= step * value.abs().max(), (form.name, name)
    assert not torch.equal(back["embed.weight"], model.embed.weight)


def test_the_command_prints_one_document_and_rewrites_the_readme(peers, tmp_path, monkeypatch, capsys):
    peers("transformers", [0.04])
    record, readme = tmp_path / "record.json", tmp_path / "README.md"
    monkeypatch.setattr(run.machine, "has_bfloat16", lambda: False)
    monkeypatch.setattr(
        sys, "argv", ["run.py", "--quick", "--json", "--rounds", "1", "--record", str(record), "--peers", f"transformers={sys.executable}"]
    )
    run.main()
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(record.read_text())
    assert set(document) == {"date", "command", "machine", "threads", "read_bytes_per_s", "gemm_flops_per_s", "peers", "ratios", "mbu", "mfu",
                             "batch8_over_floor", "kv_read_fraction", "rows"}  # fmt: skip
    assert {row["case"] for row in document["rows"]} == {"f32", "int8", "gpt2_f32"}
    assert document["command"] == "python course.py bench --quick --json --rounds 1 --record record.json --peers transformers=PYTHON"
    readme.write_text(f"before\n{run.MARKS[0]}\nold\n{run.MARKS[1]}\nafter\n")
    run.write_readme(document, readme)
    run.write_readme(document, readme)
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| SmolLM2-135M f32, batch 1, 128 tokens | 20.0 ms | 50.0 | 0.27 | 2.00 |" in text
    assert document["date"][:10] in text and document["machine"]["processor"] in text and "llama.cpp absent" in text
    readme.write_text("no marks")
    with pytest.raises(SystemExit, match="needs the lines"):
        run.write_readme(document, readme)


def test_readme_has_a_place_for_the_table():
    text = (course.ROOT / "README.md").read_text(encoding="utf-8")
    assert [text.count(mark) for mark in run.MARKS] == [1, 1]


def test_peers_are_named_as_a_pair():
    assert run.peer_pythons(["llama.cpp=python3"])["llama_cpp"] == "python3"
    for pair in ("llama_cpp", "worker=python3", "numpy=python3"):
        with pytest.raises(SystemExit, match="write NAME=PYTHON"):
            run.peer_pythons([pair])
