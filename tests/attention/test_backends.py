"""Which backend carries out paged attention."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from cortexmlx.attention import reference
from cortexmlx.attention.backends import AttentionBackend, auto_backend_name, choose_backend
from cortexmlx.errors import InvalidRequest


def test_backends_are_chosen_by_name() -> None:
    assert choose_backend("reference").describe() == "reference"
    assert choose_backend("sim").name == "sim"
    with pytest.raises(InvalidRequest, match="auto, metal, reference or sim"):
        choose_backend("cuda")


def test_a_backend_describes_itself_in_one_line_whatever_its_notes_are() -> None:
    notes = ("head_dim 18: no", "head_dim 64: it does not compile (a)\n  all\n  lines")
    backend = AttentionBackend("metal", reference.attend, lambda: notes, kernels=lambda: ("matrix", "vector"))
    assert backend.describe() == (
        "metal, matrix kernel, vector kernel; reference for head_dim 18: no; reference for head_dim 64: it does not "
        "compile (a); the whole message is in the log"
    )


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool, bool, mx.Device], None]:
    """MLX as it is on another machine: built for Metal or not, with a GPU that opens or not, and its default device."""

    def pretend(built: bool, opens: bool, default: mx.Device) -> None:
        def device_info(device: mx.Device) -> dict[str, str]:
            if not opens:
                raise RuntimeError("[metal::load_device] No Metal device available.")
            return {"device_name": "Apple M4"}

        monkeypatch.setattr(mx.metal, "is_available", lambda: built)
        monkeypatch.setattr(mx, "device_info", device_info)
        monkeypatch.setattr(mx, "default_device", lambda: default)

    return pretend


@pytest.mark.parametrize(
    ("built", "opens", "default", "name"),
    [
        (True, True, mx.gpu, "metal"),
        (True, True, mx.cpu, "reference"),
        (True, False, mx.gpu, "reference"),
        (False, False, mx.cpu, "reference"),
    ],
    ids=["a Mac", "a Mac whose app computes on the CPU", "a virtual machine without a GPU", "a CPU build"],
)
def test_auto_means_the_kernels_where_mlx_computes_on_an_apple_gpu(
    pretended: Callable[[bool, bool, mx.Device], None], built: bool, opens: bool, default: mx.Device, name: str
) -> None:
    pretended(built, opens, default)
    assert auto_backend_name() == name
    if opens:
        assert choose_backend("metal").name == "metal"
    else:
        with pytest.raises(InvalidRequest, match="no Metal device"):
            choose_backend("metal")
