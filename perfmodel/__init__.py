"""A differentiable performance model of LLM inference on any silicon.

    import perfmodel
    perfmodel.estimate("llama-3.3-70b", "h100", tp=8, batch=32, isl=4000, osl=1000)
    perfmodel.frontier("llama-3.3-70b", ["h100", "b200"], isl=4000, osl=1000)

Names are loaded when first used: importing the package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfmodel.bands import ranges
    from perfmodel.cache import enable_cache
    from perfmodel.chips import Chip, load_chip
    from perfmodel.engines import EngineEntry, load_engine
    from perfmodel.errors import Infeasible, InputError, PerfmodelError
    from perfmodel.evaluation import estimate
    from perfmodel.evaluation import operators as operator_table
    from perfmodel.exploration import frontier
    from perfmodel.formats import Precision, precision
    from perfmodel.machine import Machine
    from perfmodel.measured import overlay
    from perfmodel.models.catalogue import ModelEntry, load_model
    from perfmodel.models.transformer import Model
    from perfmodel.plan import Engine, Limits, Load, Plan
    from perfmodel.prediction import predict
    from perfmodel.sensitivities import sensitivity
    from perfmodel.serving import Estimate
    from perfmodel.sizing import size
    from perfmodel.tracing import Traced, trace

    __version__: str

_HOME = {
    "enable_cache": "cache",
    "Chip": "chips",
    "load_chip": "chips",
    "EngineEntry": "engines",
    "load_engine": "engines",
    "Infeasible": "errors",
    "InputError": "errors",
    "PerfmodelError": "errors",
    "estimate": "evaluation",
    # `perfmodel.operators` is the module of the operator types.
    "operator_table": "evaluation:operators",
    "frontier": "exploration",
    "overlay": "measured",
    "Precision": "formats",
    "precision": "formats",
    "Machine": "machine",
    "ModelEntry": "models.catalogue",
    "load_model": "models.catalogue",
    "Model": "models.transformer",
    "Engine": "plan",
    "Limits": "plan",
    "Load": "plan",
    "Plan": "plan",
    "predict": "prediction",
    "ranges": "bands",
    "sensitivity": "sensitivities",
    "Estimate": "serving",
    "size": "sizing",
    "trace": "tracing",
    "Traced": "tracing",
}

__all__ = [
    "Chip", "Engine", "EngineEntry", "Estimate", "Infeasible", "InputError", "Limits", "Load",
    "Machine", "Model", "ModelEntry", "PerfmodelError", "Plan", "Precision", "Traced",
    "__version__", "enable_cache", "estimate", "frontier", "load_chip", "load_engine", "load_model",
    "operator_table", "overlay", "precision", "predict", "ranges", "sensitivity", "size",
    "trace",
]  # fmt: skip


def _version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("perfmodel")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _HOME:
        module, _, attribute = _HOME[name].partition(":")
        value = getattr(importlib.import_module(f"perfmodel.{module}"), attribute or name)
    else:
        raise AttributeError(f"module 'perfmodel' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
