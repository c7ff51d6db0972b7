"""The product for few rows against torch's, in Triton's interpreter (see `test_attention_triton.py`)."""

import os
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETED:

    def test_in_the_interpreter():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

else:
    import torch

    from cowbeam.decoder.model_adapter import ModelAdapter
    from cowbeam.kernels import skinny_linear as module
    from cowbeam.kernels.skinny_linear import Variant, Workspace, skinny_linear
    from fakes import tiny_model
    from test_compiled_layers import TOLERANCE, decode_step

    SMALL = Variant(16, 16, 4, 2, 1)

    def new_workspace():
        return Workspace(torch.device("cpu"))

    def check(rows, outputs, inputs, *, dtype=torch.float32, bias=False, workspace=None, x=None):
        torch.manual_seed(rows + outputs + inputs)
        x = torch.randn(rows, inputs, dtype=dtype) if x is None else x
        weight = torch.randn(outputs, inputs, dtype=dtype)
        offset = torch.randn(outputs, dtype=dtype) if bias else None
        workspace = workspace or new_workspace()
        workspace.partial.fill_(torch.nan)  # a part that nobody wrote must not be read
        got = skinny_linear(x, weight, offset, workspace.partial, workspace.counters, SMALL)
        want = torch.nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        assert float((got.double() - want).norm() / want.norm()) < tolerance
        assert not workspace.counters.any(), "the next product would find tiles half done"
        return got

    @pytest.fixture(params=[1, 3, 7, 40])
    def programs(request, monkeypatch):
        """One piece for all, pieces that end within tiles, and one a unit."""
        monkeypatch.setattr(module, "_num_programs", lambda *_: request.param)

    @pytest.mark.parametrize("rows", [1, 3, 16, 17])
    def test_every_number_of_programs(programs, rows):
        check(rows, 64, 96)

    @pytest.mark.parametrize(("outputs", "inputs"), [(5, 3), (16, 16), (17, 33), (100, 40), (40, 100)])
    def test_sizes_that_tiles_do_not_divide(programs, outputs, inputs):
        check(4, outputs, inputs, bias=True)

    def test_half_precision():
        check(8, 64, 96, dtype=torch.bfloat16)
        check(8, 64, 96, dtype=torch.float16, bias=True)

    def test_rows_of_a_wider_tensor():
        check(6, 40, 32, x=torch.randn(6, 96)[:, 32:64])

    def test_one_workspace_serves_products_of_several_sizes():
        workspace = new_workspace()
        first = check(3, 64, 96, workspace=workspace)
        check(5, 40, 33, workspace=workspace)
        assert torch.equal(check(3, 64, 96, workspace=workspace), first), "the same sums in the same order"

    @pytest.mark.parametrize("backend", [None, "aot_eager"])
    def test_a_models_steps_are_those_of_its_own_linears(backend):
        """All Linears, the tied head among them, of more rows than the kernel takes too."""
        eager, skinny = (ModelAdapter(tiny_model("qwen2"), "torch") for _ in range(2))
        shapes = skinny.probe(2)
        skinny.fuse_linears(skinny=True)
        assert [len(group.members) for group in skinny._fused.groups] == [3, 2, 3, 2, 1, 1, 1, 1, 1]
        if backend:
            skinny.compile_layers(shapes, backend)
        for rows in (3, 1, 70):
            want, got = decode_step(eager, rows), decode_step(skinny, rows)
            assert skinny.is_compiled == (backend is not None)
            assert float((got - want).norm() / want.norm()) <= TOLERANCE
