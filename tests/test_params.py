"""SamplingParams: vLLM's defaults, and every bad value named with the allowed range."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sakiyomi.errors import ParameterError
from sakiyomi.params import MAX_LOGPROBS, MAX_SEED, SamplingParams

REALS = {
    "temperature": (0.0, None, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "repetition_penalty": (0.0, None, True),
}
INTEGERS = {
    "n": (1, None, False),
    "top_k": (-1, None, False),
    "seed": (0, MAX_SEED, True),
    "max_tokens": (1, None, True),
    "min_tokens": (0, None, False),
    "logprobs": (0, MAX_LOGPROBS, True),
}
NO_NUMBERS = st.sampled_from([True, False, "1", "", b"1", [1], (), {}, 1j, math.nan, math.inf, -math.inf, object])
TOO_LARGE = st.sampled_from([10**400, -(10**400)])  # no float holds them


def make(name: str, value: Any) -> SamplingParams:
    others = {"max_tokens": None} if name == "min_tokens" else {}
    return SamplingParams(**{name: value}, **others)


def refuse(name: str, value: Any) -> str:
    with pytest.raises(ParameterError) as caught:
        make(name, value)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert message.startswith(f"{name}={value!r} is not allowed; give ")
    assert "\n" not in message
    return message


# ---------------------------------------------------------------------------------------------- defaults


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.ignore_eos, params.include_stop_str_in_output, params.skip_special_tokens) == (False, False, True)
    assert params.stop_strings == ()


def test_arguments_are_keywords_only_and_the_value_is_frozen():
    with pytest.raises(TypeError):
        SamplingParams(2)  # type: ignore[misc]
    with pytest.raises(AttributeError):
        SamplingParams().n = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


# ---------------------------------------------------------------------------------------------- ranges


@pytest.mark.parametrize("name", REALS)
@given(data=st.data())
def test_reals_inside_their_range_are_taken(name: str, data: st.DataObject):
    low, high, is_open = REALS[name]
    numbers = st.floats(low, high, exclude_min=is_open, allow_nan=False, allow_infinity=False)
    value = data.draw(numbers | st.integers(int(low) + is_open, 10**6 if high is None else int(high)))
    assert getattr(make(name, value), name) == value


@pytest.mark.parametrize("name", REALS)
@given(data=st.data())
def test_reals_outside_their_range_are_refused(name: str, data: st.DataObject):
    low, high, is_open = REALS[name]
    outside = st.floats(max_value=low, exclude_max=not is_open)
    if high is not None:
        outside |= st.floats(high, exclude_min=True)
    message = refuse(name, data.draw(outside | NO_NUMBERS | TOO_LARGE | st.none()))
    assert (f"above {low:g}" if is_open else f"at least {low:g}") in message
    assert high is None or f"at most {high:g}" in message


@pytest.mark.parametrize("name", INTEGERS)
@given(data=st.data())
def test_integers_inside_their_range_are_taken(name: str, data: st.DataObject):
    low, high, is_optional = INTEGERS[name]
    value = data.draw(st.integers(low, high) | (st.none() if is_optional else st.nothing()))
    assert getattr(make(name, value), name) == value


@pytest.mark.parametrize("name", INTEGERS)
@given(data=st.data())
def test_integers_outside_their_range_are_refused(name: str, data: st.DataObject):
    low, high, is_optional = INTEGERS[name]
    outside = st.integers(max_value=low - 1) | st.floats() | NO_NUMBERS
    outside |= st.nothing() if high is None else st.integers(high + 1)
    outside |= st.nothing() if is_optional else st.none()
    message = refuse(name, data.draw(outside))
    assert (f"at least {low}" if high is None else f"from {low} to {high}") in message
    assert message.endswith(" or None.") == is_optional


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", -1, "temperature=-1 is not allowed; give a number of at least 0."),
        ("top_p", 0, "top_p=0 is not allowed; give a number above 0 and at most 1."),
        ("temperature", math.nan, "temperature=nan is not allowed; give a number of at least 0."),
        ("temperature", True, "temperature=True is not allowed; give a number of at least 0."),
        ("n", "2", "n='2' is not allowed; give an integer of at least 1."),
        ("max_tokens", 0, "max_tokens=0 is not allowed; give an integer of at least 1 or None."),
        ("logprobs", 21, "logprobs=21 is not allowed; give an integer from 0 to 20 or None."),
    ],
)
def test_the_message_says_what_and_what_to_do(name: str, value: Any, message: str):
    assert refuse(name, value) == message


# ---------------------------------------------------------------------------------------------- combinations


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(ParameterError, match="min_tokens=17 is above max_tokens=16; lower it"):
        SamplingParams(min_tokens=17)
    assert SamplingParams(min_tokens=16).min_tokens == 16
    assert SamplingParams(min_tokens=17, max_tokens=None).min_tokens == 17


@pytest.mark.parametrize(
    ("logit_bias", "message"),
    [
        ({-1: 1.0}, "an id in logit_bias=-1 is not allowed"),
        ({"5": 1.0}, "an id in logit_bias='5' is not allowed"),
        ({5: 101}, "logit_bias[5]=101 is not allowed; give a number of at least -100 and at most 100."),
        ({5: math.nan}, "logit_bias[5]=nan is not allowed"),
        ({5: "1"}, "logit_bias[5]='1' is not allowed"),
    ],
)
def test_a_bad_bias_is_refused(logit_bias: Any, message: str):
    with pytest.raises(ParameterError, match=re.escape(message)):
        SamplingParams(logit_bias=logit_bias)


@pytest.mark.parametrize("stop_token_id", [-1, 1.5, "2", True, None])
def test_a_bad_stop_id_is_refused(stop_token_id: Any):
    with pytest.raises(ParameterError, match=re.escape(f"an id in stop_token_ids={stop_token_id!r} is not allowed")):
        SamplingParams(stop_token_ids=[3, stop_token_id])


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("logit_bias", [(1, 2.0)], "a mapping of ids to numbers"),
        ("logit_bias", "1", "a mapping of ids to numbers"),
        ("stop_token_ids", 3, "a list of ids"),
        ("stop_token_ids", "3", "a list of ids"),
        ("stop", 3, "a text or a list of texts"),
        ("stop", True, "a text or a list of texts"),
    ],
)
def test_a_value_of_another_kind_is_refused(name: str, value: Any, wanted: str):
    assert refuse(name, value).endswith(f"give {wanted}.")


def test_stop_takes_one_text_or_several():
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop_strings == ("ab", "c")
    assert SamplingParams(stop=[]).stop_strings == ()


@pytest.mark.parametrize("stop", [[""], ["a", ""], [3], [None], [b"a"]])
def test_a_bad_stop_string_is_refused(stop: Any):
    with pytest.raises(ParameterError, match="each stop string is a text of at least one character"):
        SamplingParams(stop=stop)


def test_an_empty_stop_string_is_refused_like_one_in_a_list():
    with pytest.raises(ParameterError, match="at least one character"):
        SamplingParams(stop="")


@pytest.mark.parametrize(
    ("params", "has_penalties"),
    [
        ({}, False),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repetition_penalty": 1.1}, True),
    ],
)
def test_has_penalties(params: dict[str, float], has_penalties: bool):
    assert SamplingParams(**params).has_penalties == has_penalties


def test_is_greedy_at_temperature_zero_only():
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-9).is_greedy
