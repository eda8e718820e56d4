"""Fits the engine profiles to measured serving runs.

What is fitted is what predicts: every residual goes through `prediction.evaluate_row`. Run

    python -m perfmodel.calibrate_serving RUNS.csv --out perfmodel/engine_profiles \\
        --report docs/serving-accuracy.md

with the public table of runs to write everything again; with `--keep` instead of `--out`, the
report is of the profiles as they are. Constants are of an engine, never of a
network or a chip; a fifth of the concurrency series is held out (`_serving_runs.held_out`).
"""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from perfmodel import _serving_report as report
from perfmodel import catalog, compiled, disaggregated_report, engines, prediction
from perfmodel._calibration_files import toml_value
from perfmodel._fitting import Prior
from perfmodel._serving_runs import SEED, Runs, load

PRIORS: Mapping[str, Prior] = {
    "host_step": Prior(0.6e-3, 0.7),
    "host_sequence": Prior(15e-6, 0.7),
    "request_time": Prior(20e-3, 1.0),
    "launch_graph": Prior(2e-6, 0.7),
    "launch_eager": Prior(100e-6, 1.0),
    "host_prefill": Prior(1.5e-3, 0.7),
    "host_request": Prior(2e-3, 1.0),
    "admission_steps": Prior(2.0, 0.7),
    "quantisation": Prior(0.5, 1.5, "share"),
}
"""What is fitted of each engine, and what is believed of it beforehand."""

HUBER = 0.1
"""Log error at which the loss turns from square to linear."""

TTFT_WEIGHT = 0.4
"""Of a TTFT beside a TPOT: it scatters three times as much between repeats of a run."""

STEPS, RATE = 400, 0.03

LATER = ("qwen3.5-397b-a17b",)
"""Models that came into reach after the shipped profiles were fitted: no row of theirs was seen."""


@dataclasses.dataclass(frozen=True, eq=False)
class Fit:
    """Constants by engine, and predictions of every row [s]."""

    constants: dict[str, dict[str, float]]
    ttft: np.ndarray
    tpot: np.ndarray


def _bound(free: Array, prior: Prior) -> Array:
    return jnp.exp(free) if prior.link == "log" else jax.nn.sigmoid(free)


def _huber(error: Array) -> Array:
    size = jnp.abs(error)
    small = jnp.minimum(size, HUBER)
    return small * (size - 0.5 * small)


def fit(runs: Runs, seen: np.ndarray, steps: int = STEPS) -> Fit:
    """Returns the constants fitted to the rows `seen`, all engines together.

    Minimises Σ ρ(log TPOT error) + TTFT_WEIGHT·ρ(log TTFT error) over HUBER², with Gaussian priors
    on the scale of `PRIORS`, by Adam with a cosine schedule.
    """
    asked = runs.asked
    parts = prediction.structures(asked)
    batches = [prediction.arguments(asked, rows) for rows in parts]
    measured = {name: asked.numbers[f"{name}_ms"] * 1e-3 for name in ("ttft", "tpot")}
    weight = {"tpot": seen.astype(float), "ttft": TTFT_WEIGHT * (seen & runs.use_ttft)}
    centre = {
        name: jnp.full(len(asked.engines), prior.free(), dtype=float)
        for name, prior in PRIORS.items()
    }

    def constants(free: Mapping[str, Array]) -> dict[str, Array]:
        return {name: _bound(free[name], PRIORS[name]) for name in PRIORS}

    def batch_cost(free: Any, values: Any, which: Array, target: Any, weights: Any) -> Array:
        *rest, engine = values
        machine, model, load_, plan, formats = rest
        engine = dataclasses.replace(engine, **{k: v[which] for k, v in constants(free).items()})
        found = jax.vmap(prediction.evaluate_row)(machine, model, load_, plan, formats, engine)
        errors = {name: jnp.log(found[name]) - jnp.log(target[name]) for name in target}
        return sum(
            (jnp.sum(weights[name] * _huber(error)) for name, error in errors.items()),
            start=jnp.zeros(()),
        )

    slope = compiled.unfused(jax.value_and_grad(batch_cost))

    def prior_cost(free: Mapping[str, Array]) -> Array:
        terms = [jnp.sum(((free[n] - centre[n]) / PRIORS[n].sigma) ** 2) for n in PRIORS]
        return 0.5 * HUBER**2 * jnp.sum(jnp.stack(terms))

    prior_slope = jax.jit(jax.value_and_grad(prior_cost))
    given = []
    for rows, values in zip(parts, batches, strict=True):
        target = {name: value[rows] for name, value in measured.items()}
        weights = {name: value[rows].astype(float) for name, value in weight.items()}
        given.append(jax.device_put((values, asked.engine[rows], target, weights)))
    optimiser = optax.adam(optax.cosine_decay_schedule(RATE, steps))
    free: Any = centre
    state = optimiser.init(centre)
    update = jax.jit(optimiser.update)
    for step in range(steps):
        costs = [prior_slope(free), *(slope(free, *part) for part in given)]
        gradient = jax.tree.map(lambda *leaves: sum(leaves), *(g for _, g in costs))
        if step % 100 == 0:
            print(f"step {step}: cost {sum(float(c) for c, _ in costs):.4f}", flush=True)
        change, state = update(gradient, state)
        free = optax.apply_updates(free, change)
    found = {name: np.asarray(value, float) for name, value in constants(free).items()}
    by_engine = {
        entry.name: {name: float(value[place]) for name, value in found.items()}
        for place, entry in enumerate(asked.engines)
    }
    ttft, tpot = predict(runs, by_engine)
    return Fit(by_engine, ttft, tpot)


