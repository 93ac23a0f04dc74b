"""lw_jax/data/pair_texts.py: what a row says stands in what its template writes, or the row is refused by name."""

import json
import logging

import pytest

from lw_jax.core.config_sections import DPO
from lw_jax.core.errors import UserError
from lw_jax.data import pairs
from lw_jax.data.preferences import encode
from lw_jax.data.tokens import load_tokenizer
from lw_jax.recipes import selfmade

HEAD = "{% for m in messages %}[{{ m.role }}]"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
PLAIN = HEAD + "{{ m.content }}" + TAIL
CUT = "{{ m.content.split('</think>')[-1] }}"  # as R1's template does to replies
FULL = (
    "{% if tools %}[tools]{{ tools | tojson }}{% endif %}{% for d in documents or [] %}{{ d.title }}:{{ d.text }}"
    "{% endfor %}{% if mood %}({{ mood }}){% endif %}" + HEAD + "{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}" + TAIL
)
PARTS = HEAD + "{% for part in m.content %}{{ part.text }}{% endfor %}" + TAIL
ASK = {"role": "user", "content": "Weather?"}
TOOLS = [{"type": "function", "function": {"name": "wind", "parameters": {"properties": {"town": {"type": "string"}}}}}]


def say(content="sun", role="assistant", **more):
    return {"role": role, "content": content} | more


def call(arguments):
    return [{"type": "function", "function": {"name": "wind", "arguments": arguments}}]


def part(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.fixture
def run(tmp_path):
    """Encodes one row in a template; returns the texts of prompt, chosen and rejected, and the counts."""

    def run(template, prompt=(ASK,), chosen=None, rejected=None, **row):
        selfmade.write_tokenizer(tmp_path / "letters", selfmade.Vocabulary(0, "", "<|im_end|>", "<pad>"), [])
        tokenizer = load_tokenizer(tmp_path / "letters")
        tokenizer.backend.chat_template = template
        texts = {"prompt": prompt, "chosen": chosen or say(), "rejected": rejected or say("rain")}
        row |= {name: [text] if isinstance(text, dict) else text for name, text in texts.items()}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        found = pairs.read(str(tmp_path / "rows.jsonl"))
        data = encode(found, tokenizer=tokenizer, template="chat", limits=DPO(max_length=2000))
        (pair,) = data.pairs
        return *(tokenizer.decode(ids) for ids in (pair.prompt, pair.chosen, pair.rejected)), data.counts

    return run


@pytest.mark.parametrize(
    ("template", "row", "named"),
    [
        (HEAD + CUT + TAIL, {"chosen": say("<think>south wind</think>sun")}, "chosen.*'content'.*south wind"),
        (PLAIN, {"rejected": say("rain", reasoning_content="no idea")}, "rejected.*'reasoning_content'.*no idea"),
        (PLAIN, {"chosen": say("", tool_calls=call({"town": "Faro"}))}, "chosen.*'tool_calls'.*'(wind|town|Faro)'"),
        (PLAIN, {"chosen": say("", refusal="I will not.")}, "chosen.*'refusal'.*I will not"),
        (PLAIN, {"chosen": say("", function_call={"name": "wind", "arguments": "{}"})}, "'function_call'.*'wind'"),
        (PLAIN, {"tools": TOOLS}, "'tools'.*'(wind|town)'"),
        (PLAIN, {"documents": [{"title": "Faro", "text": "a town"}]}, "'documents'.*'a town'"),
        ("{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}" + TAIL,
         {"prompt": [say("Be kind.", "system"), ASK]}, "prompt, turn 1 .system.*Be kind"),
        (HEAD + "{{ m.content[:5] }}" + TAIL, {"prompt": [say("Hail.", "user")], "rejected": say("no rain")},
         "rejected.*no rain"),
        (PARTS, {"prompt": [{"role": "user", "content": part("Wea", "ther?")}]}, "chosen.*'content'.*sun"),
    ],
)  # fmt: skip
def test_what_the_template_leaves_out_is_refused_by_row_turn_and_key(run, template, row, named):
    with pytest.raises(UserError, match=rf"rows.jsonl:1: .*{named}"):
        run(template, **row)


def test_everything_that_a_row_has_for_its_template_reaches_it(run):
    chosen = say(None, reasoning_content="I look.", tool_calls=call({"town": 'Faro "Sul" é'}))
    prompt, good, bad, _ = run(
        FULL, chosen=chosen, tools=json.dumps(TOOLS), documents=[{"title": "Faro", "text": "a town"}],
        chat_template_kwargs={"mood": "glad"},
    )  # fmt: skip
    assert prompt == f"[tools]{json.dumps(TOOLS)}Faro:a town(glad)[user]Weather?\n[assistant]"
    assert good == '<think>I look.</think><call>wind {"town": "Faro \\"Sul\\" é"}</call>' and bad == "rain"


@pytest.mark.parametrize("arguments", [{"town": "São\nTomé", "days": 3}, '{"town": "S\\u00e3o", "days": 3.0}'])
def test_arguments_are_found_as_an_object_and_as_text(run, arguments):
    assert "wind" in run(FULL, chosen=say("", tool_calls=call(arguments)))[1]


@pytest.mark.parametrize("written", ["m.content | trim", "m.content ~ ' '"])
def test_white_space_is_the_templates(run, written):
    assert "blue sky" in run(HEAD + "{{ " + written + " }}" + TAIL, chosen=say("\n\n  blue sky \n"))[1]


def test_reasoning_of_earlier_turns_may_be_left_out_and_is_counted(run):
    earlier = [ASK, say("<think>hm</think>sun", reasoning="ah"), ASK]
    template = "{% for m in messages %}[{{ m.role }}]" + CUT + TAIL
    prompt, *_, counts = run(template, prompt=earlier)
    assert counts["past"] == 1 and "hm" not in prompt
    assert run(FULL, prompt=earlier)[-1]["past"] == 0
    with pytest.raises(UserError, match="prompt, turn 2 .assistant.*'sun'"):
        run(HEAD + "{{ m.content.split('</think>')[0] }}" + TAIL, prompt=earlier)


@pytest.mark.parametrize("template", [PLAIN, PARTS])
def test_parts_are_joined_where_the_template_does_not_read_them(run, template):
    prompt, good, *_ = run(
        template, [say(part("Wea", "ther?"), "user")], chosen=say(part("s", "un")), rejected=say(part("rain"))
    )
    assert (prompt, good) == ("[user]Weather?\n[assistant]", "sun")


def test_key_that_the_template_does_not_read_is_told_and_one_it_reads_is_not(run, caplog):
    template = FULL.replace("[{{ m.role }}]", "[{{ m.role }}{{ m.name }}]")
    with caplog.at_level(logging.WARNING):
        prompt, *_ = run(template, [ASK | {"name": " Mara", "id": 7}], chat_template_kwargs={"mood": "glad", "x": 1})
    assert "[user Mara]" in prompt
    told = sorted(record.getMessage().rpartition("/")[2] for record in caplog.records)
    assert told == [f"rows.jsonl: not read by the chat template: '{key}' (1 rows)" for key in ("id", "x")]
