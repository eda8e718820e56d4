"""The command `perfmodel`: thin shells over the public functions, as text or JSON.

Exit status: 0 feasible, 2 bad input (one line on standard error), 3 understood but infeasible.
Nothing heavy is imported before a command runs, so that help is quick.
"""

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from perfmodel import _chips_command, _exits
from perfmodel._commands import Grouped
from perfmodel._commands import command as _command
from perfmodel._commands import print_json as _print_json
from perfmodel._commands import ready as _ready
from perfmodel._commands import show as _show
from perfmodel._commands import working as _working
from perfmodel._options import (
    COST,
    DRAFTS,
    LIMITS,
    OUTPUT,
    PLAN,
    POOLS,
    TRAFFIC,
    Batching,
    Budgets,
    Dense,
    Engine,
    Json,
    KvMemory,
    ModelName,
    Owning,
    Pools,
    Precisions,
    Prices,
    Routing,
    ServiceLevels,
    Simulate,
    TraceFile,
    Traffic,
    exponent,
    grouped,
    is_table,
    kv_options,
    option,
    price_table,
    refuse,
    refuse_unused,
    systems_asked,
    typed,
)
from perfmodel.errors import Infeasible, InputError, shorten

app = typer.Typer(
    name="perfmodel",
    help="Performance models of language-model inference on AI hardware.",
    add_completion=False,
    # The framed help of rich takes twice as long.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(_chips_command.app)

# What is not given on the command line, group by group.
_TRAFFIC, _LEVELS, _BUDGETS = Traffic(), ServiceLevels(), Budgets()
_OWNING, _POOLS = Owning(), Pools()

# The plan of CHIP in `estimate`.
_PLAN = (
    "tp", "pp", "ep", "attention_dp", "regions", "offload", "weights_first", "replicas", "chunk",
)  # fmt: skip

# ---- Commands ----


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        import perfmodel

        typer.echo(f"perfmodel {perfmodel.__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(cls=Grouped)
@grouped
def estimate(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Catalogue name, config.json, or a folder with one; left out where a function is "
            "traced.",
        ),
    ],
    chip: Annotated[
        str | None, typer.Argument(metavar="CHIP", help="Catalogue name, or a TOML file.")
    ] = None,
    tp: Annotated[int, option(PLAN, help="Chips of a stage (tensor-parallel degree).")] = 1,
    pp: Annotated[int, option(PLAN, help="Pipeline stages.")] = 1,
    ep: Annotated[int, option(PLAN, help="Expert-parallel degree, of the TP chips.")] = 1,
    attention_dp: Annotated[
        int, option(PLAN, help="Groups of the TP chips that attend to requests of their own.")
    ] = 1,
    cp: Annotated[int, option(PLAN, help="Chips of a group that share each sequence's keys.")] = 1,
    regions: Annotated[
        int, option(PLAN, help="Pipeline stages side by side on each chip (wafers).")
    ] = 1,
    replicas: Annotated[int, option(PLAN, help="Equal replicas.")] = 1,
    batch: Annotated[int, option(PLAN, help="Concurrent requests per replica.")] = 1,
    chunk: Annotated[
        int | None,
        option(PLAN, help="Most prompt tokens in a step.", show_default="the engine's"),
    ] = None,
    weights: Annotated[
        str | None, option(PLAN, help="Format of weights: bf16, fp8, int8, int4, nvfp4, mxfp4.")
    ] = None,
    activations: Annotated[str | None, option(PLAN, help="Format of activations.")] = None,
    kv: Annotated[
        str | None,
        option(
            PLAN,
            metavar="FORMAT|paged|reserved[:TOKENS]",
            help="Format of the KV cache, and how its memory is given out (commas between).",
        ),
    ] = None,
    offload: Annotated[
        float, option(PLAN, help="Share of slower memories, the host's among them, that is used.")
    ] = 0.0,
    weights_first: Annotated[
        float, option(PLAN, help="Share of the weights placed before keys and values.")
    ] = 1.0,
    traffic: Traffic = _TRAFFIC,
    trace: Annotated[
        str | None,
        option(
            TRAFFIC,
            metavar="FILE|MODULE:FUNCTION",
            help="Requests of a trace, instead of --isl and --osl; or time a JAX function of your "
            "own on CHIP.",
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        option(
            TRAFFIC,
            metavar="SIZES:TYPE",
            help="Argument of that function, as 8,4096:bf16 (repeat for more).",
        ),
    ] = None,
    routing: Routing = "uniform",
    simulate: Simulate = 0,
    engine: Engine = "neutral",
    batching: Batching = "continuous",
    levels: ServiceLevels = _LEVELS,
    price: Annotated[
        float | None, option(COST, metavar="USD", help="Rent of one chip and hour.")
    ] = None,
    owning: Owning = _OWNING,
    pools: Pools = _POOLS,
    micro_batches: Annotated[
        int, option(POOLS, help="Micro-batches that take turns between pools.")
    ] = 1,
    draft_tokens: Annotated[float, option(DRAFTS, help="Tokens drafted in a cycle.")] = 4.0,
    operators: Annotated[
        bool, option(OUTPUT, "--operators", help="Open the steps down to their operators.")
    ] = False,
    sensitivity: Annotated[
        bool, option(OUTPUT, "--sensitivity", help="Tell what 1 % more of each number would do.")
    ] = False,
    ranges: Annotated[
        bool,
        option(
            OUTPUT,
            "--ranges/--no-ranges",
            help="Tell how far ranges of the chip's numbers carry.",
        ),
    ] = True,
    export: Annotated[
        str | None,
        option(
            OUTPUT,
            metavar="vllm|sglang|trtllm",
            help="Tell the commands that start and measure it.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        option(
            OUTPUT,
            metavar="DIR",
            help="Write sensitivity.nc, .png and .html, or the commands there.",
        ),
    ] = None,
    assume_dense: Dense = False,
    json: Json = False,
) -> None:
    """Tell what one design achieves and what binds it.

    Speed, throughput, memory, energy and cost of a model on chips at a plan. With pools of their
    own for prefill, attention, FFN or drafts, that of the whole system: CHIP and its options are
    then the pool of the rest. Exit status 3 where it does not fit or misses a limit.
    """
    from perfmodel import _export_command

    _export_command.check(export, trace)
    if trace is not None and not is_table(trace):
        _estimate_function(context, trace, shape or [], model, json)
        return
    if shape:
        raise InputError("--shape: it is of the function that --trace names")
    kv, policy = kv_options(kv)
    refuse_unused(context, pools, traffic, trace)
    if simulate < 0:
        raise InputError(f"--simulate: requests to follow, at least 1, not {simulate}")
    if systems_asked(pools, traffic, trace, batching, policy) or simulate:
        from perfmodel import _system_command

        if operators or sensitivity or (out is not None and export is None):
            raise InputError(
                "--operators, --sensitivity and --out: of one pool, one class and pages of KV only"
            )
        why = "of one pool, one class and pages of KV only"
        refuse(context, why, "cp", "images", "ranges")
        if chip is None and not pools.named():
            raise InputError("missing argument 'CHIP', or a pool such as '--decode'")
        if chip is None:
            why = "of CHIP; a pool's own is written CHIP:tp=…,replicas=…"
            refuse(context, why, *_PLAN)
        made = _system_command.Asked(
            model, pools, traffic,
            dict(
                tp=tp, pp=pp, ep=ep, attention_dp=attention_dp, regions=regions, offload=offload,
                weights_first=weights_first, replicas=replicas, chunk=chunk, weights=weights,
                activations=activations, kv=kv,
            ),
            chip=chip, trace=trace, batching=batching, kv=policy, draft_tokens=draft_tokens,
            micro_batches=micro_batches, simulate=simulate, assume_dense=assume_dense,
        )  # fmt: skip
        with _working("evaluating", quiet=json):
            _ready()
            found, scripts = _system_command.run(
                made, export, batch=batch, engine=engine, price=price, routing=exponent(routing),
                **traffic.alike(), **levels.seconds(), **owning.terms(),
            )  # fmt: skip
            found = found.assign_attrs(_command(context))
        made_by = found.attrs["command"]
        if json:
            from perfmodel import _json

            _print_json(_json.system(found) | _export_command.told(scripts, out, made_by))
        else:
            from perfmodel import report

            report.write(report.system_table(found))
            _export_command.show(scripts, out, made_by)
        if not bool(found["feasible"]):
            raise Infeasible(str(found["binding"].item()))
        return
    if chip is None:
        raise InputError("missing argument 'CHIP'")
    options: dict[str, Any] = dict(
        tp=tp, pp=pp, ep=ep, attention_dp=attention_dp, cp=cp, regions=regions, offload=offload,
        weights_first=weights_first, batch=batch, chunk=chunk, replicas=replicas,
        weights=weights, activations=activations, kv=kv, engine=engine, price=price,
        routing=exponent(routing), images=traffic.images or None,
        **traffic.alike(), **levels.seconds(), **owning.terms(),
    )  # fmt: skip
    if out is not None and not sensitivity and export is None:
        raise InputError("--out: there is something to write with --sensitivity or --export")
    with _working("evaluating", quiet=json):
        import perfmodel
        from perfmodel import report
        from perfmodel.export import of_pool

        _ready()
        network = perfmodel.load_model(model, assume_dense=assume_dense)
        found = perfmodel.estimate(network, chip, **options).assign_attrs(_command(context))
        # The parts of a token's time are the operators', so the table opens them as well.
        opened = None
        if operators or not json:
            opened = perfmodel.operator_table(network, chip, **options)
        spans = perfmodel.ranges(network, chip, **options) if ranges else None
        moved, files = None, {}
        if sensitivity:
            moved = perfmodel.sensitivity(network, chip, **options).assign_attrs(_command(context))
            if out is not None and bool(moved["elasticity"].notnull().any()):
                files = report.save_sensitivity(moved, out)
        scripts = _export_command.scripts(
            export,
            lambda: of_pool(
                network, chip, found, engine=engine, weights=weights, activations=activations, kv=kv
            ),
        )
    made_by = found.attrs["command"]
    if json:
        from perfmodel import _json

        exported = _export_command.told(scripts, out, made_by)
        _print_json(_json.estimate(found, opened, moved, files, spans) | exported)
    else:
        report.write(report.estimate_table(found, opened, spans))
        if operators and opened is not None:
            report.write(report.operators_table(opened))
        if moved is not None:
            report.write(report.sensitivity_table(moved))
        if files:
            report.write("\n".join(f"wrote {path}" for path in files.values()))
        _export_command.show(scripts, out, made_by)
    if not bool(found["feasible"]):
        raise Infeasible(f"{found['binding'].item()}: {found['advice'].item()}")


def _estimate_function(
    context: typer.Context, name: str, shapes: list[str], chip: str, json: bool
) -> None:
    """Tells the time of a traced function on a chip, which is the only argument then."""
    other = sorted(set(typed(context).values()) - {"model", "--trace", "--shape", "--json"})
    if other:
        said = "one CHIP and no MODEL" if "chip" in other else f"no {other[0]}"
        raise InputError(f"--trace: a function takes {said}")
    with _working("tracing", quiet=json):
        import perfmodel
        from perfmodel import _targets, report

        _ready()
        entry = perfmodel.load_chip(chip)
        function, arguments = _targets.call(name, shapes)
        found = perfmodel.trace(function, *arguments).on(entry)
        found = found.assign_attrs(_command(context), function=name)
    if json:
        from perfmodel import _json

        _print_json(_json.traced(found))
    else:
        report.write(report.traced_table(found))
    if not bool(found["feasible"]):
        need = sum(float(found[f"{part}_bytes"]) for part in ("parameter", "input", "output"))
        have = float(found["memory_capacity"])
        raise Infeasible(
            f"memory: parameters, arguments and results take {need / 1e9:.4g} GB, "
            f"{int(found['ranks'])} × {have / 1e9:.4g} GB are there"
        )


@app.command(cls=Grouped)
@grouped
def frontier(
    context: typer.Context,
    model: ModelName,
    chip: Annotated[
        list[str] | None,
        option(PLAN, help="Chip (repeat for more), a TOML file of one, or all."),
    ] = None,
    pp: Annotated[
        list[int] | None,
        option(PLAN, help="Pipeline stages to try (repeat for more).", show_default="1"),
    ] = None,
    cp: Annotated[
        list[int] | None,
        option(PLAN, help="Context-parallel degrees to try (repeat).", show_default="1"),
    ] = None,
    precision: Precisions = None,
    traffic: Traffic = _TRAFFIC,
    trace: TraceFile = None,
    routing: Routing = "uniform",
    engine: Engine = "neutral",
    batching: Batching = "continuous",
    kv: KvMemory = "paged",
    levels: ServiceLevels = _LEVELS,
    max_chips: Annotated[
        int | None,
        option(
            LIMITS,
            help="Chips that a plan and its replicas may fill.",
            show_default="16, or what the limits below allow",
        ),
    ] = None,
    budgets: Budgets = _BUDGETS,
    price: Prices = None,
    owning: Owning = _OWNING,
    pools: Pools = _POOLS,
    x: Annotated[str, option(OUTPUT, help="Horizontal axis.")] = "tokens_per_second_user",
    y: Annotated[str, option(OUTPUT, help="Vertical axis.")] = "output_tokens_per_second_chip",
    per: Annotated[
        str | None,
        option(
            OUTPUT,
            metavar="chip|kw|usd|rack",
            help="What throughput on an axis is counted per.",
        ),
    ] = None,
    descend: Annotated[
        bool, option(OUTPUT, "--descend", help="Find the plans by gradient; compare with all.")
    ] = False,
    measured: Annotated[
        Path | None, option(OUTPUT, metavar="RUNS.csv", help="Measured runs to draw beside.")
    ] = None,
    out: Annotated[
        Path | None, option(OUTPUT, metavar="DIR", help="Write frontier.nc, .png and .html there.")
    ] = None,
    assume_dense: Dense = False,
    json: Json = False,
) -> None:
    """Find the plans worth having, for each chip.

    Those that no other plan of the chip betters on both axes: by default throughput per chip and
    interactivity, the tokens per second that one user sees.
    """
    refuse_unused(context, pools, traffic, trace)
    asked_for: dict[str, Any] = dict(
        engine=engine, price=price_table(price), routing=exponent(routing), descend=descend,
        **traffic.alike(), **owning.terms(), **levels.seconds(), **budgets.checked(),
    )  # fmt: skip
    if systems_asked(pools, traffic, trace, batching, kv):
        from perfmodel import _system_command

        refuse(context, "of one pool and one class only", "measured", "pp", "cp", "images")
        x, y = _system_command.per_axes(x, y, per)
        asked = _system_command.Asked(
            model, pools, traffic, _system_command.formats(precision), trace=trace,
            batching=batching, kv=kv, searched=True, assume_dense=assume_dense,
        )  # fmt: skip
        most = 16 if max_chips is None else max_chips
        _system_command.show_frontier(
            context, asked, chip or [], out, json, max_chips=most, x=x, y=y, **asked_for
        )
        return
    if not chip:
        raise InputError("missing option '--chip'")
    choices = {"precisions": precision, "pp": pp, "cp": cp}
    extra: dict[str, Any] = {name: given for name, given in choices.items() if given}
    from perfmodel import report

    with contextlib.ExitStack() as stack:
        drawing = None if out is None else stack.enter_context(report.Drawing())
        with _working("evaluating every plan", quiet=json):
            import perfmodel

            _ready()
            try:
                found = perfmodel.frontier(
                    perfmodel.load_model(model, assume_dense=assume_dense), chip,
                    max_chips=max_chips, x=x, y=y, per=per, images=traffic.images or None,
                    **asked_for, **extra,
                ).assign_attrs(_command(context))  # fmt: skip
            except Infeasible as error:
                if json and error.found is not None:
                    from perfmodel import _json

                    _print_json(_json.frontier(error.found.assign_attrs(_command(context))))
                raise
            runs = None if measured is None else perfmodel.overlay(measured, found)
        files: dict[str, Path] = {}
        if out is not None:
            with _working("drawing", quiet=json):
                files = report.save_frontier(found, out, runs, drawing)
    if json:
        from perfmodel import _json

        _print_json(_json.frontier(found, runs, files))
        return
    # Of every chip at once, first of all which are worth a closer look.
    whole = "all" in chip and (x, y) == report.OVERVIEW_AXES
    report.write(report.overview_table(found) if whole else report.frontier_table(found))
    if runs is not None:
        report.write(report.overlay_text(runs))
    if files:
        report.write("\n".join(f"wrote {path}" for path in files.values()))


@app.command(cls=Grouped)
@grouped
def size(
    context: typer.Context,
    model: ModelName,
    rate: Annotated[float, option(TRAFFIC, help="Requests per second that arrive.")],
    traffic: Traffic = _TRAFFIC,
    trace: TraceFile = None,
    routing: Routing = "uniform",
    simulate: Simulate = 0,
    chip: Annotated[
        list[str] | None,
        option(
            PLAN,
            help="Chip (repeat for more), a TOML file of one, or all.",
            show_default="all; none beside several pools",
        ),
    ] = None,
    precision: Precisions = None,
    engine: Engine = "neutral",
    batching: Batching = "continuous",
    kv: KvMemory = "paged",
    levels: ServiceLevels = _LEVELS,
    max_chips: Annotated[
        int | None,
        option(LIMITS, help="Most chips, spare ones included.", show_default="any"),
    ] = None,
    budgets: Budgets = _BUDGETS,
    headroom: Annotated[
        float, option(LIMITS, help="Capacity beyond the rate, a share of it.")
    ] = 0.2,
    spare: Annotated[int, option(LIMITS, help="Replicas beyond those needed, for failures.")] = 1,
    by: Annotated[str, option(LIMITS, help="Smallest in: chips, usd, kw or nodes.")] = "chips",
    price: Prices = None,
    pools: Pools = _POOLS,
    out: Annotated[
        Path | None, option(OUTPUT, metavar="DIR", help="Write size.nc and size.json there.")
    ] = None,
    assume_dense: Dense = False,
    json: Json = False,
) -> None:
    """Find the smallest deployment that serves a request rate.

    For each chip: chips and whole nodes, power and rent, the plan of each replica, how much room it
    leaves, and what one step smaller would violate. Exit status 3 where none holds the limits.
    """
    refuse_unused(context, pools, traffic, trace)
    asked_for: dict[str, Any] = dict(
        rate=rate, headroom=headroom, max_chips=max_chips, engine=engine, price=price_table(price),
        routing=exponent(routing), **traffic.alike(), **levels.seconds(), **budgets.checked(),
    )  # fmt: skip
    if simulate < 0:
        raise InputError(f"--simulate: requests to follow, at least 1, not {simulate}")
    if systems_asked(pools, traffic, trace, batching, kv) or simulate:
        from perfmodel import _system_command

        refuse(context, "of one pool and one class only", "by", "spare", "out", "images")
        asked = _system_command.Asked(
            model, pools, traffic, _system_command.formats(precision), trace=trace,
            batching=batching, kv=kv, searched=True, simulate=simulate, assume_dense=assume_dense,
        )  # fmt: skip
        # One pool is tried of every chip, as where all requests are alike.
        chips = chip or ([] if pools.several() else ["all"])
        _system_command.show_size(context, asked, chips, json, **asked_for)
        return
    extra: dict[str, Any] = {"precisions": precision} if precision else {}
    from perfmodel import _json, report

    with _working("evaluating every plan", quiet=json):
        import perfmodel

        _ready()
        try:
            found = perfmodel.size(
                perfmodel.load_model(model, assume_dense=assume_dense), chip or "all",
                spare=spare, by=by, images=traffic.images or None, **asked_for, **extra,
            )  # fmt: skip
            failed = None
        except Infeasible as error:
            found, failed = error.found, error
    if found is not None:
        found = found.assign_attrs(_command(context))
        files = {} if out is None else report.save_size(found, out)
        if json:
            _print_json(_json.size(found, files))
        else:
            report.write(report.size_table(found))
            if files:
                report.write("\n".join(f"wrote {path}" for path in files.values()))
    if failed is not None:
        raise failed


@app.command()
def models(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One model in full.")] = None,
    assume_dense: Dense = False,
    json: Json = False,
) -> None:
    """List models, or one in full."""
    from perfmodel import _listings

    found = _listings.models() if name is None else _listings.model(name, assume_dense)
    _show(found, json)


@app.command()
def validate(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[FAMILY|gains]", help="Points of one chip family, or gains."),
    ] = None,
    json: Json = False,
) -> None:
    """Compare published speeds of whole models on other silicon with the model's.

    The points that ship with the package: each with its source, whether a constant has seen it, and
    what is known of speculation. `gains` are ratios that serving techniques were published with:
    paged keys, chunks of prompts, prompts, attention or experts on chips of their own, hits, narrow
    keys. Both sides of each are evaluated, some request by request: about a minute.
    """
    with _working("evaluating every point", quiet=json):
        _ready()
        from perfmodel import _listings

        found = _listings.points(name)
    _show(found, json)


