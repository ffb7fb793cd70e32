"""The check of tests/gpu/test_nccl_on_cuda.py on the CPU, with gloo and a tape."""

import pytest

from tests.gpu.one_rank import check_one_rank


@pytest.mark.long
def test_a_recorded_sum_is_replayed_and_the_process_ends_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    check_one_rank("cpu", exit_limit_s=5.0)


@pytest.mark.long
def test_an_end_that_takes_too_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(AssertionError, match="had not ended"):
        check_one_rank("cpu", exit_limit_s=0.0)


@pytest.mark.long
def test_a_child_that_fails_is_found() -> None:
    with pytest.raises(AssertionError, match="ended early"):
        check_one_rank("no device")
