"""Tokenizers: the same ids as the reference, start tokens, streaming, and chat templates that misbehave."""

import json
import re
import shutil
import warnings

import gguf
import pytest
import regex
import transformers
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from decodelab.decoder import template, weights
from decodelab.decoder.template import TemplateError, render
from decodelab.decoder.tokenizer import load_tokenizer
from decodelab.decoder.weights import LoadError

TEXTS = ["Hello world", "  two  spaces", "a 12", "café ☕ 日本語 👩‍👩‍👧 क्षि", "don't I'LL we've", "tabs\t\tand\r\nnew\n\n\nlines", "", " ", "   ",
         "1234567890 3.14159", "def f(x):\n    return x**2\n", "\u00a0nbsp\u200b", "end  ", "<|im_start|>user\nhi<|im_end|>", "a<|endoftext|>b",
         "ÀÉÎ naïve coöperate", "𝒳𝒴 \U0001f9d1\u200d\U0001f680", "x" * 300, "\x00\x07", "http://a.b/c?d=e&f=1", "混合 mixed текст"]  # fmt: skip
DIGITS = ["a  12", "x\n\n  7 8", "3 ²½Ⅷ", "  ٣٤ 5", "12  34   56", "v1.2\t3"]


@pytest.fixture(scope="module")
def smollm():
    return load_tokenizer("smollm2-135m")


@pytest.fixture(scope="module")
def reference():
    path = weights.find("smollm2-135m")
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_same_ids_and_text_as_transformers(smollm, reference):
    for text in TEXTS:
        ids = reference(text).input_ids
        assert smollm.encode(text) == ids, text
        assert smollm.decode(ids) == reference.decode(ids, skip_special_tokens=True)
        assert smollm.decode(ids, skip_special=False) == reference.decode(ids)
    assert smollm.vocab_size == len(reference) == 49_152


def test_the_smollm_pre_tokenizer_takes_digits_first(smollm, reference):
    """transformers reads this file with GPT-2's rule, which takes the space before a digit into the number's word.

    The model was trained with digits cut off first, as `tokenizer.ggml.pre` = smollm says: two spaces before a digit are
    one token. With that rule put into the reference the ids agree.
    """
    assert any(smollm.encode(text) != reference(text).input_ids for text in DIGITS)
    plain = reference.backend_tokenizer.pre_tokenizer
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), plain])
    try:
        for text in TEXTS + DIGITS:
            assert smollm.encode(text) == reference(text).input_ids, text
    finally:
        reference.backend_tokenizer.pre_tokenizer = plain


def test_chat_is_what_transformers_renders(smollm, reference):
    messages = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A model."}, {"role": "user", "content": "Ö <b>"}]
    for prompt in (True, False):
        text = reference.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        ids = smollm.chat(messages, add_generation_prompt=prompt)
        assert smollm.decode(ids, skip_special=False) == text
        assert ids == reference(text, add_special_tokens=False).input_ids
    assert smollm.end_ids == (2,)


# Files made for one question each. The vocabulary: 256 bytes, three merges, a start and an end token.


