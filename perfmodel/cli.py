"""The command `perfmodel`: thin shells over the public functions, as text or JSON.

Exit status: 0 feasible, 2 bad input (one line on standard error), 3 understood but infeasible.
Nothing heavy is imported before a command runs, so that help is quick.
"""

import contextlib
import difflib
import errno
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from perfmodel.errors import Infeasible, InputError, shorten

_BAD_INPUT, _INFEASIBLE, _INTERRUPTED, _PIPE_CLOSED = 2, 3, 130, 141
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

app = typer.Typer(
    name="perfmodel",
    help="Performance models of language-model inference on AI hardware.",
    add_completion=False,
    # The framed help of rich takes twice as long.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# ---- Options that commands share ----

_ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="Catalogue name, config.json, or a folder with one.")
]
_Dense = Annotated[
    bool,
    typer.Option(
        "--assume-dense", help="Read a config.json that is not understood as a dense decoder."
    ),
]
_Isl = Annotated[int, typer.Option(help="Prompt tokens.")]
_Osl = Annotated[int, typer.Option(help="Output tokens.")]
_Hit = Annotated[float, typer.Option(help="Share of the prompt already cached, 0 to below 1.")]
_Engine = Annotated[str, typer.Option(help="Engine profile, or a TOML file of one.")]
_Ttft = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Longest time to first token: 2s, 500ms, or seconds."),
]
_Tpot = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Longest time per output token: 30ms, 0.03s, or seconds."),
]
_Precisions = Annotated[
    list[str] | None,
    typer.Option(
        help="Format, or weights/activations/kv (repeat for more).",
        show_default="bf16 and fp8",
    ),
]
_Prices = Annotated[
    list[str] | None,
    typer.Option(metavar="[CHIP=]USD", help="Rent of one chip and hour (repeat for more)."),
]
_Ownership = Annotated[
    str,
    typer.Option(
        metavar="rented|list|cost",
        help="Rent, or owned at list price or at the estimated cost of making the chip.",
    ),
]
_Electricity = Annotated[
    float | None, typer.Option(metavar="USD", help="Price of a kWh, for owned chips.")
]
_Pue = Annotated[float | None, typer.Option(help="Power usage effectiveness of the site.")]
_Lifetime = Annotated[
    float | None, typer.Option(metavar="YEARS", help="Over which an owned chip is paid off.")
]
_Routing = Annotated[
    str,
    typer.Option(
        metavar="uniform|power:EXPONENT",
        help="How tokens fall on experts: evenly, or by a power law (docs/routing.md).",
    ),
]
_POOL = "CHIP[:tp=…,replicas=…]"
_Prefill = Annotated[str | None, typer.Option(metavar=_POOL, help="Pool that computes prompts.")]
_Decode = Annotated[
    str | None, typer.Option(metavar=_POOL, help="Pool that decodes (attention and FFN).")
]
_Attention = Annotated[
    str | None, typer.Option(metavar=_POOL, help="Pool of attention while decoding.")
]
_Ffn = Annotated[
    str | None, typer.Option(metavar=_POOL, help="Pool of feed-forward layers while decoding.")
]
_Draft = Annotated[
    str | None,
    typer.Option(metavar="MODEL[@CHIP:…]", help="Draft model, and its pool (else where decoded)."),
]
_DraftTokens = Annotated[float, typer.Option(help="Tokens drafted in a cycle.")]
_Acceptance = Annotated[
    str | None, typer.Option(metavar="RATE[,RATE…]", help="Share of drafts accepted, by position.")
]
_Accepted = Annotated[
    str | None,
    typer.Option(metavar="LENGTH[,…]", help="Mean tokens of a cycle, or those of 1, 2, … drafts."),
]
_Link = Annotated[
    str | None,
    typer.Option(
        metavar="GB/s",
        help="Bandwidth between pools, inf for an ideal one.",
        show_default="the chips' ports",
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, in SI units, and nothing else.")]


def _time(text: str | None, option: str) -> float | None:
    """Returns seconds from `2s`, `500ms`, `80us` or a plain number of seconds."""
    if text is None:
        return None
    known = {"ms": 1e-3, "us": 1e-6, "µs": 1e-6, "s": 1.0}
    words = text.strip().lower()
    unit = next((unit for unit in known if words.endswith(unit)), "")
    try:
        return float(words.removesuffix(unit)) * known.get(unit, 1.0)
    except ValueError:
        raise InputError(
            f"{option}: a time is needed (2s, 500ms, or plain seconds), not '{shorten(text)}'"
        ) from None


def _exponent(text: str) -> float | None:
    """Returns the exponent of routing from `power:1.2`, None from `uniform`."""
    kind, colon, number = text.strip().lower().partition(":")
    if kind == "uniform" and not colon:
        return None
    with contextlib.suppress(ValueError):
        if kind == "power":
            return float(number)
    raise InputError(
        f"--routing: 'uniform' or 'power:EXPONENT' is needed (nearest: power:1.2), "
        f"not '{shorten(text)}'"
    )


def _prices(given: list[str] | None) -> "float | dict[str, float] | None":
    """Returns prices from `2.5` for every chip, or `h100=2.5` for one."""
    if not given:
        return None
    from perfmodel.chips import load_chip

    table: dict[str, float] = {}
    for text in given:
        name, _, amount = text.rpartition("=")
        try:
            dollars = float(amount)
        except ValueError:
            raise InputError(
                f"--price: dollars per chip and hour are needed (2.5, or h100=2.5), "
                f"not '{shorten(text)}'"
            ) from None
        if "=" in text and not name.strip():
            raise InputError(f"--price: a chip's name is needed before '=' in '{shorten(text)}'")
        if not name and len(given) > 1:
            raise InputError("--price: name a chip in each (h100=2.5) where there are several")
        if not name:
            return dollars
        chip = load_chip(name).name
        if chip in table:
            raise InputError(f"--price: {chip} is given more than once")
        table[chip] = dollars
    return table


def _print_json(value: Any) -> None:
    from perfmodel import _json

    sys.stdout.write(_json.text(value) + "\n")


def _working(what: str, quiet: bool = False) -> Any:
    """Returns a context that says on a terminal what is being done."""
    if quiet or not sys.stderr.isatty():
        return contextlib.nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(what, spinner_style="")


def _command(context: typer.Context) -> dict[str, str]:
    """Returns the command line, as an attribute of what it makes."""
    return {"command": shorten(shlex.join(["perfmodel", *context.obj]), 4000)}


def _ready() -> None:
    import perfmodel

    perfmodel.enable_cache()


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
    prefix_hit: _Hit = 0.0,
    weights: Annotated[
        str | None, typer.Option(help="Format of weights: bf16, fp8, int8, int4, nvfp4, mxfp4.")
    ] = None,
    activations: Annotated[str | None, typer.Option(help="Format of activations.")] = None,
    kv: Annotated[str | None, typer.Option(help="Format of the KV cache.")] = None,
    engine: _Engine = "neutral",
    chunk: Annotated[
        int | None, typer.Option(help="Most prompt tokens in a step.", show_default="the engine's")
    ] = None,
    replicas: Annotated[int, typer.Option(help="Equal replicas.")] = 1,
    slo_ttft: _Ttft = None,
    slo_tpot: _Tpot = None,
    price: Annotated[
        float | None, typer.Option(metavar="USD", help="Rent of one chip and hour.")
    ] = None,
    ownership: _Ownership = "rented",
    electricity: _Electricity = None,
    pue: _Pue = None,
    lifetime: _Lifetime = None,
    routing: _Routing = "uniform",
    operators: Annotated[
        bool, typer.Option("--operators", help="Open the steps down to their operators.")
    ] = False,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Tell what 1 % more of each number would do.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write sensitivity.nc, .png and .html there."),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Time a JAX function of your own on CHIP instead."
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZES:TYPE",
            help="Argument of that function, as 8,4096:bf16 (repeat for more).",
        ),
    ] = None,
    prefill: _Prefill = None,
    decode: _Decode = None,
    attention: _Attention = None,
    ffn: _Ffn = None,
    draft: _Draft = None,
    draft_tokens: _DraftTokens = 4.0,
    acceptance: _Acceptance = None,
    accepted_length: _Accepted = None,
    micro_batches: Annotated[
        int, typer.Option(help="Micro-batches that take turns between pools.")
    ] = 1,
    link: _Link = None,
    assume_dense: _Dense = False,
    json: _Json = False,
) -> None:
    """Tell what one design achieves and what binds it.

    Speed, throughput, memory, energy and cost of a model on chips at a plan. With pools of their
    own for prefill, attention, FFN or drafts, that of the whole system: CHIP and its options are
    then the pool of the rest. Exit status 3 where it does not fit or misses a limit.
    """
    named = {"prefill": prefill, "decode": decode, "attention": attention, "ffn": ffn}
    if any(named.values()) or draft is not None:
        from perfmodel import _system_command

        if operators or sensitivity or out is not None or trace is not None:
            raise InputError(
                "--operators, --sensitivity, --out and --trace: of one pool only, not of several"
            )
        made = _system_command.Asked(
            model=model, chip=chip, pools={k: v for k, v in named.items() if v is not None},
            draft=draft, draft_tokens=draft_tokens, acceptance=acceptance,
            accepted_length=accepted_length, micro_batches=micro_batches, link=link,
            base=dict(tp=tp, pp=pp, ep=ep, attention_dp=attention_dp, regions=regions,
                      replicas=replicas, chunk=chunk, weights=weights, activations=activations,
                      kv=kv),
            assume_dense=assume_dense,
        )  # fmt: skip
        with _working("evaluating", quiet=json):
            _ready()
            found = _system_command.run(
                made, batch=batch, isl=isl, osl=osl, prefix_hit=prefix_hit, engine=engine,
                slo_ttft=_time(slo_ttft, "--slo-ttft"), slo_tpot=_time(slo_tpot, "--slo-tpot"),
                price=price, ownership=ownership, electricity=electricity, pue=pue,
                lifetime=lifetime, routing=_exponent(routing),
            ).assign_attrs(_command(context))  # fmt: skip
        if json:
            from perfmodel import _json

            _print_json(_json.system(found))
        else:
            from perfmodel import report

            report.write(report.system_table(found))
        if not bool(found["feasible"]):
            raise Infeasible(str(found["binding"].item()))
        return
    if trace is not None:
        _estimate_function(context, trace, shape or [], model, json)
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
        slo_ttft=_time(slo_ttft, "--slo-ttft"), slo_tpot=_time(slo_tpot, "--slo-tpot"),
        price=price, ownership=ownership, electricity=electricity, pue=pue, lifetime=lifetime,
        routing=_exponent(routing),
    )  # fmt: skip
    if out is not None and not sensitivity:
        raise InputError("--out: there is something to write with --sensitivity only")
    with _working("evaluating", quiet=json):
        import perfmodel
        from perfmodel import report

        _ready()
        network = perfmodel.load_model(model, assume_dense=assume_dense)
        found = perfmodel.estimate(network, chip, **options).assign_attrs(_command(context))
        # The parts of a token's time are the operators', so the table opens them as well.
        opened = None
        if operators or not json:
            opened = perfmodel.operator_table(network, chip, **options)
        moved, files = None, {}
        if sensitivity:
            moved = perfmodel.sensitivity(network, chip, **options).assign_attrs(_command(context))
            if out is not None and bool(moved["elasticity"].notnull().any()):
                files = report.save_sensitivity(moved, out)
    if json:
        from perfmodel import _json

        _print_json(_json.estimate(found, opened, moved, files))
    else:
        report.write(report.estimate_table(found, opened))
        if operators and opened is not None:
            report.write(report.operators_table(opened))
        if moved is not None:
            report.write(report.sensitivity_table(moved))
        if files:
            report.write("\n".join(f"wrote {path}" for path in files.values()))
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
    model: _ModelName,
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
        int, typer.Option(help="Chips that a plan and its replicas may fill.")
    ] = 16,
    pp: Annotated[
        list[int] | None,
        typer.Option(help="Pipeline stages to try (repeat for more).", show_default="1"),
    ] = None,
    cp: Annotated[
        list[int] | None,
        typer.Option(help="Context-parallel degrees to try (repeat).", show_default="1"),
    ] = None,
    precision: _Precisions = None,
    slo_ttft: _Ttft = None,
    slo_tpot: _Tpot = None,
    prefix_hit: _Hit = 0.0,
    engine: _Engine = "neutral",
    price: _Prices = None,
    ownership: _Ownership = "rented",
    electricity: _Electricity = None,
    pue: _Pue = None,
    lifetime: _Lifetime = None,
    descend: Annotated[
        bool, typer.Option("--descend", help="Find the plans by gradient; compare with all.")
    ] = False,
    measured: Annotated[
        Path | None, typer.Option(metavar="RUNS.csv", help="Measured runs to draw beside.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write frontier.nc, .png and .html there.")
    ] = None,
    prefill: _Prefill = None,
    decode: _Decode = None,
    attention: _Attention = None,
    ffn: _Ffn = None,
    draft: _Draft = None,
    acceptance: _Acceptance = None,
    accepted_length: _Accepted = None,
    link: _Link = None,
    assume_dense: _Dense = False,
    json: _Json = False,
) -> None:
    """Find the plans worth having, for each chip.

    Those that no other plan of the chip betters on both axes: by default throughput per chip and
    interactivity, the tokens per second that one user sees.
    """
    named = {"prefill": prefill, "decode": decode, "attention": attention, "ffn": ffn}
    if any(named.values()) or draft is not None:
        formats = (precision or ["fp8"])[0].split("/")
        keys = ("weights", "activations", "kv")
        base: dict[str, Any] = dict.fromkeys(keys) | dict(zip(keys, formats, strict=False))
        from perfmodel import _system_command

        asked = _system_command.Asked(
            model=model, chip=None, pools={k: v for k, v in named.items() if v is not None},
            draft=draft, draft_tokens=4.0, acceptance=acceptance,
            accepted_length=accepted_length, micro_batches=1, link=link, base=base,
            assume_dense=assume_dense,
        )  # fmt: skip
        _frontier_of_systems(
            context, asked, chip or [], out, json,
            isl=isl, osl=osl, max_chips=max_chips, prefix_hit=prefix_hit, engine=engine, x=x, y=y,
            descend=descend, price=_prices(price), ownership=ownership, electricity=electricity,
            pue=pue, lifetime=lifetime, slo_ttft=_time(slo_ttft, "--slo-ttft"),
            slo_tpot=_time(slo_tpot, "--slo-tpot"),
        )  # fmt: skip
        return
    if not chip:
        raise InputError("missing option '--chip'")
    choices = {"precisions": precision, "pp": pp, "cp": cp}
    extra: dict[str, Any] = {name: given for name, given in choices.items() if given}
    limits = {
        "slo_ttft": _time(slo_ttft, "--slo-ttft"),
        "slo_tpot": _time(slo_tpot, "--slo-tpot"),
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
                    price=_prices(price),
                    ownership=ownership, electricity=electricity, pue=pue, lifetime=lifetime,
                    **limits, **extra,
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


def _frontier_of_systems(
    context: typer.Context,
    asked: Any,
    chips: list[str],
    out: Path | None,
    json: bool,
    **options: Any,
) -> None:
    """Finds the systems worth having, beside those of one pool of each chip."""
    from perfmodel import _json, _system_command, report

    with _working("evaluating every system", quiet=json):
        _ready()
        found = _system_command.frontier(asked, chips, dict(asked.base), **options)
        found = found.assign_attrs(_command(context))
        files = {} if out is None else report.save_systems(found, out)
    if json:
        _print_json(_json.systems(found, files))
        return
    report.write(report.systems_table(found))
    if files:
        report.write("\n".join(f"wrote {path}" for path in files.values()))


@app.command()
def size(
    context: typer.Context,
    model: _ModelName,
    rate: Annotated[float, typer.Option(help="Requests per second that arrive.")],
    slo_ttft: _Ttft = None,
    slo_tpot: _Tpot = None,
    isl: _Isl = 4000,
    osl: _Osl = 1000,
    prefix_hit: _Hit = 0.0,
    chip: Annotated[
        list[str] | None,
        typer.Option(
            help="Chip (repeat for more), a TOML file of one, or all.", show_default="all"
        ),
    ] = None,
    max_chips: Annotated[
        int | None, typer.Option(help="Most chips, spare ones included.", show_default="any")
    ] = None,
    headroom: Annotated[float, typer.Option(help="Capacity beyond the rate, a share of it.")] = 0.2,
    spare: Annotated[int, typer.Option(help="Replicas beyond those needed, for failures.")] = 1,
    by: Annotated[str, typer.Option(help="Smallest in: chips, usd, kw or nodes.")] = "chips",
    precision: _Precisions = None,
    engine: _Engine = "neutral",
    price: _Prices = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write size.nc and size.json there.")
    ] = None,
    assume_dense: _Dense = False,
    json: _Json = False,
) -> None:
    """Find the smallest deployment that serves a request rate.

    For each chip: chips and whole nodes, power and rent, the plan of each replica, how much room it
    leaves, and what one step smaller would violate. Exit status 3 where none holds the limits.
    """
    extra: dict[str, Any] = {"precisions": precision} if precision else {}
    from perfmodel import _json, report

    with _working("evaluating every plan", quiet=json):
        import perfmodel

        _ready()
        try:
            found = perfmodel.size(
                perfmodel.load_model(model, assume_dense=assume_dense), chip or "all",
                rate=rate, isl=isl, osl=osl, prefix_hit=prefix_hit,
                slo_ttft=_time(slo_ttft, "--slo-ttft"), slo_tpot=_time(slo_tpot, "--slo-tpot"),
                headroom=headroom, spare=spare, by=by, max_chips=max_chips, engine=engine,
                price=_prices(price), **extra,
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
def chips(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One chip in full.")] = None,
    json: _Json = False,
) -> None:
    """List chips, or every number of one and its source."""
    from perfmodel import _listings

    found = _listings.chips() if name is None else _listings.chip(name)
    _show(found, json)


@app.command()
def models(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One model in full.")] = None,
    assume_dense: _Dense = False,
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


def _show(listing: Any, json: bool) -> None:
    from perfmodel import report

    if json:
        _print_json(listing.values)
    else:
        report.write(listing.table)


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
    json: _Json = False,
) -> None:
    """Predict every row of a table, and compare with what it measured.

    Deployments need model, chip, tp, concurrency, isl and osl; kernels are in the form of the
    public operator tables. Rows that cannot be predicted say why in their status.
    """
    if (runs is None) == (operators is None):
        raise InputError("predict: a table of deployments, or one of kernels after --operators")
    if operators is not None and engine is not None:
        raise InputError("--engine: kernels have no engine")
    with _working("predicting", quiet=json):
        _ready()
        if runs is not None:
            from perfmodel.prediction import predict_all

            found = predict_all(runs, engine)
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


# ---- Errors become one line ----


def _usage(error: Exception) -> str:
    """Returns the message of a usage error on one line, with what is nearest."""
    words = " ".join(error.format_message().split()).rstrip(".")  # pyright: ignore[reportAttributeAccessIssue]
    words = words[:1].lower() + words[1:]
    wrong = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and isinstance(wrong, str):
        context = getattr(error, "ctx", None)
        known = [o for p in context.command.params for o in p.opts] if context else []
        close = difflib.get_close_matches(wrong, known, n=3, cutoff=0.5)
        words = f"no such option: {shorten(wrong)}"
        words += f" (nearest: {', '.join(close)})" if close else ""
    return shorten(words, 300)


def _run(command: Callable[[], Any]) -> int:
    """Returns the exit status of a command, with every error said in one line."""
    try:
        status = command()
        sys.stdout.flush()
        # typer has turned Ctrl-C into its exit status.
        if status == _INTERRUPTED:
            raise KeyboardInterrupt
        return status if isinstance(status, int) else 0
    except InputError as error:
        return _fail(str(error), _BAD_INPUT)
    except Infeasible as error:
        return _fail(str(error), _INFEASIBLE, "infeasible")
    except KeyboardInterrupt:
        return _fail("interrupted", _INTERRUPTED)
    except (BrokenPipeError, SystemExit):
        # Who read the output has gone, as `head` does (typer makes it a SystemExit, for which
        # there is no other reason).
        _close_output()
        return _PIPE_CLOSED
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
            return _bug(error)
        _close_output()
        return _fail(f"standard output cannot be written ({error.strerror})", 1)
    except Exception as error:
        if hasattr(error, "format_message"):
            return _fail(_usage(error), _BAD_INPUT)
        return _bug(error)


def _bug(error: Exception) -> int:
    if os.environ.get("PERFMODEL_TRACEBACK"):
        raise error
    what = shorten(f"{type(error).__name__}: {error}", 200)
    return _fail(f"{what} (a bug; PERFMODEL_TRACEBACK=1 shows where)", 1)


def _close_output() -> None:
    """Lets what is still to be written go nowhere, at exit too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _fail(message: str, status: int, word: str = "error") -> int:
    line = " ".join(str(message).split())
    try:
        print(f"{word}: {line}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        pass
    return status


def _warn(message: Any, *_: Any, **__: Any) -> None:
    print(f"warning: {shorten(' '.join(str(message).split()), 300)}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    import warnings

    given = sys.argv[1:] if arguments is None else arguments
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
            return _fail("standard output is closed", 1)
        return _run(
            lambda: app(args=given, prog_name="perfmodel", standalone_mode=False, obj=given)
        )
