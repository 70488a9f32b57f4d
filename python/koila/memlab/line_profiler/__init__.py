"""The line profiler: which line needs, keeps or frees the memory."""

from .line_profiler import DEFAULT_COLUMNS, LineProfiler, RecordsDisplay
from .profile import clear_global_line_profiler, profile, profile_every, set_target_gpu

__all__ = [
    "DEFAULT_COLUMNS",
    "LineProfiler",
    "RecordsDisplay",
    "clear_global_line_profiler",
    "profile",
    "profile_every",
    "set_target_gpu",
]
