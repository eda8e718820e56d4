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
from perfmodel._commands import Engine as _Engine
from perfmodel._commands import Isl as _Isl
from perfmodel._commands import Json as _Json
from perfmodel._commands import MaxCost as _MaxCost
from perfmodel._commands import MaxPower as _MaxPower
from perfmodel._commands import MaxRacks as _MaxRacks
from perfmodel._commands import Osl as _Osl
from perfmodel._commands import budgets as _budgets
from perfmodel._commands import command as _command
from perfmodel._commands import print_json as _print_json
from perfmodel._commands import ready as _ready
from perfmodel._commands import show as _show
from perfmodel._commands import working as _working
from perfmodel._options import (
    Acceptance,
    Accepted,
    Attention,
    CacheTokens,
    Candidates,
    Classes,
    Decode,
    Dense,
    Draft,
    DraftTokens,
    Electricity,
    Ffn,
    Hit,
    Images,
    KvMemory,
    Lifetime,
    Link,
    ModelName,
    Ownership,
    Precisions,
    Prefill,
    Prices,
    Pue,
    Routing,
    Tpot,
    TraceFile,
    Ttft,
    exponent,
    is_table,
    kv_options,
    price_table,
    refuse,
    seconds,
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


@app.command()
def estimate(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Catalogue name, config.json, or a folder with one; left out with --trace.",
        ),
    ],
    chip: Annotated[
        str | None, typer.Argument(metavar="CHIP", help="Catalogue name, or a TOML file.")
    ] = None,
    tp: Annotated[int, typer.Option(help="Chips of a stage (tensor-parallel degree).")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert-parallel degree, of the TP chips.")] = 1,
    attention_dp: Annotated[
        int, typer.Option(help="Groups of the TP chips that attend to requests of their own.")
    ] = 1,
    cp: Annotated[int, typer.Option(help="Chips of a group that share each sequence's keys.")] = 1,
    regions: Annotated[
        int, typer.Option(help="Pipeline stages side by side on each chip (wafers).")
    ] = 1,
    offload: Annotated[
        float, typer.Option(help="Share of slower memories, the host's among them, that is used.")
    ] = 0.0,
    weights_first: Annotated[
        float, typer.Option(help="Share of the weights placed before keys and values.")
    ] = 1.0,
    batch: Annotated[int, typer.Option(help="Concurrent requests per replica.")] = 1,
    isl: _Isl = 4000,
    osl: _Osl = 1000,
    prefix_hit: Hit = 0.0,
    weights: Annotated[
        str | None, typer.Option(help="Format of weights: bf16, fp8, int8, int4, nvfp4, mxfp4.")
    ] = None,
    activations: Annotated[str | None, typer.Option(help="Format of activations.")] = None,
    kv: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT|paged|reserved[:TOKENS]",
            help="Format of the KV cache, and how its memory is given out (commas between).",
        ),
    ] = None,
    batching: Annotated[
        str,
        typer.Option(
            metavar="continuous|static[:SPREAD]",
            help="Requests come and go, or wait for the longest output of their batch.",
        ),
    ] = "continuous",
    classes: Classes = None,
    cache_tokens: CacheTokens = None,
    simulate: Annotated[
        int, typer.Option(metavar="REQUESTS", help="Follow so many requests, for percentiles.")
    ] = 0,
    engine: _Engine = "neutral",
    chunk: Annotated[
        int | None, typer.Option(help="Most prompt tokens in a step.", show_default="the engine's")
    ] = None,
    replicas: Annotated[int, typer.Option(help="Equal replicas.")] = 1,
    slo_ttft: Ttft = None,
    slo_tpot: Tpot = None,
    price: Annotated[
        float | None, typer.Option(metavar="USD", help="Rent of one chip and hour.")
    ] = None,
    ownership: Ownership = "rented",
    electricity: Electricity = None,
    pue: Pue = None,
    lifetime: Lifetime = None,
    routing: Routing = "uniform",
    images: Images = 0.0,
    operators: Annotated[
        bool, typer.Option("--operators", help="Open the steps down to their operators.")
    ] = False,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Tell what 1 % more of each number would do.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write sensitivity.nc, .png and .html, or the commands there."
        ),
    ] = None,
    ranges: Annotated[
        bool,
        typer.Option(
            "--ranges/--no-ranges", help="Tell how far ranges of the chip's numbers carry."
        ),
    ] = True,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION|FILE",
            help="Time a JAX function of your own on CHIP instead; or requests of a trace.",
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZES:TYPE",
            help="Argument of that function, as 8,4096:bf16 (repeat for more).",
        ),
    ] = None,
    prefill: Prefill = None,
    decode: Decode = None,
    attention: Attention = None,
    ffn: Ffn = None,
    draft: Draft = None,
    draft_tokens: DraftTokens = 4.0,
    acceptance: Acceptance = None,
    accepted_length: Accepted = None,
    draft_candidates: Candidates = 1.0,
    micro_batches: Annotated[
        int, typer.Option(help="Micro-batches that take turns between pools.")
    ] = 1,
    link: Link = None,
    export: Annotated[
        str | None,
        typer.Option(
            metavar="vllm|sglang|trtllm", help="Tell the commands that start and measure it."
        ),
    ] = None,
    assume_dense: Dense = False,
    json: _Json = False,
) -> None:
    """Tell what one design achieves and what binds it.

    Speed, throughput, memory, energy and cost of a model on chips at a plan. With pools of their
    own for prefill, attention, FFN or drafts, that of the whole system: CHIP and its options are
    then the pool of the rest. Exit status 3 where it does not fit or misses a limit.
    """
    from perfmodel import _export_command

    kv, policy = kv_options(kv)
    unknown = {
        "--images": bool(images), "--class": bool(classes), "--batching": batching != "continuous",
        "--kv reserved": policy not in ("", "paged"), "--draft-candidates": draft_candidates != 1.0,
        "--trace": trace is not None and is_table(trace),
    }  # fmt: skip
    _export_command.check(export, trace, unknown)
    if trace is not None and not is_table(trace):
        _estimate_function(context, trace, shape or [], model, json)
        return
    named = {"prefill": prefill, "decode": decode, "attention": attention, "ffn": ffn}
    if not any(named.values()) and draft is None:
        refuse("of several pools", link=(link, None), micro_batches=(micro_batches, 1))
    if draft is None:
        refuse(
            "of what --draft names", acceptance=(acceptance, None),
            accepted_length=(accepted_length, None), draft_tokens=(draft_tokens, 4.0),
            draft_candidates=(draft_candidates, 1.0),
        )  # fmt: skip
    if trace is None:
        refuse("of a trace that names its blocks (--trace FILE)", cache_tokens=(cache_tokens, None))
    if simulate < 0:
        raise InputError(f"--simulate: requests to follow, at least 1, not {simulate}")
    scheduled = (
        batching != "continuous", policy not in ("", "paged"), bool(classes), trace is not None,
        simulate > 0,
    )  # fmt: skip
    if any(named.values()) or draft is not None or any(scheduled):
        from perfmodel import _system_command

        if operators or sensitivity or (out is not None and export is None):
            raise InputError(
                "--operators, --sensitivity and --out: of one pool, one class and pages of KV only"
            )
        refuse("of one pool, one class and pages of KV only", cp=(cp, 1), images=(images, 0))
        if not any(named.values()) and "@" not in (draft or ""):
            refuse("of several pools", link=(link, None), micro_batches=(micro_batches, 1))
        if classes or trace is not None:
            why = "--class and --trace say how long requests are"
            refuse(why, isl=(isl, 4000), osl=(osl, 1000), prefix_hit=(prefix_hit, 0.0))
        made = _system_command.Asked(
            model=model, chip=chip, pools={k: v for k, v in named.items() if v is not None},
            draft=draft, draft_tokens=draft_tokens, acceptance=acceptance,
            accepted_length=accepted_length, candidates=draft_candidates,
            micro_batches=micro_batches, link=link,
            batching=batching, kv=policy, classes=classes or [], trace=trace,
            cache_tokens=cache_tokens, simulate=simulate,
            base=dict(
                tp=tp, pp=pp, ep=ep, attention_dp=attention_dp, regions=regions, offload=offload,
                weights_first=weights_first, replicas=replicas, chunk=chunk, weights=weights,
                activations=activations, kv=kv,
            ),
            assume_dense=assume_dense,
        )  # fmt: skip
        with _working("evaluating", quiet=json):
            _ready()
            found, scripts = _system_command.run(
                made, export, batch=batch, isl=isl, osl=osl, prefix_hit=prefix_hit, engine=engine,
                slo_ttft=seconds(slo_ttft, "--slo-ttft"), slo_tpot=seconds(slo_tpot, "--slo-tpot"),
                price=price, ownership=ownership, electricity=electricity, pue=pue,
                lifetime=lifetime, routing=exponent(routing),
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
    if shape:
        raise InputError("--shape: it is of the function that --trace names")
    if chip is None:
        raise InputError("missing argument 'CHIP'")
    options: dict[str, Any] = dict(
        tp=tp, pp=pp, ep=ep, attention_dp=attention_dp, cp=cp, regions=regions, offload=offload,
        weights_first=weights_first, batch=batch, chunk=chunk,
        replicas=replicas, isl=isl, osl=osl,
        prefix_hit=prefix_hit, weights=weights, activations=activations, kv=kv, engine=engine,
        slo_ttft=seconds(slo_ttft, "--slo-ttft"), slo_tpot=seconds(slo_tpot, "--slo-tpot"),
        price=price, ownership=ownership, electricity=electricity, pue=pue, lifetime=lifetime,
        routing=exponent(routing), images=images or None,
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
    passed = {
        parameter.opts[0]
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") is not None
        and context.get_parameter_source(parameter.name or "").name == "COMMANDLINE"  # pyright: ignore[reportOptionalMemberAccess]
    }
    other = sorted(passed - {"model", "--trace", "--shape", "--json"})
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


@app.command()
def frontier(
    context: typer.Context,
    model: ModelName,
    chip: Annotated[
        list[str] | None, typer.Option(help="Chip (repeat for more), a TOML file of one, or all.")
    ] = None,
    x: Annotated[str, typer.Option(help="Horizontal axis.")] = "tokens_per_second_user",
    y: Annotated[str, typer.Option(help="Vertical axis.")] = "output_tokens_per_second_chip",
    per: Annotated[
        str | None,
        typer.Option(metavar="chip|kw|usd|rack", help="What throughput on an axis is counted per."),
    ] = None,
    isl: _Isl = 4000,
    osl: _Osl = 1000,
    max_chips: Annotated[
        int | None,
        typer.Option(
            help="Chips that a plan and its replicas may fill.",
            show_default="16, or what the limits below allow",
        ),
    ] = None,
    max_power: _MaxPower = None,
    max_racks: _MaxRacks = None,
    max_cost: _MaxCost = None,
    pp: Annotated[
        list[int] | None,
        typer.Option(help="Pipeline stages to try (repeat for more).", show_default="1"),
    ] = None,
    cp: Annotated[
        list[int] | None,
        typer.Option(help="Context-parallel degrees to try (repeat).", show_default="1"),
    ] = None,
    precision: Precisions = None,
    slo_ttft: Ttft = None,
    slo_tpot: Tpot = None,
    prefix_hit: Hit = 0.0,
    engine: _Engine = "neutral",
    price: Prices = None,
    ownership: Ownership = "rented",
    electricity: Electricity = None,
    pue: Pue = None,
    lifetime: Lifetime = None,
    routing: Routing = "uniform",
    images: Images = 0.0,
    descend: Annotated[
        bool, typer.Option("--descend", help="Find the plans by gradient; compare with all.")
    ] = False,
    measured: Annotated[
        Path | None, typer.Option(metavar="RUNS.csv", help="Measured runs to draw beside.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write frontier.nc, .png and .html there.")
    ] = None,
    classes: Classes = None,
    trace: TraceFile = None,
    cache_tokens: CacheTokens = None,
    kv: KvMemory = "paged",
    prefill: Prefill = None,
    decode: Decode = None,
    attention: Attention = None,
    ffn: Ffn = None,
    draft: Draft = None,
    acceptance: Acceptance = None,
    accepted_length: Accepted = None,
    draft_candidates: Candidates = 1.0,
    link: Link = None,
    assume_dense: Dense = False,
    json: _Json = False,
) -> None:
    """Find the plans worth having, for each chip.

    Those that no other plan of the chip betters on both axes: by default throughput per chip and
    interactivity, the tokens per second that one user sees.
    """
    named = {"prefill": prefill, "decode": decode, "attention": attention, "ffn": ffn}
    if any(named.values()) or draft is not None or classes or trace or kv != "paged":
        from perfmodel import _system_command

        refuse(
            "of one pool and one class only", measured=(measured, None), pp=(pp, None),
            cp=(cp, None), images=(images, 0),
        )  # fmt: skip
        x, y = _system_command.per_axes(x, y, per)
        asked = _system_command.asked(
            model, named, draft, acceptance, accepted_length, link, classes, precision,
            assume_dense, trace, cache_tokens, kv, draft_candidates,
        )  # fmt: skip
        _system_command.show_frontier(
            context, asked, chip or [], out, json,
            isl=isl, osl=osl, max_chips=16 if max_chips is None else max_chips,
            prefix_hit=prefix_hit, engine=engine, x=x, y=y,
            descend=descend, price=price_table(price), ownership=ownership, electricity=electricity,
            pue=pue, lifetime=lifetime, slo_ttft=seconds(slo_ttft, "--slo-ttft"),
            slo_tpot=seconds(slo_tpot, "--slo-tpot"), **_budgets(max_power, max_racks, max_cost),
            routing=exponent(routing),
        )  # fmt: skip
        return
    _only_systems(acceptance, accepted_length, draft_candidates, link, cache_tokens)
    if not chip:
        raise InputError("missing option '--chip'")
    choices = {"precisions": precision, "pp": pp, "cp": cp}
    extra: dict[str, Any] = {name: given for name, given in choices.items() if given}
    extra |= {
        "slo_ttft": seconds(slo_ttft, "--slo-ttft"),
        "slo_tpot": seconds(slo_tpot, "--slo-tpot"),
        **_budgets(max_power, max_racks, max_cost),
        "routing": exponent(routing),
        "images": images or None,
    }
    from perfmodel import report

    with contextlib.ExitStack() as stack:
        drawing = None if out is None else stack.enter_context(report.Drawing())
        with _working("evaluating every plan", quiet=json):
            import perfmodel

            _ready()
            try:
                found = perfmodel.frontier(
                    perfmodel.load_model(model, assume_dense=assume_dense), chip,
                    isl=isl, osl=osl, max_chips=max_chips,
                    prefix_hit=prefix_hit, engine=engine, x=x, y=y, per=per, descend=descend,
                    price=price_table(price),
                    ownership=ownership, electricity=electricity, pue=pue, lifetime=lifetime,
                    **extra,
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


def _only_systems(
    acceptance: str | None,
    accepted_length: str | None,
    candidates: float,
    link: str | None,
    cache_tokens: str | None,
) -> None:
    """Raises for options of systems where none is asked for."""
    refuse(
        "of what --draft names", acceptance=(acceptance, None),
        accepted_length=(accepted_length, None), draft_candidates=(candidates, 1.0),
    )  # fmt: skip
    refuse("of several pools (--prefill, --decode …)", link=(link, None))
    refuse("of a trace that names its blocks (--trace FILE)", cache_tokens=(cache_tokens, None))


@app.command()
def size(
    context: typer.Context,
    model: ModelName,
    rate: Annotated[float, typer.Option(help="Requests per second that arrive.")],
    slo_ttft: Ttft = None,
    slo_tpot: Tpot = None,
    isl: _Isl = 4000,
    osl: _Osl = 1000,
    prefix_hit: Hit = 0.0,
    chip: Annotated[
        list[str] | None,
        typer.Option(
            help="Chip (repeat for more), a TOML file of one, or all.", show_default="all"
        ),
    ] = None,
    max_chips: Annotated[
        int | None, typer.Option(help="Most chips, spare ones included.", show_default="any")
    ] = None,
    max_power: _MaxPower = None,
    max_racks: _MaxRacks = None,
    max_cost: _MaxCost = None,
    headroom: Annotated[float, typer.Option(help="Capacity beyond the rate, a share of it.")] = 0.2,
    spare: Annotated[int, typer.Option(help="Replicas beyond those needed, for failures.")] = 1,
    by: Annotated[str, typer.Option(help="Smallest in: chips, usd, kw or nodes.")] = "chips",
    precision: Precisions = None,
    engine: _Engine = "neutral",
    price: Prices = None,
    routing: Routing = "uniform",
    images: Images = 0.0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write size.nc, size.json and commands there."),
    ] = None,
    export: Annotated[
        str | None,
        typer.Option(
            metavar="vllm|sglang|trtllm", help="Tell the commands of the smallest deployment."
        ),
    ] = None,
    prefill: Prefill = None,
    decode: Decode = None,
    attention: Attention = None,
    ffn: Ffn = None,
    draft: Draft = None,
    acceptance: Acceptance = None,
    accepted_length: Accepted = None,
    draft_candidates: Candidates = 1.0,
    link: Link = None,
    classes: Classes = None,
    trace: TraceFile = None,
    cache_tokens: CacheTokens = None,
    kv: KvMemory = "paged",
    assume_dense: Dense = False,
    json: _Json = False,
) -> None:
    """Find the smallest deployment that serves a request rate.

    For each chip: chips and whole nodes, power and rent, the plan of each replica, how much room it
    leaves, and what one step smaller would violate. Exit status 3 where none holds the limits.
    """
    from perfmodel import _export_command

    _export_command.check(export, None, {"--images": bool(images)})
    named = {"prefill": prefill, "decode": decode, "attention": attention, "ffn": ffn}
    if any(named.values()) or draft is not None or classes or trace or kv != "paged":
        from perfmodel import _system_command

        refuse(
            "of one pool and one class only", by=(by, "chips"), spare=(spare, 1), out=(out, None),
            images=(images, 0), export=(export, None),
        )  # fmt: skip
        asked = _system_command.asked(
            model, named, draft, acceptance, accepted_length, link, classes, precision,
            assume_dense, trace, cache_tokens, kv, draft_candidates,
        )  # fmt: skip
        _system_command.show_size(
            context, asked, chip or [], json,
            rate=rate, headroom=headroom, max_chips=max_chips, isl=isl, osl=osl,
            prefix_hit=prefix_hit, engine=engine, price=price_table(price),
            slo_ttft=seconds(slo_ttft, "--slo-ttft"), slo_tpot=seconds(slo_tpot, "--slo-tpot"),
            **_budgets(max_power, max_racks, max_cost), routing=exponent(routing),
        )  # fmt: skip
        return
    _only_systems(acceptance, accepted_length, draft_candidates, link, cache_tokens)
    extra: dict[str, Any] = {"precisions": precision} if precision else {}
    from perfmodel import _json, report

    with _working("evaluating every plan", quiet=json):
        import perfmodel

        _ready()
        network = perfmodel.load_model(model, assume_dense=assume_dense)
        try:
            found = perfmodel.size(
                network, chip or "all",
                rate=rate, isl=isl, osl=osl, prefix_hit=prefix_hit,
                slo_ttft=seconds(slo_ttft, "--slo-ttft"), slo_tpot=seconds(slo_tpot, "--slo-tpot"),
                headroom=headroom, spare=spare, by=by, max_chips=max_chips, engine=engine,
                price=price_table(price), routing=exponent(routing), images=images or None,
                **_budgets(max_power, max_racks, max_cost), **extra,
            )  # fmt: skip
            failed = None
        except Infeasible as error:
            found, failed = error.found, error
    if found is not None:
        found = found.assign_attrs(_command(context))
        made_by, smallest = found.attrs["command"], found
        named_chips = [each for each in chip or [] if each != "all"]
        scripts = None
        if failed is None:
            from perfmodel.export import of_size

            scripts = _export_command.scripts(
                export, lambda: of_size(network, named_chips, smallest, engine=engine)
            )
        files = {} if out is None else report.save_size(found, out)
        if json:
            _print_json(_json.size(found, files) | _export_command.told(scripts, out, made_by))
        else:
            report.write(report.size_table(found))
            if files:
                report.write("\n".join(f"wrote {path}" for path in files.values()))
            _export_command.show(scripts, out, made_by)
    if failed is not None:
        raise failed


@app.command()
def models(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One model in full.")] = None,
    assume_dense: Dense = False,
    json: _Json = False,
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
    json: _Json = False,
) -> None:
    """Compare published speeds of whole models on other silicon with the model's.

    The points that ship with the package: each with its source, whether a constant has seen it, and
    what is known of speculation. `gains` are ratios that serving techniques were published with:
    paged keys, prompts, attention or experts on chips of their own, hits, narrow keys.
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
    json: _Json = False,
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
