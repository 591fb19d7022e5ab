"""Text to token ids and back, from the tokenizer inside a GGUF file or a Hugging Face folder."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from decodelab.decoder.template import TemplateError, render
from decodelab.decoder.weights import LoadError, find, open_gguf, read_json

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGITS = {"llama-bpe": "{1,3}", "qwen2": ""}  # how many make a word
_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types that are matched whole
_UNFINISHED = "\ufffd"  # what decoding prints for a character whose last bytes are still to come


class Tokenizer:
    """A vocabulary with its start and end tokens and its chat template.

    `start_id` is None where the vocabulary has none. `adds_start` says whether raw text gets it, as the file asks.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, start_id: int | None = None, adds_start: bool = False,
                 end_ids: Sequence[int] = (), template: str | None = None) -> None:  # fmt: skip
        backend.no_padding()
        backend.no_truncation()
        self._backend, self._last = backend, max(backend.get_vocab().values(), default=-1)
        for i in (start_id, *end_ids):
            _require(i is None or (type(i) is int and 0 <= i <= self._last), "start or end id", i, f"a whole number from 0 to {self._last:,}")
        _require(isinstance(adds_start, bool), "add_bos_token", adds_start, "true or false")
        _require(isinstance(template, str | None), "chat_template", template, "text, or a list of {name: text, template: text}")
        self.start_id, self.adds_start = start_id, adds_start and start_id is not None
        self.end_ids, self.template = tuple(end_ids), template

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer can write; the model may have more rows, as padding."""
        return self._backend.get_vocab_size()

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """Token ids of raw text, with the start token if the file asks for one and `start` is true.

        Warns: on two start tokens in a row, which shift every position by one. Raises: ValueError for what is not text.
        """
        _require(isinstance(text, str) and text.encode(errors="ignore").decode() == text, "the text", text, "a str without lone surrogates")
        try:
            ids = ([self.start_id] if start and self.adds_start else []) + self._backend.encode(text, add_special_tokens=False).ids
        except Exception:  # tokenizers raises bare Exception, where a vocabulary of words has no entry and no unknown token
            raise ValueError(f"the text {text!r:.60} holds a character or word that is none of this vocabulary's {self.vocab_size:,}") from None
        if self.start_id is not None and ids[:2] == [self.start_id] * 2:
            warnings.warn("two start tokens in a row: this text already has one; encode it with start=False", stacklevel=2)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids; special tokens are left out unless `skip_special` is false. Raises: ValueError for an unknown id."""
        for i in ids:
            _require(hasattr(i, "__index__") and 0 <= i <= self._last, "token id", i, f"a whole number from 0 to {self._last:,}")
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def chat(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation: the file's chat template, rendered in a sandbox, then encoded.

        The template alone decides on a start token; none is added to what it wrote.

        Raises: TemplateError where the file has no template or the template misbehaves.
        """
        if self.template is None:
            raise TemplateError("this tokenizer has no chat template: it is not a chat model, or its file left it out; encode plain text")
        for m in messages if isinstance(messages, list | tuple) else [type(messages)]:
            _require(isinstance(m, dict) and all(isinstance(t, str) for t in m.values()), "message", m, "{'role': text, 'content': text}")
        text = render(self.template, {"messages": list(messages), "add_generation_prompt": add_generation_prompt, "tools": None,
                                      "documents": None, "bos_token": self._text_of(self.start_id),
                                      "eos_token": self._text_of(self.end_ids[0] if self.end_ids else None)})  # fmt: skip
        return self.encode(text, start=False)

    def stream(self) -> "TextStream":
        """A decoder that takes one token at a time."""
        return TextStream(self)

    @property
    def tokens(self) -> tuple[str, ...]:
        """Every entry by its id, as the file spells it: two models read the same ids alike where these are equal."""
        return tuple(self._backend.id_to_token(i) or "" for i in range(self._last + 1))

    def _text_of(self, token_id: int | None) -> str:
        return "" if token_id is None else self._backend.id_to_token(token_id) or ""


def _require(good: bool, what: str, value: Any, limit: str) -> None:
    if not good:
        raise ValueError(f"{what} is {value!r:.60} and must be {limit}")


class TextStream:
    """Text of one generation, token by token: a token that ends inside a character is held back until it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the last tokens shown, as context, and those still held back
        self._known, self._shown = 0, 0  # tokens at the last clean point, characters of self._ids already given out

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished."""
        text = self._tokenizer.decode([*self._ids, token_id])
        self._ids.append(token_id)
        held = len(text) - len(text.rstrip(_UNFINISHED))
        if held > 7:  # more marks than one character has bytes: wrong bytes, not late ones
            held = 1
        new = text[self._shown : len(text) - held]
        self._shown = max(self._shown, len(text) - held)
        if held == 0:
            del self._ids[: self._known]
            self._known, self._shown = len(self._ids), len(self._tokenizer.decode(self._ids))
        return new

    def flush(self) -> str:
        """What is still held back, as replacement marks, once no token will follow."""
        text = self._tokenizer.decode(self._ids)[self._shown :]
        self._ids, self._known, self._shown = [], 0, 0
        return text


def load_tokenizer(source: str | Path) -> Tokenizer:
    """The tokenizer of a GGUF file, a Hugging Face folder, or a name that `weights.load` takes.

    Raises: LoadError on a missing file, a vocabulary that is not byte-level BPE, an unknown pre-tokenizer.
    """
    path = find(source)
    try:
        return _from_folder(path) if path.is_dir() else _from_gguf(path)
    except LoadError:
        raise
    except Exception as error:  # a KeyError or ValueError of ours; tokenizers raises bare Exception
        raise LoadError(f"{path}: its tokenizer cannot be built ({type(error).__name__}: {' '.join(str(error).split())[:200]}); correct it") from None


def _splitter(pre: str | None, path: Path) -> tuple[Any, bool]:
    """How the text is cut into words before BPE, and whether a word that is a token skips the merges.

    Source: ggml-org/llama.cpp src/llama-vocab.cpp, the pre-tokenizer table.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "gpt-2":
        return byte_level, False
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]), False
    if pre in ("llama-bpe", "qwen2"):
        words = pre_tokenizers.Split(Regex(_WORDS % _DIGITS[pre]), "isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), pre == "llama-bpe"
    raise LoadError(f"{path}: pre-tokenizer {pre!r} is unknown here and a guess would change the ids; known: gpt-2, llama-bpe, qwen2, smollm. "
                    "Load the tokenizer from a Hugging Face folder instead")  # fmt: skip


def _from_gguf(path: Path) -> Tokenizer:
    """Byte-level BPE from GGUF metadata: tokens, merges, token types, special ids, chat template."""
    fields, _ = open_gguf(path)
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise LoadError(f"{path}: tokenizer model {kind!r} is not supported, only 'gpt2' (byte-level BPE); "
                        "load the tokenizer from a Hugging Face folder instead")  # fmt: skip
    splitter, ignore_merges = _splitter(pre := fields.get("tokenizer.ggml.pre"), path)
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    _require(isinstance(types, list) and len(types) == len(tokens), "token_type", types, f"a list of {len(tokens):,}, one per token")
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=ignore_merges))
    backend.pre_tokenizer, backend.decoder = splitter, decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()  # as in Qwen's own tokenizer.json
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == _CONTROL:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False)])
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return Tokenizer(backend, start_id=fields.get("tokenizer.ggml.bos_token_id"),
                     adds_start=fields.get("tokenizer.ggml.add_bos_token", ignore_merges),  # llama.cpp: llama-bpe adds it by default
                     end_ids=list(dict.fromkeys(i for i in ends if i is not None)),
                     template=fields.get("tokenizer.chat_template"))  # fmt: skip


