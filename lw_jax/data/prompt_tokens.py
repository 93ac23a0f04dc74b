"""Prompts as token ids: the layout of a reader's prompt, and tokenisation of its parts and of sources.

The only module that knows how a prompt is laid out. Cut and dropped examples are counted (`example_counts`).
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from lw_jax.core import config
from lw_jax.core.errors import UserError
from lw_jax.core.types import Example
from lw_jax.data import chat_templates
from lw_jax.data.example_counts import DropCounts
from lw_jax.data.tokens import BertTokenizer, ByteTokenizer, Tokenizer, marked

WIDEST = 16  # characters of a token, at most, in a text of which a prefix is tokenised; tokens of text have 4
MARGIN = 256  # ids tokenised beyond a limit, so that those before it are the whole text's
PROMPTS = 256  # made of whole texts and in memory at once; a text itself is there once for all of its questions
AnyTokenizer = Tokenizer | BertTokenizer | ByteTokenizer
# Private-use placeholders while rendering.
_CONTEXT, _QUESTION, _ANSWER = "\ue000context\ue001", "\ue000question\ue001", "\ue000answer\ue001"


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reader's tokenizer and the template of its prompt: "plain" or "chat"."""

    tokenizer: Tokenizer
    template: str


@dataclasses.dataclass(frozen=True)
class Layout:
    """Settings of tokenisation: prompt, tokenizers and length limits."""

    prompt: config.Prompt
    readers: dict[str, Reader]
    source: AnyTokenizer
    window: int  # of the encoder's body, in its tokens or bytes
    windows: int  # at most, of a source
    slots: int  # of a message, at most
    width: int  # of a latent
    data: config.Data
    ratio: int = 0  # tokens of a source a slot; 0: every message has all slots

    def count_slots(self, sources: Sequence[np.ndarray]) -> np.ndarray:
        """Returns i32[n]: the slots of the messages of sources with these ids."""
        return count_slots([len(ids) for ids in sources], ratio=self.ratio, most=self.slots)


@dataclasses.dataclass(frozen=True)
class Frame:
    """One reader's prompt text around the context and the question."""

    before: str
    middle: str
    tail: str
    gap: str  # between the prompt and the answer
    end: int  # id behind the answer

    def after(self, question: str) -> str:
        return self.middle + question + self.tail


