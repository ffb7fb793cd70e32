"""The weights that the tokens of an answer are from."""

from collections.abc import Sequence

from tokasaurus.messages.commands import WeightVersions
from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.protocol.answers import WeightSpan


def weight_spans(versions: WeightVersions, num_tokens: int) -> list[WeightSpan]:
    """Spans of tokens by their weights, at least one; all have tokens, unless the completion has none.

    versions: as of SequenceDelta; the last of them may have no tokens, if the sequence was aborted just after it."""
    starts = [start for start, _ in versions]
    ends = [min(end, num_tokens) for end in (*starts[1:], num_tokens)]
    spans = [WeightSpan(version, start, end) for (start, version), end in zip(versions, ends, strict=True)]
    return [span for span in spans if span.start < span.end] or spans[-1:]


def newest_version(sequences: Sequence[FinishedSequence]) -> str:
    """Weight version of the last token of the sequence that finished last. At least one sequence is needed."""
    last = max(sequences, key=lambda sequence: sequence.end_number)
    return weight_spans(last.weight_versions, len(last.token_ids))[-1].version