def _from_folder(path: Path) -> Tokenizer:
    """tokenizer.json with the flags of tokenizer_config.json, generation_config.json and config.json."""
    if not (path / "tokenizer.json").is_file():
        raise LoadError(f"{path}: no tokenizer.json; save the folder with a fast tokenizer, or copy the file there")
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    settings, config, generation = (read_json(path / f"{name}.json") if (path / f"{name}.json").is_file() else {}
                                    for name in ("tokenizer_config", "config", "generation_config"))  # fmt: skip

    def token_id(key: str) -> int | None:
        named = settings.get(key)
        text = named.get("content", named) if isinstance(named, dict) else named
        _require(isinstance(text, str | None), key, named, "text, or an object with its text as content")
        return backend.token_to_id(text) if text else None

    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    ends = [token_id("eos_token")] if ends is None else ends if isinstance(ends, list) else [ends]
    start_id = token_id("bos_token")
    written = backend.encode("", add_special_tokens=True).ids
    adds = settings.get("add_bos_token")
    return Tokenizer(backend, start_id=start_id, adds_start=start_id in written if adds is None else adds,
                     end_ids=[i for i in ends if i is not None], template=_folder_template(path, settings))  # fmt: skip


def _folder_template(path: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja where there is one, else the key in tokenizer_config.json (a string, or a list of named ones)."""
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    found = settings.get("chat_template")
    return {t["name"]: t["template"] for t in found}.get("default") if isinstance(found, list) else found