def tiny_gguf(path, *, pre="gpt-2", model="gpt2", add_start=None, chat=None, special=("<s>", "</s>"), leave_out=(), extra=()):
    alphabet = list(bytes_to_unicode().values())
    tokens = [*alphabet, "he", "hel", *special, "12"]
    writer = gguf.GGUFWriter(str(path), "llama")
    fields = {"model": (writer.add_tokenizer_model, model), "pre": (writer.add_tokenizer_pre, pre), "tokens": (writer.add_token_list, tokens),
              "merges": (writer.add_token_merges, ["h e", "he l", "1 2"]), "types": (writer.add_token_types, [1] * 258 + [3, 3, 1]),
              "bos": (writer.add_bos_token_id, 258), "eos": (writer.add_eos_token_id, 259),
              "add": (writer.add_add_bos_token, add_start), "chat": (writer.add_chat_template, chat)}  # fmt: skip
    for name, (add, value) in fields.items():
        if name not in leave_out and value is not None:
            add(value)
    for name, value in dict(extra).items():
        add = {str: writer.add_string, int: writer.add_int32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"tokenizer.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_b077_start_tokens(smollm, tmp_path):
    """As many as the file's flag and template say: none for raw text in SmolLM2 and GPT-2, one where the file asks."""
    assert smollm.encode("hi") == [6004] and smollm.encode("") == []
    plain = load_tokenizer(tiny_gguf(tmp_path / "none.gguf"))
    assert plain.start_id not in plain.encode("hello") and plain.encode("") == []
    asks = load_tokenizer(tiny_gguf(tmp_path / "one.gguf", add_start=True, chat="{{ bos_token }}{{ messages[0]['content'] }}"))
    assert asks.encode("hello")[:2] == [258, 257] and asks.encode("") == [258]
    assert asks.encode("hello", start=False)[0] == 257
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ids = asks.chat([{"role": "user", "content": "hello"}])
        assert ids.count(258) == 1 and ids[0] == 258
        assert smollm.chat([{"role": "user", "content": "hi"}])[:2].count(smollm.start_id) == 1


def test_b077_two_start_tokens_in_a_row_warn(tmp_path):
    asks = load_tokenizer(tiny_gguf(tmp_path / "one.gguf", add_start=True))
    with pytest.warns(UserWarning, match="two start tokens in a row"):
        assert asks.encode("<s>hello").count(258) == 2


def test_smollm_cuts_every_digit_off(tmp_path):
    ids = {pre: load_tokenizer(tiny_gguf(tmp_path / f"{pre}.gguf", pre=pre)).encode("12") for pre in ("gpt-2", "smollm")}
    assert ids["gpt-2"] == [260] and len(ids["smollm"]) == 2


def test_llama_bpe_adds_the_start_token_unless_told_otherwise(tmp_path):
    assert load_tokenizer(tiny_gguf(tmp_path / "a.gguf", pre="llama-bpe")).encode("he") == [258, 256]
    assert load_tokenizer(tiny_gguf(tmp_path / "b.gguf", pre="llama-bpe", add_start=False)).encode("he") == [256]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_words_are_those_of_transformers(tmp_path, pre):
    """The words, cut by the pattern that transformers holds for the same name, with the `regex` module."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    pattern = regex.compile(GGUF_PRE_TOKENIZER_SPLITS[pre])
    splitter = load_tokenizer(tiny_gguf(tmp_path / "a.gguf", pre=pre))._backend.pre_tokenizer
    for text in TEXTS + DIGITS:
        words = [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)]
        assert words == pattern.findall(text)


def test_qwen2_from_a_gguf_and_from_a_folder_is_the_tokenizer_of_transformers(tmp_path):
    """Same ids for every text, letters and their accents joined first; no start token unless the file asks."""
    alphabet = list(bytes_to_unicode().values())
    tokens = {token: i for i, token in enumerate([*alphabet, "he", "hel", "<|endoftext|>", "<|im_end|>", "12"])}
    reference = transformers.Qwen2Tokenizer(vocab=tokens, merges=[("h", "e"), ("he", "l"), ("1", "2")], eos_token="<|im_end|>")
    reference.save_pretrained(tmp_path / "folder")
    folder = load_tokenizer(tmp_path / "folder")
    file = load_tokenizer(tiny_gguf(tmp_path / "a.gguf", pre="qwen2", special=("<|endoftext|>", "<|im_end|>")))
    for text in [*TEXTS, *DIGITS, "hello 12 112", "cafe\u0301 A\u030a \u1100\u1161", "hel<|im_end|>"]:
        ids = reference(text).input_ids
        assert file.encode(text) == folder.encode(text) == ids, text
        assert file.decode(ids) == folder.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert file.end_ids == folder.end_ids == (259,) and not file.adds_start


@pytest.mark.parametrize(("options", "cause"), [
    ({"pre": "tekken"}, "pre-tokenizer 'tekken' is unknown here and a guess would change the ids; known: gpt-2, llama-bpe, qwen2, smollm"),
    ({"pre": "default"}, "pre-tokenizer 'default'"),
    ({"leave_out": ("pre",)}, "pre-tokenizer None"),
    ({"model": "llama"}, "tokenizer model 'llama' is not supported"),
    ({"leave_out": ("merges",)}, "KeyError: 'tokenizer.ggml.merges'"),
    ({"leave_out": ("merges",), "extra": {"ggml.merges": ["x\ny z"]}}, "its tokenizer cannot be built"),
    ({"leave_out": ("bos",), "extra": {"ggml.bos_token_id": 261}}, "start or end id is 261 and must be a whole number from 0 to 260"),
    ({"leave_out": ("eos",), "extra": {"ggml.eos_token_id": -1}}, "start or end id is -1"),
    ({"leave_out": ("eos",), "extra": {"ggml.eos_token_id": "2"}}, "start or end id is '2'"),
    ({"leave_out": ("types",), "extra": {"ggml.token_type": 1}}, "token_type is 1 and must be a list of 261"),
    ({"leave_out": ("types",), "extra": {"ggml.token_type": [1, 3]}}, "token_type is [1, 3] and must be a list of 261"),
    ({"leave_out": ("add",), "extra": {"ggml.add_bos_token": 1}}, "add_bos_token is 1 and must be true or false"),
    ({"extra": {"chat_template": 5}}, "chat_template is 5 and must be text"),
])  # fmt: skip
def test_vocabularies_that_are_refused(tmp_path, options, cause):
    with pytest.raises(LoadError, match=re.escape(cause)) as caught:
        load_tokenizer(tiny_gguf(tmp_path / "a.gguf", **options))
    assert "\n" not in str(caught.value)


def test_what_is_not_text_or_not_an_id(tmp_path):
    tokenizer = load_tokenizer(tiny_gguf(tmp_path / "a.gguf", chat="{{ messages[0]['content'] }}"))
    for value in (None, b"a", "a\ud800", ["a"]):
        with pytest.raises(ValueError, match="text is .* and must be a str without lone surrogates"):
            tokenizer.encode(value)
        with pytest.raises(ValueError, match="(message|text) is .* and must be"):
            tokenizer.chat([{"role": "user", "content": value}])
    for messages in (None, "hi", ["hi"], {"role": "user"}):
        with pytest.raises(ValueError, match="message is .* and must be {'role'"):
            tokenizer.chat(messages)
    stream = tokenizer.stream()
    for value in (-1, 261, 2**40, 1.5, "a"):
        with pytest.raises(ValueError, match="token id is .* and must be a whole number from 0 to 260"):
            stream.push(value)
    assert stream.push(257) == tokenizer.decode([257]) == "hel"


# Hugging Face folders.


@pytest.fixture
def folder(reference, tmp_path):
    reference.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_reads_like_the_file_it_came_from(folder, smollm, reference):
    loaded = load_tokenizer(folder)
    for text in TEXTS + DIGITS:
        assert loaded.encode(text) == reference(text).input_ids
    messages = [{"role": "user", "content": "hi"}]
    assert loaded.chat(messages) == smollm.chat(messages)
    assert loaded.end_ids == (2,) and loaded.start_id == 1


def test_a_folder_s_flags(folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": True}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    loaded = load_tokenizer(folder)
    assert loaded.encode("hi") == [1, 6004]
    assert loaded.end_ids == (2, 0)


def test_a_folder_s_start_token_may_be_in_its_post_processor(folder):
    from tokenizers import Tokenizer, processors

    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if k != "add_bos_token"}))
    loaded = load_tokenizer(folder)
    assert loaded.encode("hi") == backend.encode("hi").ids == [1, 6004]


def test_templates_in_a_folder(folder):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "hi"}]
    for value, ids in (("hi", [6004]), (named, [6004])):
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": value}))
        assert load_tokenizer(folder).chat([]) == ids
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if k != "chat_template"}))
    with pytest.raises(TemplateError, match="has no chat template"):
        load_tokenizer(folder).chat([])


@pytest.mark.parametrize(("file", "text", "cause"), [
    ("tokenizer_config.json", b'{"bos_token": 5}', "bos_token is 5 and must be text"),
    ("tokenizer_config.json", b'{"eos_token": {"id": 5}}', "eos_token is {'id': 5} and must be text"),
    ("tokenizer_config.json", b'{"bos_token": "<|im_start|>", "add_bos_token": "yes"}', "add_bos_token is 'yes'"),
    ("tokenizer_config.json", b'{"chat_template": [{"template": "hi"}]}', "KeyError: 'name'"),
    ("tokenizer_config.json", b'{"chat_template": 5}', "chat_template is 5 and must be text"),
    ("generation_config.json", b'{"eos_token_id": "2"}', "start or end id is '2' and must be a whole number"),
    ("generation_config.json", b'{"eos_token_id": [2, 49152]}', "start or end id is 49152"),
    ("chat_template.jinja", b"\xff", "UnicodeDecodeError"),
])  # fmt: skip
def test_a_folder_s_wrong_settings(folder, file, text, cause):
    (folder / "generation_config.json").write_text('{"eos_token_id": null}')
    if file == "tokenizer_config.json":
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / file).write_bytes(text)
    with pytest.raises(LoadError, match=re.escape(cause)) as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_a_folder_without_a_usable_tokenizer(folder, tmp_path):
    (folder / "tokenizer.json").write_text("version https://git-lfs")
    with pytest.raises(LoadError, match="its tokenizer cannot be built"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(LoadError, match="no tokenizer.json"):
        load_tokenizer(folder)


# Streaming.


@pytest.mark.parametrize("text", [*TEXTS, *DIGITS, "日本" * 20, "a\ufffdb", "ends in \ufffd"])
def test_streamed_text_is_the_text_and_never_a_broken_character(smollm, text):
    stream, ids = smollm.stream(), smollm.encode(text)
    pieces = [stream.push(token) for token in ids]
    whole = smollm.decode(ids)
    assert "".join(pieces) + stream.flush() == whole
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)


def test_a_token_inside_a_character_is_held_back(tmp_path):
    """☕ is three bytes, so three tokens of this vocabulary: nothing, nothing, the character."""
    tokenizer = load_tokenizer(tiny_gguf(tmp_path / "a.gguf"))
    stream, ids = tokenizer.stream(), tokenizer.encode("a☕b")
    assert [stream.push(token) for token in ids] == ["a", "", "", "☕", "b"]
    assert stream.flush() == ""
    for token in ids[:3]:
        stream.push(token)
    assert stream.flush() == "\ufffd"  # the end came inside the character
    assert stream.push(ids[0]) == "a"


def test_wrong_bytes_do_not_hold_the_text_back_for_ever(tmp_path):
    tokenizer = load_tokenizer(tiny_gguf(tmp_path / "a.gguf"))
    wrong = tokenizer.encode("é")[1]  # a continuation byte on its own
    ids = [wrong] * 40 + tokenizer.encode("é fine")
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    assert any(pieces[:40])
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)


# Templates that misbehave: one line each, in bounded time and memory.

LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"


@pytest.mark.parametrize(("text", "cause"), [
    ("{{ 'a' * 1000000000 }}", "asks for \\* on values of size 1 and 1e\\+09"),
    ("{{ [1] * 3000000 }}", "asks for"),
    ("{{ 3000000 * 'a' }}", "asks for"),
    ("{{ 10 ** 10 }}", "asks for \\*\\*"),
    ("{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}", "more than 2,000,000 characters"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ cycler.__init__.__globals__ }}", "unsafe"),
    ("{{ messages.append(1) }}", "unsafe"),
    ("{{ lipsum.__globals__['os'].popen('id').read() }}", "unsafe"),
    ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
    ("{{ range(1000000) | list }}", "OverflowError"),
    ("{% include 'other' %}", "no loader"),
    ("{{ messages", "TemplateSyntaxError"),
    ("{{" + "(" * 20000 + "1" + ")" * 20000 + "}}", "RecursionError"),
    ("{{ raise_exception('roles must\nalternate') }}", "failed: roles must alternate;"),
])  # fmt: skip
def test_a_hostile_template_is_one_line(text, cause):
    with pytest.raises(TemplateError, match=cause) as caught:
        render(text, {"messages": [{"role": "user", "content": "hi"}]})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_template_that_never_ends_is_stopped(monkeypatch):
    monkeypatch.setattr(template, "TIME_LIMIT_S", 1.0)
    with pytest.raises(TemplateError, match="ran longer than 1 s and was stopped"):
        render(LOOP, {})


@pytest.mark.parametrize("text", [DOUBLING, "{{ 'a' | center(3000000000) }}", "{{ '%3000000000d' % 1 }}"])
def test_a_template_that_eats_memory_is_stopped(monkeypatch, text):
    """By the memory limit where the system has one, by the clock elsewhere."""
    monkeypatch.setattr(template, "TIME_LIMIT_S", 10.0)
    with pytest.raises(TemplateError, match="memory|ran longer|more than 2,000,000 characters"):
        render(text, {})


def test_what_honest_templates_use():
    text = ("{%- for m in messages -%}\n  {%- if loop.first %}{{ bos_token }}{% endif %}\n  {{- m.role | upper }}: {{ m['content'] | trim }}\n"
            "{% endfor %}{% if tools is not none %}tools{% endif %}{{ {'a': 'é'} | tojson }}"
            "{{ '-' * 3 }}{% for i in [1, 2] %}{% break %}{% endfor %}")  # fmt: skip
    messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "né"}]
    assert render(text, {"messages": messages, "bos_token": "<s>", "tools": None}) == '<s>USER: hi\nASSISTANT: né\n{"a": "é"}---'
    assert render("{{ 3000*1000 }} {{ 1.5 * 2 }}{% generation %}a{%- endgeneration -%} {{ 'b' }}", {}) == "3000000 3.0ab"
    options = "ensure_ascii=true, separators=(',', ':'), sort_keys=true, indent=none"
    assert render("{{ {'b': 1, 'a': 'é'} | tojson(%s) }}" % options, {}) == '{"a":"\\u00e9","b":1}'  # noqa: UP031
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}", {}))


def test_the_tokenizer_survives_a_bad_template(tmp_path):
    tokenizer = load_tokenizer(tiny_gguf(tmp_path / "a.gguf", chat="{{ 'a' * 10000000000 }}"))
    with pytest.raises(TemplateError):
        tokenizer.chat([])
    assert tokenizer.encode("hello")[0] == 257
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    assert load_tokenizer(tmp_path / "b.gguf").decode([257]) == "hel"
