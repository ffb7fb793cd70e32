"""Sampling on CUDA in Triton kernels: one finds the limits' thresholds, a program for each row; one draws, a program
for each part of a row; one merges the parts; two find the most likely tokens.

A row is one part if there are enough rows to fill the device. Few rows are divided into parts, since a program reads
its blocks one after another: 63 of them in Llama 3's vocabulary. Noise does not depend on the order, so the token is
the same. In recorded steps, the parts are merged by the kernel that also finishes the row: it checks that all is
finite, stores the token as its slot's last one, and packs what the host reads.

Plain torch in `rules.py` and `sample.py` is their readable reference; the noise is that of `noise.py`, so that all
samplers draw the same tokens. A row without limits takes one pass over its logits, and most rows with limits take two:
see triton_limits.

The noise of a token takes two logarithms and a division. They are computed only for blocks of tokens of which one may
win: the noise is at most -log(u), u being uniform, so a token with u >= exp(adjusted logit - best noisy logit so far)
cannot. In both a normal distribution over 128,256 tokens and the demo model's, 5 to 8 % of the blocks remain. No draw
differs, as it could if E / exp(adjusted logit) were compared with E = -log1p(-u): other roundings break near ties.

The most likely tokens: the first kernel takes the largest logits of each part of a row, the second the largest of
these. A logit and its token are one integer, whose order is that of the logits and, among equal ones, of the smaller
token: so each turn is a single reduction, and nothing is sorted.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokasaurus.model.buffer_sizes import parts_of_rows
from tokasaurus.model.sampling.finish import Finished
from tokasaurus.model.sampling.triton_limits import find_least
from tokasaurus.model.sampling.triton_rows import COLUMN, block_size, load_block, open_row, row_arguments

# R rows that sample, V vocabulary, E hidden size, C rows with changed logits, A rows with a mask or with top-k
# logprobs, K largest of each row, P parts of a row

_NUM_WARPS = 8
_NO_TOKEN = 2**31 - 1
_MERGE_WARPS = 4
_HIDDEN_BLOCK = 1024
_LARGEST_NOISE = 22.88  # -log(2^-33), and some more

_PART = 8192
"""Most logits of a part of a row."""
_USUAL_COUNT = 32
"""Candidates per part; a larger number compiles another kernel."""
_LARGEST_ID = 2**31 - 1


def draw(
    logits: Tensor,
    own: slice,
    device_params: Tensor,
    noise_keys: Tensor,
    changed: tuple[Tensor, Tensor] | None,
    masks: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a token from some rows of logits [R, V], of any float dtype: the fields of Drawn in sample.py.

    own: which rows. device_params: int32 [R, F], from params_to_device. noise_keys: int64
    [R, 2]. changed: (int32 [R], float32 [C, V]): index of a row's changed logits, or less than 0. masks: (int32 [R],
    int32 [A, words]): index of a row's bits, or -1; see TokenMasks."""
    num_rows, vocab_size = own.stop - own.start, logits.shape[1]
    device = logits.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    chosen = torch.empty(num_rows, dtype=torch.float32, device=device)
    normalizers = torch.empty(num_rows, dtype=torch.float32, device=device)
    parts = _draw_parts(logits, own, device_params, noise_keys, changed, masks)
    _merge_row[(num_rows,)](
        *(parts, parts.shape[1], own.start, logits, logits.stride(0), vocab_size, tokens, chosen, normalizers),
        **_merge_constants(vocab_size),
    )
    return tokens, chosen, normalizers


def draw_and_finish(
    logits: Tensor, device_params: Tensor, noise_keys: Tensor, hidden: Tensor, slots: Tensor, last_tokens: Tensor
) -> Finished:
    """Draw a token from each row of logits [R, V] and finish the rows, as finish_by_torch does: no row has rules or a
    mask. device_params, noise_keys: as in draw."""
    num_rows, vocab_size = logits.shape
    parts = _draw_parts(logits, slice(0, num_rows), device_params, noise_keys, None, None)
    finished = Finished.allocate(num_rows, logits.device)
    _finish_row[(num_rows,)](
        *(parts, parts.shape[1], logits, logits.stride(0), vocab_size, hidden, hidden.stride(0), slots, last_tokens),
        *(*finished, last_tokens),
        HIDDEN_SIZE=hidden.shape[1],
        HIDDEN_BLOCK=min(_HIDDEN_BLOCK, triton.next_power_of_2(hidden.shape[1])),
        HAS_PARTS=True,
        HAS_LOGPROBS=True,
        **_merge_constants(vocab_size),
    )
    return finished


