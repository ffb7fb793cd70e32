"""How many prompt tokens the steps of microbatches compute. Pure functions."""

# M microbatches

from dataclasses import dataclass

_LEAST_CHUNK = 64
"""Prompt tokens that a step may have, even if it has more tokens than others: so that short prompts need not wait."""

_MOST_ROUNDS = 64
"""Longest prefill that is followed round by round."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What limits the prompt tokens of a step."""

    num_stages: int
    num_microbatches: int
    """Precondition: at least 2."""
    max_tokens: int
    """Most tokens of a step."""

    def most_prefill(self, num_decoding: int, num_all_tokens: int) -> int:
        """Most prompt tokens for a step with so many decoding rows.

        num_all_tokens: decoding rows and prompt tokens still to compute, of all microbatches. So many that the steps of
        a round have equally many tokens, because a step that is longer than the others leaves stages idle before it
        and behind it; or as many as it may have more than the others without that.
        """
        num_even = -(-num_all_tokens // self.num_microbatches) - num_decoding
        return min(max(self._spare_tokens(num_decoding), num_even), self.max_tokens - num_decoding)

    def _spare_tokens(self, num_decoding: int) -> int:
        """Prompt tokens by which one step of a round may be longer than the others.

        With S stages, M microbatches and steps of a tokens, but one of a + c: a stage computes M * a + c tokens in a
        round, and the longer step takes S * (a + c) to pass all stages. It delays nothing up to c = (M - S) * a /
        (S - 1).
        """
        num_more = self.num_microbatches - self.num_stages
        return max(_LEAST_CHUNK, num_more * num_decoding // max(1, self.num_stages - 1))

    def prefill_per_round(self, num_decoding: list[int], num_left: list[int]) -> int | None:
        """Prompt tokens that a step of each microbatch compute together, in the mean until all prompts are computed.

        None if there is no prompt, or if decoding rows leave no room. num_decoding, num_left: [M] rows, which are taken
        to stay the same, and prompt tokens still to compute.
        """
        left, num_all_left, num_rounds = list(num_left), sum(num_left), 0
        num_all_decoding = sum(num_decoding)
        while (num_now := sum(left)) and num_rounds < _MOST_ROUNDS:
            for index, own_decoding in enumerate(num_decoding):
                most = max(0, self.most_prefill(own_decoding, num_all_decoding + sum(left)))
                left[index] -= min(left[index], most)
            if sum(left) == num_now:
                break
            num_rounds += 1
        return -(-(num_all_left - sum(left)) // num_rounds) if num_rounds else None
