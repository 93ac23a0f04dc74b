"""lw_jax/data/chat_templates.py: what published templates write, and what of the turns a template has left out."""

import json

import pytest

from lw_jax.core.errors import UserError
from lw_jax.data import chat_templates

TURNS = [{"role": "system", "content": " Be kind. "}, {"role": "user", "content": "Who?\n<b>&"}]
VALUES = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}


def test_template_asks_transformers_for_a_day_and_is_told_a_fixed_one() -> None:
    template = (
        "{% macro day(form) %}{{ strftime_now(form) }}{% endmacro %}"
        "{{ day('%d %b %Y') }}{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
    )
    written = chat_templates.render(template, TURNS, VALUES, where="a.gguf", remedy="mend it")
    assert written == "26 Jul 2024" + "".join(map(json.dumps, TURNS))


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
        chat_templates.render(BAD[name], TURNS, VALUES, where="a.gguf", remedy="mend it")
    message = str(caught.value)
    assert message.startswith("a.gguf: the chat template") and message.endswith("; mend it")
    assert "\n" not in message and len(message) < 400