@app.command()
def predict(
    runs: Annotated[
        Path | None, typer.Argument(metavar="[RUNS.csv]", help="Deployments, one a row.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="OUT.csv", help="Write rows and predictions there.")
    ] = None,
    operators: Annotated[
        Path | None,
        typer.Option(metavar="TABLE", help="Kernels instead of deployments; CSV or Parquet."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Engine profile of every row.", show_default="that of its engine column"),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="A config.json, or a folder with one, that rows name by its name (repeat).",
        ),
    ] = None,
    assume_dense: Dense = False,
    routing: Routing = "uniform",
    json: Json = False,
) -> None:
    """Predict every row of a table, and compare with what it measured.

    Deployments need model, chip, tp, concurrency, isl and osl; kernels are in the form of the
    public operator tables. Rows that cannot be predicted say why in their status.
    """
    if (runs is None) == (operators is None):
        raise InputError("predict: a table of deployments, or one of kernels after --operators")
    if operators is not None:
        given = {"--engine": engine, "--model": model, "--routing": exponent(routing)}
        wrong = next((name for name, value in given.items() if value), None)
        if wrong is not None:
            raise InputError(f"{wrong}: kernels have no {wrong.removeprefix('--')} of their own")
    if assume_dense and not model:
        raise InputError("--assume-dense: networks of the catalogue are understood; see --model")
    with _working("predicting", quiet=json):
        _ready()
        if runs is not None:
            from perfmodel.models.catalogue import load_model
            from perfmodel.prediction import predict_all

            own = [load_model(path, assume_dense=assume_dense) for path in model or []]
            found = predict_all(runs, engine, own, exponent(routing))
        else:
            from perfmodel.kernel_tables import predict_kernels

            found = predict_kernels(operators or "")
        if out is not None:
            _write_table(found.frame, out)
    if json:
        _print_json(found.told())
        return
    from perfmodel import report

    report.write(report.predictions_table(found))
    if out is not None:
        report.write(f"wrote {out}")


def _write_table(frame: Any, path: Path) -> None:
    """Writes a frame as Parquet where the name says so, else as CSV."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() in (".parquet", ".pq"):
            frame.to_parquet(path, index=False)
        else:
            frame.to_csv(path, index=False)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{shorten(path, 120)}: cannot be written ({reason})") from None


@app.command()
def study(
    name: Annotated[str, typer.Argument(metavar="NAME|list|all", help="A study's name.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where results go.", show_default="out/NAME"),
    ] = None,
) -> None:
    """Run a study; `list` names them."""
    from perfmodel import report, studies

    known = studies.names()
    if name == "list":
        width = max(map(len, known))
        report.write("\n".join(f"{n:<{width}}  {studies.load(n).TITLE}" for n in known))
        return
    for each in known if name == "all" else [studies.resolve(name)]:
        chosen = studies.load(each)
        # The folders of several studies lie side by side.
        base = Path("out") if out is None else out
        folder = base / each if out is None or name == "all" else base
        with _working(chosen.TITLE):
            _ready()
            found = chosen.run(folder)
        report.write(chosen.summary(found))
        report.write("\n".join(f"wrote {path}" for path in sorted(folder.glob(f"{each}.*"))))


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    import warnings

    given = sys.argv[1:] if arguments is None else arguments
    with warnings.catch_warnings():
        warnings.showwarning = _exits.warn
        if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
            return _exits.fail("standard output is closed", 1)
        return _exits.run(
            lambda: app(args=given, prog_name="perfmodel", standalone_mode=False, obj=given)
        )
