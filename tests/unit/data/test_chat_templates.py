"""lw_jax/data/chat_templates.py: what published templates write, and what of the turns a template has left out."""

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from lw_jax.core.errors import UserError
from lw_jax.data import chat_templates
from lw_jax.data.chat_templates import Said

TURNS = [{"role": "system", "content": " Be kind. "}, {"role": "user", "content": "Who?\n<b>&"}]
VALUES = {"messages": TURNS, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}

GOOD = [
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' ~ m.content | trim }}\n{% endfor %}",
    "{% for m in messages %}{{ loop.index0 }}{{ loop.last }}{{ loop.length }}"
    "{% if loop.first %}{% continue %}{% endif %}{{ m | tojson }}{% break %}{% endfor %}",
    "{% set ns = namespace(a='x', n=0) %}{% for m in messages %}{% set ns.a = ns.a ~ m['content'][1:] ~ ns.n %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.a }}",
    "{% macro turn(m) %}{{ m.role.upper() }}: {{ m.content.strip().replace('?', '!') }}{% endmacro %}"
    "{% for m in messages[1:] %}{{ turn(m) }}{% generation %}{{ '=' * 3 }}{% endgeneration %}{% endfor %}",
    "{% if tools is defined and tools %}t{% endif %}{{ {'a': 1} | tojson(indent=2) }}{{ 'a\nb' | indent(2) }}",
]


@pytest.mark.parametrize("template", GOOD, ids=range(len(GOOD)))
def test_templates_write_what_transformers_writes(template: str) -> None:
    options = {key: value for key, value in VALUES.items() if key != "messages"}
    (expected,), _ = render_jinja_template([TURNS], chat_template=template, **options)
    values = {"tools": None, "documents": None, **VALUES}
    assert chat_templates.render(template, values, where="a.gguf", remedy="mend it") == expected


BAD = {
    "arithmetic": "{{ 1 / 0 }}",
    "include": "{% include 'x' %}",
    "range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "attributes": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "changed": "{{ messages.clear() }}{{ messages.append(1) }}",
    "syntax": "{% for %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "raised": "{{ raise_exception('no\nsystem') }}",
}


@pytest.mark.parametrize("name", BAD)
def test_fault_of_a_template_is_one_line(name: str) -> None:
    with pytest.raises(UserError) as caught:
        chat_templates.render(BAD[name], VALUES, where="a.gguf", remedy="mend it")
    message = str(caught.value)
    assert message.startswith("a.gguf: the chat template") and message.endswith("; mend it")
    assert "\n" not in message and len(message) < 400


# --- what was given must stand in what is written


def lost(written: str, *given: str) -> list[str]:
    return [one.text for one in chat_templates.find_lost(written, [Said("", text) for text in given])]


def test_white_space_and_escapes_of_json_are_no_loss() -> None:
    text = 'two\n  "words" of caf\u00e9 \U0001f600, \\alpha'
    for written in (text, " ".join(text.split()), json.dumps(text), json.dumps(json.dumps(text)), f"a{text.strip()}b"):
        assert not lost(written, text)
    assert lost(text.upper(), text) == lost(text.replace("words", ""), text) == [text]


def test_each_text_needs_a_place_of_its_own() -> None:
    assert not lost("yes, no, yes", "yes", "no", "yes")
    assert lost("yes, no", "yes", "no", "yes") == ["yes"]
    assert not lost("ab abc", "ab", "abc")  # the longer one does not lose its place to the shorter


def test_earlier_reasoning_is_apart_from_what_was_said() -> None:
    turns = [
        {"role": "assistant", "content": "<think>hm</think>four", "reasoning_content": "so"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "7", "function": {"name": "f", "arguments": {"a": [1, None, "b"]}}}],
        },
    ]
    assert [(one.text, one.thought) for one in chat_templates.said(turns, "prompt", earlier=True)] == [
        ("so", True),
        ("<think>hm</think>", True),
        ("four", False),
        *((text, False) for text in ("f", "a", "1", "b")),
    ]
    assert [one.text for one in chat_templates.said(turns[:1], "chosen")] == ["so", "<think>hm</think>four"]
