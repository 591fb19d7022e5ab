"""Text to token ids and back, from the tokenizer inside a GGUF file or a Hugging Face folder."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from decodelab.decoder.template import TemplateError, render
from decodelab.decoder.weights import LoadError, find, gguf_fields, read_json

_LLAMA3_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                 r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")  # fmt: skip
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
        self._backend = backend
        self.start_id, self.adds_start = start_id, adds_start and start_id is not None
        self.end_ids, self.template = tuple(end_ids), template

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer can write; the model may have more rows, as padding."""
        return self._backend.get_vocab_size()

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """Token ids of raw text, with the start token if the file asks for one and `start` is true.

        Warns: on two start tokens in a row, which shift every position by one.
        """
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if start and self.adds_start:
            ids = [self.start_id, *ids]
        if self.start_id is not None and ids[:2] == [self.start_id] * 2:
            warnings.warn("two start tokens in a row: this text already has one; encode it with start=False", stacklevel=2)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids; special tokens are left out unless `skip_special` is false."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def chat(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation: the file's chat template, rendered in a sandbox, then encoded.

        The template alone decides on a start token; none is added to what it wrote.

        Raises: TemplateError where the file has no template or the template misbehaves.
        """
        if self.template is None:
            raise TemplateError("this tokenizer has no chat template: it is not a chat model, or its file left it out; encode plain text")
        text = render(self.template, {"messages": list(messages), "add_generation_prompt": add_generation_prompt, "tools": None,
                                      "documents": None, "bos_token": self._text_of(self.start_id),
                                      "eos_token": self._text_of(self.end_ids[0] if self.end_ids else None)})  # fmt: skip
        return self.encode(text, start=False)

    def stream(self) -> "TextStream":
        """A decoder that takes one token at a time."""
        return TextStream(self)

    def _text_of(self, token_id: int | None) -> str:
        return "" if token_id is None else self._backend.id_to_token(token_id) or ""


class TextStream:
    """Text of one generation, token by token: a token that ends inside a character is held back until it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the last tokens shown, as context, and those still held back
        self._known, self._shown = 0, 0  # tokens at the last clean point, characters of self._ids already given out

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
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
    return _from_gguf(path) if path.suffix == ".gguf" else _from_folder(path)


def _splitter(pre: str | None, path: Path) -> tuple[Any, bool]:
    """How the text is cut into words before BPE, and whether a word that is a token skips the merges.

    Source: ggml-org/llama.cpp src/llama-vocab.cpp, the pre-tokenizer table.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "gpt-2":
        return byte_level, False
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]), False
    if pre == "llama-bpe":
        words = pre_tokenizers.Split(Regex(_LLAMA3_WORDS), "isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), True
    raise LoadError(f"{path}: pre-tokenizer {pre!r} is unknown here and a guess would change the ids; known: gpt-2, llama-bpe, smollm. "
                    "Load the tokenizer from a Hugging Face folder instead")  # fmt: skip


def _from_gguf(path: Path) -> Tokenizer:
    """Byte-level BPE from GGUF metadata: tokens, merges, token types, special ids, chat template."""
    fields = gguf_fields(path)
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise LoadError(f"{path}: tokenizer model {kind!r} is not supported, only 'gpt2' (byte-level BPE); "
                        "load the tokenizer from a Hugging Face folder instead")  # fmt: skip
    splitter, ignore_merges = _splitter(fields.get("tokenizer.ggml.pre"), path)
    try:
        tokens = fields["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
        backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=ignore_merges))
    except Exception as error:  # a KeyError of ours; tokenizers raises bare Exception on a merge of unknown tokens
        raise LoadError(f"{path}: its vocabulary cannot be built ({type(error).__name__}: {error})") from None
    backend.pre_tokenizer, backend.decoder = splitter, decoders.ByteLevel()
    for token, token_type in zip(tokens, fields.get("tokenizer.ggml.token_type", ()), strict=False):
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
    try:
        backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:
        raise LoadError(f"{path / 'tokenizer.json'}: not a tokenizer file: {error}") from None
    settings, config, generation = (read_json(path / f"{name}.json") if (path / f"{name}.json").is_file() else {}
                                    for name in ("tokenizer_config", "config", "generation_config"))  # fmt: skip

    def token_id(key: str) -> int | None:
        named = settings.get(key)
        return backend.token_to_id(named["content"] if isinstance(named, dict) else named) if named else None

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
    return next((t["template"] for t in found if t["name"] == "default"), None) if isinstance(found, list) else found
