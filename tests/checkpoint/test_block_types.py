"""Rows of blocks of integers, against their description; those of GGUF are in test_tensor_files."""

import numpy as np
import pytest
import torch

from tests.model.helpers.quantized_rows import plain_rows, random_block_rows
from tokasaurus.checkpoint.block_types import bytes_of_row, dequantize_rows, inputs_of_row


@pytest.mark.parametrize("block_type", ["I4_32", "I4_64", "I4_128", "I8"])
def test_blocks_of_integers_are_dequantised_as_described(block_type: str) -> None:
    rows = random_block_rows(block_type, num_rows=7, num_blocks=3)
    found = dequantize_rows(rows.blocks.numpy(), block_type)
    np.testing.assert_array_equal(found, plain_rows(rows).numpy())
    assert torch.equal(rows.dequantized(), plain_rows(rows))
    assert inputs_of_row(block_type, rows.blocks.shape[1]) == found.shape[1]
    assert bytes_of_row(block_type, found.shape[1]) == rows.blocks.shape[1]
