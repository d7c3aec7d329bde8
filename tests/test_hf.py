"""transformers' own call: the same ids as the model's plain generate, and what cannot be honoured refused by name."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import GenerationConfig  # noqa: E402

from sakiyomi.errors import ParameterError, VocabularyError  # noqa: E402
from sakiyomi.hf import wrap  # noqa: E402

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
IDS = torch.tensor([[2, 2, 2, 8, 9, 10, 8, 9], [5, 9, 5, 9, 17, 5, 9, 17], [2, 40, 41, 40, 41, 40, 41, 40]])
MASK = (IDS != 2).long()
MASK[1:, 1:] = 1


def build(name: str = "Llama", seed: int = 0, **options: Any) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**(SHAPE | {"initializer_range": 0.3} | options))
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return build()


@pytest.fixture(scope="module")
def wrapped(model: Any) -> Any:
    return wrap(model)


def both(wrapped: Any, ids: Any = IDS, **kwargs: Any) -> tuple[Any, Any]:
    """What the wrapped model returns, and what the model itself does."""
    kwargs = {"max_new_tokens": 24, "do_sample": False} | kwargs
    if "attention_mask" not in kwargs:
        kwargs["attention_mask"] = MASK if ids is IDS else torch.ones_like(ids)
    ours = wrapped.generate(input_ids=ids, **copy.deepcopy(kwargs))
    return ours, wrapped._wrapped.generate(input_ids=ids, **kwargs)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")  # transformers says so of its own call
# A token that greedy decoding emits early ends the text there, so that rows end at different places.
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"max_new_tokens": 1},
        {"eos_token_id": -1},
        {"eos_token_id": [11, 17, 60], "pad_token_id": 3},
        {"eos_token_id": list(range(3, 60)), "min_new_tokens": 5},
        {"eos_token_id": list(range(3, 60)), "min_length": 12},
        {"max_new_tokens": None, "max_length": 20},
        {"max_new_tokens": None},
        {"repetition_penalty": 1.3},
        {"num_return_sequences": 1, "use_cache": True, "top_k": 7},
        {"generation_config": GenerationConfig(max_new_tokens=9, eos_token_id=1, pad_token_id=2)},
    ],
    ids=str,
)
def test_greedy_ids_are_those_of_the_model(wrapped: Any, kwargs: dict[str, Any]) -> None:
    if "generation_config" in kwargs:
        config = kwargs["generation_config"]
        ours = wrapped.generate(IDS, config, attention_mask=MASK)
        theirs = wrapped._wrapped.generate(IDS, config, attention_mask=MASK)
    else:
        ours, theirs = both(wrapped, **kwargs)
    assert torch.equal(ours, theirs)
    assert ours.dtype == theirs.dtype


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("GPT2", {}),
        ("Gemma3Text", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}),
        ("Mamba", {"state_size": 8}),
    ],
)
def test_other_models_too(name: str, options: dict[str, Any]) -> None:
    wrapped = wrap(build(name, **options))
    assert torch.equal(*both(wrapped, IDS[1:2]))
    assert torch.equal(*both(wrapped, torch.tensor([[5]])))


def test_drafts_are_made_and_accepted(wrapped: Any) -> None:
    ids = torch.tensor([[5, 6, 7, 8] * 4])
    both(wrapped, ids, max_new_tokens=60, eos_token_id=-1)
    plain = wrapped.last_speculation
    assert plain.num_draft_tokens > 0
    assistant = wrapped._wrapped
    for kwargs in ({"assistant_model": assistant}, {"assistant_model": wrap(assistant), "num_assistant_tokens": 6}):
        ours = wrapped.generate(ids, max_new_tokens=60, eos_token_id=-1, **kwargs)
        counts = wrapped.last_speculation
        assert counts.num_accepted_tokens == counts.num_draft_tokens > 40
        assert torch.equal(ours, wrapped._wrapped.generate(ids, max_new_tokens=60, eos_token_id=-1, do_sample=False))
    assert counts.mean_acceptance_length > 6


def test_a_stranger_assists_and_prompt_lookup_looks_up(wrapped: Any) -> None:
    theirs = both(wrapped)[1]
    for kwargs in (
        {"assistant_model": build(seed=1, hidden_size=16)},
        {"prompt_lookup_num_tokens": 5},
        {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 3},
    ):
        assert torch.equal(wrapped.generate(IDS, attention_mask=MASK, max_new_tokens=24, **kwargs), theirs)
        assert wrapped.last_speculation.num_draft_tokens > 0


def test_padding_is_inferred_as_in_transformers(wrapped: Any) -> None:
    ids = IDS[[0, 2]]
    assert torch.equal(
        wrapped.generate(ids, max_new_tokens=12), wrapped._wrapped.generate(ids, max_new_tokens=12, do_sample=False)
    )


def test_without_ids_it_starts_at_bos(wrapped: Any) -> None:
    assert torch.equal(wrapped.generate(max_new_tokens=5), wrapped._wrapped.generate(max_new_tokens=5, do_sample=False))


def test_sampling_follows_the_law_and_torch_seed(wrapped: Any) -> None:
    ids, settings = IDS[1:2], {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "max_new_tokens": 2}
    torch.manual_seed(5)
    first = wrapped.generate(ids, num_return_sequences=3, **settings)
    torch.manual_seed(5)
    assert torch.equal(first, wrapped.generate(ids, num_return_sequences=3, **settings))
    assert first.shape == (3, 10)
    ours = wrapped.generate(ids, num_return_sequences=600, **settings)[:, 8].tolist()
    theirs = wrapped._wrapped.generate(ids, num_return_sequences=600, **settings)[:, 8].tolist()
    assert set(ours) == set(theirs)
    counts = Counter(ours), Counter(theirs)
    assert sum(abs(counts[0][token] - counts[1][token]) for token in counts[0]) / 1200 < 0.1


def test_rows_of_a_sampled_batch_differ(wrapped: Any) -> None:
    ids = IDS[1:2].repeat(2, 1)
    rows = wrapped.generate(ids, do_sample=True, num_return_sequences=2, max_new_tokens=12)
    assert rows.shape == (4, 20)
    assert len({tuple(row) for row in rows.tolist()}) == 4


def test_an_output_is_returned_on_request(wrapped: Any) -> None:
    ours, theirs = both(wrapped, return_dict_in_generate=True)
    assert type(ours) is type(theirs)
    assert torch.equal(ours.sequences, theirs.sequences)


class Recorder:
    def __init__(self) -> None:
        self.heard: list[list[int]] = []
        self.is_over = False

    def put(self, value: Any) -> None:
        self.heard.append(value.flatten().tolist())

    def end(self) -> None:
        self.is_over = True


def test_a_streamer_hears_what_transformers_tells_it(wrapped: Any) -> None:
    recorders = Recorder(), Recorder()
    settings = {"max_new_tokens": 12, "do_sample": False}
    wrapped.generate(IDS[1:2], streamer=recorders[0], **settings)
    wrapped._wrapped.generate(IDS[1:2], streamer=recorders[1], **settings)
    assert recorders[0].heard == recorders[1].heard
    assert recorders[0].is_over
    with pytest.raises(ParameterError, match="streamer"):
        wrapped.generate(IDS, streamer=Recorder(), **settings)


class LetterTokenizer:
    """Id 40 is A, and so on."""

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(chr(int(token) + 25) for token in ids)


def test_stop_strings_end_the_text_with_the_token_that_completes_them(wrapped: Any) -> None:
    plain = wrapped.generate(IDS[1:2], max_new_tokens=12, eos_token_id=-1)[0, 8:]
    stop = LetterTokenizer().decode(plain[3:5])
    place = LetterTokenizer().decode(plain).index(stop) + len(stop)
    for kwargs in ({"tokenizer": LetterTokenizer(), "stop_strings": stop},):
        ours = wrapped.generate(IDS[1:2], max_new_tokens=12, eos_token_id=-1, **kwargs)[0, 8:]
        assert ours.tolist() == plain[:place].tolist()
    with pytest.raises(ParameterError, match="tokenizer"):
        wrapped.generate(IDS, max_new_tokens=3, stop_strings="x")


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"bad_words_ids": [[3]]}, "bad_words_ids"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"do_sample": True, "typical_p": 0.5}, "typical_p"),
        ({"do_sample": True, "min_p": 0.1, "top_p": 0.5}, "min_p with top_p"),
        ({"do_sample": True, "temperature": 0.0}, "temperature"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
        ({"logits_processor": [print]}, "logits_processor"),
        ({"stopping_criteria": [print]}, "stopping_criteria"),
        ({"prefix_allowed_tokens_fn": print}, "prefix_allowed_tokens_fn"),
        ({"inputs_embeds": torch.zeros(3, 8, 32)}, "inputs_embeds"),
        ({"position_ids": torch.zeros(3, 8)}, "position_ids"),
        ({"assistant_tokenizer": print}, "assistant_tokenizer"),
        ({"custom_generate": print}, "custom_generate"),
        ({"max_new_token": 5}, "did you mean 'max_new_tokens'"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1]] * 3)}, "attention_mask"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0]] * 3)}, "attention_mask"),
        ({"attention_mask": torch.ones(3, 7)}, "attention_mask"),
        ({"max_new_tokens": 1000}, "max_new_tokens=1000"),
        ({"max_new_tokens": None, "max_length": 8}, "max_length=8"),
        ({"input_ids": IDS}, "inputs and input_ids"),
        ({"input_ids": torch.zeros(1, 2)}, "inputs and input_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_honoured_is_refused_by_name(wrapped: Any, kwargs: dict[str, Any], name: str) -> None:
    with pytest.raises(ParameterError, match=name):
        wrapped.generate(IDS, **({"attention_mask": MASK, "max_new_tokens": 4} | kwargs))


def test_wrong_ids_and_assistants_are_refused(wrapped: Any) -> None:
    for ids in (torch.zeros(1, 0, dtype=torch.long), torch.zeros(3, dtype=torch.long), torch.zeros(1, 2), [[1]]):
        with pytest.raises(ParameterError, match="tensor of ids"):
            wrapped.generate(ids, max_new_tokens=2)
    with pytest.raises(ParameterError, match="id 128"):
        wrapped.generate(torch.tensor([[128]]), max_new_tokens=2)
    with pytest.raises(VocabularyError, match="257"):
        wrapped.generate(IDS, max_new_tokens=2, assistant_model=build(vocab_size=257))
    with pytest.raises(ParameterError, match="give one of them"):
        wrapped.generate(
            IDS, attention_mask=MASK, max_new_tokens=2, assistant_model=wrapped._wrapped, prompt_lookup_num_tokens=2
        )


def test_the_wrapped_model_is_not_changed(model: Any) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = model.generation_config.to_dict(), model.config.to_dict()
    wrapped = wrap(model)
    wrapped.generate(IDS, attention_mask=MASK, max_new_tokens=8, eos_token_id=5, repetition_penalty=1.2)
    assert (model.generation_config.to_dict(), model.config.to_dict()) == settings
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "generate" not in vars(model)
    assert not any(module._forward_hooks for module in model.modules())
    assert wrapped.config is model.config
    assert wrapped.device == model.device
    assert torch.equal(wrapped(IDS).logits, model(IDS).logits)
    with pytest.raises(AttributeError, match="no_such"):
        _ = wrapped.no_such
