"""How many programs it takes to evaluate every network on every chip in every format."""

from collections.abc import Iterator

import jax

from benchmarks._measure import COMPILE, compilations, covered
from benchmarks._report import Result
from perfmodel import chips, question
from perfmodel.designs import designs, evaluate
from perfmodel.formats import FORMATS, precision_name
from perfmodel.models import catalogue


def run(quick: bool) -> Iterator[Result]:
    """Yields the number of compilations; each network is asked about as a command would."""
    jax.config.update("jax_enable_compilation_cache", False)
    jax.clear_caches()
    known, formats = chips.names(), [precision_name(name) for name in FORMATS]
    networks = catalogue.names()
    with compilations() as seen:
        for network in networks:
            asked = question.ask(
                network, known, formats, isl=1000, osl=100, prefix_hit=0.0, engine="neutral",
                slo_ttft=None, slo_tpot=None, price=None,
            )  # fmt: skip
            pairs = [(c, f) for c in range(len(known)) for f in range(len(formats))]
            chip, kind = zip(*(pair for pair in pairs if asked.supports(*pair)), strict=True)
            evaluate(asked, designs(chip=chip, precision=kind, tp=1, batch=8, chunk=1000))
    # The estimate is what takes the time; others convert a number or so.
    groups: dict[str, list[tuple[float, float, str]]] = {}
    for span in seen[COMPILE]:
        groups.setdefault(span[2], []).append(span)
    main = max(groups, key=lambda name: covered(groups[name]))
    kinds = {jax.tree.structure(catalogue.load_model(name).model) for name in networks}
    asked_of = f"{len(networks)} networks, {len(known)} chips, {len(formats)} formats"
    note = f"one a structure; {asked_of}: {main}"
    yield Result("programs of the estimate", len(groups[main]), "1", len(kinds), note)
    others = {name: spans for name, spans in groups.items() if name != main}
    listed = ", ".join(f"{name} × {len(spans)}" for name, spans in others.items())
    yield Result("others", sum(map(len, others.values())), "1", note=listed)
    whole = covered(seen[COMPILE])
    small = covered([span for spans in others.values() for span in spans])
    yield Result("time in all of them", whole, "s", note=f"others {small:.2f} s")