def predict(
    runs: Runs, constants: Mapping[str, Mapping[str, float]]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns TTFT and TPOT of every row [s] with trial constants of the engines."""
    entries = [
        dataclasses.replace(
            entry, engine=dataclasses.replace(entry.engine, **constants.get(entry.name, {}))
        )
        for entry in runs.asked.engines
    ]
    found = prediction.evaluate(dataclasses.replace(runs.asked, engines=entries))
    return found["ttft"], found["tpot"]


def transfer(runs: Runs, by: str = "model") -> dict[str, np.ndarray]:
    """Returns predictions [s] of rows whose whole model (or chip) a fit has not seen."""
    asked = runs.asked
    entries = asked.models if by == "model" else asked.chips
    places = getattr(asked, by)
    good = asked.status == ""
    found = {name: np.full(len(asked), np.nan) for name in ("ttft", "tpot")}
    for place in np.unique(places[good]):
        out = good & (places == place)
        print(f"without {entries[place].name}", flush=True)
        other = fit(runs, good & ~out)
        found["ttft"][out], found["tpot"][out] = other.ttft[out], other.tpot[out]
    return found


def write_profiles(folder: Path, runs: Runs, fitted: Fit, seen: np.ndarray, table: str) -> None:
    """Writes the constants into the profiles of a folder; what is not fitted stays as it is."""
    for place, entry in enumerate(runs.asked.engines):
        count = int(np.sum(seen & (runs.asked.engine == place)))
        tables = catalog.read_toml(folder / f"{entry.name}.toml")
        for name, prior in PRIORS.items():
            value = fitted.constants[entry.name][name]
            free = np.log(value) if prior.link == "log" else np.log(value / (1.0 - value))
            moved = abs(float(free) - prior.free()) / prior.sigma
            field = next(field for field in engines.FIELDS if field.name == name)
            tables[name] = {"value": value, "unit": field.unit, "kind": "fitted", "source": "runs"}
            if moved < 0.3:
                tables[name]["note"] = "poorly told by these rows; near its prior"
        tables["sources"]["runs"] = {
            "title": "Serving runs of InferenceX and of NVIDIA, as AIConfigurator ships them",
            "publisher": "SemiAnalysis; NVIDIA",
            "date": "2025-10 to 2026-04",
            "locator": f"{table}: {count} rows of this engine seen; series with a hash below a "
            f"fifth (seed {SEED}, perfmodel/_serving_runs.py) were not. docs/serving-accuracy.md",
        }
        (folder / f"{entry.name}.toml").write_text(_profile_text(tables), encoding="utf-8")


def _profile_text(tables: Mapping[str, Any]) -> str:
    """Returns a profile as TOML: identity, numbers in the order of the schema, sources."""

    def lines(head: str, table: Mapping[str, Any]) -> list[str]:
        def shown(value: Any) -> str:
            listed = isinstance(value, list)
            return f"[{', '.join(map(toml_value, value))}]" if listed else toml_value(value)

        return [f"[{head}]", *(f"{key} = {shown(value)}" for key, value in table.items()), ""]

    text = lines("engine", tables["engine"])
    for field in engines.FIELDS:
        if field.name in tables:
            text += lines(field.name, tables[field.name])
    for key, source in tables["sources"].items():
        text += lines(f"sources.{key}", source)
    return "\n".join(text)


def main() -> None:
    """Fits the profiles to a table of runs and writes them and a report."""
    parser = argparse.ArgumentParser(
        prog="python -m perfmodel.calibrate_serving", description=__doc__
    )
    parser.add_argument("runs", type=Path, help="the public table of serving runs")
    parser.add_argument("--out", type=Path, help="folder of the engine profiles")
    parser.add_argument("--keep", action="store_true", help="report the profiles as they are")
    parser.add_argument("--report", type=Path, help="Markdown file for the error tables")
    parser.add_argument("--transfer", action="store_true", help="also leave each model out")
    options = parser.parse_args()
    runs = load(options.runs)
    good = runs.asked.status == ""
    if options.keep == (options.out is not None):
        parser.error("one of --out and --keep is needed")
    if options.keep:
        later = np.isin([runs.asked.models[m].name for m in runs.asked.model], LATER)
        runs = dataclasses.replace(runs, held_out=runs.held_out | later)
        shipped = {e.name: {n: float(getattr(e.engine, n)) for n in PRIORS}
                   for e in runs.asked.engines}  # fmt: skip
        fitted = Fit(shipped, *predict(runs, {}))
    else:
        seen = good & ~runs.held_out
        fitted = fit(runs, seen)
        write_profiles(options.out, runs, fitted, seen, options.runs.name)
    others = transfer(runs) if options.transfer else None
    text = report.text(runs, fitted.constants, {"ttft": fitted.ttft, "tpot": fitted.tpot}, others)
    if options.report:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        old = options.report.read_text(encoding="utf-8") if options.report.exists() else ""
        options.report.write_text(disaggregated_report.kept(old, text), encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
