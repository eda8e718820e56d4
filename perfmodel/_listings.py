"""What the catalogues hold, as tables and as JSON values."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from perfmodel import report
from perfmodel.units import GB, TB, si

if TYPE_CHECKING:
    from rich.console import RenderableType

    from perfmodel.chips import Chip
    from perfmodel.models.catalogue import ModelEntry
    from perfmodel.models.transformer import Body, Model


@dataclasses.dataclass(frozen=True)
class Listing:
    """A table to read, and the same as values to write as JSON."""

    table: "RenderableType"
    values: dict[str, Any]


def _stamp() -> dict[str, Any]:
    import perfmodel

    return {"version": perfmodel.__version__}


# ---- Chips ----

# Header, field, JSON key, and the unit it is shown in.
_FACTS = (
    ("bf16\nTFLOP/s", "peak_bf16", "peak_bf16_flop_per_second", TB),
    ("fp8\nTFLOP/s", "peak_fp8", "peak_fp8_flop_per_second", TB),
    ("fp4\nTFLOP/s", "peak_fp4", "peak_fp4_flop_per_second", TB),
    ("memory\nGB", "memory_capacity", "memory_capacity_bytes", GB),
    ("bandwidth\nTB/s", "memory_bandwidth", "memory_bandwidth_bytes_per_second", TB),
    ("domain\nchips", "domain", "domain_chips", 1.0),
    ("TDP\nW", "tdp", "tdp_w", 1.0),
    ("rent\n$/h", "rent", "rent_usd_per_hour", 1.0),
)


def _fact(chip: "Chip", field: str) -> tuple[float | None, bool]:
    """Returns a datasheet number, None where unknown or 0, and whether it is assumed."""
    number = chip.fields[field]
    value = number.value if number.value else None
    return value, value is not None and number.kind == "assumed"


def chips() -> Listing:
    """Returns every chip of the catalogue with its main numbers."""
    from perfmodel.chips import load_chip, names

    heads = [(head, "right") for head, *_ in _FACTS]
    table = report.grid(("chip", "left"), ("", "left"), *heads)
    values = []
    for name in names():
        chip = load_chip(name)
        facts = {field: _fact(chip, field) for _, field, _, _ in _FACTS}
        cells = []
        for _, field, _, unit in _FACTS:
            value, assumed = facts[field]
            scaled = 0.0 if value is None else value / unit
            shown = f"{scaled:,.0f}" if scaled >= 1e3 else f"{scaled:.4g}" if scaled else ""
            cells.append(shown + ("*" if assumed else " "))
        table.add_row(name, chip.title, *cells)
        values.append(
            {"name": name, "title": chip.title}
            | {key: facts[field][0] for _, field, key, _ in _FACTS}
            | {"assumed": [key for _, field, key, _ in _FACTS if facts[field][1]]}
            | {"kernels": list(chip.supported), "kernel_measurements": chip.kernels_of()}
        )
    notes = "peaks are dense · blank: unknown, or no such kernel · *: assumed"
    return Listing(_below(table, notes), _stamp() | {"chips": values})


def chip(name: str) -> Listing:
    """Returns every number of one chip, with unit, kind, source and origin."""
    from perfmodel.chips import load_chip

    found = load_chip(name)
    table = report.grid(
        ("number", "left"), ("value", "right"), ("unit", "left"), ("kind", "left"),
        ("whose", "left"), ("source", "left"),
    )  # fmt: skip
    for column in table.columns[:3]:
        column.no_wrap = True
    rows = found.numbers()
    for row in rows:
        value = "–" if row.value is None else f"{row.value:.4g}"
        if row.low is not None and row.high is not None and row.low < row.high:
            value += f" ({row.low:.3g} to {row.high:.3g})"
        table.add_row(row.field, value, row.unit, row.kind, row.origin, row.source)
    digest = f"{found.title} · digest {found.digest} · kernels: {', '.join(found.supported)}"
    values = _stamp() | {
        "name": found.name,
        "title": found.title,
        "digest": found.digest,
        "kernels": list(found.supported),
        "numbers": [row._asdict() for row in rows],
    }
    return Listing(_above(f"{found.name}", digest, table), values)


def new_chip(made: "Chip") -> "RenderableType":
    """Returns what is given of a chip and what its family assumes, with the wide range of that."""
    from rich.console import Group

    given = report.grid(("given", "left"), ("", "right"), ("", "left"))
    assumed = report.grid(
        ("assumed", "left"), ("", "right"), ("", "left"), ("range", "left"), ("because", "left")
    )
    for row in made.numbers():
        if row.field not in made.fields or row.value is None:
            continue
        if row.origin == "datasheet":
            given.add_row(row.field, f"{row.value:.4g}", row.unit)
        elif row.value:
            known = row.low is not None and row.high is not None
            span = f"{row.low:.3g} to {row.high:.3g}" if known else ""
            assumed.add_row(row.field, f"{row.value:.4g}", row.unit, span, row.note)
    kernels = made.kernels_of()
    whose = {"its own": "its own", "its family": f"of its family, {made.sheet.identity['family']}"}
    said = f"kernel constants: {whose.get(kernels, f'of {kernels}, its generation')}"
    said += f"; kernels: {', '.join(made.supported)}"
    return Group(report.lines(made.title, style="bold"), given, "", assumed, "", report.lines(said))


# ---- Models ----

_FORMATS = ("bf16", "fp8", "int4", "nvfp4")


def _counts(entry: "ModelEntry") -> dict[str, Any]:
    from perfmodel.formats import precision, precision_numbers
    from perfmodel.models.transformer import (
        active_parameters,
        kv_bytes_per_token,
        parameters,
        weight_bytes,
    )

    model = entry.model
    return {
        "name": entry.name,
        "title": entry.title,
        "parameters": int(parameters(model)),
        "active_parameters": int(active_parameters(model)),
        "kv_bytes_per_token": int(kv_bytes_per_token(model, precision("bf16"))),
        "weight_bytes": {f: int(weight_bytes(model, precision(f))) for f in _FORMATS},
        "precision": str(entry.precision),
        "own_weight_bytes": int(weight_bytes(model, precision_numbers(entry.precision))),
        "max_context_tokens": int(model.max_context),
    }


def _draft_counts(entry: "ModelEntry") -> dict[str, Any] | None:
    from perfmodel.formats import precision
    from perfmodel.models.draft import draft_parameters, draft_weight_bytes

    draft = entry.draft
    if draft is None:
        return None
    return {
        "layers": int(draft.count),
        "parameters": int(draft_parameters(draft)),
        "weight_bytes": {f: int(draft_weight_bytes(draft, precision(f))) for f in _FORMATS},
    }


def _encoder_counts(entry: "ModelEntry") -> dict[str, Any] | None:
    from perfmodel.models.encoder import encoder_parameters

    encoder = entry.encoder
    if encoder is None:
        return None
    return {
        "layers": int(encoder.layers),
        "parameters": int(encoder_parameters(encoder)),
        "patches": int(encoder.patches),
        "image_tokens": int(encoder.tokens),
    }


def _longest_cache(model: "Model") -> float:
    """Returns bytes of the KV cache of one sequence of the longest context [B], in bf16."""
    from perfmodel.formats import precision
    from perfmodel.models.transformer import kv_bytes

    return float(kv_bytes(model, precision("bf16"), model.max_context))


def models() -> Listing:
    """Returns every network of the catalogue with its counts."""
    from perfmodel.models.catalogue import load_model, names

    table = report.grid(
        ("model", "left"), ("weights", "right"), ("active", "right"), ("KV of a\ntoken", "right"),
        ("stored\nbf16", "right"), ("stored as\npublished", "right"), ("which is", "left"),
        ("longest\ncontext", "right"),
    )  # fmt: skip
    values = [_counts(load_model(name)) for name in names()]
    for row in values:
        table.add_row(
            row["name"], si(row["parameters"], digits=4), si(row["active_parameters"]),
            si(row["kv_bytes_per_token"], "B", 4),
            si(row["weight_bytes"]["bf16"], "B"), si(row["own_weight_bytes"], "B"),
            row["precision"], f"{row['max_context_tokens']:,}",
        )  # fmt: skip
    notes = "embeddings, output head, routers, norms and the KV of a token in bf16; "
    notes += "exact counts and other formats: perfmodel models NAME"
    return Listing(_below(table, notes), _stamp() | {"models": values})


_RECURRENT = {
    "Mamba2": "Mamba-2", "GatedDelta": "gated delta net", "KimiDelta": "Kimi delta attention",
}  # fmt: skip


def describe(body: "Body") -> tuple[str, dict[str, Any]]:
    """Returns one kind of sublayer in words, and its numbers."""
    from perfmodel.models.attention import GroupedQueryAttention
    from perfmodel.models.block_sparse import BlockSparseAttention
    from perfmodel.models.compressed import CompressedAttention
    from perfmodel.models.mla import LatentAttention
    from perfmodel.models.mlp import Mlp
    from perfmodel.models.recurrent import Recurrent
    from perfmodel.step import Shard

    if isinstance(body, GroupedQueryAttention):
        spans = {
            "full": "",
            "window": f", the last {body.window} keys",
            "chunk": f", keys of a chunk of {body.window}",
        }
        words = f"attention: {body.heads} heads, {body.kv_heads} kv heads, width {body.head_dim}"
        facts = {"kind": "attention", "heads": body.heads, "kv_heads": body.kv_heads,
                 "head_width": body.head_dim, "value_width": body.value_width,
                 "window": body.window, "cached": body.cached,
                 "parallel": body.joined}  # fmt: skip
        words += f", values of {body.value_width}" if body.v_width is not None else ""
        words += {"own": "", "key": ", values made of keys", "earlier": ", an earlier cache"}[
            body.cached
        ]
        words += spans[body.span]
        words += ", beside its feed-forward layer" if body.joined else ""
        if isinstance(body, BlockSparseAttention):
            words += f", the {body.index.blocks} best blocks of {body.index.size} keys"
            facts |= {"blocks": body.index.blocks, "block_size": body.index.size}
        return words, facts
    if isinstance(body, CompressedAttention):
        words = f"compressed attention: {body.heads} heads, width {body.width}, the last "
        words += f"{body.window} keys"
        facts = {"kind": "compressed attention", "heads": body.heads, "width": body.width,
                 "window": body.window, "ratio": body.ratio, "top_k": None}  # fmt: skip
        if body.index is not None:
            words += f" and the {body.index.top_k:,} best of one entry in {body.ratio}"
            facts["top_k"] = body.index.top_k
        elif body.ratio is not None:
            words += f" and one entry in {body.ratio}"
        return words, facts
    if isinstance(body, LatentAttention):
        words = f"latent attention: {body.heads} heads, rank {body.kv_rank} + {body.rope_width}"
        facts = {"kind": "latent attention", "heads": body.heads, "kv_rank": body.kv_rank,
                 "rope_width": body.rope_width, "top_k": None}  # fmt: skip
        if body.top_k is not None:
            words += f", the {body.top_k:,} best keys"
            words += "" if body.index is not None else " of an earlier layer's choice"
            facts["top_k"] = body.top_k
        return words, facts
    if isinstance(body, Recurrent):
        kind = _RECURRENT[type(body).__name__]
        words = f"{kind}: {body.heads} heads, state {body.state} × {body.width}"
        if body.key_heads != body.heads:
            words += f", {body.key_heads} heads of keys"
        return words, {
            "kind": kind, "heads": body.heads, "key_heads": body.key_heads,
            "state": body.state, "width": body.width, "state_bytes": body.state_bytes(Shard()),
        }  # fmt: skip
    gated = "gated" if body.gates > 1 else "plain"
    if isinstance(body, Mlp):
        facts = {"kind": "feed-forward", "width": body.intermediate, "gated": body.gates > 1}
        return f"feed-forward: width {body.intermediate:,}, {gated}", facts
    shared = body.shared.intermediate if body.shared is not None else 0
    beside = f", beside one of width {shared:,}" if shared else ""
    if body.latent is not None:
        beside += f", in vectors of {body.latent:,}"
    words = f"experts: {body.top_k} of {body.experts}, width {body.intermediate:,}, {gated}{beside}"
    facts = {"kind": "experts", "experts": body.experts, "top_k": body.top_k,
             "width": body.intermediate, "shared_width": shared,
             "gated": body.gates > 1}  # fmt: skip
    return words, facts


def model(name: str, assume_dense: bool = False) -> Listing:
    """Returns one network: its shape, its counts, what a token costs, and the published counts."""
    from perfmodel import _model_counts
    from perfmodel.models.catalogue import load_model

    entry = load_model(name, assume_dense=assume_dense)
    counts = _counts(entry)
    network = entry.model
    table = report.grid(("", "left"), ("", "left"))
    rows = [
        ("parameters", f"{counts['parameters']:,}"),
        ("active for a token", f"{counts['active_parameters']:,}"),
        ("KV cache of a token, bf16", f"{counts['kv_bytes_per_token']:,} B"),
        *((f"weights, {f}", si(size, "B", 4)) for f, size in counts["weight_bytes"].items()),
        ("longest context", f"{counts['max_context_tokens']:,} tokens"),
        ("KV cache of that, bf16", si(_longest_cache(network), "B", 4)),
        ("hidden width", f"{network.hidden:,}"),
        ("vocabulary", f"{network.vocabulary:,}" + (", tied" if network.tied else "")),
    ]
    shape = {"hidden": network.hidden, "vocabulary": network.vocabulary, "tied": bool(network.tied)}
    rows.append(("layers", f"{network.layers}"))
    blocks = []
    for block in network.blocks:
        words, facts = describe(block.body)
        rows.append((f"{block.count} ×", words))
        blocks.append({"count": block.count, **facts})
    draft = _draft_counts(entry)
    if draft is not None:
        size = si(draft["weight_bytes"]["bf16"], "B", 4)
        rows.append((f"{draft['layers']} draft", f"{draft['parameters']:,} more, {size} in bf16"))
    tower = _encoder_counts(entry)
    if tower is not None:
        words = f"{tower['parameters']:,} more, {tower['layers']} layers; an image of "
        words += f"{tower['patches']:,} patches takes {tower['image_tokens']:,} tokens"
        rows.append(("image encoder", words))
    flops, held = _model_counts.token_flops(network), _model_counts.bytes_by_length(network)
    context = _model_counts.context_of(network)
    rows.append(
        (f"FLOPs of a token at {context:,} keys", si(sum(flops.values()), "FLOP", digits=4))
    )
    for part, value in flops.items():
        share = value / sum(flops.values())
        rows.append((f"  {part}", f"{si(value, 'FLOP', digits=4)}, {share:.1%}"))
    listed = ", ".join(f"{si(size, 'B', 4)} at {tokens:,}" for tokens, size in held.items())
    rows.append(("cache and state of a sequence", listed))
    published = {}
    for key, number in entry.published.items():
        source = entry.sources.get(number.source)
        title = source.title if source else ""
        mine = counts.get(key)
        same = " (the same)" if number.covers(mine) else f" (counted {mine:,})" if mine else ""
        shown = f"{number.value:,.0f}" if number.value is not None else "unknown"
        said = f" – {number.note}" if number.note else ""
        rows.append((f"published {key.split('_')[0]}", f"{shown}{same} – {title}{said}"))
        published[key] = {"value": number.value, "kind": number.kind, "source": title}
    rows += [("formats the file asks for", str(entry.precision)), ("config.json", entry.source)]
    rows += [("note", note) for note in entry.notes]
    for words, value in rows:
        table.add_row(words, value)
    values = _stamp() | counts | shape | {
        "blocks": blocks, "draft": draft, "encoder": tower, "published": published,
        "flops_context_tokens": context, "token_flops": {**flops, "total": sum(flops.values())},
        "sequence_bytes": {str(tokens): size for tokens, size in held.items()},
        "source": entry.source, "notes": list(entry.notes), "digest": entry.digest,
    }  # fmt: skip
    return Listing(_above(entry.name, f"{entry.title} · digest {entry.digest}", table), values)


def points(name: str | None) -> Listing:
    """Returns published points beside what the model says of them, of one family or of all."""
    from perfmodel import validation
    from perfmodel.errors import InputError, nearest

    if name == "gains":
        return ratios()
    known = validation.names()
    if name is not None and name not in known:
        raise InputError(f"unknown family {name!r}{nearest(name, [*known, 'gains'])}")
    table = report.grid(
        ("point", "left"), ("published", "right"), ("model", "right"), ("error", "right"),
        ("kind", "left"), ("fitted", "left"), ("speculation", "left"), ("source", "left"),
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    for family in known if name is None else [name]:
        for point in validation.points(family):
            value, margin = validation.modelled(point)
            error = value / point.value - 1.0
            fits = margin >= 0.0
            table.add_row(
                point.id, f"{point.value:.4g}", f"{value:.4g}" + ("" if fits else " *"),
                f"{100 * error:+.0f} %", point.kind, "yes" if point.fitted else "",
                point.speculation, point.source,
            )  # fmt: skip
            rows.append(
                {
                    "family": family, "id": point.id, "chip": point.chip, "model": point.model,
                    "metric": point.metric, "published": point.value, "modelled": value,
                    "error": error, "kind": point.kind, "fitted": point.fitted, "fits": fits,
                    "speculation": point.speculation, "source": point.source, "note": point.note,
                }
            )  # fmt: skip
    medians = _medians(rows)
    told = "* does not fit the memory as modelled, or lacks the kernel"
    if medians:
        shown = [f"{m['chip']} {100 * m['median']:.0f} % of {m['points']}" for m in medians]
        told = (
            f"median error of measured points that no constant has seen: {', '.join(shown)}; {told}"
        )
    title = "published and modelled, in the units of the metric"
    return Listing(_above(title, told, table), {**_stamp(), "points": rows, "medians": medians})


def _medians(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the median error of measured points that no constant has seen: of all, by chip."""
    unseen = [r for r in rows if r["kind"] == "measured" and not r["fitted"]]
    found = []
    for chip in ("all", *sorted({r["chip"] for r in unseen})):
        errors = sorted(abs(r["error"]) for r in unseen if chip in ("all", r["chip"]))
        if errors:
            middle = errors[len(errors) // 2]
            found.append({"chip": chip, "points": len(errors), "median": middle})
    return found


def ratios() -> Listing:
    """Returns published gains of serving techniques beside those of the model."""
    from perfmodel import gains

    table = report.grid(
        ("gain", "left"), ("technique", "left"), ("published", "right"), ("model", "right"),
        ("kind", "left"), ("taken for granted, or why there is no answer", "left"),
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    for gain in gains.gains():
        ratio, before, after = gains.modelled(gain)
        has = math.isfinite(ratio)
        table.add_row(
            gain.id, gain.technique, f"{gain.published:.3g}", f"{ratio:.2f}" if has else "–",
            gain.kind, gain.why or gain.assumption,
        )  # fmt: skip
        rows.append(
            {
                "id": gain.id, "technique": gain.technique, "published": gain.published,
                "modelled": ratio if has else None, "kind": gain.kind, "source": gain.source,
                "assumption": gain.assumption, "why": gain.why, "metric": gain.metric,
                "before": dict(before), "after": dict(after),
            }
        )  # fmt: skip
    told = [row for row in rows if row["modelled"] is not None]
    near = sum(0.75 < row["modelled"] / row["published"] < 4 / 3 for row in told)
    words = f"{len(told)} of {len(rows)} have an answer, {near} of them within a third"
    title = "published gains and the model's, after over before"
    return Listing(_above(title, words, table), {**_stamp(), "gains": rows})


def _below(table: Any, note: str) -> "RenderableType":
    from rich.console import Group

    return Group(table, report.lines(note, style="dim"))


def _above(title: str, subtitle: str, table: Any) -> "RenderableType":
    from rich.console import Group

    return Group(report.lines(title, style="bold"), report.lines(subtitle), "", table)
