"""What a dry run says: what would be read and written, estimated from the start of the corpus."""

from collections import Counter

import numpy

from megatron_fp4.mcore.data.corpus.blocks import SourceFile, blocks
from megatron_fp4.mcore.data.corpus.encoding import tokenized
from megatron_fp4.mcore.data.corpus.options import CorpusOptions
from megatron_fp4.mcore.data.corpus.parts import PROBLEMS_SHOWN
from megatron_fp4.mcore.data.corpus.tokenizers import Tokenizer

_SAMPLE_BYTES = 2**20  # that are tokenized
_NAMES = {"lines": "JSON lines", "parquet": "Parquet", "text": "plain text"}


def estimate(sources: list[SourceFile], options: CorpusOptions, tokenizer: Tokenizer) -> list[str]:
    """Lines for the user. Raises DataError if a file cannot be read."""
    total = sum(source.size for source in sources)
    kinds = Counter(_NAMES[source.kind] for source in sources)
    files = ", ".join(f"{count} of {kind}" for kind, count in sorted(kinds.items()))
    token_bytes = numpy.dtype(tokenizer.dtype).itemsize
    return [
        f"files: {files}; {total / 1e6:,.1f} MB",
        f"tokenizer: {tokenizer.kind} {tokenizer.path}, {tokenizer.vocab_size:,} tokens of "
        f"{token_bytes} bytes; token {tokenizer.eod} ends a document",
        *_sample(sources, options, tokenizer, total, token_bytes),
    ]


def _sample(
    sources: list[SourceFile],
    options: CorpusOptions,
    tokenizer: Tokenizer,
    total: int,
    token_bytes: int,
) -> list[str]:
    block = next(blocks(sources, options.json_key, _SAMPLE_BYTES), None)
    if block is None or not block.position:
        return ["the files are empty"]
    part = tokenized(block, tokenizer, options)
    documents, tokens, size = (
        sum(getattr(count, name) for count in part.header.counts.values())
        for name in ("documents", "tokens", "bytes")
    )
    all_tokens = tokens * total / block.position
    return [
        f"the first {documents:,} documents: {size / max(tokens, 1):.2f} bytes of text a token, "
        f"{len(part.problems)} lines or files left out",
        *(f"  {place}: {reason}" for place, reason in part.problems[:PROBLEMS_SHOWN]),
        f"as these go: {all_tokens:,.0f} tokens in all, {all_tokens * token_bytes / 1e6:,.1f} MB, "
        "and as much again while they are written",
    ]
