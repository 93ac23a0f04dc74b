"""Passages for reconstruction and continuation: texts cut to a length, the text itself (or what follows) the answer."""

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from lw_jax.core.errors import UserError
from lw_jax.core.files import expand
from lw_jax.core.types import Example
from lw_jax.data import batches, prompt_tokens, row_sources, rows
from lw_jax.data.batches import Encoded, Field
from lw_jax.data.example_counts import DropCounts
from lw_jax.data.prompt_tokens import Layout
from lw_jax.data.row_fields import Fields
from lw_jax.data.tokens import Tokenizer, marked

_REMEDY = 'a passage is a row {"text": "..."}; correct or remove it'
_ROWS = frozenset((".json", ".jsonl", ".ndjson", ".csv", ".tsv"))  # suffixes of what is not paragraphs
SHORTEST = 0.5  # of the length asked for, that a document's last piece must have
# Share of the pieces that each tokenizer keeps. All are padded to the longest: a few with a word of many tokens (an
# address) would make every batch up to twice as wide.
KEPT = 0.99
Starts = Callable[[str], Sequence[int] | np.ndarray]  # text -> places at which its tokens begin, of `Tokenizer.starts`


def read(source: str, columns: Sequence[str] = ()) -> list[str]:
    """Returns the texts of .txt files (split at blank lines, also .gz), or of rows {"text": ...}, commas between.

    Rows are as `row_sources.read` finds them, `columns` is data.columns. Raises UserError naming file, line and rule.
    """
    passages = []
    for name in row_sources.split_sources(source):
        path = expand(name)
        if row_sources.is_table(name) or not _ROWS.isdisjoint(path.suffixes):
            fields = Fields.of(rows.Text, columns, _REMEDY)
            texts = []
            for where, row in row_sources.read(name, fields, split="train"):
                if not (text := row.text.strip()):
                    raise UserError(f"{where}: text={row.text!r}: a passage is not empty; {_REMEDY}")
                texts.append(text)
        else:
            texts = list(rows.paragraphs(path))
        if not texts:
            raise UserError(f'{path}: no text; a .txt file with paragraphs or rows {{"text": ...}} is needed')
        passages += texts
    return passages


def cut(document: str, length: int, read_starts: Starts) -> list[str]:
    """Returns a document in pieces of about `length` tokens, cut at white space; one shorter than that stays whole.

    A piece begins with a blank where white space stood before it: in a word, or a script without blanks, none did. The
    last piece is left out where it has less than SHORTEST of the length.
    """
    starts = read_starts(document)
    if len(starts) <= length:
        return [document]
    ends = [*map(int, starts[length::length]), len(document)]
    if (len(starts) - 1) % length + 1 < SHORTEST * length:
        ends.pop()
    pieces, begin = [], 0
    for end in ends:
        stop = end if end == len(document) else _space_before(document, begin, end)
        behind = " " * (begin > 0 and document[begin - 1 : begin + 1].strip() != document[begin - 1 : begin + 1])
        if piece := document[begin:stop].strip():
            pieces.append(behind + piece)
        begin = stop
    return pieces


def reconstructions(documents: Iterable[str], length: int, read_starts: Starts) -> list[Example]:
    """Returns one example a piece: the text is its own answer."""
    pieces = (piece.strip() for document in dict.fromkeys(documents) for piece in cut(document, length, read_starts))
    return [Example(f"passage {i}", piece, "", (piece,)) for i, piece in enumerate(pieces)]


def continuations(documents: Iterable[str], length: int, read_starts: Starts) -> list[Example]:
    """Returns one example for each two pieces that follow each other; a short document is cut in half."""
    pairs = []
    for document in dict.fromkeys(documents):
        pieces = cut(document, min(length, -(-len(read_starts(document)) // 2)), read_starts)
        pairs += [(left.strip(), right) for left, right in itertools.pairwise(pieces)]
    return [Example(f"passage {i}", left, "", (right,)) for i, (left, right) in enumerate(pairs)]


def encode(found: Sequence[Example], *, layout: Layout, task: str) -> Encoded:
    """Returns passages as token ids: source, the prompt up to the context, and the answer's tokens.

    A repeated text ends with EOS; a continuation does not. The longest 1 % in any tokenizer are left out (`KEPT`), and
    under data.overlong="cut" those beyond the encoder's window too: the rest of a text cannot be repeated, nor does
    anything follow it. Raises UserError where none is left, and for an overlong source under data.overlong="refuse".
    """
    if not found:
        raise UserError(
            f"no passage for {task}: the texts are shorter than two words; name longer ones: "
            "data.validation, or for training data.passages or data.train"
        )
    drops = DropCounts([example.id for example in found])
    source = prompt_tokens.read_source([example.context for example in found], layout, drops)
    texts = [example.answers[0] for example in found]
    answers = {name: tokenize_answers(texts, reader.tokenizer, task) for name, reader in layout.readers.items()}
    _drop(found, source, answers, drops)
    keep = drops.apply_policy(layout.data.overlong)
    readers = {}
    for name, reader in layout.readers.items():
        tokenizer = reader.tokenizer
        shared = prompt_tokens.shared_prefix(name, reader, layout.prompt)
        ending = (tokenizer.eos,) if task == "reconstruct" else ()
        targets = [marked(answers[name][i], (), ending) for i in keep]
        readers[name] = {
            "before": batches.field([shared] * len(keep), tokenizer.pad, left=True),
            "after": Field([np.zeros(0, np.int32)] * len(keep), 0, tokenizer.pad, left=True),
            "answer": batches.field(targets, tokenizer.pad, left=False),
        }
    return Encoded(
        examples=tuple(found[i] for i in keep),
        source=batches.source_field([source[i] for i in keep], layout),
        readers=readers,
        counts=drops.counts(),
        slots=layout.slots,
        width=layout.width,
        ratio=layout.ratio,
        task=task,
    )


def tokenize_answers(texts: Sequence[str], tokenizer: Tokenizer, task: str) -> list[np.ndarray]:
    """Returns the ids of texts that are repeated, or that continue another one, with the blank before them if any."""
    return prompt_tokens.tokenize(tokenizer, list(texts), behind=task == "continuation")


def _drop(
    examples: Sequence[Example], source: list[np.ndarray], answers: dict[str, list[np.ndarray]], drops: DropCounts
) -> None:
    """Records passages without a token, those cut at the encoder's window and the longest ones as dropped."""
    for name, each in answers.items():
        for i, ids in enumerate(each):
            if not len(ids):
                drops.drop(i, "nothing", f"text {examples[i].answers[0]!r}, reader {name!r}")
    for i in drops.cut["source_cut"]:
        drops.drop(i, "context", "beyond encoder.window; a passage is read whole, whatever data.overlong is")
    for each in (source, *answers.values()):
        limit = np.quantile([len(ids) for ids in each], KEPT, method="higher")
        for i, ids in enumerate(each):
            if len(ids) > limit:
                drops.drop(i, "outlier", f"{len(ids)} tokens, most passages have at most {int(limit)}")


def _space_before(text: str, begin: int, end: int) -> int:
    """Returns the last place at or before `end` where a word begins; `end` itself in a text without spaces."""
    index = end
    while index > begin and not (text[index - 1].isspace() or text[index].isspace()):
        index -= 1
    return index if index > begin else end
