"""One thread for torch, set before it is loaded.

The tests' matrices are tiny, and a machine that runs several test processes (or anything else) beside each other makes
threads that wait for their fellows ten times slower than one thread alone.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


@pytest.fixture(autouse=True, scope="session")
def _paths_of_choice() -> None:
    """``COWBEAM_TEST_LOOKAHEAD=1`` runs the tests with steps in flight, as on CUDA.

    On CUDA the hundreds of tiny models are not compiled, which takes seconds each; test_compiled_layers does it.
    """
    if os.environ.get("COWBEAM_TEST_LOOKAHEAD") == "1":
        from cowbeam.decoder.engine import Engine

        Engine.__init__.__defaults__ = (True,)
    if os.environ.get("COWBEAM_TEST_DEVICE") == "cuda":
        from cowbeam.decoder import Decoder, attach

        Decoder.__init__.__kwdefaults__["compile"] = False
        attach.__kwdefaults__["compile"] = False


@pytest.fixture(scope="module")
def demo():
    """The demo on the default model: its address, and its sessions."""
    from ui_server import running_demo

    with running_demo() as (url, sessions):
        yield url, sessions


@pytest.fixture(scope="module")
def browser():
    from ui_server import running_browser

    with running_browser() as browser:
        yield browser


@pytest.fixture
def visitor(demo, browser):
    """A tab on the demo, which must end without an error and without a request to an outside host."""
    from ui_server import Visitor

    visitor = Visitor(browser, demo[0])
    yield visitor
    visitor.close()
