"""Staging on a CPU: the device is the host."""

import numpy as np
import pytest

from tokasaurus.model.staging.staging import ON_HOST


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.bool_])
def test_a_tensor_on_the_host_is_the_array_itself(dtype: type) -> None:
    array = np.zeros((3, 2), dtype)
    staged = ON_HOST.to_device(array)
    array[1, 1] = 1
    assert staged.tolist() == array.tolist()
    assert staged.data_ptr() == array.ctypes.data


def test_work_is_done_at_once() -> None:
    done = []
    ON_HOST.then(lambda: done.append(1))
    assert done == [1]
