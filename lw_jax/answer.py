"""The verb `answer`: a text goes over the wire once; each reader answers each question from latents and from text."""

from pathlib import Path
from typing import Any

from lw_jax.api import open_wire
from lw_jax.core.config import Config


def main(cfg: Config, *, resolved: dict[str, Any], workdir: Path, context: str, questions: list[str]) -> int:
    """Prints the answers and the size of the message beside the text's."""
    del resolved
    wire = open_wire(cfg, workdir)
    message = wire.write(context)
    print(f"message: {len(message)} bytes for {len(context.encode())} bytes of text")
    for question in questions:
        print(f"question: {question}")
        for name in cfg.llms:
            print(f"  {name} from latents: {wire.read(message, reader=name, question=question)}")
            print(f"  {name} from text:    {wire.read_text(context, reader=name, question=question)}")
    return 0
