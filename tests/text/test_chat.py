"""text/chat.py: prompts as transformers renders them, from templates that must not be trusted."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from sakiyomi.errors import CheckpointError, ParameterError
from sakiyomi.text.chat import ChatTemplate
from sakiyomi.types import TokenizerData

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

HEADERS = """{%- if not date is defined %}
    {%- set date = "26 Jul 2024" %}
{%- endif %}
{%- set first = namespace(done=false) -%}
{{- bos_token }}
{%- for message in messages %}
    {%- if message['content'] is string and not message['content'] %}
        {%- continue %}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim }}
    {%- if loop.first and message['role'] == 'system' %}
        {{- "\n\nToday: " + date }}
        {%- set first.done = true %}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

INST = """{{ bos_token }}{% for message in messages %}
    {% if message['role'] == 'user' %}
{{ ' [INST] ' + message['content'] + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
    {% else %}
{{ raise_exception('Only user and assistant roles are supported!\nGot ' + message['role']) }}
    {% endif %}
{% endfor %}"""

TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>' + message.role }}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": " Why <b>is</b> the sky blue? & 'why'\n"},
    {"role": "assistant", "content": "Because of Rayleigh: 日本 {{ 7 * 7 }} {% x %}"},
    {"role": "user", "content": "Really?"},
]
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief. "}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"where": "<東京>", "n": 2}}}
TOOL_TURNS: list[dict[str, Any]] = [
    TURNS[0],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny"},
    {"role": "tool", "content": "warm"},
]
SCHEMA = {
    "type": "function",
    "function": {"name": "look", "description": "<&>", "parameters": {"é": [1, 2.5, None, True]}},
}


def make(template: str, **config: Any) -> ChatTemplate:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}} | config
    return ChatTemplate(TokenizerData(json="{}", config=config, chat_template=template))


@pytest.fixture(scope="module")
def theirs(request: pytest.FixtureRequest) -> Any:
    transformers = pytest.importorskip("transformers")
    from .conftest import train_byte_level

    return transformers.PreTrainedTokenizerFast(tokenizer_object=train_byte_level(), bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (CHATML, TURNS),
        (CHATML, [SYSTEM, *TURNS]),
        (HEADERS, [SYSTEM, *TURNS]),
        (HEADERS, [*TURNS[:1], {"role": "assistant", "content": ""}, TURNS[2]]),
        (INST, TURNS),
        (TOOLS, TOOL_TURNS),
        (TOOLS, [SYSTEM, *TURNS]),
    ],
)
def test_prompts_are_those_of_transformers(theirs: Any, template: str, messages: list[dict[str, Any]]) -> None:
    for prompt in (True, False):
        for tools in (None, [SCHEMA]):
            expected = theirs.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=prompt, tools=tools
            )
            assert make(template).render(messages, add_generation_prompt=prompt, tools=tools) == expected


def test_the_default_model(theirs: Any, model_path: Path) -> None:
    from sakiyomi.checkpoints.gguf import read_gguf

    data = read_gguf(model_path).tokenizer
    assert data is not None
    template = ChatTemplate(data)
    for messages in (TURNS, [SYSTEM, *TURNS], TURNS[:1]):
        expected = theirs.apply_chat_template(
            messages, chat_template=data.chat_template, tokenize=False, add_generation_prompt=True
        )
        assert template.render(messages) == expected
    assert template.render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_turn_more_only_adds_to_the_prompt() -> None:
    template = make(CHATML)
    first = template.render(TURNS[:1])
    assert template.render(TURNS[:2], add_generation_prompt=False).startswith(first)


def test_the_tokens_of_a_gguf_file() -> None:
    fields = {"tokens": ["a", "<|bos|>", "<|end|>"], "bos_token_id": 1, "eos_token_id": 2}
    template = ChatTemplate(TokenizerData(gguf=fields, chat_template="{{ bos_token }}|{{ eos_token }}"))
    assert template.render([]) == "<|bos|>|<|end|>"
    empty = ChatTemplate(TokenizerData(gguf={"tokens": ["a"]}, chat_template="{{ bos_token }}|{{ eos_token }}"))
    assert empty.render([]) == "|"


def test_functions_that_templates_use() -> None:
    assert make("{{ strftime_now('%Y') }}").render([]) == str(datetime.datetime.now().year)
    assert make("{{ messages | tojson(indent=1) }}").render([{"role": "a<é"}]) == '[\n {\n  "role": "a<é"\n }\n]'
    assert make("{% set d = dict(a=1) %}{{ d.a }}{{ d['b'] is defined }}").render([]) == "1False"


def test_messages_are_copied_not_changed() -> None:
    messages = [{"role": "user", "content": ["a"]}]
    with pytest.raises(CheckpointError):
        make("{{ messages[0].content.append('b') }}").render(messages)
    assert messages == [{"role": "user", "content": ["a"]}]


# ---------------------------------------------------------------------------------------------- errors


def test_a_refusal_is_one_line() -> None:
    with pytest.raises(
        ParameterError, match="refuses these messages: Only user and .* supported! Got system"
    ) as caught:
        make(INST).render([SYSTEM, *TURNS])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "messages", [["Hi"], [{"content": "Hi"}], [{"role": 3}], [{"role": "user", "content": object()}]]
)
def test_malformed_messages(messages: Any) -> None:
    with pytest.raises(ParameterError, match="a chat message"):
        make(CHATML).render(messages)


def test_a_message_that_the_template_cannot_take() -> None:
    with pytest.raises(CheckpointError, match="fails on these messages .*; change the messages or use raw prompts"):
        make(CHATML).render([{"role": "user"}])


def test_a_template_that_is_no_jinja() -> None:
    with pytest.raises(CheckpointError, match=r"not valid \(line 2: .*\); use raw prompts"):
        make("a\n{% for x in %}")
    with pytest.raises(CheckpointError, match="no chat template"):
        ChatTemplate(TokenizerData(json="{}"))


HOSTILE = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'] }}{{ ''|attr('__class__') }}",
    "{{ ().__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['__builtins__'] }}",
    "{{ strftime_now.__code__ }}",
    "{{ dict.__base__ }}{{ dict.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ loop.__class__ }}",
    "{{ messages.__class__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ ('{0.__class__}' | attr('format'))(1) }}",
    "{% set ns = namespace(__html__=1) %}{{ ns }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ namespace.__class__ }}",
    "{% for k in messages.append(1) %}{% endfor %}",
    "{{ messages.clear() }}",
    "{{ lipsum.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{{ [1, 2] | map(attribute='__class__') | list }}",
    "{{ messages | selectattr('__class__') | list }}",
    "{{ messages | map('attr', '__class__') | list }}",
]  # fmt: skip


@pytest.mark.parametrize("template", HOSTILE)
def test_a_hostile_template_reaches_nothing(template: str) -> None:
    try:
        text = make(template).render(TURNS)
    except CheckpointError as error:
        text = str(error)
    for sign in ("<class", "<function", "<module", "builtin_function", "object at 0x", "root:", "uid=", "mappingproxy"):
        assert sign not in text
    assert "\n" not in text