def count_slots(tokens: Sequence[int], *, ratio: int | np.ndarray, most: int) -> np.ndarray:
    """Returns i32[n]: the slots of messages of texts of so many source tokens, from 1 to `most`.

    `ratio`: tokens a slot, one for all or of each text; 0: `most` slots whatever the text.
    """
    needed = -(-np.asarray(tokens, np.int64) // np.maximum(ratio, 1))
    return np.where(np.asarray(ratio) > 0, np.clip(needed, 1, most), most).astype(np.int32)


def read_source(texts: list[str], layout: Layout, ledger: DropCounts) -> list[np.ndarray]:
    """Returns the encoder's ids of each text, cut to its windows; the ledger records cut and refused texts."""
    marks = sum(map(len, layout.source.special))
    limit = (layout.window - marks) * layout.windows
    source = tokenize(layout.source, texts, limit=limit)
    named = f"config.encoder.window={layout.window}" + f" x windows={layout.windows}" * (layout.windows > 1)
    named += f", {marks} of each window marks" * (marks > 0)
    for i, ids in enumerate(source):
        if len(ids) - marks <= limit:
            continue
        if layout.data.overlong == "cut":
            ledger.cut["source_cut"].add(i)
        else:
            ledger.refuse(i, f"{_count(ids[marks:], texts[i], limit)} tokens or bytes of context, limit {named}")
    shared = {id(ids): to_windows(ids, layout) for ids in source}  # of equal texts
    return [shared[id(ids)] for ids in source]


def to_windows(ids: np.ndarray, layout: Layout) -> np.ndarray:
    """Returns what the encoder reads of a text's ids: those of its windows, each between a BERT-class body's marks."""
    first, last = layout.source.special
    room = layout.window - len(first) - len(last)
    bare = ids[len(first) : len(ids) - len(last)][: room * layout.windows]
    if not first and not last:
        return bare
    starts = range(0, max(len(bare), 1), room)
    return np.concatenate([part for i in starts for part in (first, bare[i : i + room], last)]).astype(np.int32)


class ReaderPass:
    """One reader's tokenisation of all examples."""

    def __init__(self, name: str, reader: Reader, layout: Layout, ledger: DropCounts) -> None:
        self.name, self.reader, self.layout, self.ledger = name, reader, layout, ledger
        self.frame = make_frame(name, reader, layout.prompt)
        self.context_tokens: dict[str, list[int]] = {}  # prompt field -> tokens of each prompt that hold the context

    def read(
        self, examples: Sequence[Example], rows: set[str], answered: bool, *, slots: Sequence[int]
    ) -> dict[str, list[np.ndarray]]:
        """Returns each field's ids, one array an example; the ledger records dropped examples.

        `slots` of each example's message: also the context tokens of the row "truncated".
        """
        after_texts = [self.frame.after(example.question) for example in examples]
        data = self.layout.data
        before = self._tokenize([self.frame.before], begin=True)[0]
        question = self._tokenize(after_texts, limit=data.question_tokens)
        fields = {"before": [before] * len(examples), "after": question}
        self._limit(question, after_texts, "question", "question_tokens")
        if answered:
            fields["answer"] = self._read_answers(after_texts, question, examples, limit=data.question_tokens)
            self._limit(fields["answer"], [example.answers[0] for example in examples], "answer", "answer_tokens")
        if "text" in rows:
            fields["text"] = self._read_text(examples, after_texts, fields.get("answer"))
            self.context_tokens["text"] = [
                max(0, len(whole) - len(before) - len(q)) for whole, q in zip(fields["text"], question, strict=True)
            ]
        if "context" in rows:
            fields["context"] = self._read_context(examples, before, question)
        if "asked" in rows:
            fields["asked"] = question
            self.context_tokens["asked"] = [0] * len(examples)
        if "none" in rows:
            limit = len(before) + data.question_tokens
            fields["none"] = self._tokenize([self.frame.before + text for text in after_texts], begin=True, limit=limit)
            self.context_tokens["none"] = [0] * len(examples)
        if "truncated" in rows:
            contexts = self._tokenize_contexts(examples, limit=self.layout.slots)
            contexts = [ids[:most] for ids, most in zip(contexts, slots, strict=True)]
            fields["truncated"] = [np.concatenate([before, c, a]) for c, a in zip(contexts, question, strict=True)]
            self.context_tokens["truncated"] = [len(ids) for ids in contexts]
        return fields

    def _tokenize(self, texts: list[str], *, begin: bool = False, limit: int | None = None) -> list[np.ndarray]:
        """Returns the ids of texts that begin a prompt, or that stand behind its beginning."""
        if begin:
            return with_begin(self.reader, tokenize(self.reader.tokenizer, texts, limit=limit))
        return tokenize(self.reader.tokenizer, texts, limit=limit, behind=True)

    def _tokenize_contexts(self, examples: Sequence[Example], *, limit: int) -> list[np.ndarray]:
        return tokenize_contexts(self.reader.tokenizer, self.frame, [e.context for e in examples], limit=limit)

    def _limit(self, ids: list[np.ndarray], texts: list[str], reason: str, key: str) -> None:
        limit = getattr(self.layout.data, key)
        for i, (row, text) in enumerate(zip(ids, texts, strict=True)):
            if len(row) > limit:
                count = _count(row, text, limit)
                self.ledger.drop(i, reason, f"{count} tokens of reader {self.name!r}, config.data.{key}={limit}")

    def _read_answers(
        self,
        texts: list[str],
        prompts: list[np.ndarray],
        examples: Sequence[Example],
        *,
        limit: int,
        begin: bool = False,
        first: int = 0,
    ) -> list[np.ndarray]:
        """Returns the ids that follow each prompt when it is tokenised together with its answer, and the one behind it.

        For an already dropped or refused example, whose prompt of more than `limit` ids may be a prefix, only that.
        `first`: position of the first example in the ledger.
        """
        joined = [text + self.frame.gap + e.answers[0] for text, e in zip(texts, examples, strict=True)]
        answers = []
        ids = self._tokenize(joined, begin=begin, limit=limit + self.layout.data.answer_tokens)
        for i, (text, prompt, full, example) in enumerate(zip(texts, prompts, ids, examples, strict=True), first):
            if _is_cut(text, limit) and self.ledger.settled(i):
                answers.append(marked((), (), (self.frame.end,)))
                continue
            if np.array_equal(full, prompt):
                self.ledger.drop(i, "nothing", f"answer {example.answers[0]!r}, reader {self.name!r}")
            elif len(full) <= len(prompt) or not np.array_equal(full[: len(prompt)], prompt):
                self._drop_boundary(i, example)
            answers.append(marked(full[len(prompt) :], (), (self.frame.end,)))
        return answers

    def _read_text(
        self, examples: Sequence[Example], after_texts: list[str], answers: list[np.ndarray] | None
    ) -> list[np.ndarray]:
        """Returns the whole prompts, tokenised jointly; one that changes the answer's ids is dropped."""
        prompts = []
        for first in range(0, len(examples), PROMPTS):
            part = slice(first, first + PROMPTS)
            prompts += self._read_prompts(examples[part], after_texts[part], answers and answers[part], first)
        return prompts

    def _read_prompts(
        self, examples: Sequence[Example], after_texts: list[str], answers: list[np.ndarray] | None, first: int
    ) -> list[np.ndarray]:
        """Returns `_read_text` of the examples from the position `first` on."""
        texts = [self.frame.before + e.context + after for e, after in zip(examples, after_texts, strict=True)]
        limit = self.layout.data.context_tokens
        prompts = self._tokenize(texts, begin=True, limit=limit)
        overlong = [i for i, ids in enumerate(prompts) if len(ids) > limit]
        if self.layout.data.overlong != "cut":
            for i in overlong:
                count = _count(prompts[i], texts[i], limit)
                detail = f"{count} tokens of text prompt of reader {self.name!r}, config.data.context_tokens={limit}"
                self.ledger.refuse(first + i, detail)
        elif overlong:
            kept = self._cut_contexts([examples[i].context for i in overlong], [after_texts[i] for i in overlong])
            for i, text in zip(overlong, kept, strict=True):
                texts[i] = self.frame.before + text + after_texts[i]
            shorter = self._tokenize([texts[i] for i in overlong], begin=True, limit=limit)
            for i, text, ids in zip(overlong, kept, shorter, strict=True):
                prompts[i] = ids
                if not text:
                    self.ledger.drop(first + i, "prompt", f"{len(ids)} tokens of reader {self.name!r}, limit {limit}")
                self.ledger.cut["text_cut"].add(first + i)
        if answers is not None:
            joint = self._read_answers(texts, prompts, examples, limit=limit, begin=True, first=first)
            for i, (wire, text) in enumerate(zip(answers, joint, strict=True)):
                known = _is_cut(texts[i], limit) and self.ledger.settled(first + i)
                if not known and not np.array_equal(wire, text):
                    self._drop_boundary(first + i, examples[i])
        return prompts

    def _read_context(
        self, examples: Sequence[Example], before: np.ndarray, question: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Returns the ids up to the question, tokenised by themselves; the limit counts the question too."""
        limit = self.layout.data.context_tokens
        contexts = self._tokenize_contexts(examples, limit=limit)
        for i, (ids, after) in enumerate(zip(contexts, question, strict=True)):
            room = limit - len(before) - len(after)
            if len(ids) <= room:
                continue
            if self.layout.data.overlong != "cut":
                count = _count(ids, examples[i].context, limit)
                detail = f"{count} tokens of context of reader {self.name!r}, config.data.context_tokens={limit}"
                self.ledger.refuse(i, detail)
            elif room < 1:
                self.ledger.drop(i, "prompt", f"{limit - room} tokens of reader {self.name!r}, limit {limit}")
            else:
                contexts[i] = ids[:room]
                self.ledger.cut["text_cut"].add(i)
        self.context_tokens["context"] = [len(ids) for ids in contexts]
        return [np.concatenate([before, ids]) for ids in contexts]

    def _cut_contexts(self, contexts: list[str], after: list[str]) -> list[str]:
        """Returns the longest start of each context whose prompt fits, found by bisection over characters."""
        limit = self.layout.data.context_tokens
        low, high = [0] * len(contexts), list(map(len, contexts))  # `low` characters fit, or nothing does; `high` not
        while pending := [i for i in range(len(contexts)) if high[i] - low[i] > 1]:
            middle = [(low[i] + high[i]) // 2 for i in pending]
            texts = [self.frame.before + contexts[i][:end] + after[i] for i, end in zip(pending, middle, strict=True)]
            tokens = self._tokenize(texts, begin=True, limit=limit)  # of all at once, on all cores
            for i, end, ids in zip(pending, middle, tokens, strict=True):
                low[i], high[i] = (end, high[i]) if len(ids) <= limit else (low[i], end)
        return [context[:end] for context, end in zip(contexts, low, strict=True)]

    def _drop_boundary(self, index: int, example: Example) -> None:
        detail = f"reader {self.name!r}, prompt.anchor={self.layout.prompt.anchor!r}, answer {example.answers[0]!r}"
        self.ledger.drop(index, "boundary", detail)


def make_frame(name: str, reader: Reader, prompt: config.Prompt) -> Frame:
    """Returns a reader's prompt text around context and question, by its template."""
    parts = config.split_prompt(prompt.user)
    assert parts is not None, "as `core.validation` wants it"
    user = parts[0] + _CONTEXT + parts[1] + _QUESTION + parts[2]
    chat = reader.template == "chat"
    text = (reader.tokenizer.render_chat(user, system=prompt.system) if chat else user) + prompt.anchor
    if text.count(_CONTEXT) != 1 or text.count(_QUESTION) != 1 or text.index(_CONTEXT) > text.index(_QUESTION):
        raise UserError(
            f"config.llms.{name}: its chat template does not contain the user's text once and unchanged; "
            'set template="plain" for this reader'
        )
    turns = [{"role": "system", "content": prompt.system}] if prompt.system else []
    turns = [*turns, {"role": "user", "content": user}] if chat else []
    if lost := chat_templates.find_lost(text, chat_templates.said(turns, "prompt")):
        key = "system" if "(system)" in lost[0].where else "user"
        raise UserError(
            f"config.prompt.{key}={getattr(prompt, key)!r}: the chat template of config.llms.{name} does not write it; "
            f'leave it out (prompt.{key}), or set template="plain" for this reader'
        )
    before, after = text.split(_CONTEXT)
    middle, tail = after.split(_QUESTION)
    gap, end = _read_reply(reader.tokenizer, text, turns) if chat else ("", reader.tokenizer.eos)
    if prompt.anchor or not chat:
        gap = "" if tail and tail[-1].isspace() else " "
    return Frame(before, middle, tail, gap, end)


def _read_reply(tokenizer: Tokenizer, text: str, turns: Sequence[Mapping[str, str]]) -> tuple[str, int]:
    """Returns what the chat template writes around the reply to a prompt.

    White space before it, as Llama 2's does, and the id that ends its turn, which of Phi-3 is not EOS.
    """
    answered = tokenizer.render([*turns, {"role": "assistant", "content": _ANSWER}], reply=False)
    before, _, behind = answered.partition(_ANSWER)
    gap = before.removeprefix(text)
    first = tokenizer.encode(behind.lstrip())[:1]
    end = first[0] if first and first[0] in tokenizer.stops else tokenizer.eos
    return gap if before.startswith(text) and gap.isspace() else "", end


def tokenize(
    tokenizer: AnyTokenizer, texts: list[str], *, limit: int | None = None, behind: bool = False
) -> list[np.ndarray]:
    """Returns the ids of each text, i32, with nothing added; `behind`: of texts that follow another one.

    With a limit, only a prefix of a far longer text is tokenised: more than `limit` ids, the first `limit` of them the
    whole text's. So an overlong text is detected without tokenising megabytes. Equal texts, as those of several
    questions, are tokenised once and share their ids. Raises UserError for a text with half of a surrogate pair, as one
    that JavaScript has cut inside an emoji.
    """
    if len(distinct := list(dict.fromkeys(texts))) < len(texts):
        known = dict(zip(distinct, tokenize(tokenizer, distinct, limit=limit, behind=behind), strict=True))
        return [known[text] for text in texts]
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            near = text[max(0, error.start - 20) : error.end + 20]
            rule = f"{text[error.start]!r} is half of a surrogate pair, which no UTF-8 text has"
            raise UserError(f"text {near!r}: {rule}; remove it, or cut texts between characters") from error
    encode = tokenizer.encode_behind if behind and isinstance(tokenizer, Tokenizer) else tokenizer.encode_batch
    chunk = 1024  # the library's encodings take many times the memory of their ids, so only a chunk is held
    starts = range(0, len(texts), chunk)
    size = None if limit is None else WIDEST * (limit + MARGIN)
    cut = [text[:size] for text in texts]
    ids = [row for i in starts for row in encode(cut[i : i + chunk])]
    if limit is None or size is None:
        return ids
    for i, text in enumerate(texts):
        read = size
        # The last ids of a prefix are of a cut word; a tokenizer may make one id of very many characters.
        while len(text) > read and len(ids[i]) < limit + MARGIN:
            read *= 4
            (ids[i],) = encode([text[:read]])
    return ids


def tokenize_contexts(
    tokenizer: Tokenizer, frame: Frame, texts: list[str], *, limit: int | None = None
) -> list[np.ndarray]:
    """Returns `tokenize` of texts in the place of the context, with SentencePiece's blank where the prompt has it.

    It has it at its beginning, and with some tokenizers behind a special token.
    """
    apart = [*tokenizer.encode(frame.before), *tokenizer.encode("a")]
    return tokenize(tokenizer, texts, limit=limit, behind=tokenizer.encode(frame.before + "a") != apart)


def shared_prefix(name: str, reader: Reader, prompt: config.Prompt) -> np.ndarray:
    """Returns the ids of a reader's prompt up to the context, BOS included."""
    return with_begin(reader, tokenize(reader.tokenizer, [make_frame(name, reader, prompt).before]))[0]


def with_begin(reader: Reader, rows: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the rows with the tokenizer's first ids, unless they begin with them; a chat template writes its own."""
    return rows if reader.template == "chat" else [marked(row, reader.tokenizer.begin) for row in rows]


def _count(ids: np.ndarray, text: str, limit: int) -> str:
    return f"more than {limit} (of {len(text):,} characters)" if _is_cut(text, limit) else f"{len(ids)}"


def _is_cut(text: str, limit: int) -> bool:
    return len(text) > WIDEST * (limit + MARGIN)