def finish(tokens: Tensor, logprobs: Tensor | None, hidden: Tensor, slots: Tensor, last_tokens: Tensor) -> Finished:
    """As finish_by_torch."""
    num_rows = len(tokens)
    finished = Finished.allocate(num_rows, tokens.device)
    given = tokens if logprobs is None else logprobs
    _finish_row[(num_rows,)](
        *(tokens, 0, hidden, 0, 0, hidden, hidden.stride(0), slots, last_tokens, *finished, given),
        HIDDEN_SIZE=hidden.shape[1],
        HIDDEN_BLOCK=min(_HIDDEN_BLOCK, triton.next_power_of_2(hidden.shape[1])),
        HAS_PARTS=False,
        HAS_LOGPROBS=logprobs is not None,
        **_merge_constants(1),
    )
    return finished


def _draw_parts(
    logits: Tensor,
    own: slice,
    device_params: Tensor,
    noise_keys: Tensor,
    changed: tuple[Tensor, Tensor] | None,
    masks: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """What is drawn from each part of each row: int32 [R, P, 4], for `_merge_parts`. Parameters as in `draw`."""
    num_rows, vocab_size = own.stop - own.start, logits.shape[1]
    arguments = row_arguments(logits, own, device_params, changed, masks)
    flags = {"HAS_CHANGED": changed is not None, "HAS_MASKS": masks is not None}
    least = find_least(num_rows, vocab_size, logits.device, *arguments, **flags)
    block = block_size(vocab_size)
    num_parts, blocks_per_part = parts_of_rows(num_rows, triton.cdiv(vocab_size, block), _num_processors(logits.device))
    parts = torch.empty((num_rows, num_parts, 4), dtype=torch.int32, device=logits.device)
    _draw_part[(num_rows, num_parts)](
        *(*arguments, noise_keys, least, blocks_per_part * block, parts),
        **flags,
        TEMPERATURE=COLUMN["temperature"],
        NO_TOKEN=_NO_TOKEN,
        LARGEST_NOISE=_LARGEST_NOISE,
        BLOCK=block,
        num_warps=_NUM_WARPS,
    )
    return parts


def _merge_constants(vocab_size: int) -> dict[str, int]:
    most = triton.next_power_of_2(triton.cdiv(vocab_size, block_size(vocab_size)))
    return {"NO_TOKEN": _NO_TOKEN, "PARTS": most, "num_warps": _MERGE_WARPS}


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _uniform(hashed):
    """The u of `gumbel_noise`, from uint32 hashes: (hash + 0.5) / 2^32, rounded once.

    float32 holds either half of the bits exactly, the lower one also with 0.5 added: only their sum is rounded."""
    high = (hashed >> 16).to(tl.float32) * 1.52587890625e-05  # 2^-16
    low = ((hashed & 0xFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    return tl.minimum(high + low, 0.99999994)


@triton.jit
def _gumbel(uniform):
    """Gumbel noise of uniform numbers, by the formula of `gumbel_noise`: -log(-log1p(-u))."""
    # log1p(-u) by Kahan's formula: the rounding of 1 - u cancels.
    rest = 1.0 - uniform
    log1p = tl.where(rest == 1.0, -uniform, tl.log(rest) * (-uniform / tl.where(rest == 1.0, 1.0, rest - 1.0)))
    return -tl.log(-log1p)


@triton.jit(do_not_specialize=["first", "part_size"])
def _draw_part(
    first, logits, row_stride, vocab_size, row_params, params_stride, changed_index, changed_logits, mask_index,
    mask_bits, num_words, noise_keys, least_of_row, part_size, parts,
    HAS_CHANGED: tl.constexpr, HAS_MASKS: tl.constexpr, TEMPERATURE: tl.constexpr,
    NO_TOKEN: tl.constexpr, LARGEST_NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each row and part_size tokens, a multiple of BLOCK."""
    own = tl.program_id(0).to(tl.int64)
    index = first + own
    row = open_row(
        index, logits, row_stride, vocab_size, row_params, params_stride, changed_index, changed_logits, mask_index,
        mask_bits, num_words, TEMPERATURE, HAS_CHANGED, HAS_MASKS,
    )  # fmt: skip
    is_greedy = tl.load(row_params + index * params_stride + TEMPERATURE).to(tl.float32, bitcast=True) == 0.0
    first_key = tl.load(noise_keys + 2 * index).to(tl.uint32)
    second_key = tl.load(noise_keys + 2 * index + 1).to(tl.uint32)
    least = tl.load(least_of_row + own)

    best = tl.full((), float("-inf"), tl.float32)  # of the noisy logits so far
    token = tl.full((), NO_TOKEN, tl.int32)
    bar = best  # a token wins only if an upper bound of its noisy logit is above
    max_noise = tl.where(is_greedy, 0.0, LARGEST_NOISE)
    reference = best  # the largest logit so far
    sums = tl.zeros((BLOCK,), tl.float32)  # of exp(logits - reference)
    begin = tl.program_id(1) * part_size
    for start in range(begin, tl.minimum(begin + part_size, vocab_size), BLOCK):
        token_ids, raw, adjusted, is_allowed = load_block(row, start, HAS_CHANGED, HAS_MASKS, BLOCK)
        previous = reference
        reference = tl.maximum(previous, tl.max(raw))
        origin = tl.where(reference == float("-inf"), 0.0, reference)
        sums = sums * tl.exp(previous - origin) + tl.exp(raw - origin)
        adjusted = tl.where(adjusted >= least, adjusted, float("-inf"))
        if (tl.max(adjusted) + max_noise > bar) | (token == NO_TOKEN):
            noisy = adjusted
            if is_greedy:
                highest = tl.max(adjusted)
            else:
                first_hash = _mix32(token_ids.to(tl.uint32) * 0x9E3779B1 + first_key)
                uniform = _uniform(_mix32(first_hash ^ second_key))
                # The noise is at most -log(u): compared without a logarithm.
                may_win = uniform < tl.exp(adjusted - bar)
                highest = tl.full((), float("-inf"), tl.float32)
                if (tl.max(may_win.to(tl.int32)) > 0) | (token == NO_TOKEN):
                    noisy = adjusted + _gumbel(uniform)
                    highest = tl.max(noisy)
            if (highest > best) | (token == NO_TOKEN):
                token = tl.min(tl.where(is_allowed & (noisy == highest), token_ids, NO_TOKEN))
                best = highest
                # Far more than what rounding may add to the noise and to the sum.
                bar = tl.where(is_greedy, best, best - (1e-3 + 1e-6 * tl.abs(best)))
    place = parts + (own * tl.num_programs(1) + tl.program_id(1)) * 4
    tl.store(place, best.to(tl.int32, bitcast=True))
    tl.store(place + 1, token)
    tl.store(place + 2, reference.to(tl.int32, bitcast=True))
    tl.store(place + 3, tl.sum(sums).to(tl.int32, bitcast=True))


@triton.jit
def _merge_parts(parts, num_parts, vocab_size, NO_TOKEN: tl.constexpr, PARTS: tl.constexpr):
    """(the token drawn from a row, -1 if a logit is NaN or positive infinity; one that is inside the vocabulary; the
    row's normalizer). parts: of the row. Of equally good tokens, the first is drawn, as in each part."""
    offsets = tl.arange(0, PARTS)
    is_part = offsets < num_parts
    best = tl.load(parts + 4 * offsets, mask=is_part, other=0).to(tl.float32, bitcast=True)
    best = tl.where(is_part, best, float("-inf"))
    token_ids = tl.load(parts + 4 * offsets + 1, mask=is_part, other=NO_TOKEN)
    references = tl.load(parts + 4 * offsets + 2, mask=is_part, other=0).to(tl.float32, bitcast=True)
    references = tl.where(is_part, references, float("-inf"))
    totals = tl.load(parts + 4 * offsets + 3, mask=is_part, other=0).to(tl.float32, bitcast=True)
    token = tl.min(tl.where(best == tl.max(best), token_ids, NO_TOKEN))
    inside = tl.minimum(token, vocab_size - 1)  # if a NaN has won
    reference = tl.max(references)
    origin = tl.where(reference == float("-inf"), 0.0, reference)
    total = tl.sum(totals * tl.exp(references - origin))
    # The sum is NaN if a logit is NaN or positive infinity.
    return tl.where(total < float("inf"), inside, -1), inside, reference + tl.log(total)


@triton.jit(do_not_specialize=["num_parts", "first"])
def _merge_row(
    parts, num_parts, first, logits, row_stride, vocab_size, tokens, chosen, normalizers,
    NO_TOKEN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0).to(tl.int64)
    token, inside, normalizer = _merge_parts(parts + own * num_parts * 4, num_parts, vocab_size, NO_TOKEN, PARTS)
    tl.store(normalizers + own, normalizer)
    tl.store(chosen + own, tl.load(logits + (first + own) * row_stride + inside).to(tl.float32))
    tl.store(tokens + own, token.to(tl.int64))


@triton.jit(do_not_specialize=["num_parts"])
def _finish_row(
    parts, num_parts, logits, row_stride, vocab_size, hidden, hidden_stride, slots, last_tokens, tokens, packed,
    logprobs, HIDDEN_SIZE: tl.constexpr, HIDDEN_BLOCK: tl.constexpr, HAS_PARTS: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr, NO_TOKEN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """HAS_PARTS: the token and its logprob are merged from `parts`; otherwise `parts` has the tokens, and with
    HAS_LOGPROBS `logprobs` their logprobs."""
    own = tl.program_id(0).to(tl.int64)
    logprob = tl.full((), 0.0, tl.float32)
    if HAS_PARTS:
        token, inside, normalizer = _merge_parts(parts + own * num_parts * 4, num_parts, vocab_size, NO_TOKEN, PARTS)
        logprob = tl.load(logits + own * row_stride + inside).to(tl.float32) - normalizer
    else:
        token = tl.load(parts + own).to(tl.int32)
        if HAS_LOGPROBS:
            logprob = tl.load(logprobs + own)
    row = hidden + own * hidden_stride
    num_wrong = tl.zeros((HIDDEN_BLOCK,), tl.int32)
    for start in range(0, HIDDEN_SIZE, HIDDEN_BLOCK):
        offsets = start + tl.arange(0, HIDDEN_BLOCK)
        size = tl.abs(tl.load(row + offsets, mask=offsets < HIDDEN_SIZE, other=0.0).to(tl.float32))
        num_wrong += tl.where(size < float("inf"), 0, 1)  # NaN is not
    is_finite = (token >= 0) & (tl.sum(num_wrong) == 0)
    usable = tl.maximum(token, 0)
    tl.store(last_tokens + tl.load(slots + own), usable.to(tl.int64))
    tl.store(tokens + own, token.to(tl.int64))
    tl.store(packed + 3 * own, usable)
    tl.store(packed + 3 * own + 1, logprob.to(tl.int32, bitcast=True))
    tl.store(packed + 3 * own + 2, is_finite.to(tl.int32))


def largest_logits(logits: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The K = `count` <= V largest logits of some rows: their tokens, int32 [A, K], and logits, float32 [A, K].

    In descending order; of equal logits, the smaller token comes first. logits: [R, V], of any float dtype. rows: int64
    [A]. A row with NaN has tokens of the vocabulary, whose choice has no meaning.
    """
    num_rows, vocab_size = len(rows), logits.shape[1]
    assert count <= vocab_size
    assert logits.stride(1) == 1
    num_parts = triton.cdiv(vocab_size, _PART)
    candidates = torch.empty((num_rows, num_parts, count), dtype=torch.int64, device=logits.device)
    token_ids = torch.empty((num_rows, count), dtype=torch.int32, device=logits.device)
    values = torch.empty((num_rows, count), dtype=torch.float32, device=logits.device)
    _largest_of_parts[(num_rows, num_parts)](
        *(logits, logits.stride(0), vocab_size, rows, candidates, count),
        PART=min(_PART, triton.next_power_of_2(vocab_size)),
        LARGEST_ID=_LARGEST_ID,
        num_warps=_NUM_WARPS,
    )
    _largest_of_candidates[(num_rows,)](
        *(candidates, num_parts * count, token_ids, values, count),
        NUM=triton.next_power_of_2(num_parts * max(count, _USUAL_COUNT)),
        LARGEST_ID=_LARGEST_ID,
        num_warps=_NUM_WARPS,
    )
    return token_ids, values


@triton.jit(do_not_specialize=["count"])
def _largest_of_parts(
    logits, row_stride, vocab_size, rows, candidates, count, PART: tl.constexpr, LARGEST_ID: tl.constexpr
):
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = logits + tl.load(rows + index) * row_stride
    offsets = part * PART + tl.arange(0, PART)
    in_row = offsets < vocab_size
    bits = tl.load(row + offsets, mask=in_row, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)  # in the order of the floats
    left = tl.where(in_row, keys * 4294967296 + (LARGEST_ID - offsets), -9223372036854775808)
    own = candidates + (index * tl.num_programs(1) + part) * count
    for turn in range(count):
        largest = tl.max(left)
        tl.store(own + turn, largest)
        left = tl.where(left == largest, -9223372036854775808, left)


@triton.jit(do_not_specialize=["num_candidates", "count"])
def _largest_of_candidates(
    candidates, num_candidates, token_ids, values, count, NUM: tl.constexpr, LARGEST_ID: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, NUM)
    left = tl.load(
        candidates + index * num_candidates + offsets, mask=offsets < num_candidates, other=-9223372036854775808
    )
    for turn in range(count):
        largest = tl.max(left)
        key = (largest >> 32).to(tl.int32)
        bits = key ^ ((key >> 31) & 0x7FFFFFFF)
        tl.store(token_ids + index * count + turn, (LARGEST_ID - (largest & 0xFFFFFFFF)).to(tl.int32))
        tl.store(values + index * count + turn, bits.to(tl.float32, bitcast=True))
        left = tl.where(left == largest, -9223372036854775808, left)
