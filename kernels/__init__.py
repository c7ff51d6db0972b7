"""Triton kernels and their plain-torch twins. This file imports nothing, on purpose.

Hugging Face publishes a package named ``kernels`` and transformers probes for it. With this repository's root on
``sys.path`` (``python -c``, ``python -m``, a notebook) the probe finds this folder instead. Imported under that
top-level name, the module gives way to the published package where one is installed, and else stays an empty module
whose version every release of transformers refuses.
"""

if __name__ == "kernels":
    import os as _os
    import sys as _sys
    from importlib.machinery import PathFinder as _PathFinder
    from importlib.util import module_from_spec as _module_from_spec

    _root = _os.path.dirname(_os.path.dirname(_os.path.realpath(__file__)))
    _elsewhere = [path for path in _sys.path if _os.path.realpath(path or _os.getcwd()) != _root]
    _spec = _PathFinder.find_spec("kernels", _elsewhere)
    if _spec is not None and _spec.loader is not None:
        _sys.modules["kernels"] = _published = _module_from_spec(_spec)
        _spec.loader.exec_module(_published)
    else:
        __version__ = "0.0.0"
