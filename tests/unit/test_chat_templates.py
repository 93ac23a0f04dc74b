"""lw_jax/data/chat_templates.py: what published templates write, and what no template may do to the process."""

import time

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
    "{% for i in range(3) %}{{ '%s-%s' % (i, 2 ** i) }} {% endfor %}"
    "{{ messages | map(attribute='role') | join(', ') }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'a\nb' | indent(2) }}{{ 'x'.split('y') }}"
    "{% if tools is defined and tools %}t{% endif %}{{ messages[0] | dictsort }}{{ {'a': 1} | tojson(indent=2) }}",
    "{{ messages | length % 2 }} {{ 7 // 2 * 3 }} {{ ['a'] + ['b'] }} {% set x %}  {{ eos_token }}{% endset %}{{ x }}",
    "{% for a in [[1, [2]], [3]] recursive %}{{ loop(a) if a is iterable else a }}{% else %}none{% endfor %}",
    "{% for k, v in messages[0].items() if v %}{{ k }}{{ v }}{% endfor %}{{ 'abc' | upper | first ~ 1 }}",
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
    "import": "{% import 'x' as y %}",
    "range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "repeat": "{{ 'a' * 3000000000 }}",
    "repeat list": "{{ [1] * 3000000000 }}",
    "shifted": "{% set n = 3000000000 %}{{ n * 'a' }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "doubling": "{% set ns = namespace(a='a') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "adding": "{% set ns = namespace(a='a') %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "nested lists": "{% set ns = namespace(a=['a']) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"
    "{{ ns.a }}",
    "nested loops": "{% set r = range(100000) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "output": "{% set a = 'a' * 1000000 %}{% for i in range(100000) %}{{ a }}{% endfor %}",
    "block": "{% set a = 'a' * 1000000 %}{% set b %}{% for i in range(100000) %}{{ a }}{% endfor %}{% endset %}",
    "format": "{{ '%1000000000d' % 1 }}",
    "format method": "{{ '{:>1000000000}'.format(1) }}",
    "pad": "{{ 'a'.ljust(1000000000) }}",
    "pad filter": "{{ 'a' | center(1000000000) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "replace filter": "{{ ('a' * 1000000) | replace('', 'b' * 1000000) }}",
    "join": "{{ range(100000) | list | join('b' * 1000000) }}",
    "join method": "{{ ('b' * 1000000).join('a' * 100000) }}",
    "indent": "{{ ('\n' * 1000000) | indent(1000000) }}",
    "tojson": "{{ ([[1]] * 100000) | tojson(indent=1000000) }}",
    "recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "tree of calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "tree of loops": "{% for a in [60] recursive %}{% if a %}{{ loop([a - 1, a - 1]) }}{% endif %}{% endfor %}",
    "attributes": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "namespace": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "changed": "{{ messages.clear() }}{{ messages.append(1) }}",
    "method of None": "{{ none.strip() }}",
    "index": "{{ messages[0]['content'][:'a'] }}",
    "syntax": "{% for %}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "raised": "{{ raise_exception('no\nsystem') }}",
    "size": "a" * (chat_templates.LARGEST + 1),
}


@pytest.mark.parametrize("name", BAD)
def test_no_template_harms_the_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_templates, "SECONDS", 0.3)
    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        chat_templates.render(BAD[name], VALUES, where="a.gguf", remedy="mend it")
    assert time.monotonic() - started < 2
    message = str(caught.value)
    assert message.startswith("a.gguf: the chat template") and message.endswith("; mend it")
    assert "\n" not in message and len(message) < 400


def test_what_python_keeps_to_itself_is_not_there() -> None:
    for template in (
        "{{ raise_exception.__globals__ }}",
        "{{ ''.__class__ }}",
        "{{ self._TemplateReference__context }}",
    ):
        assert chat_templates.render(template, VALUES, where="", remedy="") == ""


def test_today_is_always_the_same_day() -> None:
    written = chat_templates.render("{{ strftime_now('%d %b %Y') }}", VALUES, where="", remedy="")
    assert written == "26 Jul 2024"
