"""Start the engine, once: refuse a torch that is too old, count torch's CPU bytes from now on,
route backward through koila, read the environment. With KOILA=0 the last is all that is done."""

from . import _torch  # noqa: F401  first: it says which torch is needed
from . import _capture  # noqa: F401  the functions that C calls, and LazyTensor with them
from . import _backward, _core, _log, _progress, _switch
from ._budget import from_environment

if _switch.OFF:
    _switch.answer_on_plain_tensors()
else:
    _core.cpu_bytes_install()
    _backward.install()
from_environment()
_log.install()
_progress.from_environment()
