"""Row `selected`: the text's own words, chosen as the wire's literals are, in a message's positions.

The idea of LLMLingua (arXiv 2310.05736): no message at all, the reader gets some of the text's tokens; by default those
that a language model finds least predictable.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from lw_jax.data import batches, literals, prompt_tokens
from lw_jax.data.batches import Encoded
from lw_jax.data.literals import Scored
from lw_jax.evals.control_rows import positions

ROW = "selected"
CONTEXT = "selected_context"  # field of the same prompt up to the question
ROWS = (ROW, "selected_taught")


def attach(
    encoded: Encoded, indices: Sequence[int], scored: Sequence[Scored], *, layout: prompt_tokens.Layout
) -> Encoded:
    """Returns the data set with prompts of selected words for the examples at `indices`; the others' are empty.

    Args:
        encoded: the data set, with the field "asked".
        indices: its measured examples.
        scored: the tokens of each one's context with what chooses words.
        layout: how prompts are tokenised.
    """
    readers, counts = {}, {}
    for name, fields in encoded.readers.items():
        tokenizer = layout.readers[name].tokenizer
        ids, parts = ([np.zeros(0, np.int32)] * len(encoded) for _ in range(2))
        held = [0] * len(encoded)
        for index, slots, one in zip(indices, encoded.count_slots(indices), scored, strict=True):
            room = positions(encoded, name, "message", index, slots=int(slots))
            text = encoded.examples[index].context
            chosen = prompt_tokens.tokenize(tokenizer, [choose(text, one, tokenizer, room=room)])[0][:room]
            parts[index] = np.concatenate([fields["before"].ids[index], chosen])
            ids[index] = np.concatenate([parts[index], fields["asked"].ids[index]])
            held[index] = len(chosen)
        made = {ROW: ids, CONTEXT: parts}
        readers[name] = fields | {key: batches.field(one, tokenizer.pad, left=True) for key, one in made.items()}
        counts[name] = {**encoded.context_tokens[name], ROW: held, CONTEXT: held}
    return dataclasses.replace(encoded, readers=readers, context_tokens=counts)


def choose(text: str, scored: Scored, tokenizer: prompt_tokens.ReaderTokenizer, *, room: int) -> str:
    """Returns the words that fit into `room` of the reader's tokens, in the text's order.

    Those with the most nats for each token; where a word's score is a mean over its tokens, those of the highest score.
    """
    found = literals.words(text, scored.spans)
    spoken = [text[slice(*word)] for word in found]
    scores = literals.score(found, scored)
    sizes = np.array([len(ids) for ids in tokenizer.encode_batch([f" {word}" for word in spoken])], int)
    kept: list[int] = []
    order = scores if scored.mean else scores / np.maximum(sizes, 1)
    for number in np.argsort(-order, kind="stable"):
        if scores[number] == -np.inf:
            break
        if sizes[number] <= room:
            room -= int(sizes[number])
            kept.append(int(number))
    return " ".join(literals.join(text, [found[number] for number in sorted(kept)]))
