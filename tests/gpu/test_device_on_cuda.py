"""Workers on the CUDA devices of this machine."""

import pytest
import torch

from tokasaurus.messages.status import UserError
from tokasaurus.model.worker.device import choose_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def test_what_names_no_index_is_made_on_the_device_of_the_worker() -> None:
    num_devices = torch.cuda.device_count()
    try:
        for index in range(num_devices):
            device = choose_device("cuda", index)
            assert torch.zeros(1, device="cuda").device == device == torch.device("cuda", index)
            assert torch.cuda.current_stream().device == device
    finally:
        torch.cuda.set_device(0)
    with pytest.raises(UserError, match=f"torch sees only {num_devices}"):
        choose_device("cuda", num_devices)
