"""Python's garbage collector, kept from going through everything in the middle of decoding."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def old_objects_left_alone() -> Iterator[None]:
    """Collections inside the body look only at objects that were made in it.

    Generated tokens are objects, and every few 100,000 new ones Python goes through all there are: about a million in a
    process that has loaded and compiled a model, which takes half a second, and no step is launched meanwhile.

    Only for processes of our own: what was there before and becomes garbage is kept until the body ends. Who decodes in
    a process of theirs can call ``gc.collect()`` and ``gc.freeze()`` themselves, when all is loaded.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
