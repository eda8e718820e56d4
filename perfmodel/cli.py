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
_Hit = Annotated[float, typer.Option(help="Share of the prompt already cached, 0 to below 1.")]
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
_Classes = Annotated[
    list[str] | None,
    typer.Option(
        "--class",
        metavar="NAME=ISL:OSL:SHARE[:HIT]",
        help="Kind of requests, instead of --isl and --osl (repeat for more).",
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
_Images = Annotated[
    float,
    typer.Option(help="Images of a prompt; their tokens are part of the prompt tokens."),
]


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


def _is_table(text: str) -> bool:
    """Returns whether `--trace` names a table of requests, not a function."""
    return Path(text).suffix in (".csv", ".parquet", ".jsonl", ".ndjson") or Path(text).is_file()


def _kv(text: str | None) -> tuple[str | None, str]:
    """Returns the format of the KV cache, and how its memory is given out ("" where not said)."""
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    policy = [part for part in parts if part.partition(":")[0] in ("paged", "reserved")]
    formats = [part for part in parts if part not in policy]
    if len(policy) > 1 or len(formats) > 1:
        raise InputError(f"--kv: one format and one of paged, reserved, not '{shorten(text)}'")
    return (formats or [None])[0], (policy or [""])[0]


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
    classes: _Classes = None,
    cache_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS[,TOKENS…]",
            help="Size of a prefix cache for a trace that names its blocks, tier by tier.",
        ),
    ] = None,
    simulate: Annotated[
        int, typer.Option(metavar="REQUESTS", help="Follow so many requests, for percentiles.")
    ] = 0,
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
    images: _Images = 0.0,
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
    export: Annotated[
        str | None,
        typer.Option(
            metavar="vllm|sglang|trtllm", help="Tell the commands that start and measure it."
        ),
    ] = None,
    assume_dense: _Dense = False,
    json: _Json = False,
) -> None:
    """Tell what one design achieves and what binds it.

    Speed, throughput, memory, energy and cost of a model on chips at a plan. With pools of their
    own for prefill, attention, FFN or drafts, that of the whole system: CHIP and its options are
    then the pool of the rest. Exit status 3 where it does not fit or misses a limit.
    """
    from perfmodel import _export_command

    _export_command.check(export, trace)
    if trace is not None and not _is_table(trace):
        _estimate_function(context, trace, shape or [], model, json)
        return
    named = {"prefill": prefill, "decode": decode, "attention": attention, "ffn": ffn}
    kv, policy = _kv(kv)
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
        made = _system_command.Asked(
            model=model, chip=chip, pools={k: v for k, v in named.items() if v is not None},
            draft=draft, draft_tokens=draft_tokens, acceptance=acceptance,
            accepted_length=accepted_length, micro_batches=micro_batches, link=link,
            batching=batching, kv=policy, classes=classes or [], trace=trace,
            cache_tokens=cache_tokens, simulate=simulate,
            base=dict(tp=tp, pp=pp, ep=ep, attention_dp=attention_dp, regions=regions,
                      replicas=replicas, chunk=chunk, weights=weights, activations=activations,
                      kv=kv),
            assume_dense=assume_dense,
        )  # fmt: skip
        with _working("evaluating", quiet=json):
            _ready()
            found, scripts = _system_command.run(
                made, export, batch=batch, isl=isl, osl=osl, prefix_hit=prefix_hit, engine=engine,
                slo_ttft=_time(slo_ttft, "--slo-ttft"), slo_tpot=_time(slo_tpot, "--slo-tpot"),
                price=price, ownership=ownership, electricity=electricity, pue=pue,
                lifetime=lifetime, routing=_exponent(routing),
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
        slo_ttft=_time(slo_ttft, "--slo-ttft"), slo_tpot=_time(slo_tpot, "--slo-tpot"),
        price=price, ownership=ownership, electricity=electricity, pue=pue, lifetime=lifetime,
        routing=_exponent(routing), images=images or None,
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
    routing: _Routing = "uniform",
    images: _Images = 0.0,
    descend: Annotated[
        bool, typer.Option("--descend", help="Find the plans by gradient; compare with all.")
    ] = False,
    measured: Annotated[
        Path | None, typer.Option(metavar="RUNS.csv", help="Measured runs to draw beside.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write frontier.nc, .png and .html there.")
    ] = None,
    classes: _Classes = None,
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
    if any(named.values()) or draft is not None or classes:
        if any(_budgets(max_power, max_racks, max_cost).values()):
            raise InputError("--max-power, --max-racks, --max-cost: of one pool only")
        asked = _system_options(
            model, named, draft, acceptance, accepted_length, link, classes, precision, assume_dense
        )
        _frontier_of_systems(
            context, asked, chip or [], out, json,
            isl=isl, osl=osl, max_chips=16 if max_chips is None else max_chips,
            prefix_hit=prefix_hit, engine=engine, x=x, y=y,
            descend=descend, price=_prices(price), ownership=ownership, electricity=electricity,
            pue=pue, lifetime=lifetime, slo_ttft=_time(slo_ttft, "--slo-ttft"),
            slo_tpot=_time(slo_tpot, "--slo-tpot"),
        )  # fmt: skip
        return
    if not chip:
        raise InputError("missing option '--chip'")
    choices = {"precisions": precision, "pp": pp, "cp": cp}
    extra: dict[str, Any] = {name: given for name, given in choices.items() if given}
    extra |= {
        "slo_ttft": _time(slo_ttft, "--slo-ttft"),
        "slo_tpot": _time(slo_tpot, "--slo-tpot"),
        **_budgets(max_power, max_racks, max_cost),
        "routing": _exponent(routing),
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
                    price=_prices(price),
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


def _system_options(
    model: str,
    named: dict[str, str | None],
    draft: str | None,
    acceptance: str | None,
    accepted_length: str | None,
    link: str | None,
    classes: list[str] | None,
    precision: list[str] | None,
    assume_dense: bool,
) -> Any:
    """Returns the options of a search; pools that name no format have the one asked for."""
    from perfmodel import _system_command

    base: dict[str, Any] = {"weights": None, "activations": None, "kv": None}
    base |= dict(zip(base, (precision or ["fp8"])[0].split("/"), strict=False))
    return _system_command.Asked(
        model=model, chip=None, pools={k: v for k, v in named.items() if v is not None},
        draft=draft, draft_tokens=4.0, acceptance=acceptance, accepted_length=accepted_length,
        micro_batches=1, link=link, base=base, assume_dense=assume_dense, classes=classes or [],
    )  # fmt: skip


def _size_of_systems(
    context: typer.Context, asked: Any, chips: list[str], json: bool, **options: Any
) -> None:
    """Finds the smallest system of the pools named that serves a rate."""
    from perfmodel import _json, _system_command, report

    with _working("evaluating every system", quiet=json):
        _ready()
        found = _system_command.size(asked, chips, **options).assign_attrs(_command(context))
    if json:
        _print_json(_json.systems(found, {}))
        return
    report.write(report.systems_table(found))


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
    max_power: _MaxPower = None,
    max_racks: _MaxRacks = None,
    max_cost: _MaxCost = None,
    headroom: Annotated[float, typer.Option(help="Capacity beyond the rate, a share of it.")] = 0.2,
    spare: Annotated[int, typer.Option(help="Replicas beyond those needed, for failures.")] = 1,
    by: Annotated[str, typer.Option(help="Smallest in: chips, usd, kw or nodes.")] = "chips",
    precision: _Precisions = None,
    engine: _Engine = "neutral",
    price: _Prices = None,
    routing: _Routing = "uniform",
    images: _Images = 0.0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write size.nc and size.json there.")
    ] = None,
    prefill: _Prefill = None,
    decode: _Decode = None,
    attention: _Attention = None,
    ffn: _Ffn = None,
    draft: _Draft = None,
    acceptance: _Acceptance = None,
    accepted_length: _Accepted = None,
    link: _Link = None,
    classes: _Classes = None,
    assume_dense: _Dense = False,
    json: _Json = False,
) -> None:
    """Find the smallest deployment that serves a request rate.

    For each chip: chips and whole nodes, power and rent, the plan of each replica, how much room it
    leaves, and what one step smaller would violate. Exit status 3 where none holds the limits.
    """
    named = {"prefill": prefill, "decode": decode, "attention": attention, "ffn": ffn}
    if any(named.values()) or draft is not None or classes:
        asked = _system_options(
            model, named, draft, acceptance, accepted_length, link, classes, precision, assume_dense
        )
        _size_of_systems(
            context, asked, chip or [], json,
            rate=rate, headroom=headroom, max_chips=max_chips, isl=isl, osl=osl,
            prefix_hit=prefix_hit, engine=engine, price=_prices(price),
            slo_ttft=_time(slo_ttft, "--slo-ttft"), slo_tpot=_time(slo_tpot, "--slo-tpot"),
        )  # fmt: skip
        return
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
                price=_prices(price), routing=_exponent(routing), images=images or None,
                **_budgets(max_power, max_racks, max_cost), **extra,
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
    assume_dense: _Dense = False,
    routing: _Routing = "uniform",
    json: _Json = False,
) -> None:
    """Predict every row of a table, and compare with what it measured.

    Deployments need model, chip, tp, concurrency, isl and osl; kernels are in the form of the
    public operator tables. Rows that cannot be predicted say why in their status.
    """
    if (runs is None) == (operators is None):
        raise InputError("predict: a table of deployments, or one of kernels after --operators")
    if operators is not None:
        given = {"--engine": engine, "--model": model, "--routing": _exponent(routing)}
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
            found = predict_all(runs, engine, own, _exponent(routing))
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
