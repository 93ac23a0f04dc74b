"""lw_jax/data/chat_templates.py: what published templates write, and what of the turns a template has left out."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from lw_jax.core.errors import UserError
from lw_jax.data import chat_templates

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
