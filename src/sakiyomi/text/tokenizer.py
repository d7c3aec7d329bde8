"""Tokenizer: text to ids and ids to the exact bytes they stand for, over the `tokenizers` package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from sakiyomi.errors import CheckpointError, ParameterError
from sakiyomi.types import TokenizerData

# Token types of GGUF metadata.
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5

_UNUSED_NAME = re.compile(r"[\[<]\|?(pad|unused|reserved|dummy|extra)[a-z_ ]*\d+\|?[\]>]", re.IGNORECASE)
_BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """Encodes and decodes; ids without a token (padding of the model's head) stand for no bytes."""

    def __init__(
        self,
        backend: Backend,
        *,
        is_byte_level: bool,
        strips_space: bool,
        bos_id: int | None = None,
        eos_id: int | None = None,
        unused: Iterable[int] = (),
    ) -> None:
        """Wrap a `tokenizers.Tokenizer`; `load` is the usual way in.

        Args:
            is_byte_level: tokens are written in the GPT-2 byte alphabet; else they are SentencePiece pieces.
            strips_space: decoding drops one leading space (the one that encoding put there).
            unused: ids that the files mark as never used.
        """
        vocab = backend.get_vocab(with_added_tokens=True)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.strips_space = strips_space
        self._backend = backend
        self._is_byte_level = is_byte_level
        self._tokens: list[str | None] = [None] * (max(vocab.values(), default=-1) + 1)
        for token, token_id in vocab.items():
            self._tokens[token_id] = token
        self._added = {token_id: token.special for token_id, token in backend.get_added_tokens_decoder().items()}
        self._unused = frozenset(unused)
        self._bytes: list[bytes | None] = [None] * len(self._tokens)

    @classmethod
    def load(cls, data: TokenizerData) -> Tokenizer:
        """From the text of a tokenizer.json or the metadata of a GGUF file.

        Raises:
            CheckpointError: there is neither, or a kind of tokenizer that is not supported.
        """
        if data.json is not None:
            return _load_json(data.json, data.config)
        if data.gguf is not None:
            return _load_gguf(data.gguf)
        raise CheckpointError("the model has no tokenizer; put its tokenizer.json into the folder.")

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included: the largest id plus one."""
        return len(self._tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens written in it become their ids.

        Args:
            add_special_tokens: put the tokens around it that the model was trained with (such as BOS). A rendered
                chat template holds them already.
        """
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError:
            # So the package answers to surrogates as to anything that is no text.
            assert isinstance(text, str), f"a text is expected, not {type(text).__name__}"
            raise ParameterError("the text holds lone surrogates, which are no characters; remove them.") from None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        skipped = self.is_special if skip_special_tokens else lambda _: False
        data = b"".join(self.token_bytes(token_id) for token_id in ids if not skipped(token_id))
        return (data[1:] if self.strips_space and data[:1] == b" " else data).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for (special tokens: their text); empty for an id without a token."""
        if not 0 <= token_id < len(self._tokens):
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token, which decoding leaves out."""
        return self._added.get(token_id, False)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def describe_mismatch(self, other: Tokenizer) -> str | None:
        """None if both tokenizers mean the same by every id, else a text that names the first id that differs.

        Ids that one of them does not have may be padding or unused in the other, nothing else.
        """
        if self._tokens == other._tokens:
            return None
        for token_id in range(max(self.vocab_size, other.vocab_size)):
            ours, theirs = self._meaning(token_id), other._meaning(token_id)
            if ours != theirs:
                return f"id {token_id} is {_show(ours)} in one and {_show(theirs)} in the other"
        return None

    def _meaning(self, token_id: int) -> bytes | None:
        """Bytes of a token, None for padding."""
        token = self._tokens[token_id] if token_id < len(self._tokens) else None
        if token is None or token_id in self._unused or _UNUSED_NAME.fullmatch(token):
            return None
        return self.token_bytes(token_id)

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._tokens[token_id]
        if token is None:
            return b""
        if self._is_byte_level:
            return token.encode() if token_id in self._added else _from_byte_alphabet(token)
        if token_id not in self._added and (match := _BYTE_NAME.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace("▁", " ").encode()


def _show(token: bytes | None) -> str:
    return "unused" if token is None else repr(token.decode("utf-8", "backslashreplace"))


# ---------------------------------------------------------------------------------------------- bytes as letters


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes: printable ones are themselves, the others count up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _from_byte_alphabet(token: str) -> bytes:
    alphabet = _byte_alphabet()
    try:
        return bytes([alphabet[letter] for letter in token])
    except KeyError:
        return token.encode()


# ---------------------------------------------------------------------------------------------- tokenizer.json


def _load_json(text: str, config: Mapping[str, Any]) -> Tokenizer:
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the package raises plain Exception
        raise CheckpointError(f"tokenizer.json cannot be read ({error}); download the model again.") from None
    backend.no_truncation()
    backend.no_padding()
    _add_configured_tokens(backend, config)
    kinds = _list_decoders(backend)
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace", "Strip"}:
        raise CheckpointError(
            f"tokenizer.json has the decoder {', '.join(sorted(kinds)) or 'none'}, which is not supported; "
            "supported are byte-level BPE and SentencePiece-style BPE."
        )
    return Tokenizer(
        backend,
        is_byte_level="ByteLevel" in kinds,
        strips_space=bool(kinds & {"Strip", "Metaspace"}),
        bos_id=_find_named_token(backend, config, "bos_token"),
        eos_id=_find_named_token(backend, config, "eos_token"),
    )


def _list_decoders(backend: Backend) -> set[str]:
    """Names of the decoder's steps; a Metaspace or Strip that drops no leading space is left out."""
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    names = set()
    for step in steps:
        name = step["type"]
        if name == "Strip" and not step["start"]:
            continue
        names.add("Pieces" if name == "Metaspace" and step.get("prepend_scheme") == "never" else name)
    return names


def _add_configured_tokens(backend: Backend, config: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json declares, and roles that make a token special."""
    known = backend.get_added_tokens_decoder()
    declared = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    for token_id, fields in declared:
        if int(token_id) not in known:
            backend.add_tokens([_read_added_token(fields)])
    roles = [config.get(f"{role}_token") for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
    more = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    roles += more.values() if isinstance(more, Mapping) else more
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for role in roles:
        content = role["content"] if isinstance(role, Mapping) else role
        if content and content not in special and backend.token_to_id(content) is not None:
            backend.add_special_tokens([AddedToken(content, special=True, normalized=False)])


def _read_added_token(fields: Mapping[str, Any]) -> AddedToken:
    flags = ("special", "lstrip", "rstrip", "single_word", "normalized")
    return AddedToken(fields["content"], **{flag: fields[flag] for flag in flags if flag in fields})


def _find_named_token(backend: Backend, config: Mapping[str, Any], key: str) -> int | None:
    token = config.get(key)
    content = token["content"] if isinstance(token, Mapping) else token
    return None if content is None else backend.token_to_id(content)


# ---------------------------------------------------------------------------------------------- GGUF metadata


def _load_gguf(fields: Mapping[str, Any]) -> Tokenizer:
    model = str(fields.get("model"))
    builders = {"gpt2": _build_byte_level, "llama": _build_sentencepiece}
    if model not in builders:
        raise CheckpointError(
            f"the file's tokenizer is of kind {model!r}, which is not supported; supported are {', '.join(builders)}."
        )
    tokens: list[str] = fields["tokens"]
    types: list[int] = fields.get("token_type") or [1] * len(tokens)
    _check_fields(fields, len(tokens))
    backend = builders[model](fields, tokens, types)
    _mark_added_tokens(backend, tokens, types)
    _surround(backend, fields, tokens, default_bos=model == "llama" or fields.get("pre") in _STARTS_WITH_BOS)
    return Tokenizer(
        backend,
        is_byte_level=model == "gpt2",
        strips_space=model == "llama" and fields.get("add_space_prefix", True),
        bos_id=fields.get("bos_token_id"),
        eos_id=fields.get("eos_token_id"),
        unused=[token_id for token_id, kind in enumerate(types) if kind == UNUSED],
    )


def _check_fields(fields: Mapping[str, Any], num_tokens: int) -> None:
    for key in ("token_type", "scores"):
        if (values := fields.get(key)) and len(values) != num_tokens:
            raise CheckpointError(
                f"the file's {key} has {len(values)} entries for {num_tokens} tokens; download the file again."
            )
    for key in ("bos_token_id", "eos_token_id", "unknown_token_id"):
        token_id = fields.get(key, 0)
        if not isinstance(token_id, int) or not 0 <= token_id < num_tokens:
            raise CheckpointError(
                f"the file's {key} is {token_id}; its ids are 0 to {num_tokens - 1}; download the file again."
            )


def _mark_added_tokens(backend: Backend, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Make control and user-defined tokens findable in text."""
    added = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
    ]
    backend.add_tokens(added)


def _surround(backend: Backend, fields: Mapping[str, Any], tokens: Sequence[str], default_bos: bool) -> None:
    """BOS before and EOS behind the text, as the metadata ask."""
    start, end = fields.get("bos_token_id"), fields.get("eos_token_id")
    before = [start] if start is not None and fields.get("add_bos_token", default_bos) else []
    behind = [end] if end is not None and fields.get("add_eos_token", False) else []
    if not before and not behind:
        return
    names = [f"S{i}" for i in range(len(before) + len(behind))]
    specials = [
        {"id": name, "ids": [token_id], "tokens": [tokens[token_id]]}
        for name, token_id in zip(names, before + behind, strict=True)
    ]
    template = [*names[: len(before)], "$A", *names[len(before) :]]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)


# ---- byte-level BPE

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"

# Patterns applied one after the other; a match becomes a piece of its own, and so does what lies between matches.
_DIGITS_THEN_GPT2 = (r"\p{N}", _GPT2)
_LLAMA3 = (_WORD + r"|\p{N}{1,3}" + _TAIL,)
_QWEN2 = (_WORD + r"|\p{N}" + _TAIL,)
_PATTERNS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"),
    "tekken": (_TEKKEN_WORD + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",),
}
_STARTS_WITH_BOS = {"llama-bpe", "llama3", "llama-v3", "tekken"}
_IGNORES_MERGES = _STARTS_WITH_BOS
_NORMALIZES = {"qwen2", "deepseek-r1-qwen"}


def _build_byte_level(fields: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Backend:
    pre = str(fields.get("pre", "default"))
    if pre not in _PATTERNS:
        raise CheckpointError(
            f"the file's pre-tokenizer {pre!r} is not supported; supported are {', '.join(_PATTERNS)}."
        )
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in fields.get("merges", ()))]
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _IGNORES_MERGES)
    except Exception as error:  # the package raises plain Exception
        raise CheckpointError(f"the file's merges do not fit its vocabulary ({error}); download it again.") from None
    backend = Backend(model)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[pre]]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, letters])
    backend.decoder = decoders.ByteLevel()
    if pre in _NORMALIZES:
        backend.normalizer = normalizers.NFC()
    return backend


# ---- SentencePiece-style BPE


def _build_sentencepiece(fields: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Backend:
    """BPE over the whole text whose next merge is the pair with the best score, bytes for unknown characters."""
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    scores: Sequence[float] = fields.get("scores") or [0.0] * len(tokens)
    unknown = fields.get("unknown_token_id", 0)
    has_bytes = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    model = models.BPE(
        vocab=vocab,
        merges=_derive_merges(tokens, types, scores, vocab),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=has_bytes,
    )
    backend = Backend(model)
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    if fields.get("add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _derive_merges(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Every way to join two pieces to a third, best score first."""
    found: list[tuple[float, int, int, str, str]] = []
    for token_id, (token, kind, score) in enumerate(zip(tokens, types, scores, strict=True)):
        if kind != 1:
            continue
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocab and right in vocab:
                found.append((-score, token_id, vocab[left], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
