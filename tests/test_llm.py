"""LLM on a toy that says a given text: everything a request can ask for, with drafts and without."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sakiyomi import LLM, RequestOutput, SamplingParams, StreamPiece
from sakiyomi.assemble import LoadedModel, choose_drafter
from sakiyomi.drafters.ngram import NgramDrafter
from sakiyomi.drafters.planted import PlantedDrafter, follow, scatter
from sakiyomi.errors import ContextLengthError, ParameterError, UnknownNameError
from sakiyomi.models.toy import Law, TokenCache, ToyModel, random_law, scripted_law
from sakiyomi.text.chat import ChatTemplate
from sakiyomi.text.tokenizer import Tokenizer
from sakiyomi.tree import Draft
from sakiyomi.types import Drafter, Sequence, TokenizerData

VOCAB = 257
END = 256
PROMPT = "Say: "
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def load(law: Law, tokenizer: Tokenizer | None, **options: int) -> LoadedModel:
    model = ToyModel(law, VOCAB, end_token_ids=(END,), **options)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        chat_template=ChatTemplate(TokenizerData(chat_template=TEMPLATE)),
        path=Path("toy"),
    )


def saying(text: str, tokenizer: Tokenizer, then: int = END) -> LoadedModel:
    """A model that answers PROMPT with `text` and then `then` for ever."""
    start = len(tokenizer.encode(PROMPT))
    return load(scripted_law(VOCAB, tokenizer.encode(text), start=start, other=then), tokenizer)


def planting(text: str, tokenizer: Tokenizer, num_tokens: int, tail: tuple[int, ...] = (END, 1, 2, 3)) -> Drafter:
    """Drafts blocks of the true answer, running on behind its end."""
    answer = (*tokenizer.encode(text), *tail)
    script = follow({tuple(tokenizer.encode(PROMPT)): answer}, num_tokens)
    return PlantedDrafter(PlantedDrafter.Config(script=script))


def note_caches(loaded: LoadedModel) -> list[weakref.ref[TokenCache]]:
    """A list that every new cache of the model enters."""
    caches: list[weakref.ref[TokenCache]] = []
    make = loaded.model.new_cache

    def note() -> TokenCache:
        cache = make()
        assert isinstance(cache, TokenCache)
        caches.append(weakref.ref(cache))
        return cache

    loaded.model.new_cache = note  # type: ignore[method-assign]
    return caches


def strip(output: RequestOutput) -> list[tuple[object, ...]]:
    return [
        (o.text, o.token_ids, o.finish_reason, o.stop_reason, o.logprobs, o.cumulative_logprob, o.seed)
        for o in output.outputs
    ]


def check_all_ways(
    loaded: LoadedModel, drafter: Drafter, params: SamplingParams, prompt: str = PROMPT
) -> tuple[RequestOutput, list[StreamPiece]]:
    """Plain, drafted and streamed answers agree in everything; returns the drafted answer and its pieces."""
    plain = LLM.from_loaded(loaded).generate(prompt, params)[0]
    drafted = LLM.from_loaded(loaded, drafter=drafter).generate(prompt, params)[0]
    pieces = list(LLM.from_loaded(loaded, drafter=drafter).stream(prompt, params))
    assert strip(drafted) == strip(plain)
    streamed = pieces[-1].output
    assert streamed is not None
    assert strip(streamed) == strip(plain)
    assert "".join(piece.text for piece in pieces) == plain.outputs[0].text
    assert [piece.token_id for piece in pieces] == plain.outputs[0].token_ids
    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    assert [i for i, piece in enumerate(pieces) if piece.source == "draft"] == drafted.outputs[0].drafted
    return drafted, pieces


# ---------------------------------------------------------------------------------------------- ends


def test_an_end_id_as_the_fifth_of_an_accepted_block_of_eight(byte_tokenizer: Tokenizer) -> None:
    loaded = saying("abcd", byte_tokenizer)
    drafted, pieces = check_all_ways(
        loaded, planting("abcd", byte_tokenizer, 8), SamplingParams(temperature=0, max_tokens=30, logprobs=5)
    )
    answer = drafted.outputs[0]
    assert (answer.text, answer.finish_reason, answer.token_ids[-1]) == ("abcd", "stop", END)
    assert len(answer.token_ids) == len(answer.logprobs or ()) == len(pieces) == 5
    assert (drafted.speculation.num_steps, drafted.speculation.num_accepted_tokens) == (1, 5)
    assert drafted.speculation.acceptance_per_position == [1.0] * 5


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_completed_by_the_third_token_of_a_block_of_six(byte_tokenizer: Tokenizer, include: bool) -> None:
    loaded = saying("xyENDabc", byte_tokenizer)
    script = byte_tokenizer.encode("xyENDabc")

    def six_from_the_third(sequence: Sequence, budget: int) -> Draft:
        return Draft.chain(script[sequence.num_new :][:6]) if sequence.num_new == 2 else Draft.empty()

    drafter = PlantedDrafter(PlantedDrafter.Config(script=six_from_the_third))
    params = SamplingParams(temperature=0, max_tokens=30, stop=["END"], include_stop_str_in_output=include)
    drafted, pieces = check_all_ways(loaded, drafter, params)
    answer = drafted.outputs[0]
    assert answer.text == ("xyEND" if include else "xy")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "END")
    assert answer.token_ids == script[:5]
    assert [piece.source for piece in pieces] == ["target", "target", "draft", "draft", "draft"]


@pytest.mark.parametrize(("stop", "max_tokens", "reason"), [("c", 5, "stop"), ("e", 3, "length"), ("c", 3, "stop")])
def test_stop_string_and_length_in_one_block(
    byte_tokenizer: Tokenizer, stop: str, max_tokens: int, reason: str
) -> None:
    loaded = saying("abcdefgh", byte_tokenizer)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, stop=stop, logprobs=0)
    drafted, _ = check_all_ways(loaded, planting("abcdefgh", byte_tokenizer, 8), params)
    assert drafted.outputs[0].finish_reason == reason
    assert drafted.outputs[0].text == ("ab" if reason == "stop" else "abc")


def test_characters_of_several_bytes_never_show_in_halves(byte_tokenizer: Tokenizer) -> None:
    text = "先読み 👩‍👩‍👧 naïve"
    drafted, pieces = check_all_ways(
        saying(text, byte_tokenizer), planting(text, byte_tokenizer, 4), SamplingParams(temperature=0, max_tokens=99)
    )
    assert drafted.outputs[0].text == text
    assert "\ufffd" not in "".join(piece.text for piece in pieces)


# ---------------------------------------------------------------------------------------------- parameters


def test_a_forbidden_drafted_token_is_not_emitted(byte_tokenizer: Tokenizer) -> None:
    text = "abcd"
    banned = byte_tokenizer.encode("c")[0]
    for params in (
        SamplingParams(temperature=0, max_tokens=8, logit_bias={banned: -100}),
        SamplingParams(temperature=1, seed=3, max_tokens=8, min_p=0.3, logit_bias={banned: -100}),
    ):
        drafted, _ = check_all_ways(saying(text, byte_tokenizer), planting(text, byte_tokenizer, 6), params)
        assert banned not in drafted.outputs[0].token_ids


def test_a_frequency_penalty_counts_drafted_tokens_of_the_same_step(byte_tokenizer: Tokenizer) -> None:
    """The favourite leads by 5: after three of them the runner-up wins, inside one draft of four."""
    favourite, second = byte_tokenizer.encode("xy")

    def law(tokens: object) -> np.ndarray:
        logits = np.zeros(VOCAB, np.float32)
        logits[[favourite, second]] = 9.0, 4.0
        return logits

    drafter = PlantedDrafter(PlantedDrafter.Config(script=lambda s, b: Draft.chain([favourite] * 4)))
    params = SamplingParams(temperature=0, max_tokens=6, frequency_penalty=2.0)
    drafted, _ = check_all_ways(load(law, byte_tokenizer), drafter, params)
    assert drafted.outputs[0].text == "xxxyxy"


@given(
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([1.0, 0.9]),
    n=st.integers(1, 3),
    seed=st.integers(0, 9),
    logprobs=st.sampled_from([None, 0, 5]),
)
def test_any_request_is_the_same_with_drafts(
    byte_tokenizer: Tokenizer, temperature: float, top_p: float, n: int, seed: int, logprobs: int | None
) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, n=n, seed=seed, logprobs=logprobs, max_tokens=12)
    loaded = load(random_law(VOCAB, seed), byte_tokenizer)
    plain = LLM.from_loaded(loaded).generate([PROMPT, "Other"], params)
    truth = {tuple(o.prompt_token_ids): o.outputs[0].token_ids for o in plain}
    drafter = PlantedDrafter(PlantedDrafter.Config(script=scatter(truth, 7, VOCAB, seed)))
    for max_num_seqs in (1, 4):
        drafted = LLM.from_loaded(loaded, drafter=drafter, max_num_seqs=max_num_seqs).generate(
            [PROMPT, "Other"], params
        )
        assert [strip(o) for o in drafted] == [strip(o) for o in plain]


def test_three_samples_differ_and_the_first_is_the_single_one(byte_tokenizer: Tokenizer) -> None:
    loaded = load(random_law(VOCAB, 1), byte_tokenizer)
    llm = LLM.from_loaded(loaded)
    three = llm.generate(PROMPT, SamplingParams(n=3, seed=5, max_tokens=8, logprobs=5))[0]
    one = llm.generate(PROMPT, SamplingParams(seed=5, max_tokens=8, logprobs=5))[0]
    assert three.outputs[0] == one.outputs[0]
    assert len({tuple(o.token_ids) for o in three.outputs}) == 3
    again = llm.generate(PROMPT, SamplingParams(seed=three.outputs[2].seed, max_tokens=8))[0]
    assert again.outputs[0].token_ids == three.outputs[2].token_ids


def test_logprobs_hold_the_chosen_token_and_the_best(byte_tokenizer: Tokenizer) -> None:
    llm = LLM.from_loaded(load(random_law(VOCAB, 1), byte_tokenizer))
    answer = llm.generate(PROMPT, SamplingParams(seed=5, max_tokens=8, logprobs=5))[0].outputs[0]
    for token, entry in zip(answer.token_ids, answer.logprobs or (), strict=True):
        assert token in entry
        ranks = sorted(x.rank for x in entry.values() if x.rank)
        assert ranks[:5] == [1, 2, 3, 4, 5]
        assert len(ranks) == len(entry)
        assert len(entry) in (5, 6)
        assert all(x.logprob < 0 for x in entry.values())
    total = sum(entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs or (), strict=True))
    assert answer.cumulative_logprob == pytest.approx(total)


def test_seeds_are_drawn_reported_and_repeatable(byte_tokenizer: Tokenizer) -> None:
    loaded = load(random_law(VOCAB, 1), byte_tokenizer)
    drawn = LLM.from_loaded(loaded).generate(PROMPT, SamplingParams(max_tokens=8))[0]
    again = LLM.from_loaded(loaded).generate(PROMPT, SamplingParams(max_tokens=8, seed=drawn.seed))[0]
    assert again.outputs == drawn.outputs
    first, second = (
        [o.outputs[0].token_ids for o in LLM.from_loaded(loaded, seed=4).generate([PROMPT] * 2)] for _ in range(2)
    )
    assert first == second
    assert first[0] != first[1]


# ---------------------------------------------------------------------------------------------- many prompts


def test_a_prompt_that_fails_does_not_lose_the_others(byte_tokenizer: Tokenizer) -> None:
    llm = LLM.from_loaded(load(random_law(VOCAB, 1), byte_tokenizer, max_model_len=20), max_num_seqs=2)
    prompts = ["one", "", "x" * 20, [1, 999], "two"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4))
    assert [type(o.error) for o in outputs] == [
        type(None),
        ContextLengthError,
        ContextLengthError,
        ParameterError,
        type(None),
    ]
    assert [o.prompt for o in outputs] == ["one", "", "x" * 20, None, "two"]
    assert [len(o.prompt_token_ids) for o in outputs] == [3, 0, 20, 2, 3]
    assert outputs[0].outputs == llm.generate("one", SamplingParams(temperature=0, max_tokens=4))[0].outputs
    assert outputs[4].outputs == llm.generate("two", SamplingParams(temperature=0, max_tokens=4))[0].outputs


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("num_good", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_sequence_that_breaks_leaves_its_neighbours_as_if_alone(
    byte_tokenizer: Tokenizer, place: int, num_good: int, drafts: bool
) -> None:
    """The bad one gives nan after `num_good` tokens, also in the very step in which a neighbour finishes."""
    bad = byte_tokenizer.encode("!")[0]
    inner = random_law(VOCAB - 1, 1)

    def law(tokens: list[int]) -> np.ndarray:
        logits = np.append(inner(tokens), np.float32(-9))
        return np.full_like(logits, np.nan) if bad in tokens[:3] and len(tokens) >= 3 + num_good else logits

    loaded = load(law, byte_tokenizer)
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2)
    prompts = ["abc", "xyz"]
    plain = [LLM.from_loaded(loaded).generate(prompt, params)[0] for prompt in prompts]
    truth = {tuple(o.prompt_token_ids): o.outputs[0].token_ids for o in plain}
    drafter = PlantedDrafter(PlantedDrafter.Config(script=follow(truth, 2))) if drafts else "none"
    llm = LLM.from_loaded(loaded, drafter=drafter)
    alone = [llm.generate(prompt, params)[0] for prompt in prompts]
    together = llm.generate([*prompts[:place], "ab!", *prompts[place:]], params)
    broken = together.pop(place)
    if num_good < 4:
        assert "nan" in str(broken.error)
        assert broken.outputs[0].finish_reason == "error"
        assert len(broken.outputs[0].token_ids) == num_good
        with pytest.raises(Exception, match="nan"):
            llm.generate("ab!", params)
    for one, other in zip(together, alone, strict=True):
        assert (one.outputs, one.speculation, one.error) == (other.outputs, other.speculation, None)


def test_a_failed_request_holds_no_cache(byte_tokenizer: Tokenizer) -> None:
    """Neither its own nor its neighbours': an error's traceback would keep every frame alive."""
    bad = byte_tokenizer.encode("!")[0]
    loaded = load(lambda tokens: np.full(VOCAB, np.nan if bad in tokens else 0, np.float32), byte_tokenizer)
    caches = note_caches(loaded)
    outputs = LLM.from_loaded(loaded).generate(["abc", "ab!", "xyz"], SamplingParams(temperature=0, max_tokens=4))
    assert outputs[1].error is not None
    gc.collect()
    held = [cache() for cache in caches]
    assert sum(cache.length for cache in held if cache is not None) == 0


@pytest.mark.parametrize("conversation", [[], [{"content": "b"}], [{"role": "user"}]])
def test_a_conversation_that_fails_does_not_lose_the_others(byte_tokenizer: Tokenizer, conversation: object) -> None:
    llm = LLM.from_loaded(load(random_law(VOCAB, 1), byte_tokenizer))
    good = [{"role": "user", "content": "a"}]
    params = SamplingParams(temperature=0, max_tokens=3)
    outputs = llm.chat([good, conversation, good], params)  # type: ignore[list-item]
    assert outputs[0].outputs == outputs[2].outputs == llm.chat(good, params)[0].outputs
    assert (outputs[0].error, outputs[2].error) == (None, None)


class UnhashableDrafter(NgramDrafter):
    """Fails in everything but being built."""

    __hash__ = None  # type: ignore[assignment]

    def propose(self, sequences: object, budgets: object) -> list[Draft]:
        raise RuntimeError("propose")

    def observe(self, *args: object) -> None:
        raise RuntimeError("observe")

    def rewind(self, sequence: object, length: int) -> None:
        raise RuntimeError("rewind")

    def forget(self, sequence: object) -> None:
        raise RuntimeError("forget")


def test_a_drafter_that_always_fails_costs_speed_alone(
    byte_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load(random_law(VOCAB - 1, 1), byte_tokenizer)
    loaded.model.law = lambda tokens: np.append(random_law(VOCAB - 1, 1)(tokens), np.float32(-9))  # type: ignore[attr-defined]
    llm, plain = LLM.from_loaded(loaded, drafter=UnhashableDrafter()), LLM.from_loaded(loaded)
    params = SamplingParams(temperature=0, max_tokens=5)
    assert [strip(o) for o in llm.generate(["a", "b"], params)] == [
        strip(o) for o in plain.generate(["a", "b"], params)
    ]
    session, plain_session = llm.session(), plain.session()
    for text in ("one", "two"):
        said = ["".join(piece.text for piece in one.stream(text, params)) for one in (session, plain_session)]
        assert said[0] == said[1]
    assert caplog.text.count("UnhashableDrafter failed") == 1


def test_one_sequence_that_cannot_be_drafted_for_leaves_the_others_their_drafts(byte_tokenizer: Tokenizer) -> None:
    bad = byte_tokenizer.encode("!")[0]

    def script(sequence: Sequence, budget: int) -> Draft:
        if bad in sequence.tokens:
            raise RuntimeError("no draft")
        return Draft.chain([7] * budget)

    loaded = load(scripted_law(VOCAB, {}, other=7), byte_tokenizer)
    llm = LLM.from_loaded(loaded, drafter=PlantedDrafter(PlantedDrafter.Config(script=script)))
    good, worse = llm.generate(["abc", "ab!"], SamplingParams(temperature=0, max_tokens=6))
    assert good.speculation.num_accepted_tokens == 5
    assert worse.speculation.num_draft_tokens == 0
    assert good.outputs[0].token_ids == worse.outputs[0].token_ids


def test_prompts_come_in_vllms_forms(byte_tokenizer: Tokenizer) -> None:
    llm = LLM.from_loaded(load(random_law(VOCAB, 1), byte_tokenizer))
    ids = byte_tokenizer.encode("abc")
    params = SamplingParams(temperature=0, max_tokens=4)
    forms = ["abc", ids, {"prompt": "abc"}, {"prompt_token_ids": ids}]
    answers = [llm.generate(form, params)[0].outputs[0].token_ids for form in forms]
    assert [o.outputs[0].token_ids for o in llm.generate(forms, [params] * 4)] == answers
    assert len({tuple(a) for a in answers}) == 1
    with pytest.raises(ParameterError, match="3 sampling parameters for 4 prompts"):
        llm.generate(forms, [params] * 3)


# ---------------------------------------------------------------------------------------------- streams and sessions


def test_closing_a_stream_frees_its_cache(byte_tokenizer: Tokenizer) -> None:
    loaded = load(random_law(VOCAB, 1), byte_tokenizer)
    caches = note_caches(loaded)
    llm = LLM.from_loaded(loaded)
    stream = llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=50))
    next(stream)
    stream.close()
    del stream
    gc.collect()
    assert all(cache() is None for cache in caches)


def test_the_llm_is_usable_after_an_interrupt(byte_tokenizer: Tokenizer) -> None:
    inner = random_law(VOCAB, 1)
    is_interrupting = True

    def law(tokens: list[int]) -> np.ndarray:
        if is_interrupting and len(tokens) > 10:
            raise KeyboardInterrupt
        return inner(tokens)

    llm = LLM.from_loaded(load(law, byte_tokenizer), drafter=NgramDrafter())
    params = SamplingParams(temperature=0, max_tokens=12)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, "Other"], params)
    is_interrupting = False
    assert llm.generate(PROMPT, params)[0].outputs[0].finish_reason == "length"


class CountingToy(ToyModel):
    num_rows = 0

    def forward(self, spans):  # type: ignore[no-untyped-def]
        self.num_rows += sum(len(span.tokens) for span in spans)
        return super().forward(spans)


def test_a_session_computes_only_the_new_turn_and_equals_a_fresh_start(byte_tokenizer: Tokenizer) -> None:
    law = random_law(VOCAB - 1, 6, order=40, scale=1.0)
    model = CountingToy(lambda tokens: np.append(law(tokens), np.float32(-9)), VOCAB, end_token_ids=(END,))
    loaded = LoadedModel(
        model=model,
        tokenizer=byte_tokenizer,
        chat_template=ChatTemplate(TokenizerData(chat_template=TEMPLATE)),
        path=Path("toy"),
    )
    llm = LLM.from_loaded(loaded, drafter=NgramDrafter(NgramDrafter.Config(min_ngram=1)))
    params = SamplingParams(temperature=1, seed=3, max_tokens=15)
    session = llm.session("Be brief.")
    for text in ("Hello", "And now?", "Bye"):
        history = [*session.messages, {"role": "user", "content": text}]
        before = model.num_rows
        streamed = "".join(piece.text for piece in session.stream(text, params))
        num_rows = model.num_rows - before
        fresh = LLM.from_loaded(loaded).chat(history, params)[0]
        assert streamed == fresh.outputs[0].text
        assert session.messages[-1] == {"role": "assistant", "content": streamed}
    assert num_rows < len(fresh.prompt_token_ids)


def test_an_answer_that_is_stopped_stays_in_the_conversation(byte_tokenizer: Tokenizer) -> None:
    llm = LLM.from_loaded(load(random_law(VOCAB - 1, 6), byte_tokenizer))
    llm.loaded.model.law = lambda tokens: np.append(random_law(VOCAB - 1, 6)(tokens), np.float32(-9))  # type: ignore[attr-defined]
    session = llm.session()
    params = SamplingParams(temperature=0, max_tokens=30)
    stream = session.stream("Hello", params)
    pieces = [next(stream) for _ in range(5)]
    stream.close()
    assert session.messages[1]["content"].startswith("".join(piece.text for piece in pieces))
    history = [*session.messages, {"role": "user", "content": "Go on"}]
    streamed = "".join(piece.text for piece in session.stream("Go on", params))
    assert streamed == llm.chat(history, params)[0].outputs[0].text


def test_a_turn_that_is_not_over_ends_when_the_next_begins(byte_tokenizer: Tokenizer) -> None:
    loaded = load(scripted_law(VOCAB, {}, other=7), byte_tokenizer)
    drafter = PlantedDrafter(PlantedDrafter.Config(script=lambda s, b: Draft.chain([7] * min(b, 6))))
    session = LLM.from_loaded(loaded, drafter=drafter).session()
    params = SamplingParams(temperature=0, max_tokens=9)
    first = session.stream("one", params)
    heard = next(first).text
    second = session.stream("two", params)
    whole = "".join(piece.text for piece in second)
    assert list(first) == []
    del first
    assert [message["content"] for message in session.messages] == ["one", heard, "two", whole]
    stale = session.stream("three", params)
    next(stale)
    session.reset()
    stale.close()
    assert session.messages == []


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (123, None, "give a text or a list of token ids"),
        (None, None, "give a text or a list of token ids"),
        ({"prompt": None}, None, "give a text or a list of token ids"),
        ([["1", "2"]], None, "token ids are integers"),
        ({"prompt_token_ids": [1.5, 2]}, None, "token ids are integers"),
        ({"text": "x"}, None, "give prompt or prompt_token_ids"),
        ("x", {"temperature": 0}, "give a SamplingParams"),
        ("x", [], "0 sampling parameters for 1 prompts"),
        ("x", "y", "give a SamplingParams"),
        ("x", [SamplingParams(), SamplingParams()], "2 sampling parameters for 1 prompts"),
    ],
)
def test_what_is_no_prompt_or_no_parameters_is_said(
    byte_tokenizer: Tokenizer, prompt: object, params: object, message: str
) -> None:
    llm = LLM.from_loaded(load(random_law(VOCAB, 1), byte_tokenizer))
    try:
        error = llm.generate(prompt, params)[0].error  # type: ignore[arg-type]  # a list keeps its errors
    except ParameterError as raised:
        error = raised
    assert isinstance(error, ParameterError)
    assert message in str(error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed=-1"),
        ({"seed": "x"}, "seed='x'"),
        ({"seed": 2**64}, "0 to 18446744073709551615"),
        ({"max_num_seqs": "4"}, "max_num_seqs='4'"),
        ({"max_num_seqs": 1.5}, "max_num_seqs=1.5"),
        ({"max_num_seqs": 0}, "at least 1"),
        ({"drafter": NgramDrafter}, "give a name or an object"),
        ({"drafter": object()}, "give a name or an object"),
    ],
)
def test_what_is_no_option_is_said(byte_tokenizer: Tokenizer, options: dict[str, object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        LLM.from_loaded(load(random_law(VOCAB, 1), byte_tokenizer), **options)  # type: ignore[arg-type]


def test_an_unknown_keyword_lists_the_known() -> None:
    with pytest.raises(ParameterError, match=r"did you mean 'drafter'.*dtype.*speculative_model"):
        LLM("smollm2", draftr="ngram")


def test_arrays_of_ids_and_vllms_keyword(byte_tokenizer: Tokenizer) -> None:
    llm = LLM.from_loaded(load(random_law(VOCAB, 1), byte_tokenizer))
    params = SamplingParams(temperature=0, max_tokens=3)
    ids = byte_tokenizer.encode("abc")
    expected = llm.generate("abc", sampling_params=params)[0].outputs
    assert llm.generate(np.array(ids), sampling_params=params)[0].outputs == expected  # type: ignore[arg-type]


def test_a_turn_that_does_not_fit_leaves_the_session_as_it_was(byte_tokenizer: Tokenizer) -> None:
    llm = LLM.from_loaded(load(random_law(VOCAB, 6), byte_tokenizer, max_model_len=60))
    session = llm.session()
    with pytest.raises(ContextLengthError, match="context 60"):
        session.stream("x" * 80)
    assert session.messages == []


# ---------------------------------------------------------------------------------------------- wishes of a request

TEXT = "The quick brown fox jumps over the lazy dog."


@pytest.mark.parametrize(
    "drafter", ["suffix:num_speculative_tokens=4", "ngram:num_speculative_tokens=4", "suffix+ngram"]
)
def test_a_prediction_saves_passes_and_changes_nothing(byte_tokenizer: Tokenizer, drafter: str) -> None:
    loaded = saying(TEXT, byte_tokenizer)
    llm = LLM.from_loaded(loaded, drafter=drafter)
    params = SamplingParams(temperature=0, max_tokens=len(TEXT))
    plain = llm.generate(PROMPT, params)[0]
    for prediction in (TEXT, byte_tokenizer.encode(TEXT)):
        predicted = llm.generate(PROMPT, params, prediction=prediction)[0]
        assert strip(predicted) == strip(plain)
        assert predicted.speculation.num_steps <= -(-len(TEXT) // 5)
        assert plain.speculation.num_steps > 2 * predicted.speculation.num_steps
    wrong = llm.generate(PROMPT, params, prediction=TEXT.upper())[0]
    assert strip(wrong) == strip(plain)


def test_predictions_go_with_their_prompts(byte_tokenizer: Tokenizer) -> None:
    llm = LLM.from_loaded(saying(TEXT, byte_tokenizer), drafter="suffix")
    params = SamplingParams(temperature=0, max_tokens=len(TEXT))
    outputs = llm.generate([PROMPT, PROMPT], params, prediction=[None, TEXT])
    assert outputs[0].speculation.num_steps > 20
    assert outputs[1].speculation.num_steps < 5
    shared = llm.generate([PROMPT, PROMPT], params, prediction=TEXT)
    assert [output.speculation.num_steps < 5 for output in shared] == [True, True]
    streamed = list(llm.stream(PROMPT, params, prediction=TEXT))[-1].output
    assert streamed is not None
    assert streamed.speculation.num_steps < 5
    chat = LLM.from_loaded(load(random_law(VOCAB, 3), byte_tokenizer), drafter="suffix")
    messages = [{"role": "user", "content": "hi"}]
    expected = chat.chat(messages, params)[0].outputs[0].token_ids
    assert chat.chat(messages, params, prediction=expected)[0].speculation.num_steps < 5
    last = list(chat.session().stream("hi", params, prediction=expected))[-1].output
    assert last is not None
    assert last.outputs[0].token_ids == expected
    assert last.speculation.num_steps < 5


def test_speculation_is_switched_per_request(byte_tokenizer: Tokenizer) -> None:
    loaded = saying(TEXT, byte_tokenizer)
    llm = LLM.from_loaded(loaded, drafter=planting(TEXT, byte_tokenizer, 8))
    params = SamplingParams(temperature=0, max_tokens=len(TEXT))
    outputs = llm.generate([PROMPT] * 4, params, speculation=[True, False, 0, 2])
    assert [strip(output) for output in outputs] == [strip(outputs[0])] * 4
    assert [output.speculation.num_draft_tokens > 0 for output in outputs] == [True, False, False, True]
    steps = [output.speculation.num_steps for output in outputs]
    assert steps[1:] == [len(TEXT), len(TEXT), -(-len(TEXT) // 3)]
    assert llm.generate(PROMPT, params, speculation=False)[0].speculation.num_draft_tokens == 0
    assert list(llm.stream(PROMPT, params, speculation=False))[-1].output.speculation.num_draft_tokens == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"speculation": -1}, "speculation=-1 is not allowed"),
        ({"speculation": "on"}, "2 values of speculation for 1 prompts"),
        ({"speculation": ["on"]}, "speculation='on' is not allowed"),
        ({"prediction": [TEXT, TEXT]}, "2 predictions for 1 prompts"),
        ({"prediction": [1, VOCAB]}, "the prediction holds id 257; ids are 0 to 256"),
    ],
)
def test_impossible_wishes_are_refused(byte_tokenizer: Tokenizer, wishes: dict[str, object], message: str) -> None:
    llm = LLM.from_loaded(saying(TEXT, byte_tokenizer), drafter="suffix")
    with pytest.raises(ParameterError, match=message):
        llm.generate(PROMPT, **wishes)  # type: ignore[arg-type]


def test_a_prediction_that_nobody_reads_is_said_once(
    byte_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM.from_loaded(saying(TEXT, byte_tokenizer), drafter="none")
    for _ in range(2):
        llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=3), prediction=TEXT)
    assert [record.message for record in caplog.records] == [
        "The drafter in use does not read predictions; take suffix or ngram."
    ]


# ---------------------------------------------------------------------------------------------- memory


def test_a_long_prompt_over_a_large_vocabulary_needs_little_memory() -> None:
    vocab_size = 262_144
    model = ToyModel(scripted_law(vocab_size, {}, other=7), vocab_size, max_model_len=9_000)
    llm = LLM.from_loaded(LoadedModel(model=model, tokenizer=None, chat_template=None, path=Path("toy")))
    prompt = list(range(8_000))
    tracemalloc.start()
    try:
        output = llm.generate(prompt, SamplingParams(temperature=1, max_tokens=4))[0]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert output.outputs[0].token_ids == [7] * 4
    assert peak < 50e6


# ---------------------------------------------------------------------------------------------- naming a drafter


@pytest.mark.parametrize(
    ("config", "legacy", "expected"),
    [
        (None, {}, ("auto", {})),
        ({"method": "ngram", "num_speculative_tokens": 3}, {}, ("ngram", {"num_speculative_tokens": 3})),
        ({"method": "mlp_speculator", "model": "a.safetensors"}, {}, ("mlp", {"path": "a.safetensors"})),
        ({"method": "mlp_speculator", "num_speculative_tokens": 2}, {}, ("mlp", {"num_speculative_tokens": 2})),
        ({"method": "ngram", "prompt_lookup_max": 5}, {}, ("ngram", {"max_ngram": 5, "min_ngram": 5})),
        (
            {"model": "[ngram]", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
            {},
            ("ngram", {"max_ngram": 4, "min_ngram": 2}),
        ),
        (
            {"model": "small", "num_speculative_tokens": 2},
            {},
            ("model", {"model": "small", "num_speculative_tokens": 2}),
        ),
        (
            None,
            {"speculative_model": "m", "num_speculative_tokens": 5},
            ("model", {"model": "m", "num_speculative_tokens": 5}),
        ),
        (
            {"method": "suffix", "num_speculative_tokens": 9, "suffix_decoding_min_token_prob": 0.2},
            {},
            ("suffix", {"num_speculative_tokens": 9, "min_confidence": 0.2}),
        ),
        (None, {"speculative_model": "[ngram]", "use_v2_block_manager": True}, ("ngram", {})),
        (None, {"num_speculative_tokens": 5}, ("suffix", {"num_speculative_tokens": 5})),
    ],
)
def test_vllms_keys_name_a_drafter(config: object, legacy: dict[str, object], expected: object) -> None:
    assert choose_drafter(None, config, legacy) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("drafter", "config", "legacy", "message"),
    [
        (None, {"metod": "ngram"}, {}, "no key 'metod'.*method"),
        (None, {"method": "magic"}, {}, "magic.*ngram, draft_model"),
        (None, {"method": "draft_model"}, {}, "needs the key model"),
        (None, None, {"speculativ_model": "x"}, "no option 'speculativ_model'.*did you mean 'speculative_model'"),
        ("ngram", {"method": "ngram"}, {}, "named twice"),
    ],
)
def test_unknown_keys_are_errors_that_name_the_known(
    drafter: str | None, config: dict[str, object] | None, legacy: dict[str, object], message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        choose_drafter(drafter, config, legacy)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("ngran", UnknownNameError, "did you mean 'ngram'.*model, ngram, none, peagle, planted"),
        ("ngram:max_ngam=3", ParameterError, "did you mean 'max_ngram'"),
        ("ngram:max_ngram=three", ParameterError, "give a number"),
        ("ngram:max_ngram", ParameterError, "name:key=value"),
        ("ngram:occurrence=first", ParameterError, "latest, earliest"),
        ("model", ParameterError, "needs the option 'model'"),
        ("none:x=1", ParameterError, "its options: none"),
    ],
)
def test_a_wrong_drafter_is_refused_with_what_is_known(
    byte_tokenizer: Tokenizer, spec: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM.from_loaded(load(random_law(VOCAB), byte_tokenizer), drafter=spec)
